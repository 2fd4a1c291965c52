from dataclasses import asdict, replace

import pytest
from prefect_torch.ckpt import RetentionPolicy
from prefect_torch.ckpt.runs.attempts.attempt import (
    Outcome,
    newest_attempt,
    newest_claims,
    read_outcome,
    read_outcomes,
    record_resumed_from,
    write_outcome,
)
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.storage.retry import CredentialsExpiredError


@pytest.mark.parametrize(("path", "restored"), [("s3://b/run/checkpoints/000001-00000002-08df6443", True), ("s3://b/x", False)])
def test_only_an_id_is_what_an_attempt_restores(store, path, restored):
    claimed = replace(claim_attempt(store, Owner.current(), world_size=1), resumed_from=path)
    assert claimed.restored_id == ("000001-00000002-08df6443" if restored else None)


def test_an_attempt_with_a_policy_of_a_later_version_is_seen_and_keeps_everything(store):
    settings = {"num_to_keep": 1, "checkpoint_score_order": "median"}
    claimed = claim_attempt(store, Owner.current(), world_size=1, settings=settings)
    assert newest_attempt(store) == claimed
    assert claimed.policy == RetentionPolicy()


def test_a_claim_that_was_not_stored_again_for_want_of_fresh_credentials_is_no_smaller_matter(store, monkeypatch):
    """Elsewhere checkpoints may be deleted, and a prune would not know which one the attempt restores."""
    claimed = claim_attempt(store, Owner.current(), world_size=1)

    def refuse(*_):
        raise CredentialsExpiredError("ExpiredToken")

    monkeypatch.setattr(type(store.storage), "put_bytes", refuse)
    with pytest.raises(CredentialsExpiredError):
        record_resumed_from(store, claimed, "s3://b/x")


@pytest.mark.parametrize(("field", "other"), [(b'"lineage": 1', b'"lineage": 3'), (b'"num_to_keep": 3', b'"num_to_keep": 1')])
def test_a_claim_with_one_changed_bit_is_not_believed(store, caplog, field, other):
    claimed = claim_attempt(store, Owner.current(), world_size=1, settings={"num_to_keep": 3})
    record_resumed_from(store, claimed, "s3://b/x")
    assert newest_attempt(store) == replace(claimed, resumed_from="s3://b/x")
    key = store.layout.attempt(claimed.number, claimed.token)
    data = store.storage.get_bytes(key)
    store.storage.put_bytes(key, data.replace(field, other))
    assert store.storage.get_bytes(key) != data
    assert newest_attempt(store) is None
    assert f"{key} is not the claim of an attempt: it does not match its own digest" in caplog.text


def test_outcomes_come_back(store):
    outcome = Outcome(2, "failed", "flow", "user", "boom", {"1": "boom"}, {"loss": float("inf")})
    write_outcome(store, outcome)
    assert read_outcomes(store) == [outcome]


def test_an_outcome_with_one_changed_bit_is_not_believed(store, caplog):
    write_outcome(store, Outcome(1, "failed", "flow", "infrastructure", return_value={9: 1, 10: 2}))
    assert read_outcomes(store)[0].return_value == {"9": 1, "10": 2}
    key = store.layout.outcome(1)
    store.storage.put_bytes(key, store.storage.get_bytes(key).replace(b'"flow"', b'"glow"'))
    assert read_outcomes(store) == []
    assert f"{key} is not the outcome of an attempt: it does not match its own digest" in caplog.text


def test_an_outcome_of_an_older_version_has_no_digest(store):
    outcome = Outcome(1, "completed", return_value=3)
    store.records.put_json(store.layout.outcome(1), asdict(outcome))
    assert read_outcomes(store) == [outcome]


def test_a_claim_or_an_outcome_under_the_name_of_another_is_not_believed(store, caplog):
    first = claim_attempt(store, Owner.current(), world_size=1)
    key = store.layout.attempt(first.number, first.token)
    store.storage.put_bytes(store.layout.attempt(2, first.token), store.storage.get_bytes(key))
    assert newest_claims(store) == ([first], [store.layout.attempt(2, first.token)])
    assert f"run/attempts/000002-{first.token}.json is not the claim of an attempt: it is that of '{key}'" in caplog.text
    write_outcome(store, Outcome(1, "completed"))
    store.storage.put_bytes(store.layout.outcome(2), store.storage.get_bytes(store.layout.outcome(1)))
    assert read_outcome(store, 2) is None
