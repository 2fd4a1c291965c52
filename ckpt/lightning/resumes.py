"""Corrections for a Trainer that resumes: it does not restore everything, and repeats some of its work."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, callbacks
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    StochasticWeightAveraging,
)
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.plugins.precision import DoublePrecision
from lightning.pytorch.utilities import rank_zero_warn

from .moments import precedes_validation

_BESIDE_SHARDS = "meta.pt"  # in a directory of shards, what Lightning does not shard
_WEIGHT_AVERAGING: Any = getattr(callbacks, "WeightAveraging", ())  # Lightning 2.4 has none


def has_stopped(callback: EarlyStopping) -> bool:
    """Return whether the callback has stopped the training, by the state that was restored."""
    reason = callback.state_dict().get("stopping_reason", 0)  # Lightning 2.6 stores it
    return bool(reason) or callback.wait_count >= max(1, callback.patience)


def leave_the_ended_epoch(trainer: Trainer) -> None:
    """Begin the next epoch where the one that was restored has ended.

    With `max_steps`, a Trainer would end that epoch again, without a batch: hooks that read the epoch's metrics or outputs,
    EarlyStopping's among them, would find none and raise, and the next epoch would draw another order.
    """
    loop = trainer.fit_loop
    if not getattr(loop, "restarted_on_epoch_end", False):  # Lightning before 2.6 does not record it
        return
    begin_next_epoch(trainer)
    loop.update_restart_stage()
    loop.epoch_progress.increment_completed()


def iterate_anew(trainer: Trainer) -> bool:
    """Have the epoch that begins make its iterator after its hooks, as every epoch but the first does; return whether it does.

    A Trainer that resumes would keep the iterator that it has made before: one that has drawn its random number before those of
    `on_train_epoch_start`, whose workers have the order of epoch 0 from their sampler, and which a loader that has a
    `state_dict` has left at its position, with no batch to come, or behind `limit_train_batches`. Where a loader has no length,
    that iterator remains, since the Trainer has read its first batch.
    """
    if trainer.num_training_batches == float("inf"):
        return False
    trainer.fit_loop._resuming_from_checkpoint = False  # noqa: SLF001 - no public name sets it; Lightning before 2.6 has none
    return True


def reset_interrupted_epoch(checkpoint: dict[str, Any]) -> int | None:
    """Have a Trainer that loads `checkpoint` begin the epoch again that it was saved within, or the next if no batch was left.

    Without this, a resume on another number of ranks would count the batches used before, of other samples, as its own.

    Returns:
        The epoch that begins; None if the checkpoint was saved at the end of one.

    """
    loops = checkpoint["loops"]["fit_loop"]
    epochs, batches = loops["epoch_progress"], loops["epoch_loop.batch_progress"]
    if epochs["total"]["processed"] == epochs["total"]["started"]:
        return None
    loops["epoch_loop.state_dict"]["_batches_that_stepped"] += 1  # a report comes before the count, after a validation, too
    for counts in (epochs["total"], epochs["current"]):
        counts.update(dict.fromkeys(counts, counts["started" if batches["is_last_batch"] else "processed"]))
    batches["total"].update(dict.fromkeys(batches["total"], batches["total"]["processed"]))
    batches["current"].update(dict.fromkeys(batches["current"], 0))
    loops["state_dict"].pop("combined_loader", None)  # the positions of the dataloaders
    return int(epochs["current"]["processed"])


def forget_ended_positions(checkpoint: dict[str, Any]) -> None:
    """Have dataloaders begin anew if `checkpoint` was saved at the last batch of an epoch, which had not ended.

    The Trainer continues with the next epoch, of which a loader that goes to its stored position would have no batch left.
    """
    loops = checkpoint["loops"]["fit_loop"]
    epochs = loops["epoch_progress"]["total"]
    if epochs["processed"] < epochs["started"] and loops["epoch_loop.batch_progress"]["is_last_batch"]:
        loops["state_dict"].pop("combined_loader", None)


def begin_next_epoch(trainer: Trainer) -> None:
    """Begin an epoch, though `max_steps` has the Trainer believe that it restarts within one."""
    # The setter of FitLoop would say so again.
    _Loop.restarting.fset(trainer.fit_loop, False)  # type: ignore[attr-defined]  # a property


def stop_early(trainer: Trainer) -> None:
    """Stop the Trainer after this batch, also before its `min_epochs` and `min_steps`, which would have it continue."""
    trainer.fit_loop.min_epochs = None
    trainer.fit_loop.epoch_loop.min_steps = None
    trainer.should_stop = True


def set_up_epoch_again(trainer: Trainer, module: LightningModule) -> None:
    """Set up the callbacks that do so at the start of an epoch, if the Trainer resumes within one: it does not call them then.

    The number of batches to accumulate, the schedule of the averaged weights and their number would be those of a new Trainer.
    """
    if not getattr(trainer.fit_loop, "restarted_mid_epoch", False):  # Lightning before 2.5 begins such an epoch again
        return
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set in a function of another module
        if isinstance(callback, GradientAccumulationScheduler):
            callback.on_train_epoch_start(trainer)
        elif isinstance(callback, StochasticWeightAveraging):
            buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
            callback.on_train_epoch_start(trainer, module)
            for name, buffer in module.named_buffers():  # it clears those of batch norm in its last epoch
                buffer.copy_(buffers[name])


def count_validated_batch(trainer: Trainer) -> None:
    """Count the batch after whose validation the restored report was made, if no validation follows it in this Trainer.

    The Trainer counts it, for the steps of loggers, only where it comes to that validation again, which it then skips.
    """
    loop = trainer.fit_loop.epoch_loop
    is_within_epoch = getattr(trainer.fit_loop, "restarted_mid_epoch", False)  # as in `set_up_epoch_again`
    if is_within_epoch and getattr(loop, "restarted_on_last", False) and not precedes_validation(trainer):
        loop._batches_that_stepped += 1  # noqa: SLF001 - no public name counts it


def convert_before_load(trainer: Trainer, module: LightningModule) -> None:
    """Make a module double that trains so: the Trainer does only after it has loaded the weights, which would be rounded."""
    if isinstance(trainer.precision_plugin, DoublePrecision):
        module.double()


def set_up_data_again(trainer: Trainer) -> None:
    """Have the Trainer make its dataloader once its loops are restored, even if it has made one.

    It has if `configure_optimizers` reads `trainer.estimated_stepping_batches`. That one would be kept without its position, in
    the order of the first epoch, and its iterator has drawn its random number before the random state is restored.
    """
    trainer.fit_loop._combined_loader = None  # noqa: SLF001 - no public name forgets it


def reload_in_same_epochs(trainer: Trainer) -> None:
    """Have `reload_dataloaders_every_n_epochs` count from the first epoch, not from that of the resume."""
    if every_n := trainer.reload_dataloaders_every_n_epochs:  # type: ignore[attr-defined]  # set in a function of another module
        loop = trainer.fit_loop
        loop._last_train_dl_reload_epoch -= loop._last_train_dl_reload_epoch % every_n  # noqa: SLF001 - no public name sets it


def restore_metrics(trainer: Trainer, reported: Mapping[str, Any]) -> None:
    """Give the Trainer the logged values of the report from which it resumes, which its own checkpoint lacks.

    After a validation within an epoch, a ReduceLROnPlateau reads them before the next batch, and raises where it finds none.
    """
    device = trainer.strategy.root_device
    for name, value in reported.items():
        if name not in ("epoch", "step") and isinstance(value, int | float):  # those two are the Trainer's counts
            trainer.callback_metrics[name] = torch.tensor(value, device=device)


def warn_of_reading_ahead(trainer: Trainer) -> None:
    """Warn if a dataloader stores a position that is one batch ahead, since Lightning reads ahead to find the last batch."""
    ahead = [loader for loader in training_loaders(trainer) if hasattr(loader, "state_dict")]
    if ahead and trainer.num_training_batches == float("inf"):
        rank_zero_warn(
            f"the {type(ahead[0]).__name__} has no length, so Lightning reads one batch ahead, which a resume within an epoch "
            "leaves out: give its dataset a __len__"
        )


def warn_of_unsafe_globals(trainer: Trainer, path: Path) -> None:
    """Warn if the checkpoint `path` has values that torch loads only on request: without it, a resume fails.

    Reads no tensors. A Trainer that has loaded a checkpoint itself, or that has a CheckpointIO of its own, is not warned.
    """
    file = path / _BESIDE_SHARDS if path.is_dir() else path
    is_of_torch = type(trainer.strategy.checkpoint_io) is TorchCheckpointIO and file.is_file()
    if trainer.ckpt_path or not trainer.is_global_zero or not is_of_torch:
        return
    if not (names := torch.serialization.get_unsafe_globals_in_checkpoint(file)):
        return
    argument = "" if path.is_dir() else "give trainer.fit() weights_only=False, or "  # lost where the strategy shards
    rank_zero_warn(
        f"{path.name} contains {', '.join(sorted(names))}, which torch loads only on request: {argument}call "
        "torch.serialization.add_safe_globals() with them before trainer.fit(), or the training cannot be resumed"
    )


def training_loaders(trainer: Trainer) -> list[Any]:
    """Return the training's dataloaders; none before the Trainer has made them."""
    return list(getattr(trainer.fit_loop._combined_loader, "flattened", []))  # noqa: SLF001 - no public name has them all


def end_with_averages(trainer: Trainer, module: LightningModule) -> None:
    """Give the module its averaged weights where nothing was left to train: the Trainer calls no `on_train_end` then."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set in a function of another module
        # With batch norm, StochasticWeightAveraging takes the averages before its last epoch.
        is_stochastic = isinstance(callback, StochasticWeightAveraging) and not callback.pl_module_contains_batch_norm(module)
        if is_stochastic or isinstance(callback, _WEIGHT_AVERAGING):
            callback.on_train_end(trainer, module)


def refuse_finders(trainer: Trainer) -> None:
    """Raise if a callback trains by itself before the training begins.

    Raises:
        ValueError: Naming what to do instead.

    """
    for callback in trainer.callbacks:  # type: ignore[attr-defined]  # set in a function of another module
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            name = type(callback).__name__
            raise ValueError(  # noqa: TRY004 - the Trainer's arguments are wrong
                f"{name} searches at every start, and the Trainer then forgets the position that it resumes from; leave it "
                "out, and search with lightning.pytorch.tuner.Tuner where resume_path() yields None"
            )
