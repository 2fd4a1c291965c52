"""The callback that reports a Trainer's checkpoints, and the path to resume from."""

import warnings
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from accelerate import PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, gather_object
from prefect_torch.ckpt.context import TrainContext, context_or_none
from prefect_torch.ckpt.errors import CheckpointNotFoundError
from prefect_torch.ckpt.framework_folders import (
    CHECKPOINT_NAME,
    check_first_step,
    check_world_size,
    part_of_rank,
)
from prefect_torch.ckpt.reporting.agreement import Upload
from prefect_torch.ckpt.reporting.api import log_metrics, report
from prefect_torch.ckpt.reporting.rank_report import check_upload
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .folders import SavedFolders, output_dir
from .resumes import ResumeCorrections, check_place, load_renamed_weights, resumed_from

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)
_LOAD_BY_THEMSELVES = (DistributedType.FSDP, DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


class ReportCallback(TrainerCallback):
    """Report every checkpoint that the Trainer saves with the metrics of its step, durable before training continues.

    The checkpoint holds `checkpoint/`, the files that the Trainer wrote to `checkpoint-<step>` on any rank; each rank reports
    its own. The Trainer's directory stays unchanged, also with `upload="async"`, which copies it, and `save_total_limit`
    rotates as usual; the run's own settings determine the checkpoints that it keeps.

    The metrics are those that the Trainer logged at exactly that step, an evaluation's among them, with `epoch` and `step`; no
    metric of another step is reported as this one's. So that there is a loss, a saved step is also logged, unless
    `logging_strategy="no"`. The step is `state.global_step`, so a training function trains once, and gives
    `resume_from_checkpoint=` from `resume_path` to continue. One step is reported once.

    After each step it calls `get_context().should_checkpoint()`, and lets the Trainer save if that is true. When termination
    of the training is requested, it then stops the Trainer. Within an evaluation it does not ask.

    Outside of a training function it warns, once per training, and does nothing, so that the same script runs on its own.

    Args:
        upload: "sync" or "async", as `report` takes it; with "async" the training waits for a copy of the files, and they are
            stored while it goes on.
        report_logs: Whether all logs of the Trainer are recorded in the run's history, with or without a checkpoint.

    Attributes:
        CHECKPOINT_NAME: The name of the Trainer's checkpoint in ours.
        is_prepared: Whether its Trainer was given to `prepare_trainer`.

    """

    CHECKPOINT_NAME = CHECKPOINT_NAME

    def __init__(self, *, upload: Upload = "sync", report_logs: bool = True) -> None:
        check_upload(upload, None, None)
        self._upload: Upload = upload
        self._report_logs = report_logs
        self.is_prepared = False
        self._context: TrainContext | None = None
        self._folders: SavedFolders | None = None
        self._reported_step = 0
        self._ends = False
        self._saves_after_evaluation = False

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - Transformers' signature
        model: object = None,
        train_dataloader: object = None,
        **_: Any,
    ) -> None:
        """Begin to count at the Trainer's first step.

        Raises:
            MemoryError: If the Trainer begins again, with a smaller batch (`auto_find_batch_size`), before a reported step.
            ValueError: If the Trainer is one that `prepare_trainer` refuses, begins before the checkpoint that this attempt
                continues or another Trainer's reports, or would continue in a wrong epoch.

        """
        self._context = context_or_none()
        if self._context is not None and args.auto_find_batch_size and self._reported_step > state.global_step:
            raise MemoryError(
                f"the memory did not suffice after step {self._reported_step} was reported, and auto_find_batch_size begins "
                f"again at step {state.global_step}; give a smaller per_device_train_batch_size, or a restart to continue from "
                "the checkpoint: FailureConfig(max_out_of_memory_failures=...)"
            )
        self._reported_step = state.global_step
        self._ends = self._saves_after_evaluation = False
        if self._context is None:
            if state.is_world_process_zero:
                warnings.warn(
                    "ReportCallback reports nothing: this is no training function of prefect_torch.flows.train()", stacklevel=2
                )
            return
        _check_arguments(args, self._context)
        _warn_of_shared_folder(args, self._context)
        self._folders = SavedFolders(args, self._context, state.global_step)
        check_first_step(state.global_step, "give trainer.train() the resume_from_checkpoint that resume_path() yields")
        folder = resumed_from()
        if folder is None or not self.is_prepared:
            check_place(args, state, train_dataloader)
        if folder is not None:
            _load_renamed_weights(model, folder)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Let the Trainer save if a checkpoint is requested, and stop, without an evaluation, if termination is requested.

        A save at the last step of an epoch waits for the evaluation at its end: a resume from before it would skip that, and
        the last checkpoint of a training that ends within an epoch would lack its metrics.
        """
        if self._context is not None and not control.should_training_stop and self._context.should_checkpoint():
            control.should_training_stop = self._ends = self._context.ends_soon()
            control.should_evaluate = control.should_evaluate and not self._ends
            control.should_save = control.should_save or self._ends or not _epoch_end_saves(args, state, control)
        if self._context is not None and control.should_save and not self._ends and _epoch_end_evaluates(args, state, control):
            control.should_save, self._saves_after_evaluation = False, True
        self._log_what_is_saved(args, control)

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002 - Transformers' signature
        """Let the Trainer log if it is about to save; skip evaluation and save if termination is requested."""
        if self._ends:  # saved after the step
            control.should_evaluate = control.should_save = False
        elif self._saves_after_evaluation:
            control.should_save = True
        self._saves_after_evaluation = False
        self._log_what_is_saved(args, control)

    def on_log(
        self,
        args: TrainingArguments,  # noqa: ARG002 - Transformers' signature
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - Transformers' signature
        logs: dict[str, Any] | None = None,
        **_: Any,
    ) -> None:
        """Record the Trainer's logs, also those of an evaluation before or after the training."""
        if self._report_logs and logs and context_or_none() is not None:
            log_metrics(_numbers_and_texts(logs), step=state.global_step)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002 - Transformers' signature
        """Report the saved checkpoint.

        Raises:
            CheckpointNotFoundError: If it is not in the directory where the Trainer saves.

        """
        if self._context is None or self._folders is None or state.global_step == self._reported_step:
            return
        self._reported_step = state.global_step
        folder = self._folders.folder(state.global_step)
        if state.is_world_process_zero and not folder.is_dir():
            raise CheckpointNotFoundError(f"the Trainer has saved, but there is no directory {folder}")
        PartialState().wait_for_everyone()  # the Trainer does not: other ranks may be writing
        progress = min(1.0, state.global_step / state.max_steps)
        with part_of_rank(folder, self._context, self._upload, self._folders.written_files(folder)) as part:
            report(_metrics_of_step(state), part, step=state.global_step, progress=progress, upload=self._upload)
        self._folders.rotate()

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - Transformers' signature
        model: object = None,
        **_: Any,
    ) -> None:
        """Load those weights of the best model that the Trainer, which has loaded it by now, has left as of the last step."""
        if self._context is not None and args.load_best_model_at_end and state.best_model_checkpoint is not None:
            _load_renamed_weights(model, Path(state.best_model_checkpoint))

    def _log_what_is_saved(self, args: TrainingArguments, control: TrainerControl) -> None:
        if self._context is None or args.logging_strategy == "no":
            return
        may_save = control.should_save or (args.save_strategy == "best" and control.should_evaluate)
        control.should_log = control.should_log or may_save


def prepare_trainer(trainer: AnyTrainer) -> AnyTrainer:
    """Return `trainer` with a ReportCallback, its own or a new one; outside of a training function, return it unchanged.

    A resume continues in the epoch of the checkpoint. Where an epoch has another number of steps than before, as on another
    number of ranks with the same batch per rank, an interrupted epoch begins again, with a warning. A resume also restores what
    the Trainer's callbacks have counted in this run, such as the evaluations that EarlyStoppingCallback has waited for.

    Raises:
        ValueError: If it does not train on exactly the ranks that exist, ranks write to different directories, or it would
            save by itself on SIGTERM.

    """
    context = context_or_none()
    if context is None:
        return trainer
    _check_arguments(trainer.args, context)
    callbacks = trainer.callback_handler.callbacks
    if not any(isinstance(it, ReportCallback) for it in callbacks):
        trainer.add_callback(ReportCallback())
    if not any(isinstance(it, ResumeCorrections) for it in callbacks):
        trainer.add_callback(ResumeCorrections(trainer))
    for callback in callbacks:
        if isinstance(callback, ReportCallback):
            callback.is_prepared = True
    return trainer


def _load_renamed_weights(model: object, folder: Path) -> None:
    if AcceleratorState().distributed_type not in _LOAD_BY_THEMSELVES:
        load_renamed_weights(model, folder)


def _epoch_end_saves(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> bool:
    # That save follows the evaluation, if there is one, and has its metrics; a step is reported once.
    return args.save_strategy == "epoch" and _ends_epoch(state, control)


def _epoch_end_evaluates(args: TrainingArguments, state: TrainerState, control: TrainerControl) -> bool:
    return args.eval_strategy == "epoch" and _ends_epoch(state, control)


def _ends_epoch(state: TrainerState, control: TrainerControl) -> bool:
    # Also within its data: at the last step of a training, or where a callback ends the epoch.
    is_complete = state.epoch is not None and state.epoch.is_integer()
    return is_complete or control.should_training_stop or control.should_epoch_stop


def _metrics_of_step(state: TrainerState) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    logged = list(takewhile(lambda entry: entry["step"] == state.global_step, reversed(state.log_history)))
    for entry in reversed(logged):
        metrics.update(_numbers_and_texts(entry))
    return {**metrics, "epoch": state.epoch, "step": state.global_step}  # pages and commands show the first ones


def _numbers_and_texts(logs: dict[Any, Any]) -> dict[str, Any]:
    # A list or an array, such as a score per class, is a log of Transformers but no metric; it must not fail the training.
    return {
        str(name): _numbers_and_texts(value) if isinstance(value, dict) else value
        for name, value in logs.items()
        if not isinstance(value, (list, tuple)) and getattr(value, "ndim", 0) == 0
    }


def _check_arguments(args: TrainingArguments, context: TrainContext) -> None:
    check_world_size("Trainer", args.world_size, context)
    if args.enable_jit_checkpoint:
        raise ValueError(
            "enable_jit_checkpoint would keep a rank running when its termination is requested; leave it out: ReportCallback "
            "has the Trainer save before the training ends"
        )
    folders: list[str] = gather_object([str(output_dir(args).resolve())])
    for rank, folder in enumerate(folders):
        if folder != folders[0]:
            raise ValueError(f"rank 0 writes to {folders[0]} but rank {rank} to {folder}; give all ranks the same output_dir")


def _warn_of_shared_folder(args: TrainingArguments, context: TrainContext) -> None:
    """Warn in a trial of a sweep that writes to the same directory as the others: all trials run in one directory."""
    sweep, _, trial = context.run_name.rpartition("/")
    if sweep and context.world_rank == 0 and trial not in str(output_dir(args)):
        warnings.warn(
            f"all trials of sweep {sweep!r} write to output_dir={args.output_dir!r}, and would report or delete each other's "
            'checkpoints: give each a directory of its own, such as f"output/{get_context().run_name}"',
            stacklevel=2,
        )
