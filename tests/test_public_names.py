import builtins
import importlib
import inspect
import re

import pytest
from prefect_torch.flows import train

PUBLIC = {
    "prefect_torch.ckpt": [
        "Checkpoint",
        "CheckpointStore",
        "Manifest",
        "RandomState",
        "RetentionPolicy",
        "TrainContext",
        "get_checkpoint",
        "get_context",
        "log_metrics",
        "report",
        "CheckpointNotFoundError",
        "CheckpointCorruptError",
        "CommitFailedError",
        "FencedError",
        "ReportMismatchError",
        "StorageError",
        "StorageFullError",
        "RunBusyError",
        "CheckpointError",
        "FileEntry",
        "Storage",
    ],
    "prefect_torch.flows": [
        "train",
        "evaluate",
        "prune",
        "RunConfig",
        "ScalingConfig",
        "CheckpointConfig",
        "FailureConfig",
        "Result",
    ],
    "prefect_torch.tasks": [
        "train_workers",
        "train_rank",
        "prune_checkpoints",
        "prepare_model",
        "prepare_data_loader",
        "get_device",
    ],
    "prefect_torch.deployments": [
        "create_work_pool",
        "deploy",
        "evaluate_new_best",
        "job_template",
        "make_deployment",
        "resume_crashed",
        "serve",
    ],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_what_outsiders_rely_on_is_exported(module):
    imported = importlib.import_module(module)
    assert set(PUBLIC[module]) <= set(imported.__all__)
    assert all(getattr(imported, name) is not None for name in imported.__all__)
    assert imported.__all__ == sorted(imported.__all__, key=lambda name: (name[0].islower(), name))


@pytest.mark.parametrize("module", PUBLIC)
def test_every_public_name_says_what_it_guarantees(module):
    imported = importlib.import_module(module)
    undocumented = [name for name in imported.__all__ if not inspect.getdoc(getattr(imported, name))]
    assert undocumented == []


def documented_errors(member):
    """Yield the names of the errors in the docstring of a function, or of a class and its public methods."""
    text = inspect.getdoc(getattr(member, "fn", member)) or ""
    raised = re.search(r"^Raises:\n((?:    .*\n|\n)+)", f"{text}\n", re.MULTILINE)
    yield from [] if raised is None else re.findall(r"^    (\w+):", raised[1], re.MULTILINE)
    for ours in (it for it in getattr(member, "__mro__", ()) if it.__module__.startswith("prefect_torch.")):
        for name, method in vars(ours).items():
            if not name.startswith("_") and inspect.getdoc(method):
                yield from documented_errors(method)


def test_an_error_that_a_public_docstring_names_is_public():
    modules = [importlib.import_module(name) for name in (*PUBLIC, "prefect_torch.ckpt.blocks")]
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    named = {error for member in public.values() for error in documented_errors(member)}
    of_prefect = {"CancelledRun", "ObjectNotFound"}
    assert {error for error in named if not hasattr(builtins, error)} - public.keys() == of_prefect


def test_train_has_the_documented_parameters():
    assert list(inspect.signature(train.fn).parameters) == [
        "train_fn",
        "config",
        "scaling",
        "run",
        "checkpoint",
        "failure",
        "resume_from",
    ]


def test_a_name_that_does_not_exist_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'nosuch'"):
        _ = importlib.import_module("prefect_torch.tasks").nosuch
