"""Moments of a Lightning training at which to report, or to end a validation, and what is done by then, by its counts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch.utils.data import DistributedSampler


def check_moments(every_n_epochs: int | None, every_n_train_steps: int | None, on_validation_end: bool) -> None:
    """Raise ValueError if more than one moment is chosen, or a number is below 1."""
    numbers = {"every_n_epochs": every_n_epochs, "every_n_train_steps": every_n_train_steps}
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"{name}={number!r}: give a whole number from 1")
    chosen = [f"{name}={number}" for name, number in numbers.items() if number is not None]
    chosen += ["on_validation_end=True"] if on_validation_end else []
    if len(chosen) > 1:
        raise ValueError(
            f"{' and '.join(chosen)} contradict each other; choose one moment to report at, or give a callback for each"
        )


def call_after_each_batch(trainer: Trainer, action: Callable[[], None], ends_validation: Callable[[], bool]) -> None:
    """Call `action` when a training batch has ended, in the module too; in place of the action of an earlier call.

    A resume continues with the next batch. The module's `on_train_batch_end`, which may average weights, follows those of all
    callbacks, and would be left out if one of these reported.

    After a batch of a training's validation it calls `ends_validation`, and leaves the other batches out if that returns True.
    The hooks at the validation's end, which bring averaged weights back, are then called as in a sanity check, from which
    other callbacks and loggers take no metrics.
    """
    connector = trainer._logger_connector  # noqa: SLF001 - what it does then comes next; no hook of callbacks does
    end_batch = type(connector).on_batch_end

    def on_batch_end() -> None:
        if trainer.training:
            action()
        end_batch(connector)
        if trainer.validating and trainer.state.fn == TrainerFn.FITTING and ends_validation():
            trainer.sanity_checking = True
            raise StopIteration  # as from a dataloader

    connector.on_batch_end = on_batch_end  # type: ignore[method-assign]


def may_end_validation(trainer: Trainer) -> bool:
    """Return whether all ranks are at one batch of a validation, not the last, and each of its dataloaders has had one.

    Without a DistributedSampler, ranks may have other numbers of batches.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    loaders = loop._combined_loader.flattened  # type: ignore[union-attr]  # noqa: SLF001 - no public name has them all
    samplers = [getattr(loader, "sampler", None) for loader in loaders]
    if trainer.world_size > 1 and not all(isinstance(sampler, DistributedSampler) for sampler in samplers):
        return False
    is_in_last = loop._results.dataloader_idx in (None, len(loaders) - 1)  # noqa: SLF001 - hooks alone are given it
    return is_in_last and not loop.batch_progress.is_last_batch


@contextmanager
def before_validation(trainer: Trainer) -> Iterator[None]:
    """Have the Trainer store its counts as of the batch before its validation, of which a resume leaves the rest out.

    By those of a validation's end, a resume at an epoch's last batch would end that epoch: EarlyStopping would count the
    metrics of an earlier validation, or raise that there are none.
    """
    progress = trainer.fit_loop.epoch_loop.batch_progress
    for counts in (progress.total, progress.current):
        counts.completed -= 1
    yield
    for counts in (progress.total, progress.current):
        counts.completed += 1


def crosses_multiple(before: int, now: int, number: int | None) -> bool:
    """Return whether a multiple of `number` lies in the steps after `before`, up to `now`."""
    # Several optimizers count several steps in one batch, and may skip the multiple itself.
    return number is not None and now // number > before // number


def precedes_validation(trainer: Trainer) -> bool:
    """Return whether a validation within the epoch follows the batch that ends; False if it depends on the time."""
    every_n_epochs, every_n_batches = trainer.check_val_every_n_epoch, trainer.val_check_batch
    if not trainer.enable_validation or (every_n_epochs and (trainer.current_epoch + 1) % every_n_epochs):
        return False
    if trainer.should_stop and trainer.fit_loop._can_stop_early:  # noqa: SLF001 - the public `done` logs
        return True
    if every_n_batches is None:
        return False
    # Without a number of epochs, the interval counts the batches of all.
    number = trainer.fit_loop.batch_idx if every_n_epochs else trainer.fit_loop.total_batch_idx
    return (number + 1) % every_n_batches == 0


def is_accumulating(trainer: Trainer) -> bool:
    """Return whether a later batch takes the optimizer step for the batch that ends; no checkpoint holds the gradients."""
    is_step = (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0
    return not (is_step or trainer.is_last_batch)


def completed_share(trainer: Trainer, *, within_epoch: bool) -> float | None:
    """Return the share of `max_epochs` or `max_steps` that is done, of that which comes first; None without either."""
    share_of_epoch = (trainer.fit_loop.batch_idx + 1) / trainer.num_training_batches if within_epoch else 1.0
    done = (trainer.current_epoch + share_of_epoch, trainer.max_epochs), (trainer.global_step, trainer.max_steps)
    shares = [number / limit for number, limit in done if limit is not None and limit > 0]
    return min(1.0, max(shares)) if shares else None
