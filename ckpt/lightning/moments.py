"""Moments of a Lightning training at which to report, by public counts of the Trainer."""

from collections.abc import Callable

from lightning.pytorch import Trainer


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


def call_after_each_batch(trainer: Trainer, action: Callable[[], None]) -> None:
    """Call `action` when a training batch has ended, in the module too; in place of the action of an earlier call.

    A resume continues with the next batch. The module's `on_train_batch_end`, which may average weights, follows those of all
    callbacks, and would be left out if one of these reported.
    """
    connector = trainer._logger_connector  # noqa: SLF001 - what it does then comes next; no hook of callbacks does
    end_batch = type(connector).on_batch_end

    def on_batch_end() -> None:
        if trainer.training:  # it is called in a validation, too
            action()
        end_batch(connector)

    connector.on_batch_end = on_batch_end  # type: ignore[method-assign]


def crosses_multiple(before: int, now: int, number: int | None) -> bool:
    """Return whether a multiple of `number` lies in the steps after `before`, up to `now`."""
    # Several optimizers count several steps in one batch, and may skip the multiple itself.
    return number is not None and now // number > before // number


def precedes_validation(trainer: Trainer) -> bool:
    """Return whether a validation within the epoch follows the batch that ends; False if it depends on the time."""
    every_n_epochs, every_n_batches = trainer.check_val_every_n_epoch, trainer.val_check_batch
    if every_n_batches is None or not trainer.enable_validation:
        return False
    if every_n_epochs is None:  # the interval counts the batches of all epochs
        return (trainer.fit_loop.total_batch_idx + 1) % every_n_batches == 0
    is_validated = (trainer.current_epoch + 1) % every_n_epochs == 0
    return is_validated and (trainer.fit_loop.batch_idx + 1) % every_n_batches == 0


def is_accumulating(trainer: Trainer) -> bool:
    """Return whether a later batch takes the optimizer step for the batch that ends; no checkpoint holds the gradients."""
    is_step = (trainer.fit_loop.batch_idx + 1) % trainer.accumulate_grad_batches == 0
    return not (is_step or trainer.is_last_batch)
