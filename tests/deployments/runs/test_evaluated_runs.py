"""What the command line says of runs whose checkpoints were evaluated after the fact."""

import json
from dataclasses import asdict

import pytest
from prefect_torch.ckpt import CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.deployments.command_line.program import run
from ranks import Attempt, folder


@pytest.fixture
def store(tmp_path):
    """Three checkpoints, of which the newest awaits its evaluation and the first is better than the second."""
    store = CheckpointStore.open(str(tmp_path / "store"), "run")
    session = Attempt(store).session()
    for epoch in range(3):
        session.report({"loss": 3 - epoch}, folder(tmp_path / "c", model=str(epoch)))
    for checkpoint_id, accuracy in zip(store.ids(), (0.9, 0.1), strict=False):
        store.attach_metrics(checkpoint_id, {"accuracy": accuracy})
    settings = asdict(RetentionPolicy(1, "eval/accuracy", evaluation_timeout_s=3600))
    claimed = claim_attempt(store, Owner.current(), world_size=1, settings=settings)
    write_outcome(store, Outcome(claimed.number, "completed"))
    return store


@pytest.fixture
def says(store, capsys):
    def call(command, *arguments):
        assert run([command, store.storage.url, "run", *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return call


def test_attached_metrics_are_listed_shown_ranked_and_pruned_by(store, says):
    first, second, third = store.ids()
    listed = says("ls")
    assert [it["metrics"] for it in listed][:2] == [
        {"loss": 3, "eval": {"accuracy": 0.9}},
        {"loss": 2, "eval": {"accuracy": 0.1}},
    ]
    assert [it["kept_because"] for it in listed] == [["best"], [], ["latest", "awaiting evaluation"]]
    shown = says("show", first)
    assert (shown["metrics"], shown["evaluations"]) == ({"loss": 3, "eval": {"accuracy": 0.9}}, ["eval"])
    assert [it["id"] for it in says("best", "-k", "2")] == [first, second]
    assert [it["metrics"]["eval"]["accuracy"] for it in says("best", "--metric", "eval/accuracy", "--order", "min")] == [0.1]
    for arguments in ([], ["--keep", "1"]):
        plan = says("prune", "--dry-run", *arguments)
        assert [it["id"] for it in plan["drop"]] == [second]
        assert [it["kept_because"] for it in plan["keep"]] == [["best"], ["latest", "awaiting evaluation"]]
    assert third in store.ids()


@pytest.mark.parametrize("command", ["prune run --yes --keep 1", "delete run best --yes", "best run"])
def test_an_evaluations_name_without_its_metric_is_refused_as_a_score(store, command, capsys):
    name, *arguments = command.split()
    assert run([name, store.storage.url, *arguments, "--metric", "eval", "--order", "max"]) == 1
    wanted = "no checkpoint of run 'run' has a number as the metric 'eval'; they have eval/accuracy, loss"
    assert capsys.readouterr().err == f"prefect-torch: {wanted}\n"
    assert len(list(store.ids())) == 3
