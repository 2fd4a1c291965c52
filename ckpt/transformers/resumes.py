"""Corrections for a Trainer that resumes: its place in the data, what its callbacks have counted, and renamed weights."""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prefect_torch.ckpt.framework_folders import CHECKPOINT_NAME, restored_part
from prefect_torch.ckpt.reporting.api import continues_own_run, get_checkpoint
from safetensors import safe_open
from transformers import (
    EarlyStoppingCallback,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import has_length
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

_ROUNDING = 1e-6  # of an epoch's fraction times its steps
_resumed_from: Path | None = None


@contextmanager
def resume_path() -> Iterator[str | None]:
    """Yield the `resume_from_checkpoint` with which `trainer.train` resumes from the latest checkpoint, verified, or None.

    It yields None on a fresh start and outside of a training function. The directory exists until the block ends, so train
    within it.

    Raises:
        CheckpointNotFoundError: If the checkpoint that this attempt continues is not one of ReportCallback.
        CheckpointCorruptError: If a file differs from the committed one.

    """
    global _resumed_from  # noqa: PLW0603 - a rank is a process, and callbacks do not receive it
    with restored_part(CHECKPOINT_NAME, "ReportCallback") as path:
        _resumed_from = path
        try:
            yield None if path is None else str(path)
        finally:
            _resumed_from = None


def resumed_from() -> Path | None:
    """Return the directory that `resume_path` yields; None outside of its block, and on a fresh start."""
    return _resumed_from


@dataclass(frozen=True, slots=True)
class Place:
    """Where a resume continues in the data, if the Trainer, which divides its step by those of an epoch, would not find it.

    Steps count on from the saved one: reports, directories and logs stay in order.

    Attributes:
        epoch: The epoch that the training continues with.
        taken: How many steps of it were taken before and are not taken again.
        begins_again: Whether steps of it are taken again.
        num_epochs: The Trainer's number of epochs.
        max_steps: The step at which the training ends: the user's, or that at which all epochs are complete.

    """

    epoch: int
    taken: int
    begins_again: bool
    num_epochs: int
    max_steps: int

    @classmethod
    def after(
        cls, state: TrainerState, args: TrainingArguments, steps_per_epoch: int, *, has_as_many_ranks: bool
    ) -> "Place | None":
        """Return where to continue after `state` was saved; None if the Trainer finds the place.

        It does not if an epoch had another number of steps once, as with a batch of all ranks that depends on their number.
        """
        epoch = math.floor(state.epoch)
        share = state.epoch - epoch
        taken = math.floor(share * steps_per_epoch + _ROUNDING)
        # Of this epoch's own steps: the last step of an epoch may accumulate fewer batches than the others.
        fewest_batches = (steps_per_epoch - 1) * args.gradient_accumulation_steps + 1
        is_own = share * fewest_batches <= taken * args.gradient_accumulation_steps + _ROUNDING
        if is_own and state.global_step == epoch * steps_per_epoch + taken:
            return None
        begins_again = share > 0 and (args.ignore_data_skip or not (is_own and has_as_many_ranks))
        taken = 0 if begins_again else taken
        is_complete = state.epoch >= args.num_train_epochs
        to_come = 0 if is_complete else math.ceil((args.num_train_epochs - epoch) * steps_per_epoch) - taken
        max_steps = args.max_steps if args.max_steps > 0 else state.global_step + to_come
        left = math.ceil((max_steps - state.global_step + taken) / steps_per_epoch) if max_steps > state.global_step else 0
        return cls(epoch, taken, begins_again, epoch + left, max_steps)

    @classmethod
    def at_end(cls, num_epochs: int, max_steps: int) -> "Place":
        """Return where no epoch is left: a Trainer asks only after a step whether it has to stop."""
        return cls(num_epochs, 0, begins_again=False, num_epochs=num_epochs, max_steps=max_steps)


class _StepsPerEpoch(int):
    """The number by which the Trainer divides its step, to find the epoch (`//`) and the steps of it that were taken (`%`)."""

    place: Place

    def __rfloordiv__(self, _: int) -> int:
        return self.place.epoch

    def __rmod__(self, _: int) -> int:
        return self.place.taken


class ResumeCorrections(TrainerCallback):
    """Have `trainer` continue at the right place, with what its callbacks have counted; `prepare_trainer` adds it."""

    def __init__(self, trainer: Trainer) -> None:
        self._handler = trainer.callback_handler
        self._place: Place | None = None
        # It sees the data, with the size of the batch that the Trainer has chosen, before the Trainer computes where to begin.
        compute = trainer.set_initial_training_values
        trainer.set_initial_training_values = partial(self._plan, compute)  # type: ignore[method-assign]

    def _plan(
        self, compute: Callable[..., tuple[Any, ...]], args: TrainingArguments, dataloader: object, *others: object
    ) -> tuple[Any, ...]:
        num_epochs, steps_per_epoch, *between, max_steps = compute(args, dataloader, *others)
        self._place = place = None
        if (folder := resumed_from()) is not None:
            state = TrainerState.load_from_json(str(folder / TRAINER_STATE_NAME))
            if has_length(dataloader):
                has_as_many_ranks = _has_as_many_ranks(args)
                self._place = place = Place.after(state, args, steps_per_epoch, has_as_many_ranks=has_as_many_ranks)
            if place is not None:
                num_epochs, max_steps = place.num_epochs, place.max_steps
            if state.global_step >= max_steps or (continues_own_run() and has_stopped(self._handler.callbacks, state)):
                place = Place.at_end(num_epochs, max_steps)
            elif place is not None and args.process_index == 0:
                _warn_of_another_course(place, state, steps_per_epoch)
            if place is not None:
                steps_per_epoch = _StepsPerEpoch(steps_per_epoch)
                steps_per_epoch.place = place
        return num_epochs, steps_per_epoch, *between, max_steps

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:  # noqa: ARG002 - Transformers' signature
        """Restore what the other callbacks have counted in this run, if the Trainer has resumed, and skip `eval_on_start`.

        That evaluation of the restored weights is no better than the best one, so EarlyStoppingCallback would count it.

        Raises:
            ValueError: If it has not, though within `resume_path`, and its number of steps was that of the resume.

        """
        if self._place is not None and state.global_step == 0:
            raise ValueError(
                "the Trainer begins anew within resume_path(): give trainer.train() the resume_from_checkpoint that it yields, "
                "or train after its block"
            )
        if state.global_step > 0:
            args.eval_on_start = False
            if continues_own_run():
                restore_counts(self._handler.callbacks, state)
            add_new_callbacks(self._handler.callbacks, state)

    def on_epoch_begin(
        self,
        args: TrainingArguments,  # noqa: ARG002 - Transformers' signature
        state: TrainerState,
        control: TrainerControl,  # noqa: ARG002 - Transformers' signature
        train_dataloader: object = None,
        **_: Any,
    ) -> None:
        """Give a batch sampler its epoch, as that of `batch_rebalance`, from which it derives its order.

        On several ranks Accelerate wraps it, and once more to skip the batches that were taken before: the Trainer, which looks
        below one wrapper only, would continue in the order of epoch 0.
        """
        sampler: Any = getattr(getattr(train_dataloader, "batch_sampler", None), "batch_sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(math.floor(state.epoch))


def check_place(args: TrainingArguments, state: TrainerState, dataloader: object) -> None:
    """Raise if a Trainer that `prepare_trainer` has not corrected continues elsewhere in its data than `state` was saved.

    Raises:
        ValueError: If it does.

    """
    if state.global_step == 0 or not has_length(dataloader):
        return
    steps_per_epoch = math.ceil(len(dataloader) / args.gradient_accumulation_steps)
    if Place.after(state, args, steps_per_epoch, has_as_many_ranks=True) is not None:
        raise ValueError(
            f"the checkpoint of step {state.global_step}, epoch {state.epoch:.2f}, had epochs of another number of steps: "
            "the Trainer would continue in a wrong one; give it to prepare_trainer()"
        )


def _has_as_many_ranks(args: TrainingArguments) -> bool:
    restored = get_checkpoint()
    return restored is not None and restored.manifest.world_size == args.world_size


def _warn_of_another_course(place: Place, state: TrainerState, steps_per_epoch: int) -> None:
    """Warn unless the training continues as it would have without the interruption."""
    if not place.begins_again and place.max_steps == state.max_steps:
        return
    continues = f"begins epoch {place.epoch} again" if place.begins_again else f"continues in epoch {place.epoch}"
    warnings.warn(
        f"not all epochs before the checkpoint of step {state.global_step}, epoch {state.epoch:.2f}, had {steps_per_epoch} "
        f"steps, as they have now: the training {continues} and ends at step {place.max_steps}; it would continue exactly with "
        "an unchanged batch of all ranks together, as by per_device_train_batch_size=BATCH // get_context().world_size",
        stacklevel=2,
    )


def restore_counts(callbacks: Iterable[TrainerCallback], state: TrainerState) -> None:
    """Set what the `callbacks` had counted when `state` was saved, such as the evaluations of EarlyStoppingCallback.

    Their own arguments stay: the Trainer's `restore_callback_states_from_checkpoint` would make new ones with those of then.
    """
    for callback, counted in _counted(callbacks, state):
        for attribute, value in counted.items():
            setattr(callback, attribute, value)


def has_stopped(callbacks: Iterable[TrainerCallback], state: TrainerState) -> bool:
    """Return whether an EarlyStoppingCallback had stopped the training, by its patience of now, when `state` was saved."""
    return any(
        counted.get("early_stopping_patience_counter", 0) >= max(1, callback.early_stopping_patience)
        for callback, counted in _counted(callbacks, state)
        if isinstance(callback, EarlyStoppingCallback)
    )


def _counted(callbacks: Iterable[TrainerCallback], state: TrainerState) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield the `callbacks` with what each had counted when `state` was saved."""
    all_stored: Any = state.stateful_callbacks  # a dict, once it is loaded
    for name, of_name in _by_name(callbacks).items():
        stored = all_stored.get(name, [])
        newest = (stored if isinstance(stored, list) else [stored])[-len(of_name) :]  # the Trainer appends at each save
        for callback, saved in zip(of_name, newest, strict=False):
            yield callback, saved.get("attributes", {})


def add_new_callbacks(callbacks: Iterable[TrainerCallback], state: TrainerState) -> None:
    """Add the `callbacks` that `state` lacks, for which the Trainer's next save would raise a KeyError."""
    all_stored: Any = state.stateful_callbacks
    for name, of_name in _by_name(callbacks).items():
        states = [callback.state() for callback in of_name]
        all_stored.setdefault(name, states if len(states) > 1 else states[0])


def _by_name(callbacks: Iterable[TrainerCallback]) -> dict[str, list[Any]]:
    by_name: dict[str, list[Any]] = {}
    for callback in callbacks:
        if isinstance(callback, ExportableState):
            by_name.setdefault(type(callback).__name__, []).append(callback)
    return by_name


def load_renamed_weights(model: object, folder: Path) -> None:
    """Load the weights that `save_pretrained` stored in `folder` under other names than the `model` has for them.

    `save_pretrained` renames them for older versions, and `from_pretrained` translates them back.
    `Trainer.train(resume_from_checkpoint=)` does not: it warns, and continues with those weights as they were initialised
    (https://github.com/huggingface/transformers/issues/43701). Nor does `load_best_model_at_end`, which keeps those of the last
    step. Costs the model once more in memory, and nothing where all names are the same.
    """
    if not isinstance(model, PreTrainedModel):
        return
    if not _stored_names(folder) <= model.state_dict().keys():
        model.load_state_dict(type(model).from_pretrained(folder).state_dict())


def _stored_names(folder: Path) -> set[str]:
    if (index := folder / SAFE_WEIGHTS_INDEX_NAME).exists():
        return set(json.loads(index.read_text())["weight_map"])
    if not (weights := folder / SAFE_WEIGHTS_NAME).exists():  # adapters, or a format of a strategy that loads it itself
        return set()
    with safe_open(weights, framework="np") as file:
        return set(file.keys())
