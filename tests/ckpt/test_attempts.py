import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from prefect_torch.ckpt import CheckpointStore, FencedError
from prefect_torch.ckpt.attempts import (
    Outcome,
    Owner,
    check_fence,
    claim_attempt,
    list_attempts,
    newest_attempt,
    read_outcomes,
    write_outcome,
)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore.open(tmp_path, "run")


def test_attempts_count_from_one(store):
    assert newest_attempt(store) is None
    assert [claim_attempt(store, Owner.current(), world_size=2).number for _ in range(3)] == [1, 2, 3]
    assert newest_attempt(store).number == 3


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
    check_fence(store, first.number)
    second = claim_attempt(store, Owner.current(), world_size=1)
    with pytest.raises(FencedError, match="attempt 1 of run 'run' was overtaken by attempt 2"):
        check_fence(store, first.number)
    check_fence(store, second.number)


def test_a_new_lineage_begins_only_where_it_is_not_given(store):
    assert claim_attempt(store, Owner.current(), world_size=1).lineage == 1
    assert claim_attempt(store, Owner.current(), world_size=1, lineage=1).lineage == 1
    assert claim_attempt(store, Owner.current(), world_size=1).lineage == 3


def test_this_process_is_alive_and_an_ended_one_is_dead():
    assert Owner.current().is_dead() is False
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        owner = replace(Owner.current(), pid=child.pid, started=0)
        assert owner.is_dead() is True  # a reused pid is another process
    assert replace(Owner.current(), pid=child.pid).is_dead() is True


def test_a_process_of_another_machine_may_be_alive():
    assert replace(Owner.current(), host="elsewhere/boot", pid=os.getpid()).is_dead() is None


def test_outcomes_come_back(store):
    outcome = Outcome(2, "failed", "flow", "user", "boom", {"1": "boom"}, {"loss": float("inf")})
    write_outcome(store, outcome)
    assert read_outcomes(store) == [outcome]
