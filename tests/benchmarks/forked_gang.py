"""A leader and its ranks as forked processes: the package's own rank program and storage calls, without Prefect.

A fork of a process that has imported torch starts in milliseconds, so that a whole training can be killed and started again
thousands of times. The ranks run `prefect_torch.tasks.rank.main` with a real TCPStore and gloo; the leader makes the same calls
to storage, in the same order, as `prefect_torch.tasks` does from its Prefect tasks.
"""

import contextlib
import ctypes
import os
import pickle
import signal
import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import file_faults
from prefect_torch.ckpt import CheckpointStore, RetentionPolicy
from prefect_torch.ckpt.reporting.events import CommitEvent, EventReceiver
from prefect_torch.ckpt.reporting.session import ReportSettings
from prefect_torch.ckpt.runs.attempts.attempt import Outcome, claim_key, newest_attempt, record_resumed_from, write_outcome
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.deletion.garbage import collect_garbage
from prefect_torch.ckpt.runs.deletion.limits import PruneLimits
from prefect_torch.ckpt.runs.deletion.pruning import prune
from prefect_torch.ckpt.runs.history import HistoryWriter, lost_records
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.tasks.rank import main
from prefect_torch.tasks.rank.checkpoint_ref import CheckpointRef
from prefect_torch.tasks.rank.rendezvous import Rendezvous
from prefect_torch.tasks.rank.spec import RankSpec
from prefect_torch.tasks.rank.user_code.function import pack_function

RUN = "run"
POLICY = RetentionPolicy(1, "val_loss", "min")
LONGEST_S = 120.0
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Training:
    """One training: what to run, on how many ranks, and where its files go."""

    folder: Path
    train_fn: str
    config: dict
    world_size: int

    @property
    def storage(self) -> Path:
        return self.folder / "store"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def acknowledged(self) -> Path:
        return self.folder / "acknowledged"


def adopt_orphans() -> None:
    """Make this process the parent of whatever its children leave behind, so that it can wait for all of them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run_attempt(training: Training, plan: file_faults.Plan) -> int | None:
    """Run one attempt in processes of its own; return the leader's exit code, or None where it hung and was killed."""
    for mark in training.folder.glob("pruned/*"):
        mark.unlink()
    (training.folder / "pruned").mkdir(parents=True, exist_ok=True)
    leader = os.fork()
    if leader == 0:
        _in_child(training, lambda: _lead(training, plan))
    deadline = time.monotonic() + LONGEST_S
    while (ended := os.waitid(os.P_PID, leader, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is None and time.monotonic() < deadline:
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):  # before the leader is waited for: until then nobody else has its number
        os.killpg(leader, signal.SIGKILL)
    _wait_for_all(leader)
    return None if ended is None else ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _wait_for_all(group: int) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)


def _in_child(training, work) -> None:
    """Do `work` in this forked process, which never returns."""
    code = 1
    try:
        if os.getpgid(0) != os.getpid():
            os.setpgid(0, 0)
        with training.log.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - a fork must not go on with its parent's work
        traceback.print_exc()
    finally:
        os._exit(code)


def _lead(training: Training, plan: file_faults.Plan) -> None:
    file_faults.arm(plan, "leader")
    store = CheckpointStore.open(training.storage, RUN)
    previous = newest_attempt(store)
    lineage = 1 if previous is None else previous.lineage
    attempt = claim_attempt(
        store, Owner.current(), world_size=training.world_size, lineage=lineage, settings=asdict(POLICY)
    )  # fmt: skip
    chosen = choose_checkpoint(store, lineage=attempt.lineage, verify="digest")
    restored = None
    if chosen is not None:
        restored = CheckpointRef(store.spec, RUN, chosen.id)
        record_resumed_from(store, attempt, restored.open().path)
    rendezvous = Rendezvous()
    ranks = [_fork_rank(training, plan, _spec(training, store, attempt, restored, rendezvous.address, rank), rendezvous)
             for rank in range(training.world_size)]  # fmt: skip
    key_value = rendezvous.serve()
    _keep_books(training, store, attempt.number, chosen, key_value, ranks)
    write_outcome(store, Outcome(attempt.number, "completed"))


def _fork_rank(training, plan, spec, rendezvous) -> int:
    pid = os.fork()
    if pid == 0:
        rendezvous.close()
        _run_rank(training, plan, spec)
    return pid


def _run_rank(training, plan, spec) -> None:
    code = 1
    try:
        file_faults.arm(plan, f"rank {spec.rank}")
        with ExitStack() as held:
            result = main._run(spec, held, group := ExitStack())
            if result.kind is None:  # as main() does
                group.close()
        if result.kind is not None:
            print(result.traceback, flush=True)
        elif spec.rank == 0:
            (training.folder / "returned").write_text(pickle.loads(result.return_value))
        code = 0 if result.kind is None else 1
    except BaseException:  # noqa: BLE001 - as above
        traceback.print_exc()
    finally:
        os._exit(code)


def _spec(training, store, attempt, restored, address, rank) -> RankSpec:
    config = {**training.config, "pruned": str(training.folder / "pruned")}
    return RankSpec(
        rank=rank,
        local_rank=rank,
        node_rank=0,
        world_size=training.world_size,
        local_world_size=training.world_size,
        rendezvous=address,
        storage=store.spec,
        run=RUN,
        attempt=attempt.number,
        restored=restored,
        function=pack_function(training.train_fn, config),
        use_gpu=False,
        backend=None,
        reports=ReportSettings(claim=claim_key(store, attempt)),
        flush_s=5.0,
    )


def _keep_books(training, store, attempt, restored, key_value, ranks) -> None:
    """Read the events of rank 0, as the recorder and the prune task of the leader do, until all ranks have exited."""
    listed = list(store.listed())
    lost = lost_records(store, listed, attempt)
    newest = max((it.id for it in listed), default=None)
    history, receiver = HistoryWriter(store, attempt, newest, lost), EventReceiver(key_value)
    history.flush()
    in_use = () if restored is None else (restored.id,)
    _prune(store, in_use, history.recorded)
    running = set(ranks)
    while running:
        for pid in tuple(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            running -= {ended}
            if ended and status != 0:
                raise RuntimeError(f"process {pid} of a rank ended with status {status}")
        for event in tuple(receiver.drain()):
            if isinstance(event, CommitEvent):
                store.hint_latest(event.id)
            else:
                history.append(event.record)
                history.flush()
                _prune(store, in_use, history.recorded)
                (training.folder / "pruned" / str(event.record.metrics["epoch"])).touch()
        time.sleep(0.005)
    _prune(store, (), history.recorded)


def _prune(store, in_use, recorded) -> None:
    prune(store, POLICY, PruneLimits(in_use, recorded), dry_run=False)
    collect_garbage(store)
