"""The callback that reports Lightning's checkpoints, and the path to resume from."""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint as CheckpointCallback
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from prefect_torch.ckpt.checkpoint import Checkpoint
from prefect_torch.ckpt.context import context_or_none
from prefect_torch.ckpt.framework_folders import check_first_step, files_in, folder_of_all_ranks, moved_part, restored_part
from prefect_torch.ckpt.reporting.agreement import Upload
from prefect_torch.ckpt.reporting.api import continues_own_run, get_checkpoint, grace_s, report
from prefect_torch.ckpt.reporting.rank_report import check_upload

from .direct_writes import direct_writes
from .moments import (
    before_validation,
    call_after_each_batch,
    check_moments,
    completed_share,
    crosses_multiple,
    is_accumulating,
    may_end_validation,
    precedes_validation,
)
from .random_states import loader_generators, read_random_state, save_random_state, set_random_state
from .ranks import check_trainer_size
from .resumes import (
    begin_next_epoch,
    convert_before_load,
    count_validated_batch,
    end_with_averages,
    forget_ended_positions,
    has_stopped,
    iterate_anew,
    leave_the_ended_epoch,
    refuse_finders,
    reload_in_same_epochs,
    reset_interrupted_epoch,
    restore_metrics,
    set_up_data_again,
    set_up_epoch_again,
    stop_early,
    warn_of_reading_ahead,
    warn_of_unsafe_globals,
)
from .sigterm import SigtermAction

if TYPE_CHECKING:
    from prefect_torch.ckpt.context import TrainContext

_NO_STEPS = (
    "nothing is reported, since trainer.global_step is 0: with manual optimization, Lightning counts only the steps of the "
    "optimizers that self.optimizers() returns"
)
_SHARE_OF_GRACE = 0.25  # for the rest of an accumulation; what remains is for the checkpoint


class ReportCallback(CheckpointCallback):
    """Report Lightning's own checkpoint and metrics from every rank, durable before training continues.

    The checkpoint holds `checkpoint.ckpt`, as `trainer.save_checkpoint` writes it: a file from rank 0, or a directory where
    the strategy shards, of which each rank reports its own files. It also holds each rank's random state, and those of its
    training dataloaders' generators, which Lightning does not store. The metrics are `trainer.callback_metrics` with `epoch`
    and `step`, the progress the share of `max_epochs` or `max_steps`. The step is `trainer.global_step`, so a training function
    fits once, and gives `ckpt_path=` from `resume_path` to continue. One step is reported once, even if several of these
    callbacks report at different moments.

    A report due at a batch that a validation follows is made after it: a resume from before would skip it. A report due at an
    epoch's last batch, or after a validation that follows it, is made when the epoch has ended, as by ModelCheckpoint: a resume
    from there on as many ranks is bit-exact, and callbacks that read the epoch's metrics (EarlyStopping) have seen them. A
    report within an epoch is resumed with the random numbers of that moment, but a dataloader without a `state_dict` starts
    over (Lightning's rule), so the training differs from there on. torchdata's StatefulDataLoader without workers, of a dataset
    with a length, is exact within an epoch, too.

    Lightning counts it among its checkpoint callbacks. It runs after all other callbacks (list a ModelCheckpoint before it) and
    after the module's own `on_train_batch_end`, so their state is stored as it is by then. The Trainer adds no ModelCheckpoint,
    and rejects `enable_checkpointing=False`.

    After each batch it calls `get_context().should_checkpoint()`, which takes a fraction of a millisecond at most, and reports
    if that is true. When termination of the training is requested, it then stops the Trainer, and breaks off a validation that
    is on its way, as if it had ended before. A report within an epoch resumes there, but a dataloader starts over unless it has
    a `state_dict`: Lightning's rule. With `accumulate_grad_batches`, reports wait for the optimizer step, since no checkpoint
    holds the gradients; at most a quarter of the grace in a termination.

    There is no CheckpointIO: Lightning calls one on rank 0 alone, and without metrics, while every rank must report.

    A SIGTERM to a rank's own process terminates it, which counts as a preemption; Lightning's handler would let it look
    like a finished training.

    Sanity checks and `trainer.validate` report nothing, and `fast_dev_run` reports metrics alone. Outside of a training
    function it warns, once per fit, and does nothing, so that the same script runs on its own.

    Args:
        every_n_epochs: Report at the end of every n-th training epoch; 1 if nothing else is chosen.
        every_n_train_steps: Report after the batch in which the global step reaches a multiple of this.
        on_validation_end: Report after each validation.
        upload: "sync" or "async", as `report` takes it; "async" lets the training go on while the files are stored.

    Attributes:
        CHECKPOINT_NAME: The name of Lightning's checkpoint in ours.
        reported_step: The global step that was reported last.

    Raises:
        ValueError: If more than one of the three moments is chosen, or a number is below 1.

    """

    CHECKPOINT_NAME = "checkpoint.ckpt"

    def __init__(
        self,
        *,
        every_n_epochs: int | None = None,
        every_n_train_steps: int | None = None,
        on_validation_end: bool = False,
        upload: Upload = "sync",
    ) -> None:
        check_moments(every_n_epochs, every_n_train_steps, on_validation_end)
        check_upload(upload, None, None)
        by_epoch = every_n_train_steps is None and not on_validation_end
        self._every_n_epochs = (every_n_epochs or 1) if by_epoch else None
        self._every_n_train_steps = every_n_train_steps
        self._on_validation_end = on_validation_end
        self._upload: Upload = upload
        self._context: TrainContext | None = None
        self._sigterm: SigtermAction | None = None
        self._seen_step = 0
        self._is_terminating = False
        self._requested_at_s: float | None = None  # by a request of termination that awaits an optimizer step
        self._is_due = False
        self._metrics_before: dict[str, Any] | None = None  # those before a validation that was broken off
        self._has_begun = False
        self._random_state: dict[str, Any] | None = None
        self._resets_epoch = False
        self.reported_step = 0

    @property
    def best_model_path(self) -> NoReturn:
        """Raise, and name alternatives to `ckpt_path="best"`, which Lightning also uses if `trainer.test()` is given no model.

        Raises:
            AttributeError: Always, as of an attribute that does not exist.

        """
        raise AttributeError(
            "ReportCallback keeps no best model on this machine: test the last weights with trainer.test(model), or list a "
            'ModelCheckpoint before the callback for ckpt_path="best"; Result.best_checkpoints has the best ones of the run'
        )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:  # noqa: ARG002 - Lightning's signature
        """Get this rank's context, check the Trainer, and prepare the module to load its weights.

        Raises:
            TypeError: If the Trainer is one of the package pytorch_lightning.
            ValueError: If it does not train on exactly the ranks that exist, or writes its files in the background.

        """
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"the Trainer is one of {type(trainer).__module__}: take it from lightning.pytorch for ReportCallback"
            )
        self._context = context_or_none()
        self._is_terminating = False
        self._requested_at_s = self._metrics_before = None
        if self._context is None:
            rank_zero_warn("ReportCallback reports nothing: this is no training function of prefect_torch.flows.train()")
            return
        check_trainer_size(trainer.world_size, self._context)
        if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
            raise ValueError(  # noqa: TRY004 - the Trainer's arguments are wrong
                "the Trainer's AsyncCheckpointIO would have half a file reported; leave it out and give ReportCallback "
                'upload="async"'
            )
        self._sigterm = SigtermAction()
        convert_before_load(trainer, pl_module)
        call_after_each_batch(trainer, partial(_report_after_batch, trainer), partial(_ends_validation, trainer))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's signature
        """Restore the random state of the checkpoint that the Trainer has loaded, if an epoch ended there."""
        self._is_due = self._has_begun = False
        self._restore_random_state(trainer)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002 - Lightning's signature
        """Begin an interrupted epoch again on another number of ranks, and the next epoch's data if it had no batch left.

        Restore the random state, too: with a strategy that shards, the Trainer loads only after `on_fit_start`.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            self._reset_interrupted_epoch(trainer, checkpoint)
            self._restore_random_state(trainer)

    def _reset_interrupted_epoch(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        restored = self._continued(trainer)
        if restored is None or self._context is None:
            return
        forget_ended_positions(checkpoint)
        if restored.manifest.world_size == self._context.world_size:
            return
        if (epoch := reset_interrupted_epoch(checkpoint)) is not None:
            self._resets_epoch = True
            rank_zero_warn(
                f"{restored.path} was reported within an epoch by {restored.manifest.world_size} ranks, and there are "
                f"{self._context.world_size} now, whose batches have other samples: epoch {epoch} begins with its first batch"
            )

    def _restore_random_state(self, trainer: Trainer) -> None:
        if self._continued(trainer) is not None:
            set_up_data_again(trainer)
        self._random_state = self._stored_random_state(trainer)
        if self._random_state is not None and not self._random_state["within_epoch"]:
            set_random_state(self._random_state)  # now: of a loader without a length, the Trainer reads the first batch next

    def _restore_metrics(self, trainer: Trainer) -> None:
        if (restored := self._continued(trainer)) is not None:
            restore_metrics(trainer, restored.manifest.reported)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's signature
        """Restore the SIGTERM handler: Lightning's would wait for ranks that have not received the signal."""
        self._take_sigterm_back()

    on_test_start = on_predict_start = on_validation_start

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin to count at the Trainer's first step.

        Raises:
            ValueError: If the Trainer begins before the checkpoint that this attempt continues or another Trainer's reports,
                or has a callback with which it could not be resumed.

        """
        self._has_begun = True
        self._restore_metrics(trainer)
        self._seen_step = self.reported_step = trainer.global_step
        if self._random_state is not None and self._random_state["within_epoch"]:
            # Not sooner: the code that begins the epoch again has drawn random numbers.
            set_random_state(self._random_state, loader_generators(trainer))
        else:
            self._begin_epoch(trainer)
        self._random_state, self._resets_epoch = None, False
        if self is _report_callbacks(trainer)[0]:
            set_up_epoch_again(trainer, pl_module)
            count_validated_batch(trainer)
            reload_in_same_epochs(trainer)
            warn_of_reading_ahead(trainer)
        if self._continues_own_run(trainer) and any(map(has_stopped, trainer.early_stopping_callbacks)):
            rank_zero_info(f"EarlyStopping had stopped the training at {trainer.ckpt_path}, so it trains no further")
            trainer.should_stop = True  # which the Trainer does not restore: it would train another epoch
        if self._context is None:
            return
        self._take_sigterm_back()
        refuse_finders(trainer)
        check_first_step(trainer.global_step, "give trainer.fit() the ckpt_path that resume_path() yields")

    def _begin_epoch(self, trainer: Trainer) -> None:
        """Begin the epoch that follows, or that begins again, with the random numbers of an uninterrupted training."""
        if self._resets_epoch:
            begin_next_epoch(trainer)
        else:
            leave_the_ended_epoch(trainer)
        if iterate_anew(trainer) and self._random_state is not None:
            set_random_state(self._random_state, loader_generators(trainer))

    def _report_after_batch(self, trainer: Trainer) -> None:
        """Report if a multiple of `every_n_train_steps` was reached, or a checkpoint is requested."""
        before, self._seen_step = self._seen_step, trainer.global_step
        if self._context is None or self._is_terminating:
            return
        is_requested = self._context.should_checkpoint()
        if not self._context.ends_soon():
            self._requested_at_s = None  # withdrawn, as where the machines for a regrowth are gone again
        if is_requested or crosses_multiple(before, trainer.global_step, self._every_n_train_steps):
            self._is_due = True
        if is_requested and self._context.ends_soon() and not self._awaits_the_step(trainer):
            self._is_terminating = True
            stop_early(trainer)
        if self._is_terminating or not precedes_validation(trainer):
            self._report_within_epoch(trainer)

    def _ends_validation(self, trainer: Trainer) -> bool:
        """Return whether to break a validation off, which may outlast the grace, since termination is requested."""
        if self._context is None or self._is_terminating or not self._context.should_checkpoint():
            return False
        self._is_due = True
        if self._context.ends_soon():
            self._is_terminating = True
            self._metrics_before = dict(trainer.callback_metrics)
            stop_early(trainer)
        return self._is_terminating

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's signature
        """Report if it was an n-th epoch, or a report is due since its last batch or the validation after that."""
        if self._is_due or self._is_nth_epoch(trainer):
            self._report(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the averaged weights and the metrics of a training that had ended before, as its end had them."""
        if self._has_begun:
            return
        self._restore_metrics(trainer)
        if self._continues_own_run(trainer):
            end_with_averages(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002 - Lightning's signature
        """Report in a training, if `on_validation_end` was chosen or a report is due since the batch before this validation.

        If it was broken off, report what the training had before it: half a validation has no metrics.
        """
        if self._metrics_before is not None:
            before, self._metrics_before = self._metrics_before, None
            with before_validation(trainer):
                self._report(trainer, before, within_epoch=True)
            trainer.callback_metrics.update(before)
        elif trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self._is_due = self._is_due or self._on_validation_end
            self._report_within_epoch(trainer)

    def _report_within_epoch(self, trainer: Trainer) -> None:
        """Report if it is due; only after the optimizer step, and after the last batch only when the epoch has ended."""
        if self._is_due and (self._is_terminating or not (is_accumulating(trainer) or trainer.is_last_batch)):
            self._report(trainer, within_epoch=True)

    def _awaits_the_step(self, trainer: Trainer) -> bool:
        """Return whether to end only after the optimizer step, if that comes early in the grace; the same on every rank."""
        if not is_accumulating(trainer) or precedes_validation(trainer):
            return False
        now_s = time.monotonic()
        self._requested_at_s = self._requested_at_s or now_s
        return bool(trainer.strategy.broadcast(now_s - self._requested_at_s < _SHARE_OF_GRACE * grace_s()))

    def _is_nth_epoch(self, trainer: Trainer) -> bool:
        return self._every_n_epochs is not None and (trainer.current_epoch + 1) % self._every_n_epochs == 0

    def _continued(self, trainer: Trainer) -> Checkpoint | None:
        """Return the checkpoint that the Trainer has loaded; None if it begins anew."""
        return get_checkpoint() if self._context is not None and trainer.ckpt_path else None

    def _continues_own_run(self, trainer: Trainer) -> bool:
        """Return whether the Trainer has loaded a checkpoint of this run, and not one of `resume_from`."""
        return self._continued(trainer) is not None and continues_own_run()

    def _stored_random_state(self, trainer: Trainer) -> dict[str, Any] | None:
        """Return this rank's random state beside the checkpoint that the Trainer has loaded; None if there is none."""
        restored = self._continued(trainer)
        if self._context is None or restored is None or restored.manifest.world_size != self._context.world_size:
            return None
        return read_random_state(Path(str(trainer.ckpt_path)).parent, self._context.world_rank)

    def _report(self, trainer: Trainer, logged: Mapping[str, Any] | None = None, *, within_epoch: bool = False) -> None:
        self._is_due = False
        step = trainer.global_step
        if self._context is None:
            return
        reported = _reported_steps(trainer)
        if step in reported:
            if step == 0:
                rank_zero_warn(_NO_STEPS)
            return
        self.reported_step = step
        logged = trainer.callback_metrics if logged is None else logged
        metrics = {**_numbers(logged), "epoch": trainer.current_epoch, "step": step}
        progress = completed_share(trainer, within_epoch=within_epoch)
        if trainer.fast_dev_run:  # type: ignore[attr-defined]  # set in a function of another module
            report(metrics, step=step, progress=progress)
            return
        with folder_of_all_ranks(self._context, self._upload, trainer.strategy.broadcast) as folder:
            with direct_writes(trainer.strategy):
                trainer.save_checkpoint(folder / self.CHECKPOINT_NAME, weights_only=False)
            if not any(reported):
                warn_of_unsafe_globals(trainer, folder / self.CHECKPOINT_NAME)
            save_random_state(folder, self._context.world_rank, loader_generators(trainer), within_epoch=within_epoch)
            trainer.strategy.barrier()  # every rank has written its own
            with moved_part(folder, self._context, files_in(folder), trainer.strategy.barrier) as part:
                report(metrics, part, step=step, progress=progress, upload=self._upload)

    def _take_sigterm_back(self) -> None:
        if self._context is not None and self._sigterm is not None:
            self._sigterm.restore()


@contextmanager
def resume_path() -> Iterator[str | None]:
    """Yield the `ckpt_path` with which `trainer.fit` resumes from the latest checkpoint, verified; None on a fresh start.

    It also yields None outside of a training function. The file exists until the block ends, so call fit within it.

    Raises:
        CheckpointNotFoundError: If the checkpoint that this attempt continues is not one of ReportCallback.
        CheckpointCorruptError: If a file differs from the committed one.

    """
    with restored_part(ReportCallback.CHECKPOINT_NAME, ReportCallback.__name__) as path:
        yield None if path is None else str(path)


def _report_after_batch(trainer: Trainer) -> None:
    for callback in _report_callbacks(trainer):
        callback._report_after_batch(trainer)  # noqa: SLF001 - of this module


def _ends_validation(trainer: Trainer) -> bool:
    if not may_end_validation(trainer):
        return False
    answers = [callback._ends_validation(trainer) for callback in _report_callbacks(trainer)]  # noqa: SLF001 - of this module
    return any(answers)


def _reported_steps(trainer: Trainer) -> set[int]:
    return {callback.reported_step for callback in _report_callbacks(trainer)}


def _report_callbacks(trainer: Trainer) -> list[ReportCallback]:
    return [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ReportCallback)]


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    # Without a logger, a score per class may be logged, but it is no metric; it must not fail the training.
    return {name: value for name, value in metrics.items() if getattr(value, "ndim", 0) == 0}
