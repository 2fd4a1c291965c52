"""Lightning trainings that report their checkpoints: a callback, the way back, and the ranks that exist.

    def train_fn(config):
        trainer = lightning.Trainer(
            strategy="ddp",
            devices=get_context().local_world_size,
            plugins=[PrefectEnvironment()],
            callbacks=[ReportCallback()],
        )
        with resume_path() as path:
            trainer.fit(Digits(), ckpt_path=path)

Needs the extra `lightning`; nothing else of this package imports this module.
"""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_warn

from . import reporting
from .arguments import Upload, check_upload
from .checkpoint import Checkpoint
from .context import TrainContext
from .errors import CheckpointNotFoundError
from .reporting import get_checkpoint, get_context, report

CHECKPOINT_NAME = "checkpoint.ckpt"


class ReportCallback(CheckpointCallback):
    """Report Lightning's own checkpoint and metrics, durable when training goes on, from every rank.

    The checkpoint holds `checkpoint.ckpt`, as `trainer.save_checkpoint` writes it: a file from rank 0, or a folder where the
    strategy shards. The metrics are `trainer.callback_metrics` with `epoch` and `step`; the step is `trainer.global_step`, so
    a training function fits once, and gives `ckpt_path=` from `resume_path` to continue. One step is reported once.
    Lightning counts it among its checkpoint callbacks: it runs after all others, whose state is stored as it is by then, and
    the Trainer adds no ModelCheckpoint of its own; `enable_checkpointing=False` contradicts it.

    After each batch it asks `get_context().should_checkpoint()`, a message of a tenth of a millisecond or more, and reports if
    told to. When the training is about to be ended from outside, it stops the Trainer then. What is reported within an epoch
    resumes there, but a dataloader begins anew unless it has a `state_dict`: Lightning's rule.

    A SIGTERM to a rank's own process is left to end it, which counts as a preemption; Lightning's handler would let it look
    like a finished training.

    Sanity checks and `trainer.validate` report nothing, and `fast_dev_run` reports metrics alone. Outside of a training
    function it warns, once per fit, and does nothing, so that the same script runs on its own.

    Args:
        every_n_epochs: Report at the end of every n-th training epoch; 1 if nothing else is chosen.
        every_n_train_steps: Report after the batch in which the global step reaches a multiple of this.
        on_validation_end: Report after each validation.
        upload: "sync" or "async", as `report` understands it; "async" lets the training go on while the files are stored.

    Raises:
        ValueError: If more than one of the three moments is chosen, or a number is below 1.

    """

    def __init__(
        self,
        *,
        every_n_epochs: int | None = None,
        every_n_train_steps: int | None = None,
        on_validation_end: bool = False,
        upload: Upload = "sync",
    ) -> None:
        _check_moments(every_n_epochs, every_n_train_steps, on_validation_end)
        check_upload(upload, None, None)
        by_epoch = every_n_train_steps is None and not on_validation_end
        self._every_n_epochs = (every_n_epochs or 1) if by_epoch else None
        self._every_n_train_steps = every_n_train_steps
        self._on_validation_end = on_validation_end
        self._upload: Upload = upload
        self._context: TrainContext | None = None
        self._signal_handler: Any = None
        self._seen_step = 0
        self._reported_step = 0
        self._ends_soon = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Find this rank's place, and refuse a Trainer that does not train on exactly the ranks that exist."""
        self._context = _context()
        self._ends_soon = False
        if self._context is None:
            rank_zero_warn("ReportCallback reports nothing: this is no training function of prefect_torch.flows.train()")
            return
        _check_world_size(trainer.world_size, self._context)
        self._signal_handler = signal.getsignal(signal.SIGTERM)

    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - as above
        """Take SIGTERM back from Lightning."""
        self._take_sigterm_back()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - as above
        """Count on from where the Trainer begins.

        Raises:
            ValueError: If it begins before the checkpoint that this attempt continues.

        """
        self._seen_step = self._reported_step = trainer.global_step
        if self._context is None:
            return
        self._take_sigterm_back()
        restored = get_checkpoint()
        if restored is not None and trainer.global_step < restored.step:
            raise ValueError(
                f"the training continues from {restored.path} at step {restored.step}, but the Trainer begins with step "
                f"{trainer.global_step}; give trainer.fit() the ckpt_path that resume_path() yields"
            )

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,  # noqa: ARG002 - as above
        outputs: Any,  # noqa: ARG002 - as above
        batch: Any,  # noqa: ARG002 - as above
        batch_idx: int,  # noqa: ARG002 - as above
    ) -> None:
        """Report if a multiple of `every_n_train_steps` was reached, or the training is told to."""
        before, self._seen_step = self._seen_step, trainer.global_step
        if self._context is None or self._ends_soon:
            return
        is_told = self._context.should_checkpoint()
        if is_told or _crosses_multiple(before, trainer.global_step, self._every_n_train_steps):
            self._report(trainer)
        if is_told and _ends_soon(trainer):
            self._ends_soon = trainer.should_stop = True

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - as above
        """Report if it was an n-th epoch."""
        if self._every_n_epochs is not None and (trainer.current_epoch + 1) % self._every_n_epochs == 0:
            self._report(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - as above
        """Report if that was chosen, and this is a validation within a training."""
        if self._on_validation_end and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if self._context is None or step == self._reported_step:
            return
        self._reported_step = step
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics.update(epoch=trainer.current_epoch, step=step)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set in a function of another module
            report(metrics, step=step)
            return
        with _folder_of_all_ranks(trainer, self._context) as folder:
            trainer.save_checkpoint(folder / CHECKPOINT_NAME)  # ends with a barrier: every rank's files are there
            # One rank of each machine brings what lies there, whichever rank wrote it.
            brings = self._context.local_rank == 0 and any(folder.iterdir())
            report(metrics, Checkpoint.from_directory(folder) if brings else None, step=step, upload=self._upload)

    def _take_sigterm_back(self) -> None:
        if self._context is not None and self._signal_handler is not None:
            signal.signal(signal.SIGTERM, self._signal_handler)


class PrefectEnvironment(ClusterEnvironment):
    """Have Lightning use the ranks that run already, and start none: `Trainer(plugins=[PrefectEnvironment()])`.

    The process group exists, so Lightning neither makes nor ends one.

    Raises:
        RuntimeError: Outside of a training function.

    """

    def __init__(self) -> None:
        self._context = get_context()

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """Where the ranks meet."""
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """The port where the ranks meet."""
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        """Say whether this is a rank of a training."""
        return _context() is not None

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._context.world_size

    def set_world_size(self, size: int) -> None:
        """Return only if Lightning counts as many ranks as there are.

        Raises:
            ValueError: If it does not.

        """
        _check_world_size(size, self._context)

    def global_rank(self) -> int:
        """Return this rank."""
        return self._context.world_rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore what Lightning reckons: ranks have their numbers."""

    def local_rank(self) -> int:
        """Return this rank's number on its machine."""
        return self._context.local_rank

    def node_rank(self) -> int:
        """Return this machine's number."""
        return self._context.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Return only if `devices` and `num_nodes` amount to the ranks that there are.

        Raises:
            ValueError: If they do not.

        """
        _check_world_size(num_devices * num_nodes, self._context)


@contextmanager
def resume_path() -> Iterator[str | None]:
    """Yield the `ckpt_path` with which `trainer.fit` goes on from the latest checkpoint, verified; None on a fresh start.

    None, too, outside of a training function. The file is there until the block ends, so fit within it.

    Raises:
        CheckpointNotFoundError: If the checkpoint that this attempt continues is not one of ReportCallback.
        CheckpointCorruptError: If a file differs from what was committed.

    """
    checkpoint = None if _context() is None else get_checkpoint()
    if checkpoint is None:
        yield None
        return
    with checkpoint.as_directory() as directory:
        path = Path(directory, CHECKPOINT_NAME)
        if not path.exists():
            raise CheckpointNotFoundError(f"{checkpoint.path} holds no {CHECKPOINT_NAME}: ReportCallback did not report it")
        yield str(path)


@contextmanager
def _folder_of_all_ranks(trainer: Trainer, context: TrainContext) -> Iterator[Path]:
    """Yield an empty folder that has one path on every rank: strategies that shard write below rank 0's path."""
    made = tempfile.mkdtemp(prefix="prefect-torch-") if context.world_rank == 0 else ""
    folder = Path(trainer.strategy.broadcast(made))
    folder.mkdir(mode=0o700, exist_ok=True)  # on another machine
    try:
        yield folder
    finally:
        if context.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _ends_soon(trainer: Trainer) -> bool:
    """Return on every rank whether rank 0 knows that the training is about to be ended.

    `should_checkpoint` is true for a pace, too (`target_overhead`), which must not end the training.
    """
    session = reporting._require_session("ReportCallback")  # noqa: SLF001 - this package's own; users need only one question
    return trainer.strategy.broadcast(session._prompts._ends_soon())  # noqa: SLF001 - as above


def _context() -> TrainContext | None:
    try:
        return get_context()
    except RuntimeError:
        return None


def _check_moments(every_n_epochs: int | None, every_n_train_steps: int | None, on_validation_end: bool) -> None:
    numbers = {"every_n_epochs": every_n_epochs, "every_n_train_steps": every_n_train_steps}
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}={number!r}: give a whole number from 1")
    chosen = [f"{name}={number}" for name, number in numbers.items() if number is not None]
    chosen += ["on_validation_end=True"] if on_validation_end else []
    if len(chosen) > 1:
        raise ValueError(f"{' and '.join(chosen)} contradict each other; choose one moment to report at")


def _check_world_size(size: int, context: TrainContext) -> None:
    if size != context.world_size:
        raise ValueError(
            f"the Trainer counts {size} ranks but the training has {context.world_size}; give it "
            f'strategy="ddp", devices={context.local_world_size}, num_nodes={context.world_size // context.local_world_size} '
            "and plugins=[PrefectEnvironment()]"
        )


def _crosses_multiple(before: int, now: int, number: int | None) -> bool:
    # Several optimizers count several steps in one batch, and may jump over the multiple itself.
    return number is not None and now // number > before // number
