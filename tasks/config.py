"""What a person says about a training; the fields of the Run form in the Prefect UI."""

from datetime import timedelta
from typing import Annotated, Any, Literal

from prefect_torch.ckpt import RetentionPolicy
from prefect_torch.ckpt.blocks import StorageBlock
from prefect_torch.ckpt.layout import check_run_name
from pydantic import BaseModel, ConfigDict, Field, field_validator

Budget = Annotated[int, Field(ge=-1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class _Config(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ScalingConfig(_Config):
    """How many ranks, and on what."""

    num_workers: int = Field(default=1, ge=1, description="How many ranks (processes) train together.")
    use_gpu: bool = Field(default=False, description="Give each rank a GPU of its own.")
    backend: str | None = Field(
        default=None, description="The process group's backend; nccl with GPUs and gloo without when empty."
    )


class RunConfig(_Config):
    """Which run, where its checkpoints lie, and how it begins."""

    name: str | None = Field(
        default=None,
        description="The run's name in the storage. An explicit name continues across flow runs; without one, each flow "
        "run has its own run, which its retries continue.",
    )
    storage: str | StorageBlock = Field(
        default="./checkpoints",
        description="Where checkpoints go: a local path, a URL (s3://bucket/prefix), 'block-type-slug/block-name', or a "
        "saved block.",
    )
    resume: Literal["auto", "never", "must"] = Field(
        default="auto",
        description="auto: continue from the latest checkpoint if there is one. never: begin anew. must: fail if there is "
        "none.",
    )
    takeover: bool = Field(
        default=False, description="Take the run over from a flow run that is still alive; that one is fenced off."
    )
    storage_deadline_s: Seconds | None = Field(
        default=None,
        description="After how many seconds a storage that does not answer is given up; when empty, the setting "
        "PREFECT_INTEGRATIONS_TORCH_STORAGE_DEADLINE_S (120).",
    )
    verify: Literal["digest", "size", "none"] = Field(
        default="digest", description="How a checkpoint is proven whole before a training resumes from it."
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        return None if name is None else check_run_name(name)


class CheckpointConfig(_Config):
    """Which checkpoints are kept; the latest always is."""

    num_to_keep: int | None = Field(default=None, ge=1, description="How many of the best to keep; all when empty.")
    checkpoint_score_attribute: str | None = Field(
        default=None,
        description="The metric that ranks checkpoints, 'a/b' for a nested one; the newest are best when empty.",
    )
    checkpoint_score_order: Literal["max", "min"] = Field(default="max", description="Whether a high or a low score is good.")
    keep_last: int = Field(default=1, ge=1, description="How many of the newest to keep besides the best.")
    keep_every_n_steps: int | None = Field(
        default=None, ge=1, description="Keep every checkpoint whose step is a multiple of this, for good."
    )

    max_in_flight: int = Field(
        default=1,
        ge=1,
        description="How many checkpoints of folders may be on their way to the storage in the background; one more waits.",
    )
    target_overhead: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="Which share of the training's time checkpoints may hold it up: get_context().should_checkpoint() is true "
        "as often as that allows.",
    )

    def policy(self) -> RetentionPolicy:
        """Return the retention policy that these fields describe."""
        return RetentionPolicy(**self.model_dump(exclude={"max_in_flight", "target_overhead"}))


class FailureConfig(_Config):
    """How often a training is restarted; every budget is counted per flow run, -1 means without end."""

    max_failures: Budget = Field(default=0, description="Restarts after an exception of the training function.")
    max_infrastructure_failures: Budget = Field(default=3, description="Restarts after a lost process, storage or network.")
    max_preemptions: Budget = Field(
        default=-1,
        description="Restarts after the flow's process was ended or killed from outside, or a rank's ended (SIGTERM).",
    )
    retry_delay_s: list[Seconds] = Field(
        default=[],
        max_length=50,  # Prefect's own bound
        description="Seconds before each restart, the last repeated; at once when empty.",
    )
    retry_jitter_factor: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="By which share the delays vary at random."
    )
    grace_s: Seconds = Field(
        default=20.0, description="Seconds that ranks have for a last checkpoint when the flow run is ended."
    )
    hang_timeout_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="End and restart a training that has not reported for so many seconds; never when empty. Must exceed the "
        "longest time between two reports, an upload included.",
    )

    @field_validator("retry_delay_s", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        if isinstance(value, timedelta):
            value = value.total_seconds()
        return [value] if isinstance(value, (int, float)) else value
