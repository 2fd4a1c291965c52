"""Task runs below `with tags(...)`, where a tag may have a concurrency limit."""

import pytest
from prefect import tags, task
from prefect.settings import PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW, temporary_settings
from prefect_torch.flows import RunConfig, evaluate, evaluation, leading, prune, pruning, train


@pytest.fixture
def tagged(monkeypatch):
    """Return the tags of each task run that had its slots, by its name."""
    tagged = {}

    def record(_task, task_run, _state):
        tagged[task_run.name.split("-")[0]] = set(task_run.tags)

    for module, name in ((leading, "train_workers"), (evaluation, "evaluate_checkpoint"), (pruning, "prune_checkpoints")):
        monkeypatch.setattr(module, name, getattr(module, name).with_options(on_completion=[record]))
    return tagged


@pytest.mark.parametrize("is_in_task", [True, False])
def test_of_a_tagged_task_and_the_task_runs_of_flows_that_it_calls_only_the_task_has_the_tag(tmp_path, tagged, is_in_task):
    """Its slot is the one that they would wait for, without an end; where no task has it, they are what is limited."""

    def upkeep():
        train("trainings:train_epochs", {"epochs": 1}, run=RunConfig(name="run", storage=str(tmp_path)))
        evaluate("evaluations:measure", str(tmp_path), "run")
        prune(str(tmp_path))

    with temporary_settings({PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}), tags("gpu"):
        (task(upkeep) if is_in_task else upkeep)()
    assert tagged == dict.fromkeys(("train", "eval", "prune"), set() if is_in_task else {"gpu"})


def test_a_tag_that_the_calling_task_lacks_is_kept(tmp_path, tagged):
    @task
    def fit():
        with tags("of-training"):
            train("trainings:train_epochs", {"epochs": 1}, run=RunConfig(name="run", storage=str(tmp_path)))

    with temporary_settings({PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW: "ignore"}), tags("gpu"):
        fit()
    assert tagged == {"train": {"of-training"}}
