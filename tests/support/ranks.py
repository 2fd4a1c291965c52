"""Ranks as threads: the real sessions over the real protocol, without processes."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from prefect_torch.ckpt import Checkpoint, CheckpointStore, TrainContext
from prefect_torch.ckpt.context import never
from prefect_torch.ckpt.reporting.api import start_session
from prefect_torch.ckpt.reporting.events import EventReceiver
from prefect_torch.ckpt.reporting.exchange.key_value import MemoryKeyValue
from prefect_torch.ckpt.reporting.exchange.node import Node
from prefect_torch.ckpt.reporting.rank_report import ReportArguments
from prefect_torch.ckpt.reporting.session import RankSession, ReportSettings
from prefect_torch.ckpt.runs.attempts.attempt import claim_key, claim_keys
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.resume import choose_checkpoint


class Session(RankSession):
    """A session that a test makes and calls with what matters to it; `api.report` may call it, too."""

    def __init__(self, *arguments, restored=None, settings=None, is_terminating=never, node=None) -> None:
        settings = settings or ReportSettings(claim=claim_keys(arguments[1])[-1])
        super().__init__(*arguments, restored, settings, is_terminating, node)

    def report(self, metrics, checkpoint=None, *, state=None, step=None, progress=None, upload=None) -> None:
        is_whole = isinstance(metrics, ReportArguments)
        super().report(metrics if is_whole else ReportArguments(metrics, checkpoint, state, step, progress, upload))


class Attempt:
    """One attempt of `world_size` ranks on `store`, resumed from its latest checkpoint as a leader would.

    Args:
        store: The run.
        world_size: The number of ranks.
        nodes: How many of them each machine has; empty for one machine.
        settings: The fields of ReportSettings.

    """

    def __init__(self, store: CheckpointStore, world_size: int = 1, nodes: Sequence[int] = (), **settings: Any) -> None:
        self.store = store
        self.ends_soon = False
        self.world_size = world_size
        claimed = claim_attempt(store, Owner.current(), world_size=world_size)
        self.number, self.claim = claimed.number, claim_key(store, claimed)
        self.settings = ReportSettings(**settings, claim=self.claim)
        manifest = choose_checkpoint(store, lineage=1, verify="digest")
        self.restored = None if manifest is None else store.checkpoint(manifest)
        self.key_value = MemoryKeyValue()
        ends = list(itertools.accumulate(nodes))
        ranks = [range(end - number, end) for end, number in zip(ends, nodes, strict=True)]
        self.nodes = [Node(MemoryKeyValue(), number, len(nodes), each) for number, each in enumerate(ranks)]

    def session(self, rank: int = 0) -> Session:
        node = next((node for node in self.nodes if rank in node.ranks), None)
        place = (rank, 0, self.world_size) if node is None else (rank - node.ranks[0], node.number, len(node.ranks))
        context = TrainContext(rank, place[0], place[1], self.world_size, place[2], self.store.run, self.number)
        found = self.restored  # each process has its own
        restored = None if found is None else Checkpoint.committed(found.store, found.manifest)
        options = {"settings": self.settings, "is_terminating": lambda: self.ends_soon, "node": node}
        return Session(context, self.store, self.key_value, restored=restored, **options)

    def run(self, function: Callable[[Session, int], Any]) -> list[BaseException | None]:
        """Run `function(session, rank)` on every rank as a rank's process does; return each rank's error."""
        errors: list[BaseException | None] = [None] * self.world_size

        def work(rank: int) -> None:
            session = self.session(rank)
            try:
                with suppress(SystemExit):
                    function(session, rank)
                session.finish()
            except Exception as exc:  # noqa: BLE001 - returned
                errors[rank] = exc
                session.fail(f"{type(exc).__name__}: {exc}", flush_s=5)

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)  # pytest's own limit is 180 s
        assert not any(thread.is_alive() for thread in threads), "a rank hangs"
        return errors

    def events(self) -> list[Any]:
        return list(EventReceiver(self.key_value).drain())


@contextmanager
def as_rank(session: RankSession) -> Iterator[RankSession]:
    """Have this process be the rank of `session`, as inside a training function."""
    start_session(session)
    try:
        yield session
    finally:
        start_session(None)


@contextmanager
def in_training(session: RankSession) -> Iterator[RankSession]:
    """Be the rank of `session`, from its function's beginning to its end."""
    with as_rank(session):
        try:
            yield session
            session.finish()
        except Exception as exc:
            session.fail(str(exc), flush_s=30)
            raise


def folder(path: Path, **files: bytes | str) -> Checkpoint:
    """Write `files` (name="content") below `path` and return them as a checkpoint to report."""
    path.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return Checkpoint.from_directory(path)


def cached(node: Path) -> list[Path]:
    """Return the files among the downloads on a node, whose folder for temporary files is `node`."""
    return [path for path in node.rglob("*") if path.is_file() and path.suffix != ".lock"]


def read_files(checkpoint: Checkpoint) -> dict[str, bytes]:
    with checkpoint.as_directory() as directory:
        return {str(path.relative_to(directory)): path.read_bytes() for path in Path(directory).rglob("*") if path.is_file()}
