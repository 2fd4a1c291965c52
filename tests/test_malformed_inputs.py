"""Whatever is handed to a public entry: it works, or raises what its docstring says, and then nothing was written."""

import enum
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prefect_torch.ckpt import Checkpoint, CheckpointError, CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.runs.manifest import Manifest
from prefect_torch.ckpt.storage.opening import open_storage, parse_storage
from prefect_torch.deployments import make_deployment
from prefect_torch.flows import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig
from prefect_torch.tasks.rank.user_code.function import pack_function
from ranks import Attempt, folder

UNHEALTHY = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
TWO_HUNDRED, ONE_HUNDRED = (settings(max_examples=number, suppress_health_check=UNHEALTHY) for number in (200, 100))


class Rude:
    """Looks like a scalar, and is none."""

    ndim = 0

    def item(self):
        raise RuntimeError("no value")


class Colour(enum.Enum):
    RED = "red"


ODD = [
    *(
        None,
        True,
        0,
        -1,
        10**30,
        10**4000,  # of 10**5000, hypothesis cannot print an example
        0.5,
        math.nan,
        math.inf,
        -0.0,
        1j,
        "",
        " ",
        "\0",
        "\ud800",
        "a/b",
        "..",
        "/",
        "x" * 300,
    ),
    *(
        b"",
        b"x",
        [],
        {},
        (),
        set(),
        {"a": {"b": []}},
        {1: 2},
        {"": 1},
        {"\ud800": 1},
        object(),
        len,
        Colour.RED,
        Rude,
        Exception(),
    ),
    *(
        np.float32(1),
        np.array([1, 2]),
        np.datetime64("2026-01-01"),
        torch.tensor(1.0),
        torch.ones(3),
        torch.ones(1, device="meta"),
    ),
    *(
        Path(),
        Path("\ud800"),
        "s3://",
        "s3://bucket",
        "://",
        "file://x",
        "s3-bucket/",
        "http://x",
        "nosuch://x",
        "~nobody/x",
        "\n",
    ),
]
of_any_shape = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
    max_leaves=10,
)
junk = st.one_of(st.sampled_from(ODD), of_any_shape)


def files_below(root):
    return {path: path.stat().st_mtime_ns for path in Path(root).rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def module_path(tmp_path_factory):
    return tmp_path_factory.mktemp("malformed")


@TWO_HUNDRED
@given(
    field=st.sampled_from(["metrics", "a metric", "a name", "checkpoint", "step", "progress", "upload"]),
    value=junk,
)
def test_a_report_of_nonsense_writes_nothing_and_the_next_one_works(tmp_path_factory, field, value):
    tmp_path = tmp_path_factory.mktemp("report")
    store = CheckpointStore.open(tmp_path / "store", "run")
    session = Attempt(store).session()
    good = {"metrics": {"loss": 1}, "checkpoint": folder(tmp_path / "c", model="x")}
    if field == "a name" and not _is_hashable(value):
        return
    nonsense = {"a metric": {"metrics": {"x": value}}, "a name": {"metrics": {value: 1}} if field == "a name" else {}}
    before = files_below(tmp_path)
    try:
        session.report(**{**good, **nonsense.get(field, {field: value})})
    except (ValueError, FileNotFoundError):
        assert files_below(tmp_path) == before
    else:
        assert [store.verify(manifest) for manifest in store.list()] == [None] * (value is not None or field != "checkpoint")
    session.report(good["metrics"], good["checkpoint"], step=session._last_step + 1)
    assert store.latest().metrics == {"loss": 1}


def _is_hashable(value):
    try:
        hash(value)
    except TypeError:
        return False
    return True


ENTRIES = {
    "Checkpoint": (lambda value, path: Checkpoint(value), (ValueError, TypeError)),
    "Checkpoint.from_directory": (lambda value, path: Checkpoint.from_directory(value), (ValueError, TypeError)),
    "open a run": (lambda value, path: CheckpointStore.open(path, value), ValueError),
    "open a storage": (lambda value, path: open_storage(value), (ValueError, ImportError)),
    "parse a storage": (lambda value, path: parse_storage(value), ValueError),
    "best": (lambda value, path: CheckpointStore.open(path, "run").best(1, value), (ValueError, TypeError)),
    "best k": (lambda value, path: CheckpointStore.open(path, "run").best(value), ValueError),
    "get": (lambda value, path: CheckpointStore.open(path, "run").get(value), (CheckpointError, ValueError, TypeError)),
    "pin": (lambda value, path: CheckpointStore.open(path, "run").pin(value), (CheckpointError, ValueError, TypeError)),
    "unpin": (lambda value, path: CheckpointStore.open(path, "run").unpin(value), (ValueError, TypeError)),
    "num_to_keep": (lambda value, path: RetentionPolicy(value), ValueError),
    "manifest": (lambda value, path: Manifest.decode(_bytes(value), "there"), CheckpointError),
    "result": (lambda value, path: Result.from_storage(path, value), (ValueError, FileNotFoundError)),
    "num_workers": (lambda value, path: ScalingConfig(num_workers=value), ValueError),
    "run name": (lambda value, path: RunConfig(name=value), ValueError),
    "storage": (lambda value, path: RunConfig(storage=value), (ValueError, TypeError)),
    "keep": (lambda value, path: CheckpointConfig(num_to_keep=value), ValueError),
    "delay": (lambda value, path: FailureConfig(retry_delay_s=value), ValueError),
    "train_fn": (lambda value, path: pack_function(value, None), (ValueError, TypeError)),
    "deployment": (lambda value, path: make_deployment("name", value), (ValueError, TypeError)),
}


def _bytes(value):
    return value if isinstance(value, bytes) else str(type(value)).encode()


def hand(value, entry, path):
    """Hand `value` to an entry: it works, or raises what it documents, and nothing is written."""
    call, documented = ENTRIES[entry]
    working_folder = Path.cwd()
    os.chdir(path)
    try:
        call(value, path / "store")
    except documented:
        pass
    finally:
        os.chdir(working_folder)
    assert files_below(path) == {}


@pytest.mark.parametrize("entry", ENTRIES)
def test_nonsense_raises_what_is_documented_and_writes_nothing(module_path, entry):
    for value in ODD:
        hand(value, entry, module_path)


@pytest.mark.parametrize("entry", ENTRIES)
@ONE_HUNDRED
@given(value=of_any_shape)
def test_nonsense_of_any_shape_raises_what_is_documented_and_writes_nothing(module_path, entry, value):
    hand(value, entry, module_path)


@TWO_HUNDRED
@given(metadata=junk)
def test_metadata_that_json_cannot_hold_is_refused_and_the_old_one_stays(module_path, metadata):
    directory = module_path / "metadata"
    checkpoint = folder(directory, model="x")
    checkpoint.set_metadata({"old": 1})
    try:
        checkpoint.set_metadata(metadata)
    except (ValueError, TypeError):
        assert checkpoint.get_metadata() == {"old": 1}
    else:
        assert isinstance(checkpoint.get_metadata(), dict)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
