"""prefect_torch: live objects, or a folder that rank 0 has filled; the leader's part and a rank's start as in `tasks`."""

import json
import tempfile
from contextlib import contextmanager

import prefect_torch.ckpt.state.save  # noqa: F401 - as a rank's process does before the training begins
import torch
from plan import WORLD_SIZE
from prefect_torch.ckpt import Checkpoint, CheckpointStore, RetentionPolicy, TrainContext, get_checkpoint, report
from prefect_torch.ckpt.context import never
from prefect_torch.ckpt.reporting.api import start_session
from prefect_torch.ckpt.reporting.session import RankSession, ReportSettings
from prefect_torch.ckpt.runs.attempts.attempt import claim_keys
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.deletion.limits import PruneLimits
from prefect_torch.ckpt.runs.deletion.pruning import prune
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.tasks.rank.rendezvous import Address, Rendezvous, connect
from prefect_torch.tasks.rank.resources.available_memory import available_bytes

from ways import WAYS

RUN = "run"


@contextmanager
def lead(plan):
    """Claim an attempt, verify what it resumes from, and serve the ranks' rendezvous; yields what they must know."""
    store = CheckpointStore.open(plan.url, RUN)
    claim_attempt(store, Owner.current(), world_size=WORLD_SIZE)
    chosen = choose_checkpoint(store, lineage=1, verify="digest") if plan.phase == "resume" else None
    rendezvous = Rendezvous()
    served = rendezvous.serve()
    yield json.dumps([rendezvous.address.port, None if chosen is None else chosen.id])
    del served


class Ours:
    def __init__(self, plan, training, store, session):
        self._plan, self._training, self._store, self._session = plan, training, store, session
        self._option = WAYS[plan.way].option
        self._state = {"model": training.model, "optimizer": training.optimizer, "epoch": 0}

    def save(self, number):
        if self._option == "state":
            report({"loss": 1.0}, state={**self._state, "epoch": number})
            return
        with tempfile.TemporaryDirectory(dir=self._plan.folder) as folder:
            checkpoint = None
            if self._plan.rank == 0:
                from ways.files import save_training

                save_training(self._training, number, f"{folder}/model.pt")
                checkpoint = Checkpoint.from_directory(folder)
            report({"loss": 1.0}, checkpoint, upload=self._option)

    def wait(self):
        background = self._session._background
        background.wait()
        for commit in background.commits:
            commit.done.result()  # raises what the next report would

    def forget(self):
        if self._plan.rank == 0:
            prune(self._store, RetentionPolicy(1), PruneLimits(), dry_run=False)

    def load(self):
        checkpoint = get_checkpoint()
        if self._option == "state":
            checkpoint.load_state(self._state)
            return
        from ways.files import load_training

        with checkpoint.as_directory() as folder:
            load_training(self._training, f"{folder}/model.pt")

    def reload(self):
        import torch.distributed as dist

        if self._plan.rank == 0:
            choose_checkpoint(self._store, lineage=1, verify="digest")
        dist.barrier()
        self.load()


def step_twice(training):
    """Take the first steps of a training, watched as a rank's process watches them."""
    from prefect_torch.ckpt.state.expected_size import watch_steps

    watch_steps(available_bytes)
    for parameter in training.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for _ in range(2):
        training.optimizer.step()
    training.optimizer.zero_grad()


def run(plan):
    from measure import measure
    from training import Training

    training = Training(plan.mebibytes, plan.matmuls, fresh=plan.phase == "resume", device=plan.device)
    port, chosen = json.loads(plan.leader)
    store = CheckpointStore.open(plan.url, RUN)
    restored = None if chosen is None else Checkpoint.committed(store, store.get(chosen))
    attempt = 1 if chosen is None else 2
    context = TrainContext(plan.rank, plan.rank, 0, WORLD_SIZE, WORLD_SIZE, RUN, attempt)
    settings = ReportSettings(claim=claim_keys(store)[-1])
    session = RankSession(context, store, connect(Address("127.0.0.1", port)), restored, settings, never, None)
    start_session(session)
    if plan.phase == "save" and WAYS[plan.way].option == "state":
        step_twice(training)
    measure(plan, Ours(plan, training, store, session), training)
