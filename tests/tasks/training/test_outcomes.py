from prefect.logging import disable_run_logger
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, claim_key, read_outcomes
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.tasks.training.outcomes import record_outcome


def test_an_attempt_whose_claim_is_gone_ends_no_other_of_its_number(store):
    """As of a run that was deleted and begun again: its next start would take the attempt that trains now for ended."""
    deleted = claim_attempt(store, Owner.current(), world_size=1)
    store.storage.delete([claim_key(store, deleted)])
    begun = claim_attempt(store, Owner.current(), world_size=1)
    assert begun.number == deleted.number
    with disable_run_logger():
        record_outcome(store, deleted, Outcome(deleted.number, "failed"))
        assert read_outcomes(store) == []
        record_outcome(store, begun, Outcome(begun.number, "completed"))
    assert [it.ending for it in read_outcomes(store)] == ["completed"]
