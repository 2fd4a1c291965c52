"""Metrics attached after the commit: what readers see, what it costs, and what a crash or damage leaves."""

import json
import logging
import math
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from crash_points import crash_points, open_run
from faulty_storage import FaultyStorage
from hypothesis import given
from hypothesis import strategies as st
from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore, RetentionPolicy, StorageSpec
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.evaluations import encode_evaluation
from prefect_torch.ckpt.runs.history import lost_records, read_history
from prefect_torch.ckpt.runs.layout import Layout, log_name
from prefect_torch.ckpt.runs.log_files import LogFiles
from prefect_torch.ckpt.runs.manifest import Manifest, seal
from prefect_torch.ckpt.runs.metrics import find_metric
from prefect_torch.ckpt.runs.quarantine import quarantine
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.runs.retention import overdue_evaluations, plan
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.object_store.backend import ObstoreStorage
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.ckpt.storage.retry import RetryingStorage
from prefect_torch.flows import CheckpointConfig
from prunes import prune_as_leader
from ranks import Attempt, folder
from wrapped_storage import WrappedStorage

BY_ACCURACY = RetentionPolicy(1, "eval/accuracy", evaluation_timeout_s=3600)


def fill(store, tmp_path, *losses) -> list[str]:
    session = Attempt(store).session()
    for loss in losses:
        session.report({"loss": loss}, folder(tmp_path / "c", model=str(loss)))
    return list(store.ids())


@pytest.fixture
def store(tmp_path):
    return open_run(LocalStorage(tmp_path / "store"))


@pytest.fixture(params=["local", "memory", "s3"])
def any_store(request, tmp_path):
    if request.param == "local":
        return CheckpointStore.open(tmp_path / "store", "run")
    if request.param == "memory":
        return CheckpointStore.open(f"memory://{tmp_path}", "run")
    server = request.getfixturevalue("rclone")
    return open_run(ObstoreStorage(f"s3://{server.new_bucket()}/folder", server.options()))


def test_attached_metrics_are_seen_wherever_a_checkpoint_is_read_and_ranked(any_store, tmp_path):
    store = any_store
    first, second, third = fill(store, tmp_path, 3, 2, 1)
    before = {it: store.storage.get_bytes(store.layout.manifest(it)) for it in (first, second, third)}
    for checkpoint_id, accuracy in ((first, 0.5), (second, 0.9), (third, 0.1)):
        store.attach_metrics(checkpoint_id, {"accuracy": accuracy, "by_class": {"cat": math.nan}})
    store.attach_metrics(third, {"bleu": 7}, name="translation")
    store.attach_metrics(third, {"accuracy": 0.2})  # again: it replaces its own
    assert [manifest.metrics["eval"]["accuracy"] for manifest in store.list()] == [0.5, 0.9, 0.2]
    assert [manifest.metrics["loss"] for manifest in store.list()] == [3, 2, 1]
    assert math.isnan(store.get(first).metrics["eval"]["by_class"]["cat"])
    expected = {"loss": 1, "eval": {"accuracy": 0.2}, "translation": {"bleu": 7}}
    assert store.latest().metrics == store.get(third).metrics == store.list()[-1].metrics == expected
    store.hint_latest(third)
    assert store.latest().metrics == expected
    assert (store.get(third).evaluations, store.get(third).reported) == (("eval", "translation"), {"loss": 1})
    assert [manifest.id for manifest in store.best(2, "eval/accuracy")] == [second, first]
    assert {it: store.storage.get_bytes(store.layout.manifest(it)) for it in before} == before
    assert list(store.ids()) == [first, second, third]
    assert list(store.ids(after=first)) == [second, third]
    assert store.checkpoint(store.get(second)).metrics["eval"]["accuracy"] == 0.9
    assert [manifest.id for manifest in prune_as_leader(store, RetentionPolicy(1, "eval/accuracy")).drop] == [first]
    assert not [info.key for info in store.storage.list("run/") if first in info.key]
    assert store.get(second).metrics["eval"]["accuracy"] == 0.9


def test_evaluators_at_the_same_time_lose_nothing_of_each_other(any_store, tmp_path):
    (only,) = fill(any_store, tmp_path, 1)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: any_store.attach_metrics(only, {"value": number}, f"e{number}"), range(16)))
    assert any_store.get(only).metrics == {"loss": 1, **{f"e{number}": {"value": number} for number in range(16)}}


def test_a_manifest_says_what_was_committed_whatever_was_attached(store, tmp_path):
    (only,) = fill(store, tmp_path, 1)
    committed = store.committed(only)
    store.attach_metrics(only, {"accuracy": 1})
    evaluated = store.get(only)
    assert evaluated.metrics != committed.metrics
    assert evaluated.encode() == committed.encode() == store.storage.get_bytes(store.layout.manifest(only))
    assert Manifest.decode(evaluated.encode(), "here") == store.committed(only) == committed
    assert choose_checkpoint(store, lineage=1, verify="digest") == committed  # all ranks are told the same
    assert [record.metrics for record in read_history(store)] == [{"loss": 1}]
    assert [record.metrics for record in lost_records(store, list(store.listed()), attempt=2)] == [{"loss": 1}]


@pytest.mark.parametrize("name", ["", "a/b", "../x", ".x", "a b", "ü", "x" * 101, "000001-00000000-00000000", None, 3])
def test_an_evaluation_name_is_a_plain_one(store, tmp_path, name):
    (only,) = fill(store, tmp_path, 1)
    with pytest.raises(ValueError, match="evaluation name"):
        store.attach_metrics(only, {}, name)


def test_a_name_that_differs_from_anothers_in_case_alone_replaces_nothing(store, tmp_path, monkeypatch):
    """As on CIFS, exFAT or APFS, where the second name finds the first file."""
    (only,) = fill(store, tmp_path, 1)
    store.attach_metrics(only, {"accuracy": 1}, "eval")
    place = tmp_path / "store" / store.layout.evaluation(only, "Eval")
    place.symlink_to("eval.json")
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: (it for it in listed(path) if it != place))
    with pytest.raises(
        ValueError, match=r"evaluation 'Eval' would replace 'eval', since case is ignored in .*: give it another"
    ):
        store.attach_metrics(only, {"accuracy": 0}, "Eval")
    assert store.get(only).metrics["eval"] == {"accuracy": 1}
    store.attach_metrics(only, {"accuracy": 2}, "eval")
    assert store.get(only).metrics["eval"] == {"accuracy": 2}


@pytest.mark.parametrize("metrics", [None, 3, {"a": [1]}, {1: 2}])
def test_what_report_refuses_is_not_attached(store, tmp_path, metrics):
    (only,) = fill(store, tmp_path, 1)
    with pytest.raises(ValueError, match="metric"):
        store.attach_metrics(only, metrics)
    assert store.get(only).evaluations == ()


def test_a_name_that_the_training_reported_is_refused_and_nothing_is_lost(store, tmp_path):
    (only,) = fill(store, tmp_path, 1)
    with pytest.raises(ValueError, match=r"the training reported a metric 'loss' with checkpoint .* another name"):
        store.attach_metrics(only, {"accuracy": 1}, name="loss")
    assert store.get(only).metrics == {"loss": 1}


@pytest.mark.parametrize("metrics", [{"val/loss": 1}, {"val": {"loss": 1}}, {"val/": 1}])
def test_a_name_with_reported_metrics_below_it_is_refused(store, tmp_path, metrics):
    Attempt(store).session().report(metrics, folder(tmp_path / "c", model="x"))
    (only,) = store.ids()
    with pytest.raises(ValueError, match=r"the training reported a metric 'val/?(loss)?' with checkpoint .* another name"):
        store.attach_metrics(only, {"loss": 0.5}, name="val")
    store.attach_metrics(only, {"loss": 0.5}, name="va")


def test_an_evaluation_stored_below_a_reported_name_stays(store, tmp_path):
    Attempt(store).session().report({"val/loss": 1}, folder(tmp_path / "c", model="x"))
    (only,) = store.ids()
    store.storage.put_bytes(store.layout.evaluation(only, "val"), encode_evaluation(only, "val", {"accuracy": 0.5}))
    assert find_metric(store.get(only).metrics, "val/accuracy") == 0.5


def test_what_does_not_exist_cannot_be_evaluated(store):
    with pytest.raises(CheckpointNotFoundError, match="has no checkpoint"):
        store.attach_metrics("000001-00000000-00000000", {})


def test_a_checkpoint_that_is_pruned_while_metrics_are_attached_leaves_nothing(tmp_path, store):
    first, _ = fill(store, tmp_path, 1, 2)

    class Pruning(FaultyStorage):
        def put_bytes(self, key, data):
            prune_as_leader(store, RetentionPolicy(1))
            self.inner.put_bytes(key, data)

    with pytest.raises(CheckpointNotFoundError, match="was pruned or never committed"):
        open_run(Pruning(store.storage)).attach_metrics(first, {"accuracy": 1})
    assert not [info.key for info in store.storage.list("run/") if first in info.key]


def test_an_evaluation_stays_though_a_listing_lags_behind_its_manifest(tmp_path, store):
    first, _ = fill(store, tmp_path, 1, 2)
    store.attach_metrics(first, {"accuracy": 1})

    class Lagging(WrappedStorage):
        def list(self, prefix, *, after=None, splits=None):
            return (info for info in self.inner.list(prefix, after=after) if info.key != store.layout.manifest(first))

    collect_garbage(open_run(Lagging(store.storage)), grace_s=0)
    assert store.get(first).metrics == {"loss": 1, "eval": {"accuracy": 1}}


def other_body(**changed):
    body = {"format": 1, "checkpoint": "{id}", "name": "eval", "metrics": {"accuracy": 1}}
    return lambda checkpoint_id, _: seal({**body, "checkpoint": checkpoint_id, **changed})


DAMAGE = {
    "empty": lambda _, data: b"",
    "cut": lambda _, data: data[: len(data) // 2],
    "changed": lambda _, data: data.replace(b"0.9", b"0.1"),
    "text": lambda _, data: b"not JSON",
    "no text": lambda _, data: b"\xff\xfe\x00",
    "list": lambda _, data: b"[]",
    "null": lambda _, data: seal(None),
    "endless": lambda _, data: b"[" * 100_000,
    "no metrics": lambda checkpoint_id, _: seal({"format": 1, "checkpoint": checkpoint_id, "name": "eval"}),
    "newer": other_body(format=2),
    "other": other_body(checkpoint="000009-00000009-00000000"),
    "wrong": other_body(metrics=[1]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_evaluation_is_left_out_and_the_checkpoint_is_as_good_as_ever(store, tmp_path, caplog, damage):
    first, _ = fill(store, tmp_path, 1, 2)
    store.attach_metrics(first, {"accuracy": 0.9})
    store.attach_metrics(first, {"bleu": 7}, name="whole")
    key = store.layout.evaluation(first, "eval")
    store.storage.put_bytes(key, DAMAGE[damage](first, store.storage.get_bytes(key)))
    with caplog.at_level(logging.WARNING):
        assert store.get(first).metrics == {"loss": 1, "whole": {"bleu": 7}}
    assert f"{key} is left out, as if the checkpoint were not evaluated" in caplog.text
    store.verify(store.list()[0])
    assert store.get(first).evaluations == ("whole",)
    store.attach_metrics(first, {"accuracy": 1})  # evaluated again, it is whole
    assert store.get(first).metrics["eval"] == {"accuracy": 1}
    store.storage.put_bytes(key, b"")
    assert [manifest.id for manifest in prune_as_leader(store, RetentionPolicy(1)).drop] == [first]
    assert not [info.key for info in store.storage.list("run/") if first in info.key]


def test_the_best_checkpoint_stays_though_its_evaluation_cannot_be_read(store, tmp_path, caplog):
    first, _ = ids = fill(store, tmp_path, 1, 2)
    for checkpoint_id, accuracy in zip(ids, (0.9, 0.1), strict=True):
        store.attach_metrics(checkpoint_id, {"accuracy": accuracy})
    key = store.layout.evaluation(first, "eval")
    store.storage.put_bytes(key, store.storage.get_bytes(key).replace(b"0.9", b"0.8"))
    assert prune_as_leader(store, RetentionPolicy(1, "eval/accuracy")).drop == ()
    assert f"checkpoint {first} of run 'run' stays, whatever its score: evaluate it again as 'eval'" in caplog.text
    assert [it.id for it in prune_as_leader(store, RetentionPolicy(1, "other/accuracy")).drop] == [first]


class HalfWritten(WrappedStorage):
    """Shows the beginning of one object to its first two readers."""

    def __init__(self, inner, key):
        super().__init__(inner)
        self.key, self.left = key, 2

    def _do(self, verb, *args, **kwargs):
        result = super()._do(verb, *args, **kwargs)
        if (verb, args[0]) == ("get_bytes", self.key) and self.left > 0:
            self.left -= 1
            return result[:20]
        return result


def test_a_prune_that_reads_an_evaluation_while_it_is_written_keeps_the_checkpoint(store, tmp_path):
    first, second = fill(store, tmp_path, 1, 2)
    store.attach_metrics(first, {"accuracy": 0.9})
    store.attach_metrics(second, {"accuracy": 0.1})
    writing = HalfWritten(store.storage, store.layout.evaluation(first, "eval"))
    retrying = RetryingStorage(lambda: writing, RetryPolicy(30, 0.01, 0.01), writing)
    assert prune_as_leader(open_run(retrying), RetentionPolicy(1, "eval/accuracy")).drop == ()
    assert writing.left == 0


def test_an_evaluation_copied_over_a_reported_name_replaces_nothing(store, tmp_path):
    (only,) = fill(store, tmp_path, 1)
    body = {"format": 1, "checkpoint": only, "name": "loss", "metrics": {"a": 1}}
    store.storage.put_bytes(store.layout.evaluation(only, "loss"), seal(body))
    assert store.get(only).metrics == {"loss": 1}


def test_what_somebody_else_left_beside_manifests_is_neither_read_nor_deleted(store, tmp_path):
    first, second = fill(store, tmp_path, 1, 2)
    foreign = [f"run/manifests/{first}/notes.txt", f"run/manifests/{first}/a/b.json", "run/manifests/x/eval.json"]
    for key in foreign:
        store.storage.put_bytes(key, json.dumps({"body": {}}).encode())
    assert [manifest.evaluations for manifest in store.list()] == [(), ()]
    prune_as_leader(store, RetentionPolicy(1))
    collect_garbage(store, grace_s=0)
    assert {info.key for info in store.storage.list("run/manifests/")} == {*foreign, store.layout.manifest(second)}


def test_a_crash_at_any_operation_of_attaching_leaves_the_old_or_the_new_metrics(tmp_path):
    def prepare(number, way):
        store = open_run(LocalStorage(tmp_path / f"store-{number}-{way}"))
        first, _ = fill(store, tmp_path, 1, 2)
        store.attach_metrics(first, {"accuracy": 0.5})
        return store.storage

    def run(faulty):
        store = open_run(faulty)
        store.attach_metrics(min(store.ids()), {"accuracy": 0.9})

    fired, seen = 0, []
    for faulty in crash_points(prepare, run):
        fired += faulty.fired
        store = open_run(faulty.inner)
        first, second = store.list()
        assert first.reported == {"loss": 1}
        assert second.metrics == {"loss": 2}
        seen.append(first.metrics.get("eval"))
        for manifest in (first, second):
            store.verify(manifest)
        run(faulty.inner)  # an evaluator that begins again
        assert store.get(first.id).metrics == {"loss": 1, "eval": {"accuracy": 0.9}}
    assert fired >= 8
    assert {json.dumps(metrics) for metrics in seen} == {'{"accuracy": 0.5}', '{"accuracy": 0.9}', "null"}  # null: torn


def test_a_crash_at_any_operation_of_a_prune_leaves_no_evaluation_behind_that_the_next_does_not_sweep(tmp_path):
    def prepare(number, way):
        store = open_run(LocalStorage(tmp_path / f"store-{number}-{way}"))
        for checkpoint_id in fill(store, tmp_path, 1, 2, 3):
            store.attach_metrics(checkpoint_id, {"accuracy": 0.5})
            store.attach_metrics(checkpoint_id, {"bleu": 1}, name="other")
            log_of(store, checkpoint_id)
        return store.storage

    fired = 0
    for faulty in crash_points(prepare, lambda faulty: prune_as_leader(open_run(faulty), RetentionPolicy(1))):
        fired += faulty.fired
        store = open_run(faulty.inner)
        assert all(manifest.evaluations == ("eval", "other") for manifest in store.list())
        prune_as_leader(store, RetentionPolicy(1))
        collect_garbage(store, grace_s=0)
        (left,) = store.list()
        assert left.metrics == {"loss": 3, "eval": {"accuracy": 0.5}, "other": {"bleu": 1}}
        assert {info.key for info in store.storage.list("run/manifests/")} == {
            store.layout.manifest(left.id),
            *(store.layout.evaluation(left.id, name) for name in ("eval", "other")),
        }
        assert evaluation_logs(store) == {store.layout.evaluation_logs("eval", left.id) + log_name(0, 0)}
    assert fired > 10


def test_evaluations_of_a_quarantined_checkpoint_go_with_its_data(store, tmp_path):
    first, _ = fill(store, tmp_path, 1, 2)
    store.attach_metrics(first, {"accuracy": 1})
    quarantine(store, first, "damaged")
    fill(store, tmp_path, 3)
    log = log_of(store, first)
    collect_garbage(store, grace_s=0, keep_quarantined_days=7)
    assert store.storage.size(store.layout.evaluation(first, "eval")) > 0
    assert evaluation_logs(store) == {log}
    collect_garbage(store, grace_s=0, keep_quarantined_days=0)
    assert not evaluation_logs(store)
    assert not [info.key for info in store.storage.list("run/manifests/") if first in info.key]


def log_of(store, checkpoint_id: str, name: str = "eval") -> str:
    """Store a log of an evaluation as its flow does, and return its key."""
    files = LogFiles(store, store.layout.evaluation_logs(name, checkpoint_id))
    files.append(0, ["a line"])
    files.close()
    return store.layout.evaluation_logs(name, checkpoint_id) + log_name(0, 0)


def evaluation_logs(store) -> set[str]:
    return set(store.keys("run/evaluation-logs/"))


def test_logs_of_evaluations_go_with_the_checkpoints_that_a_prune_deletes(any_store, tmp_path):
    store = any_store
    first, second, third = fill(store, tmp_path, 1, 2, 3)
    for checkpoint_id in (first, second, third):
        store.attach_metrics(checkpoint_id, {"accuracy": 1})
    logs = {it: {log_of(store, it), log_of(store, it, "other")} for it in (first, second, third)}
    store.pin(first)
    assert [it.id for it in prune_as_leader(store, RetentionPolicy(1)).drop] == [second]
    assert evaluation_logs(store) == logs[first] | logs[third]


def test_logs_of_evaluations_that_a_prune_could_not_know_of_are_garbage(store, tmp_path):
    """Of an evaluation that failed, or that went on after its checkpoint was pruned; what others left there stays."""
    first, second = fill(store, tmp_path, 1, 2)
    kept = {log_of(store, second), "run/evaluation-logs/notes.txt", "run/evaluation-logs/eval/readme/notes.txt"}
    log_of(store, first)
    for key in kept - {log_of(store, second)}:
        store.storage.put_bytes(key, b"")
    prune_as_leader(store, RetentionPolicy(1))
    collect_garbage(store, grace_s=0)
    assert evaluation_logs(store) == kept


def test_a_run_that_is_not_evaluated_pays_nothing(store, tmp_path):
    first, *_ = fill(store, tmp_path, 1, 2, 3)
    store.hint_latest(first)

    def cost(use) -> dict[str, int]:
        faulty = FaultyStorage(store.storage)
        use(CheckpointStore(faulty, Layout("run"), StorageSpec(faulty.url)))
        return dict(faulty.counts())

    assert cost(lambda it: it.list()) == {"list": 1, "get_bytes": 3}
    assert cost(lambda it: it.latest()) == {"list": 1, "get_bytes": 2}
    assert cost(lambda it: prune_as_leader(it, RetentionPolicy(5))) == {"list": 2, "get_bytes": 3}
    assert cost(lambda it: it.get(first)) == {"list": 1, "get_bytes": 1}
    assert cost(lambda it: it.attach_metrics(first, {"a": 1})) == {"get_bytes": 1, "put_bytes": 1, "size": 1}
    assert cost(lambda it: it.list()) == {"list": 1, "get_bytes": 4}
    assert cost(lambda it: choose_checkpoint(it, lineage=1, verify="none")) == {"list": 1, "get_bytes": 2, "folders": 1}


def at(seconds: float) -> datetime:
    return datetime(2026, 11, 21, tzinfo=timezone.utc) + timedelta(seconds=seconds)


def manifests(*metrics) -> list[Manifest]:
    """Return checkpoints of which one is committed every second."""
    return [Manifest(f"000001-{step:08d}-00000000", step, 1, it, (), 1, None, at(step)) for step, it in enumerate(metrics)]


def evaluated(accuracy):
    return {"loss": 1, "eval": {"accuracy": accuracy}}


def test_what_waits_for_its_evaluation_stays_until_the_timeout_and_then_ranks_last():
    known = manifests(evaluated(0.5), {"loss": 1}, evaluated(0.9), {"loss": 1}, {"loss": 1})

    def reasons(now_s):
        overdue = () if now_s is None else overdue_evaluations(known, BY_ACCURACY, at(now_s))
        keep = plan(known, BY_ACCURACY, overdue=overdue).keep
        return {int(checkpoint_id.split("-")[1]): why for checkpoint_id, why in keep.items()}

    waiting = ("awaiting evaluation",)
    assert reasons(10) == reasons(None) == {1: waiting, 2: ("best",), 3: waiting, 4: ("latest", *waiting)}
    assert reasons(3601) == {2: ("best",), 3: waiting, 4: ("latest", *waiting)}
    assert reasons(3604) == {2: ("best",), 4: ("latest",)}


@pytest.mark.parametrize("score", [math.nan, 0])
def test_whatever_number_was_attached_as_the_score_ends_the_wait(score):
    decided = plan(manifests(evaluated(score), evaluated(1), evaluated(0)), BY_ACCURACY)
    assert [checkpoint.step for checkpoint in decided.drop] == [0]


def test_a_text_that_was_attached_as_the_score_is_none_and_ends_no_wait():
    decided = plan(manifests(evaluated("text"), evaluated(1), evaluated(0)), BY_ACCURACY)
    assert decided.drop == ()
    assert "awaiting evaluation" in decided.keep[manifests(evaluated("text"))[0].id]


@given(st.lists(st.booleans(), max_size=8), st.integers(0, 20), st.integers(0, 20), st.integers(1, 3))
def test_only_what_has_a_score_or_had_its_time_goes(scored, now_s, timeout_s, num_to_keep):
    known = manifests(*(evaluated(0.5) if it else {} for it in scored))
    policy = RetentionPolicy(num_to_keep, "eval/accuracy", evaluation_timeout_s=timeout_s)
    for checkpoint in plan(known, policy, overdue=overdue_evaluations(known, policy, at(now_s))).drop:
        assert scored[checkpoint.step] or now_s >= checkpoint.step + timeout_s
    unprotected = plan(known, RetentionPolicy(num_to_keep, "eval/accuracy")).drop
    late = overdue_evaluations(known, policy, at(1000))
    assert {it.id for it in plan(known, policy, overdue=late).drop} == {it.id for it in unprotected}


@pytest.mark.parametrize("wrong", [-1, math.nan, math.inf, True, "60", 1e10])
def test_a_timeout_that_is_no_duration_is_refused(wrong):
    with pytest.raises(ValueError, match="evaluation_timeout_s"):
        RetentionPolicy(1, "eval/accuracy", evaluation_timeout_s=wrong)


def test_a_timeout_needs_the_metric_that_the_evaluation_brings():
    with pytest.raises(ValueError, match="give checkpoint_score_attribute, such as 'eval/accuracy'"):
        CheckpointConfig(evaluation_timeout_s=60).policy()


def test_settings_from_before_there_were_timeouts_are_a_policy():
    old = {"num_to_keep": 2, "checkpoint_score_attribute": "loss", "checkpoint_score_order": "min", "keep_last": 1}
    assert RetentionPolicy(**old, keep_every_n_steps=None).evaluation_timeout_s is None
    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="eval/accuracy", evaluation_timeout_s=3600)
    assert config.policy() == BY_ACCURACY


def test_a_prune_protects_by_the_clock_and_ranks_by_what_was_attached(store, tmp_path):
    first, second, third, fourth = fill(store, tmp_path, 1, 2, 3, 4)
    assert prune_as_leader(store, BY_ACCURACY).drop == ()
    store.attach_metrics(first, {"accuracy": 0.9})
    store.attach_metrics(second, {"accuracy": 0.1})
    decided = prune_as_leader(store, BY_ACCURACY)
    assert [manifest.id for manifest in decided.drop] == [second]
    assert decided.keep == {
        first: ("best",),
        third: ("awaiting evaluation",),
        fourth: ("latest", "awaiting evaluation"),
    }
    at_once = RetentionPolicy(1, "eval/accuracy", evaluation_timeout_s=0)
    assert [manifest.id for manifest in prune_as_leader(store, at_once).drop] == [third]
