"""Reports of Accelerate trainings: a custom loop that saves and loads its state with an Accelerator.

    def train_fn(config):
        accelerator = Accelerator()
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        checkpoint = load_state(accelerator)
        for epoch in range(0 if checkpoint is None else checkpoint.step + 1, config["epochs"]):
            ...
            report_state(accelerator, {"loss": loss}, step=epoch)

Needs the extra `accelerate`; nothing else of this package imports this module.
"""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, SupportsIndex

from prefect_torch.ckpt.checkpoint import Checkpoint
from prefect_torch.ckpt.context import TrainContext, context_or_none
from prefect_torch.ckpt.framework_folders import (
    CHECKPOINT_NAME,
    check_world_size,
    files_in,
    folder_of_all_ranks,
    moved_part,
    needs_extra,
    part_of_rank,
    restored_part,
)
from prefect_torch.ckpt.reporting.agreement import Upload
from prefect_torch.ckpt.reporting.api import get_checkpoint, report

with needs_extra("accelerate", "accelerate"):
    import torch
    from accelerate import Accelerator
    from accelerate.utils import broadcast_object_list, load


def report_state(
    accelerator: Accelerator,
    metrics: Mapping[str, object],
    *,
    step: SupportsIndex | None = None,
    progress: float | None = None,
    upload: Upload | None = None,
    safe_serialization: bool = True,
) -> None:
    """Report the files that `accelerator.save_state` writes, durable when this returns; every rank calls it, equally often.

    The checkpoint holds `checkpoint/`: models, optimizers, schedulers, samplers, each rank's random state and its positions of
    stateful data loaders, and all objects registered for checkpointing. Each rank reports its own files. With
    `automatic_checkpoint_naming` the Accelerator writes to its own directory and rotates there as usual; otherwise to a
    temporary one.

    Outside of a training function it warns and does nothing, so that the same script runs on its own.

    Args:
        accelerator: The Accelerator that has prepared every object of the state.
        metrics: As `report` takes them; rank 0's count.
        step: As `report` takes it.
        progress: As `report` takes it.
        upload: "sync" or "async", as `report` understands it; None means "sync".
        safe_serialization: As `Accelerator.save_state` takes it: models as safetensors, or pickled.

    Raises:
        ValueError: Before anything is saved, if the Accelerator does not train on exactly the ranks that exist.
        CheckpointError: As `report` raises it.

    """
    context = context_or_none()
    if context is None:
        if accelerator.is_main_process:
            warnings.warn(
                "report_state reports nothing: this is no training function of prefect_torch.flows.train()", stacklevel=2
            )
        return
    check_world_size("Accelerator", accelerator.num_processes, context)
    upload = upload or "sync"
    with _saved_state(accelerator, context, upload, safe_serialization) as (folder, lent):
        accelerator.wait_for_everyone()  # save_state does not wait: other ranks may still be writing
        others = _save_positions(accelerator, folder, context)
        files = [path for path in files_in(folder) if path not in others]
        if lent is None:
            parts = part_of_rank(folder, context, upload, files)
        else:
            moved = [f"{CHECKPOINT_NAME}/{path}" for path in files]
            parts = moved_part(lent, context, moved, accelerator.wait_for_everyone)
        with parts as part:
            report(metrics, part, step=step, progress=progress, upload=upload)


def load_state(accelerator: Accelerator, **arguments: Any) -> Checkpoint | None:
    """Load the checkpoint that this attempt continues into `accelerator`, verified, and return it; None on a fresh start.

    It also returns None outside of a training function. Call it after `prepare` and `register_for_checkpointing`; the
    checkpoint's `step` and `metrics` show where to continue.

    Args:
        accelerator: The Accelerator that has prepared the same objects as when the state was reported.
        arguments: As `Accelerator.load_state` takes them in addition to the directory.

    Raises:
        ValueError: If the Accelerator does not train on exactly the ranks that exist.
        CheckpointNotFoundError: If the checkpoint was not reported by `report_state`.
        CheckpointCorruptError: If a file differs from the committed one.

    """
    context = context_or_none()
    if context is None:
        return None
    check_world_size("Accelerator", accelerator.num_processes, context)
    with restored_part(CHECKPOINT_NAME, report_state.__name__) as folder:
        if folder is None:
            return None
        accelerator.load_state(str(folder), **arguments)
        restored = get_checkpoint()
        assert restored is not None
        if restored.manifest.world_size == context.world_size:
            _load_positions(accelerator, folder, context, arguments.get("load_kwargs") or {})
    return restored


def _save_positions(accelerator: Accelerator, folder: Path, context: TrainContext) -> set[str]:
    """Write this rank's position of each stateful data loader to a file of its own; return the files that are rank 0's.

    Accelerate has all ranks write it to one file: one rank's position, or a mixture, would be that of all. That file becomes
    rank 0's, for Accelerate's own `load_state`.
    """
    loaders = _stateful_loaders(accelerator)
    for name, loader in loaders.items():
        position = loader.state_dict()
        torch.save(position, folder / _of_rank(name, context))
        if context.world_rank == 0:
            torch.save(position, folder / name)
    if loaders:
        accelerator.wait_for_everyone()  # machines may share the directory, and see each other's files
    return set() if context.world_rank == 0 else set(loaders)


def _load_positions(accelerator: Accelerator, folder: Path, context: TrainContext, arguments: Mapping[str, Any]) -> None:
    for name, loader in _stateful_loaders(accelerator).items():
        if (path := folder / _of_rank(name, context)).exists():  # not if it was reported before ranks had their own
            loader.load_state_dict(load(path, **arguments))


def _stateful_loaders(accelerator: Accelerator) -> dict[str, Any]:
    """Return the prepared data loaders that store a position, by the name of Accelerate's file of it."""
    loaders: list[Any] = accelerator._dataloaders  # noqa: SLF001 - no public name has them all
    names = ["dl_state_dict.bin", *(f"dl_state_dict_{number}.bin" for number in range(1, len(loaders)))]
    return {name: it for name, it in zip(names, loaders, strict=False) if getattr(it, "use_stateful_dataloader", False)}


def _of_rank(name: str, context: TrainContext) -> str:
    return f"{name.removesuffix('.bin')}_rank{context.world_rank}.bin"


@contextmanager
def _saved_state(
    accelerator: Accelerator, context: TrainContext, upload: Upload, safely: bool
) -> Iterator[tuple[Path, Path | None]]:
    """Yield the directory of the saved state, the same path on every rank, and the `folder_of_all_ranks` that it lies in."""
    if accelerator.project_configuration.automatic_checkpoint_naming:
        _skip_names_in_use(accelerator)
        yield Path(accelerator.save_state(safe_serialization=safely)), None
        return
    with folder_of_all_ranks(context, upload, lambda path: str(broadcast_object_list([path])[0])) as lent:
        yield Path(accelerator.save_state(str(lent / CHECKPOINT_NAME), safely)), lent


def _skip_names_in_use(accelerator: Accelerator) -> None:
    """Continue the numbering after the directories of an earlier attempt, which `save_state` would refuse to write to."""
    accelerator.wait_for_everyone()  # before any rank makes the next directory
    paths = list(folder.iterdir()) if (folder := Path(accelerator.project_dir, "checkpoints")).is_dir() else []
    used = [int(match[1]) for path in paths if (match := re.fullmatch(r"checkpoint_(\d+)", path.name))]
    configuration = accelerator.project_configuration
    configuration.iteration = max([configuration.iteration, *(number + 1 for number in used)])
