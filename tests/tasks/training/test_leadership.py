"""Who may lead a run after whom."""

from dataclasses import replace

import pytest
from prefect.logging import disable_run_logger
from prefect_torch.ckpt import FencedError, RunBusyError
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, write_outcome
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.tasks import RunConfig
from prefect_torch.tasks.training import leadership, liveness
from prefect_torch.tasks.training.leadership import Claimant, claim_run

HERE = Owner.current("0b1c2d3e-0000-4000-8000-000000000001")
OTHER = "0b1c2d3e-0000-4000-8000-000000000002"
ELSEWHERE = replace(HERE, host="elsewhere/boot")


@pytest.fixture(params=[1, 0], ids=["training", "sweep"])
def lead(store, request):
    def lead(owner, *, takeover=False, restarted=()):
        config = RunConfig(storage=store.storage.url, takeover=takeover)
        with disable_run_logger():
            return claim_run(store, Claimant(owner, config, tuple(restarted), request.param), lambda: None)[0]

    return lead


@pytest.mark.parametrize("takeover", [False, True])
def test_a_process_that_a_later_one_of_its_flow_run_has_overtaken_does_not_take_the_run_back(lead, takeover):
    """As a machine that was suspended does, whose flow run was run again elsewhere."""
    lead(HERE, takeover=takeover)
    assert lead(HERE, takeover=takeover).number == 2, "its own retry"
    assert lead(ELSEWHERE, takeover=takeover).number == 3
    with pytest.raises(FencedError, match=rf"another process of this flow run, {HERE.pid} on elsewhere, leads run 'run'"):
        lead(HERE, takeover=takeover)
    assert lead(ELSEWHERE, takeover=takeover).number == 4


def test_a_restart_does_not_take_back_what_was_taken_over_from_the_flow_run_that_it_restarts(lead, monkeypatch):
    monkeypatch.setattr(liveness, "has_ended", lambda flow_run_id: False)
    monkeypatch.setattr(leadership, "is_unknown", lambda flow_run_id: False)
    first, taker, restart = (replace(ELSEWHERE, flow_run_id=f"0b1c2d3e-0000-4000-8000-00000000000{n}") for n in (4, 5, 6))
    lead(first, takeover=True)
    assert lead(restart, takeover=True, restarted=[first.flow_run_id]).number == 2, "it was only interrupted"
    assert lead(taker, takeover=True).number == 3
    with pytest.raises(RunBusyError, match=f"by flow run {taker.flow_run_id}"):
        lead(restart, takeover=True, restarted=[first.flow_run_id])
    fresh = replace(restart, flow_run_id="0b1c2d3e-0000-4000-8000-000000000007")
    with pytest.raises(RunBusyError):
        lead(fresh, takeover=True, restarted=[restart.flow_run_id, first.flow_run_id])
    assert lead(fresh, takeover=True).number == 4


@pytest.mark.parametrize(
    ("ending", "kind", "has_ended", "is_led"),
    [
        ("failed", "user", False, True),
        ("preempted", None, False, True),
        ("failed", "user", True, False),
        ("failed", "user", None, False),
        ("failed", "final", False, False),
        ("completed", None, False, False),
        ("cancelled", None, False, False),
    ],
)
def test_between_two_attempts_a_run_is_its_flow_runs(store, lead, monkeypatch, ending, kind, has_ended, is_led):
    monkeypatch.setattr(liveness, "has_ended", lambda flow_run_id: has_ended)
    monkeypatch.setattr(leadership, "is_unknown", lambda flow_run_id: False)
    lead(ELSEWHERE)
    write_outcome(store, Outcome(1, ending, ELSEWHERE.flow_run_id, kind))
    if is_led:
        with pytest.raises(RunBusyError, match=r"is (being trained|led) by flow run"):
            lead(replace(HERE, flow_run_id=OTHER))
        assert lead(replace(HERE, flow_run_id=OTHER), takeover=True).number == 2
    else:
        assert lead(replace(HERE, flow_run_id=OTHER)).number == 2


def test_a_flow_run_id_that_is_not_of_prefect_is_of_no_flow_run_that_it_knows(store):
    assert liveness.has_ended("x") is None
