"""Two leaders of one run, interleaved at every storage operation: an old one that does not know, and the one after it."""

import math
import time
from collections import Counter
from datetime import datetime, timezone
from functools import partial
from itertools import chain, count, product, repeat
from typing import NamedTuple

import pytest
import xxhash
from greenlet import getcurrent, greenlet
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_storage import MemoryStorage
from prefect_torch.ckpt import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointStore,
    FencedError,
    RetentionPolicy,
    RunBusyError,
    StorageSpec,
)
from prefect_torch.ckpt.runs.attempts.attempt import claim_key, list_attempts
from prefect_torch.ckpt.runs.attempts.claims import check_fence, claim_attempt, claim_unless_led
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest, new_id
from prefect_torch.ckpt.runs.quarantine import quarantine
from prefect_torch.ckpt.storage import parallel
from prunes import prune_as_leader
from ranks import Attempt, folder
from wrapped_storage import READS, WrappedStorage

POLICY = RetentionPolicy(num_to_keep=1)
NOW = datetime(2026, 11, 21, tzinfo=timezone.utc)
DIGEST_OF_X = xxhash.xxh3_128_hexdigest(b"x")


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Have few reads done in the thread that asks, where the greenlets are, however long its turn lets each wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel, "_QUICK_S", math.inf)
        yield


class Operation(NamedTuple):
    """One of a storage, on an object, on several, or on all below a prefix."""

    verb: str
    places: tuple[str, ...]

    def commutes_with(self, other):
        """Return whether the two do the same in either order: both read, or they are about other objects."""
        if self.verb in READS and other.verb in READS:
            return True
        pairs = product(self.places, other.places)
        return not any(one.startswith(another) or another.startswith(one) for one, another in pairs)


class Turns:
    """Lets one of several functions do one storage operation at a time, each in a greenlet of this thread."""

    def __init__(self):
        self._waiting: dict[str, greenlet] = {}
        self.next: dict[str, Operation] = {}  # what each waits for a turn to do

    def start(self, name, function):
        """Begin `function`, which goes on to its first operation."""
        self._waiting[name] = greenlet(function)
        self.give(name)

    def take(self, operation):
        """Wait for a turn to do an operation."""
        getcurrent().parent.switch(operation)

    def waiting(self):
        """Return who wants to go on."""
        return sorted(self._waiting)

    def give(self, name):
        """Let `name` go on to its next operation, or its end."""
        self.next[name] = self._waiting[name].switch()
        if self._waiting[name].dead:
            del self._waiting[name], self.next[name]


class OneAtATime(WrappedStorage):
    """A leader's own view of the storage."""

    def __init__(self, inner, turns):
        super().__init__(inner)
        self.turns = turns
        self.has_claimed = False

    def local_path(self, key):
        return None

    def _do(self, verb, place, *args, **kwargs):
        if verb == "delete":
            place = tuple(place)
        self.turns.take(Operation(verb, (place,) if isinstance(place, str) else tuple(place)))
        self.has_claimed |= verb == "put_bytes" and place.startswith("run/attempts/")
        result = super()._do(verb, place, *args, **kwargs)
        return iter(list(result)) if verb == "list" else result


class Leader:
    """Claims, resumes, and reports; with retention after each report, as the task beside a training does."""

    def __init__(self, storage, tmp_path, name, reports):
        self.store = CheckpointStore(storage, Layout("run"), StorageSpec(storage.url))
        self.tmp_path, self.name, self.reports = tmp_path, name, reports
        self.attempt = None
        self.committed = []
        self.fenced = False

    def __call__(self):
        self.attempt = Attempt(self.store)
        session = self.attempt.session()
        for number in range(self.reports):
            try:
                session.report({"by": self.name}, folder(self.tmp_path / self.name, model=f"{self.name}{number}"))
            except FencedError:
                self.fenced = True
                return
            self.committed.append(session._last_step)
            prune_as_leader(self.store, POLICY, in_use=() if self.attempt.restored is None else (self.attempt.restored.id,))
            collect_garbage(self.store)


@settings(max_examples=50)
@given(head_start=st.integers(0, 25), schedule=st.lists(st.booleans(), max_size=60))
def test_whoever_claims_last_owns_the_run_and_what_was_reported_before_is_not_lost(tmp_path_factory, head_start, schedule):
    tmp_path = tmp_path_factory.mktemp("run")
    plain = MemoryStorage()
    store = CheckpointStore(plain, Layout("run"), StorageSpec(plain.url))
    turns = Turns()
    leaders = {name: Leader(OneAtATime(plain, turns), tmp_path, name, reports=3) for name in "ab"}
    for name, leader in leaders.items():
        turns.start(name, leader)
    reported_before = {}  # by leader: the other's newest step when it began to claim
    choices = iter([True] * head_start + schedule)
    while waiting := turns.waiting():
        for name, other in ("ab", "ba"):
            if not leaders[name].store.storage.has_claimed:
                reported_before[name] = max(leaders[other].committed, default=-1)
        for manifest in store.list():
            store.verify(manifest)
        turns.give(waiting[0] if len(waiting) == 1 or next(choices, True) else waiting[1])

    first, second = sorted(leaders.values(), key=lambda leader: leader.attempt.number)
    assert first.attempt.number < second.attempt.number
    assert not second.fenced
    assert len(second.committed) == 3
    assert store.latest().attempt == second.attempt.number
    restored = -1 if second.attempt.restored is None else second.attempt.restored.step
    assert restored >= reported_before[second.name]
    assert second.committed[0] == restored + 1
    assert first.fenced == (len(first.committed) < 3)
    assert len(store.list()) <= 2  # the newest, and what is restored


@pytest.fixture
def quick_clock(monkeypatch):
    """Let half an hour pass at each look at the clock."""
    ticks = count(NOW.timestamp(), 1800.0)
    monkeypatch.setattr(time, "time", lambda: next(ticks))


@pytest.mark.usefixtures("quick_clock")
def test_what_a_successor_restores_is_never_withdrawn_however_long_the_commit_took(tmp_path):
    """The first is paused after each of its operations, and goes on after each of those of its successor."""
    ends = Counter()
    for paused_after, resumed_after in product(range(30), range(30)):
        plain, turns = MemoryStorage(), Turns()
        store = CheckpointStore(plain, Layout("run"), StorageSpec(plain.url))
        leaders = {name: Leader(OneAtATime(plain, turns), tmp_path, name, reports=1) for name in "ab"}
        order = chain("a" * paused_after, "b" * resumed_after, repeat("a"))
        for name, leader in leaders.items():
            turns.start(name, leader)
        while waiting := turns.waiting():
            name = next(order)
            turns.give(name if name in waiting else waiting[0])
            committed_by = {manifest.attempt for manifest in store.list()}
            for attempt in (leader.attempt for leader in leaders.values() if leader.attempt is not None):
                if attempt.restored is not None and attempt.number not in committed_by:
                    store.verify(store.committed(attempt.restored.id))
        for manifest in store.list():
            store.verify(manifest)
        restored = leaders["b"].attempt.restored
        ends[leaders["a"].fenced, restored is not None and restored.manifest.attempt == leaders["a"].attempt.number] += 1
    assert ends[True, True] > 5
    assert ends[True, False] > 5
    assert ends[False, True] > 5


class Starter:
    """Claims the run unless another leads it, which everybody does who was not refused."""

    def __init__(self, storage, name, everybody):
        self.store = CheckpointStore(storage, Layout("run"), StorageSpec(storage.url))
        self.name, self.everybody = name, everybody
        self.claimed = None
        self.is_refused = False

    def __call__(self):
        try:
            self.claimed = claim_unless_led(
                self.store,
                self._refuse_if_led,
                lambda _, known: claim_attempt(self.store, Owner.current(self.name), world_size=1, known=known),
            )
        except RunBusyError:
            self.is_refused = True

    def _refuse_if_led(self, attempt):
        if not self.everybody[attempt.owner.flow_run_id].is_refused:
            raise RunBusyError(attempt.owner.flow_run_id)


@settings(max_examples=100)
@given(schedule=st.lists(st.integers(0, 2), max_size=60))
def test_of_simultaneous_starts_exactly_one_owns_the_run_however_they_interleave(schedule):
    plain = MemoryStorage()
    store = CheckpointStore(plain, Layout("run"), StorageSpec(plain.url))
    turns = Turns()
    starters: dict[str, Starter] = {}
    for name in "abc":
        starters[name] = Starter(OneAtATime(plain, turns), name, starters)
    for name, starter in starters.items():
        turns.start(name, starter)
    choices = iter(schedule)
    while waiting := turns.waiting():
        turns.give(waiting[next(choices, 0) % len(waiting)])
    (winner,) = (starter for starter in starters.values() if starter.claimed is not None)
    assert [attempt.token for attempt in list_attempts(store)] == [winner.claimed.token]
    check_fence(store, claim_key(store, winner.claimed))
    assert sum(starter.is_refused for starter in starters.values()) == 2


def commit(store, step):
    manifest = Manifest(new_id(1, step), step, 1, {}, (FileEntry("m", 1, DIGEST_OF_X, 0),), 1, None, NOW)
    store.storage.put_bytes(store.layout.data(manifest.id, "m"), b"x")
    store.storage.put_bytes(store.layout.manifest(manifest.id), manifest.encode())
    return manifest


def note_end(results, name, function, *args):
    try:
        results[name] = function(*args)
    except CheckpointError as exc:
        results[name] = exc


def every_order(one, other, before=lambda store, manifests: None):
    """Run `one` and `other` in every order of their storage operations, each time on a fresh run of three checkpoints.

    Yields the run's plain store, its checkpoints as they were, and what the two returned or raised. Of orders that differ only
    in neighbours that commute, the one that comes first in the alphabet of the names stands for all (Mazurkiewicz, 1977).
    """
    schedule: list[bool] = []
    while True:
        plain = MemoryStorage()
        store = CheckpointStore(plain, Layout("run"), StorageSpec(plain.url))
        manifests = [commit(store, step) for step in range(3)]
        before(store, manifests)
        turns, results, taken = Turns(), {}, []
        for name, function in (("one", one), ("other", other)):
            view = CheckpointStore(OneAtATime(plain, turns), Layout("run"), StorageSpec(plain.url))
            turns.start(name, partial(note_end, results, name, function, view, manifests))
        current, done = "one", None
        while waiting := turns.waiting():
            if len(waiting) == 1:
                current = waiting[0]
            elif current == "one" or done is None or not turns.next["one"].commutes_with(done):
                taken.append(schedule[len(taken)] if len(taken) < len(schedule) else False)
                current = waiting[(waiting[0] == current) == taken[-1]]
            done = turns.next[current]
            turns.give(current)
        yield store, manifests, results["one"], results["other"]
        while taken and taken[-1]:
            taken.pop()
        if not taken:
            return
        schedule = [*taken[:-1], True]


def is_whole(store, manifest):
    try:
        store.verify(store.committed(manifest.id))
    except CheckpointError:
        return False
    return True


def test_a_pin_that_returned_holds_whoever_prunes():
    ends = Counter()
    for store, manifests, pinned, pruned in every_order(
        lambda store, manifests: store.pin(manifests[0].id), lambda store, _: prune_as_leader(store, POLICY)
    ):
        was_pinned = pinned is None
        assert was_pinned or isinstance(pinned, CheckpointNotFoundError)
        assert not was_pinned or is_whole(store, manifests[0])
        assert store.pinned() == ({manifests[0].id} if was_pinned else set())
        assert (manifests[0] in pruned.drop) == (manifests[0].id not in store.ids())
        assert (manifests[0].id in pruned.keep) == is_whole(store, manifests[0])
        assert is_whole(store, manifests[2])
        assert not any(store.storage.list(store.layout.deletions))
        ends[was_pinned] += 1
    assert min(ends[True], ends[False]) > 5


def test_a_pin_that_gives_way_takes_nobody_elses_along():
    for store, manifests, one, other in every_order(
        lambda store, manifests: store.pin(manifests[0].id), lambda store, manifests: store.pin(manifests[0].id)
    ):
        assert (one, other) == (None, None)
        prune_as_leader(store, POLICY)
        assert is_whole(store, manifests[0])
        store.unpin(manifests[0].id)
        assert store.pinned() == frozenset()


def set_aside(store, manifests):
    quarantine(store, manifests[0].id, "a bit flipped")


def test_a_restore_and_the_end_of_its_time_leave_a_whole_checkpoint_or_none():
    ends = Counter()

    def restore(store, manifests):
        store.restore(manifests[0].id)

    def collect(store, _):
        return collect_garbage(store, keep_quarantined_days=0)

    for store, manifests, restored, removed in every_order(restore, collect, before=set_aside):
        was_restored = restored is None
        assert was_restored or isinstance(restored, CheckpointCorruptError)
        assert was_restored == is_whole(store, manifests[0])
        assert was_restored == (manifests[0].id in store.ids())
        assert not (was_restored and removed)
        ends[was_restored] += 1
    assert min(ends[True], ends[False]) > 5


def test_the_latest_is_never_none_while_checkpoints_are_pruned_and_committed():
    def look(store, _):
        return store.latest()

    def train_on(store, _):
        for step in (3, 4):
            commit(store, step)
            prune_as_leader(store, POLICY)

    steps = Counter()
    for _, _, latest, _ in every_order(look, train_on):
        assert latest is not None
        steps[latest.step] += 1
    assert steps.keys() == {2, 3, 4}
