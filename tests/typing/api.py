"""How users call the public API; type-checked, never run."""

from pathlib import Path
from typing import Any

import prefect_torch
from prefect_torch.ckpt import (
    Checkpoint,
    CheckpointStore,
    Manifest,
    RandomState,
    RankLocal,
    RetentionPolicy,
    get_checkpoint,
    get_context,
    log_metrics,
    report,
)
from prefect_torch.flows import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig, train
from prefect_torch.tasks import prepare_data_loader, prepare_model
from torch import nn, randn
from torch.utils.data import DataLoader, TensorDataset


def train_fn(config: dict[str, Any]) -> dict[str, float] | None:
    checkpoint: Checkpoint | None = get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory(include=["*.pt"], own_files=True) as directory:
            Path(directory)
        copied: str = checkpoint.to_directory("x", include="*.pt") + checkpoint.to_safetensors("m.safetensors", key="model")
        Path(copied)
    rank: int = get_context().world_rank
    due: bool = get_context().should_checkpoint()
    ends: bool = get_context().ends_soon()
    log_metrics({"speed": 1.0}, step=1)
    report({"loss": 0.5, "nested": {"a": None}}, checkpoint=Checkpoint.from_directory("x"), step=3, progress=0.5)
    report({"loss": rank}, Checkpoint.from_directory(Path("x")), upload="async")
    state: dict[str, Any] = {"epoch": 1, "rng": RankLocal([1, 2]), "random": RandomState()}
    report({"loss": rank}, state=state)
    Checkpoint("x").load_state(state, rank_local=lambda name, values, rank, world_size: values[rank % len(values)])
    return {"ends": float(due and ends)}


model: nn.Module = prepare_model(
    nn.Linear(4, 1), parallel_strategy="fsdp2", parallel_strategy_kwargs={"reshard_after_forward": True}
)
loader = prepare_data_loader(DataLoader(TensorDataset(randn(8, 4)), shuffle=True), resumable=True)
result: Result = train(
    train_fn,
    config={"epochs": 5},
    scaling=ScalingConfig(num_workers=2, use_gpu=False),
    run=RunConfig(name="digits", storage=Path("checkpoints"), resume="auto", working_dir=Path("code")),
    checkpoint=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="val_loss", checkpoint_score_order="min"),
    failure=FailureConfig(max_failures=3),
    resume_from=None,
)
best: list[tuple[Checkpoint, Any]] = list(result.best_checkpoints)
best_by_another: Checkpoint = result.get_best_checkpoint("eval/accuracy", "max")
attempts: int = result.attempts
store: CheckpointStore = CheckpointStore.open("s3://bucket", "run")
manifests: list[Manifest] = store.list()
latest: Manifest | None = store.latest()
top: list[Manifest] = store.best(3, "val_loss", "min")
kept = store.prune(RetentionPolicy(num_to_keep=2), dry_run=True).keep
again: Result = Result.from_storage(Path("checkpoints"), "digits")
root: tuple[str, prefect_torch.Checkpoint, Result] = (
    prefect_torch.__version__,
    prefect_torch.Checkpoint("x"),
    prefect_torch.train("my_training:train_fn", run=prefect_torch.RunConfig(name="digits")),
)

# A name that no package has is an error for a type checker, which would otherwise warn that the comment is unused.
nowhere = (
    prefect_torch.nosuch,  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
    prefect_torch.flows.nosuch,  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
    prefect_torch.tasks.nosuch,  # type: ignore[attr-defined] # pyright: ignore[reportAttributeAccessIssue]
)
