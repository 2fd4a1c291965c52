import itertools
import os
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from faulty_storage import FaultyStorage
from prefect_torch.ckpt import CheckpointStore, FencedError, RunBusyError, StorageError
from prefect_torch.ckpt.checkpoint_store import list_runs
from prefect_torch.ckpt.runs.attempts import claims
from prefect_torch.ckpt.runs.attempts.attempt import claim_key, list_attempts, newest_attempt
from prefect_torch.ckpt.runs.attempts.claims import ClaimRenewal, check_fence, claim_attempt, claim_unless_led
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.protocol import StorageSpec
from wrapped_storage import WrappedStorage


def test_attempts_count_from_one(store):
    assert newest_attempt(store) is None
    assert [claim_attempt(store, Owner.current(), world_size=2).number for _ in range(3)] == [1, 2, 3]
    assert newest_attempt(store).number == 3


def test_a_run_without_its_first_object_is_listed_again_from_the_next_attempt_on(store):
    """As of a copy by another program that was interrupted."""
    claim_attempt(store, Owner.current(), world_size=1)
    store.storage.delete([store.layout.run_info])
    assert list(list_runs(store.storage)) == []
    claim_attempt(store, Owner.current(), world_size=1)
    assert list(list_runs(store.storage)) == ["run"]


def test_claims_at_the_same_moment_end_with_different_numbers(store):
    numbers = []
    barrier = threading.Barrier(6)

    def claim():
        barrier.wait()
        numbers.extend(claim_attempt(store, Owner.current(), world_size=1).number for _ in range(5))

    threads = [threading.Thread(target=claim) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(numbers)) == 30
    assert sorted(attempt.number for attempt in list_attempts(store)) == sorted(numbers)


def test_an_attempt_passes_the_fence_until_a_newer_one_is_claimed(store):
    first = claim_attempt(store, Owner.current(), world_size=1)
    check_fence(store, claim_key(store, first))
    second = claim_attempt(store, Owner.current(), world_size=1)
    with pytest.raises(FencedError, match="attempt 1 of run 'run' was overtaken by attempt 2"):
        check_fence(store, claim_key(store, first))
    check_fence(store, claim_key(store, second))


def test_a_run_whose_claims_were_deleted_counts_on_from_its_checkpoints(store):
    store.storage.put_bytes(store.layout.manifest("000003-00000007-0123abcd"), b"")
    assert claim_attempt(store, Owner.current(), world_size=1).number == 4
    assert claim_attempt(store, Owner.current(), world_size=1).number == 5


@pytest.mark.parametrize("left", ["manifests/000003-00000007-0123abcd.json", "outcomes/000003.json"])
def test_the_number_of_a_claim_that_was_deleted_is_not_used_again(store, left):
    claim_attempt(store, Owner.current(), world_size=1)
    store.storage.put_bytes(f"run/{left}", b"{}")
    store.storage.put_bytes("run/outcomes/notes.json", b"{}")
    assert claim_attempt(store, Owner.current(), world_size=1).number == 4


@pytest.mark.parametrize("sweep", ["", "sweep/"])
def test_a_run_whose_name_differs_from_anothers_in_case_alone_is_not_that_run(tmp_path, monkeypatch, sweep):
    """As on CIFS, exFAT or APFS, where the second name finds the first directory."""
    names = (f"{sweep}trial-0001-0000000a", f"{sweep}trial-0001-0000000A") if sweep else ("digits", "Digits")
    one, other = (Run(LocalStorage(tmp_path), Layout(name), StorageSpec(str(tmp_path))) for name in names)
    claim_attempt(one, Owner.current(), world_size=1)
    (tmp_path / other.name).symlink_to(tmp_path / one.name)
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: (it for it in listed(path) if it != tmp_path / other.name))
    with pytest.raises(ValueError, match=f"would be the run {tmp_path}/{one.name}, since case is ignored there"):
        claim_attempt(other, Owner.current(), world_size=1)
    assert [attempt.number for attempt in list_attempts(one)] == [1]
    claim_attempt(one, Owner.current(), world_size=1)


def test_a_run_whose_directory_is_a_link_of_the_user_is_what_it_leads_to(tmp_path):
    one, other = (Run(LocalStorage(tmp_path), Layout(name), StorageSpec(str(tmp_path))) for name in ("digits", "Digits"))
    claim_attempt(one, Owner.current(), world_size=1)
    (tmp_path / "Digits").symlink_to("digits")
    assert claim_attempt(other, Owner.current(), world_size=1).number == 2


def test_a_new_lineage_begins_only_where_it_is_not_given(store):
    assert claim_attempt(store, Owner.current(), world_size=1).lineage == 1
    assert claim_attempt(store, Owner.current(), world_size=1, lineage=1).lineage == 1
    assert claim_attempt(store, Owner.current(), world_size=1).lineage == 3


def test_a_claim_that_somebody_deleted_passes_no_fence(store, monkeypatch):
    monkeypatch.setattr(claims, "_LISTED_WITHIN_S", 0.0)
    claimed = claim_attempt(store, Owner.current(), world_size=1)
    store.storage.delete([store.layout.attempt(claimed.number, claimed.token)])
    with pytest.raises(FencedError, match="the claim of attempt 1 on run 'run' is gone"):
        check_fence(store, claim_key(store, claimed))


def test_a_claim_that_was_deleted_passes_no_fence_once_its_number_is_claimed_again(store):
    first = claim_attempt(store, Owner.current(), world_size=1)
    store.storage.delete(store.keys("run/"))
    second = claim_attempt(store, Owner.current(), world_size=1)
    assert second.number == first.number == 1
    with pytest.raises(FencedError, match="the claim of attempt 1 on run 'run' is gone"):
        check_fence(store, claim_key(store, first))
    check_fence(store, claim_key(store, second))


def test_a_claim_that_was_deleted_renews_no_other_of_its_number(tmp_path, monkeypatch):
    store = CheckpointStore.open(tmp_path, "run")
    first = claim_attempt(store, Owner.current(), world_size=1)
    store.storage.delete(store.keys("run/"))
    key = claim_key(store, claim_attempt(store, Owner.current(), world_size=1))
    os.utime(tmp_path / key, (0, 0))
    ClaimRenewal(store, claim_key(store, first)).renew()
    assert (tmp_path / key).stat().st_mtime == 0


def test_a_claim_that_is_renewed_each_day_outlives_what_deletes_old_files(tmp_path, monkeypatch):
    store = CheckpointStore.open(tmp_path, "run")
    attempt = claim_attempt(store, Owner.current(), world_size=1)
    renewal = ClaimRenewal(store, claim_key(store, attempt))
    assert not renewal.is_due
    monkeypatch.setattr(claims, "_RENEWED_AFTER_S", 0)
    assert renewal.is_due
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    for path in before:
        os.utime(path, (0, 0))
    renewal.renew()
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before
    assert all(path.stat().st_mtime > 0 for path in before)


def test_a_claim_that_is_gone_is_not_renewed(store, monkeypatch, caplog):
    first = claim_attempt(store, Owner.current(), world_size=1)
    second = claim_attempt(store, Owner.current(), world_size=1)
    renewal, overtaken = (ClaimRenewal(store, claim_key(store, attempt)) for attempt in (second, first))
    store.storage.delete([store.layout.attempt(second.number, second.token)])
    renewal.renew()
    assert [attempt.number for attempt in list_attempts(store)] == [first.number]
    broken = FaultyStorage(store.storage, crash_at=1, error=StorageError("no answer"))
    ClaimRenewal(replace(store, storage=broken), claim_key(store, first)).renew()
    assert caplog.messages == ["the claim of attempt 1 on run 'run' was not stored again, as each day: no answer"]
    overtaken.renew()
    assert [attempt.number for attempt in list_attempts(store)] == [first.number]


def test_what_a_run_began_with_is_written_once(store):
    claim_attempt(store, Owner.current(), world_size=1)
    began = store.storage.get_bytes(store.layout.run_info)
    claim_attempt(store, Owner.current(), world_size=1)
    assert store.storage.get_bytes(store.layout.run_info) == began


def refuse(attempt):
    raise RunBusyError(f"led by {attempt.owner.flow_run_id}")


def start_unless_led(store, name, refuse_if_led=lambda _: None):
    def claim(_, known):
        return claim_attempt(store, Owner.current(name), world_size=1, known=known)

    return claim_unless_led(store, refuse_if_led, claim)


def test_of_simultaneous_starts_one_claims_and_all_others_are_refused(store):
    """As six processes do it that start together, each of which takes every other for alive."""
    barrier = threading.Barrier(6)
    claimed, refused = [], []

    def start(name):
        barrier.wait()
        try:
            claimed.append(start_unless_led(store, name, refuse))
        except RunBusyError as exc:
            refused.append(str(exc))

    threads = [threading.Thread(target=start, args=(f"flow-{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = claimed
    assert len(refused) == 5
    assert [attempt.token for attempt in list_attempts(store)] == [winner.token]
    check_fence(store, claim_key(store, winner))


def test_a_run_whose_owner_has_ended_is_claimed_with_what_it_left(store):
    ended = claim_attempt(store, Owner.current("old"), world_size=1)
    previous = []

    def claim(attempt, known):
        previous.append(attempt)
        return claim_attempt(store, Owner.current("new"), world_size=1, known=known)

    assert claim_unless_led(store, lambda _: None, claim).number == 2
    assert previous == [ended]


@pytest.mark.parametrize("junk", [b"", b"{", b'{"number": 2}'])
def test_a_claim_that_cannot_be_read_holds_up_no_later_start(store, monkeypatch, junk):
    """As its leader leaves it who is killed while it rewrites it, on a storage that replaces objects in place."""
    monkeypatch.setattr(claims, "_REWRITTEN_WITHIN_S", 0.0)
    first = claim_attempt(store, Owner.current("ended"), world_size=1)
    torn = claim_attempt(store, Owner.current("killed"), world_size=1)
    store.storage.put_bytes(store.layout.attempt(torn.number, torn.token), junk)
    asked = []

    def note(attempt):
        asked.append(attempt)
        assert len(asked) < 5, "it claims and withdraws without end"

    assert start_unless_led(store, "new", note).number == 3
    assert asked == [first]


def test_a_claim_that_is_rewritten_at_this_moment_is_asked_about(store, monkeypatch):
    claimed = claim_attempt(store, Owner.current("leader"), world_size=1)
    key = store.layout.attempt(claimed.number, claimed.token)
    whole = store.storage.get_bytes(key)
    store.storage.put_bytes(key, whole[:9])
    monkeypatch.setattr(claims.time, "sleep", lambda _: store.storage.put_bytes(key, whole))
    with pytest.raises(RunBusyError, match="leader"):
        start_unless_led(store, "new", refuse)
    assert list(list_attempts(store)) == [claimed]


def test_a_file_of_another_program_beside_the_claims_fences_nobody(store):
    claimed = claim_attempt(store, Owner.current(), world_size=1)
    store.storage.put_bytes(f"{store.layout.attempts}000009-notes.json", b"{}")
    check_fence(store, claim_key(store, claimed))
    assert start_unless_led(store, "new").number == 2


class Meeting(WrappedStorage):
    """Calls `meanwhile` once, at the first operation that `meets` accepts: after a listing, before anything else."""

    def __init__(self, inner, meets, meanwhile):
        super().__init__(inner)
        self.meets, self.meanwhile = meets, meanwhile

    def _do(self, verb, *args, **kwargs):
        listed = list(super()._do(verb, *args, **kwargs)) if verb == "list" else None
        if self.meets(verb, args[0]) and self.meanwhile is not None:
            meanwhile, self.meanwhile = self.meanwhile, None
            meanwhile()
        return super()._do(verb, *args, **kwargs) if listed is None else iter(listed)


def test_a_start_that_looked_before_another_claimed_fences_it_at_no_moment(store):
    """It asks Prefect in between, which may take long."""
    claimed, puts = [], []

    def meets(verb, key):
        puts.extend([key] if verb == "put_bytes" and "/attempts/" in key else [])
        return verb == "list"

    late = Meeting(store.storage, meets, lambda: claimed.append(start_unless_led(store, "first")))
    with pytest.raises(RunBusyError, match="first"):
        start_unless_led(CheckpointStore(late, store.layout, store.spec), "late", refuse)
    assert puts == []
    check_fence(store, claim_key(store, claimed[0]))


def test_a_claim_with_a_smaller_number_that_was_made_meanwhile_came_first(store):
    withdrawn = claim_attempt(store, Owner.current("refused"), world_size=1)
    claimed = []

    def meanwhile():
        store.storage.delete([store.layout.attempt(withdrawn.number, withdrawn.token)])
        claimed.append(start_unless_led(store, "first"))

    late = Meeting(store.storage, lambda verb, key: verb == "put_bytes" and "/attempts/" in key, meanwhile)
    with pytest.raises(RunBusyError, match="first"):
        start_unless_led(
            CheckpointStore(late, store.layout, store.spec), "late", lambda it: refuse(it) if it != withdrawn else None
        )
    assert list(list_attempts(store)) == claimed
    assert claimed[0].number == withdrawn.number


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_start_that_fails_at_any_operation_leaves_no_claim(store, after):
    leader = claim_attempt(store, Owner.current("leader"), world_size=1)
    for number in itertools.count(1):
        faulty = FaultyStorage(store.storage, number, after=after, error=StorageError("no answer"))
        try:
            start_unless_led(CheckpointStore(faulty, store.layout, store.spec), "new")
        except StorageError:
            check_fence(store, claim_key(store, leader))
        else:
            break
    assert number == 9
    assert faulty.counts() == {"list": 5, "get_bytes": 2, "put_bytes": 1}


def test_all_claims_of_one_number_are_asked_about(store):
    """A process that was killed before it withdrew its own has left one."""
    leader = claim_attempt(store, Owner.current("leader"), world_size=1)
    for token in ("00000000", "ffffffff"):
        left = replace(leader, token=token, owner=Owner.current("killed"))
        store.records.put_json(store.layout.attempt(left.number, token), asdict(left))
    with pytest.raises(RunBusyError, match="leader"):
        start_unless_led(store, "new", lambda it: refuse(it) if it.owner.flow_run_id != "killed" else None)
