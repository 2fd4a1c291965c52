"""Two leaders of one run, interleaved at every storage operation: an old one that does not know, and the one after it."""

import threading

from faulty_storage import VERBS
from hypothesis import given, settings
from hypothesis import strategies as st
from prefect_torch.ckpt import CheckpointStore, FencedError, RetentionPolicy, StorageSpec
from prefect_torch.ckpt.fsspec_storage import FsspecStorage
from prefect_torch.ckpt.layout import Layout
from prefect_torch.ckpt.pruning import collect_garbage
from ranks import Attempt, folder

POLICY = RetentionPolicy(num_to_keep=1)


class Turns:
    """Lets one of several threads do one storage operation at a time."""

    def __init__(self):
        self._lock = threading.Condition()
        self._waiting: set[str] = set()
        self._running = 0
        self._next: str | None = None

    def start(self, name, function):
        def work():
            try:
                function()
            finally:
                with self._lock:
                    self._running -= 1
                    self._lock.notify_all()

        with self._lock:
            self._running += 1
        threading.Thread(target=work, name=name, daemon=True).start()

    def take(self, name):
        """Wait until it is `name`'s turn."""
        with self._lock:
            self._waiting.add(name)
            self._lock.notify_all()
            assert self._lock.wait_for(lambda: self._next == name, 30), "nobody gives it a turn"
            self._next = None
            self._waiting.remove(name)

    def waiting(self):
        """Return who wants to go on, once everybody stands still."""
        with self._lock:
            assert self._lock.wait_for(lambda: self._next is None and len(self._waiting) == self._running, 30)
            return sorted(self._waiting)

    def give(self, name):
        with self._lock:
            self._next = name
            self._lock.notify_all()


class OneAtATime:
    """A leader's own view of the storage."""

    def __init__(self, inner, turns, name):
        self.inner, self.turns, self.name = inner, turns, name
        self.url = inner.url
        self.has_claimed = False

    def local_path(self, key):
        return None

    def _do(self, verb, *args, **kwargs):
        self.turns.take(self.name)
        self.has_claimed |= verb == "put_bytes" and args[0].startswith("run/attempts/")
        result = getattr(self.inner, verb)(*args, **kwargs)
        return iter(list(result)) if verb == "list" else result


for _verb in VERBS:
    setattr(OneAtATime, _verb, lambda self, *args, _verb=_verb, **kwargs: self._do(_verb, *args, **kwargs))


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
            self.store.prune(POLICY, in_use=() if self.attempt.restored is None else (self.attempt.restored.id,))
            collect_garbage(self.store)


@settings(max_examples=50)
@given(head_start=st.integers(0, 25), schedule=st.lists(st.booleans(), max_size=60))
def test_whoever_claims_last_owns_the_run_and_what_was_reported_before_is_not_lost(tmp_path_factory, head_start, schedule):
    tmp_path = tmp_path_factory.mktemp("run")
    plain = FsspecStorage(f"memory://{tmp_path}", {})
    store = CheckpointStore(plain, Layout("run"), StorageSpec(plain.url))
    turns = Turns()
    leaders = {name: Leader(OneAtATime(plain, turns, name), tmp_path, name, reports=3) for name in "ab"}
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
