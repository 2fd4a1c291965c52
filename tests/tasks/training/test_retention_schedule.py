"""When a training prunes, and what it asks of each prune; that prunes prune is shown with a real server in tests/flows."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from prefect import tags
from prefect.context import TagsContext
from prefect.logging import disable_run_logger
from prefect_torch.ckpt import Plan, RetentionPolicy
from prefect_torch.ckpt.reporting.events import CommitEvent
from prefect_torch.ckpt.runs.manifest import ManifestMemory
from prefect_torch.tasks.prune_task import REFUSED, _kept
from prefect_torch.tasks.training import retention_schedule
from prefect_torch.tasks.training.retention_schedule import RetentionSchedule

NEWEST = RetentionPolicy(1)


@dataclass
class PruneTask:
    """Stands for the Prefect task: done at once, and nothing was dropped."""

    asked: list[dict] = field(default_factory=list)
    dropped: tuple = ()
    keep: dict = field(default_factory=dict)
    tags: set | None = None

    def submit(self, *args, **asked):
        self.asked.append(asked)
        self.tags = TagsContext.get().current_tags
        return self

    def add_done_callback(self, done):
        done(self)

    def wait(self):
        pass

    def result(self, *, raise_on_failure):
        return Plan(self.keep, self.dropped)


@pytest.fixture
def prunes(monkeypatch):
    task = PruneTask()
    monkeypatch.setattr(retention_schedule, "prune_checkpoints", task)
    return task


class Clock:
    """Seconds of which so many pass at each look."""

    def __init__(self, tick_s):
        self.now_s, self.tick_s = 0.0, tick_s

    def __call__(self):
        self.now_s += self.tick_s
        return self.now_s


def schedule(memory, policy=NEWEST, tick_s=60.0, *, restored=None, has_leftovers=False):
    job = SimpleNamespace(store=SimpleNamespace(storage="store"), run="run", policy=policy)
    observers = SimpleNamespace(notify=lambda event: None)
    return RetentionSchedule(job, "a claim", [], restored, observers, memory, Clock(tick_s), has_leftovers=has_leftovers)


def commit(retention, step, num_bytes=1):
    checkpoint_id = f"000001-{step:08d}-00000000"
    retention.committed(CommitEvent(checkpoint_id, step, {}, num_bytes, 0.1))
    retention.prune_due(checkpoint_id)
    return checkpoint_id


def test_a_prune_does_not_wait_for_the_slot_of_a_tag_that_its_attempt_has(prunes):
    retention = schedule(ManifestMemory())
    with tags("limited"):
        for step in range(2):
            commit(retention, step)
    assert prunes.tags == set()


def test_where_deletions_are_refused_an_attempt_prunes_once(prunes):
    prunes.keep = {"an-id": (REFUSED,)}
    retention = schedule(ManifestMemory())
    for step in range(4):
        newest = commit(retention, step)
    retention.finish(newest)
    assert len(prunes.asked) == 1


def test_what_the_ranks_restore_stays_until_no_rank_is_left(prunes):
    restored = "000001-00000000-0000000a"
    retention = schedule(ManifestMemory(), restored=restored)
    for step in range(1, 4):
        newest = commit(retention, step)
    retention.finish(newest)
    assert [asked["limits"].in_use for asked in prunes.asked] == [(restored,), (restored,), ()]


def test_a_prune_that_gets_no_thread_is_tried_again_and_stops_no_training(prunes, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("can't start new thread")

    retention = schedule(ManifestMemory())
    with monkeypatch.context() as full, disable_run_logger():
        full.setattr(prunes, "submit", fail)
        for step in range(2):
            newest = commit(retention, step)
        retention.finish(newest)
    retention.prune_due(newest)
    assert [asked["limits"].up_to for asked in prunes.asked] == [newest]


def test_garbage_is_looked_for_at_first_and_at_the_end_and_every_prune_shares_a_memory(prunes):
    memory = ManifestMemory()
    retention = schedule(memory)
    for step in range(4):
        newest = commit(retention, step)
    retention.finish(newest)
    assert [asked["garbage"] for asked in prunes.asked] == [True, False, False, True]
    assert all(asked["memory"] is memory for asked in prunes.asked)


@pytest.mark.parametrize("has_leftovers", [False, True])
def test_where_all_is_kept_garbage_is_looked_for_after_an_attempt_that_was_killed(prunes, has_leftovers):
    retention = schedule(ManifestMemory(), RetentionPolicy(), has_leftovers=has_leftovers)
    for step in range(4):
        newest = commit(retention, step)
    retention.finish(newest)
    assert [asked["garbage"] for asked in prunes.asked] == ([True, True] if has_leftovers else [])


@pytest.mark.parametrize("num_prunes", [0, 2])
def test_the_end_of_an_attempt_that_another_one_may_follow_waits_for_no_look_for_garbage(prunes, num_prunes):
    retention = schedule(ManifestMemory())
    for step in range(num_prunes + 1):
        commit(retention, step)
    assert len(prunes.asked) == num_prunes
    newest = CommitEvent("000001-00000009-00000000", 9, {}, 1, 0.1)
    retention.committed(newest)
    retention.finish(newest.id, may_go_on=True)
    assert [asked["garbage"] for asked in prunes.asked[num_prunes:]] == [False]


def test_however_often_a_training_commits_it_prunes_as_seldom_as_pages_are_published(prunes):
    retention = schedule(ManifestMemory(), tick_s=0.1)  # a look at the clock for each commit, and one for each prune
    for step in range(1000):
        commit(retention, step)
    assert 14 <= len(prunes.asked) <= 17


def test_a_training_of_months_prunes_some_thousand_times(prunes):
    """Each is a task run for good, of which Prefect also keeps an object in the leader until the flow ends."""
    retention = schedule(ManifestMemory(), tick_s=60.0)  # a look at the clock for each commit, one a minute
    for step in range(30 * 24 * 60):
        commit(retention, step)
        prunes.dropped = tuple(retention._candidates[:-1])
    assert 4_000 < len(prunes.asked) < 6_000


def test_no_pause_delays_the_deletion_of_a_gibibyte(prunes):
    retention = schedule(ManifestMemory(), tick_s=1e-6)
    for step in range(9):
        commit(retention, step, num_bytes=1 << 29)
    assert len(prunes.asked) == 4  # with every other commit, since one is half a gibibyte


def test_the_last_prune_waits_for_no_pause(prunes):
    retention = schedule(ManifestMemory(), tick_s=1e-6)
    for step in range(3):
        newest = commit(retention, step)
    assert [asked["limits"].up_to[7:15] for asked in prunes.asked] == ["00000001"]
    retention.finish(newest)
    assert [asked["limits"].up_to[7:15] for asked in prunes.asked] == ["00000001", "00000002"]


def test_a_log_line_names_some_of_many_kept_checkpoints():
    keep = {f"000001-{step:08d}-00000000": ("every",) for step in range(1000, 0, -1)}
    assert _kept(Plan(keep, ())).endswith("000001-00000981-00000000 (every) and 980 older ones")
    assert _kept(Plan({"a": ("latest", "last")}, ())) == "a (latest, last)"


@pytest.mark.parametrize("policy", [RetentionPolicy(), RetentionPolicy(2, "loss", keep_last=3, keep_every_n_steps=2)])
def test_what_stays_for_good_is_not_looked_at_again(prunes, policy):
    retention = schedule(ManifestMemory(), policy)
    for step in range(300):
        checkpoint_id = f"000001-{step:08d}-00000000"
        retention.committed(CommitEvent(checkpoint_id, step, {"loss": -step if step % 2 else step}, 1, 0.1))
        prunes.dropped = tuple(it for it in retention._candidates if it.step % 2)[:-3]
        retention.prune_due(checkpoint_id)
    assert len(retention._candidates) <= 10
