"""When a training prunes, and what it asks of each prune; that prunes prune is shown with a real server in tests/flows."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from prefect_torch.ckpt import Plan, RetentionPolicy
from prefect_torch.ckpt.reporting.events import CommitEvent
from prefect_torch.ckpt.runs.manifest import ManifestMemory
from prefect_torch.tasks.prune_task import _kept
from prefect_torch.tasks.training import retention_schedule
from prefect_torch.tasks.training.retention_schedule import RetentionSchedule

NEWEST = RetentionPolicy(1)


@dataclass
class PruneTask:
    """Stands for the Prefect task: done at once, and nothing was dropped."""

    asked: list[dict] = field(default_factory=list)
    dropped: tuple = ()

    def submit(self, *args, **asked):
        self.asked.append(asked)
        return self

    def add_done_callback(self, done):
        done(self)

    def wait(self):
        pass

    def result(self, *, raise_on_failure):
        return Plan({}, self.dropped)


@pytest.fixture
def prunes(monkeypatch):
    task = PruneTask()
    monkeypatch.setattr(retention_schedule, "prune_checkpoints", task)
    return task


def schedule(memory, policy=NEWEST):
    job = SimpleNamespace(storage="store", run="run", policy=policy)
    return RetentionSchedule(job, 1, [], None, SimpleNamespace(notify=lambda event: None), memory)


def test_garbage_is_looked_for_at_first_and_at_the_end_and_every_prune_shares_a_memory(prunes):
    memory = ManifestMemory()
    retention = schedule(memory)
    for step in range(4):
        checkpoint_id = f"000001-{step:08d}-00000000"
        retention.committed(CommitEvent(checkpoint_id, step, {}, 1, 0.1))
        retention.prune_due(checkpoint_id)
    retention.finish(checkpoint_id)
    assert [asked["garbage"] for asked in prunes.asked] == [True, False, False, True]
    assert all(asked["memory"] is memory for asked in prunes.asked)


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
