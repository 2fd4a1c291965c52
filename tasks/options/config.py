"""The configuration of a training; the fields of the Run form in the Prefect UI."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from prefect_torch.ckpt import RetentionPolicy
from prefect_torch.ckpt.runs.layout import RUN_NAME, check_run_name
from prefect_torch.ckpt.runs.retention import Order
from prefect_torch.ckpt.runs.verification import VerifyLevel
from prefect_torch.tasks.gang.engines.cluster_block import ClusterChoice
from pydantic import BeforeValidator, Field, TypeAdapter, WithJsonSchema, field_validator, model_validator
from pydantic_core import PydanticCustomError

from .ranks import Ranks
from .run_form import FormModel, PathObject
from .storage import StorageChoice
from .sync import SyncConfig

UNLIMITED = -1
Budget = Annotated[int, Field(ge=UNLIMITED)]
_RESOURCES = "a work pool's job variables determine what a flow run may use, which its ranks share"
_RESOURCES_OF_RAY = f"on a Ray cluster, give cluster=RayCluster(resources_per_worker=...); elsewhere {_RESOURCES}"
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_DelayOfEach = Annotated[list[Seconds], Field(max_length=50, title="One each")]  # as Prefect's delays
_DelayOfAll = Annotated[Seconds, Field(title="One for all")]
_DELAYS = WithJsonSchema({"anyOf": [TypeAdapter(it).json_schema() for it in (_DelayOfEach, _DelayOfAll)]})
Delays = Annotated[_DelayOfEach, _DELAYS]
Backend = Literal["gloo", "nccl", "cpu:gloo,cuda:nccl", "mpi", "ucc", "xccl"]
LogRanks = Literal["all", "rank0", "local0"]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
Directory = Annotated[str | PathObject, BeforeValidator(lambda it: os.fspath(it) if isinstance(it, Path) else it)]


class ScalingConfig(FormModel):
    """How many ranks train, and on which devices."""

    _instead_of: ClassVar = {
        **dict.fromkeys(("resources_per_worker", "accelerator_type"), _RESOURCES_OF_RAY),
        "label_selector": _RESOURCES,
        "trainer_resources": f"leave it out: {_RESOURCES}",
        "placement_strategy": "on a Ray cluster, give cluster=RayCluster(placement_strategy=...); elsewhere leave it out: each "
        "machine gets ranks as long as it has room",
        "elastic_resize_monitor_interval_s": "give regrow_after_s, with num_workers=(fewest, most)",
        **dict.fromkeys(("use_tpu", "topology"), "only GPUs are supported (use_gpu), no TPUs"),
        "torch_config": "give backend and timeout_s",
        "init_method": "leave it out: ranks meet at the flow's own store",
    }

    num_workers: Ranks = Field(
        default=1,
        title="Ranks",
        description="How many processes train together; a list of two numbers for the fewest and the most, of which an attempt "
        "has as many as there is room for when it begins: on the flow's machine, one for each free GPU, or for each CPU.",
    )
    use_gpu: bool = Field(default=False, title="GPUs", description="Give each rank a GPU of its own.")
    backend: Backend | None = Field(
        default=None,
        title="Backend",
        description="How the ranks exchange tensors. When nothing is chosen, nccl with GPUs and gloo without.",
    )
    timeout_s: float | None = Field(
        default=None,
        ge=0.001,  # torch counts milliseconds
        le=1e9,
        title="Timeout (seconds)",
        description="How long a rank waits for the others in a collective, and when they form a group. torch's own limits when "
        "empty: nccl 10 minutes, gloo 30.",
    )
    wait_for_gpus_s: Seconds | None = Field(
        default=None,
        title="Wait for GPUs (seconds)",
        description="How long to wait while other trainings use the GPUs of the flow's machine. 0: fail immediately. "
        "Without limit when empty.",
    )
    cluster: ClusterChoice | None = Field(
        default=None, title="Cluster", description="Other machines for the ranks. The flow's machine when empty."
    )
    regrow_after_s: float | None = Field(
        default=None,
        gt=0,
        le=1e9,
        title="Regrow after (seconds)",
        description="How often a training with fewer ranks than the most asks its cluster for more machines; once there are "
        "some, it goes on with more ranks after its next checkpoint. Never when empty.",
    )

    @property
    def fewest_workers(self) -> int:
        """The smallest number of ranks with which an attempt can start."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def most_workers(self) -> int:
        """The number of ranks of an attempt if there is room for them."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @model_validator(mode="after")
    def _check_growth(self) -> "ScalingConfig":
        if self.regrow_after_s is not None and self.fewest_workers == self.most_workers:
            raise ValueError("regrow_after_s has no effect on a fixed number of ranks: give num_workers=(fewest, most)")
        return self


class RunConfig(FormModel):
    """The run, its storage, and how it starts."""

    _instead_of: ClassVar = {
        "callbacks": "automations of Prefect act on the events of a training",
        "worker_runtime_env": "ranks have the environment of the flow's process; working_dir brings code to others, and "
        "the cluster's environment=... variables",
        "logging_config": "give log_level, and set PREFECT_LOGGING_LEVEL for the flow's own lines",
        "verbose": "leave it out, or give log_level",
        "log_to_file": "leave it out: a rank's output is its task run's log",
        "progress_reporter": "leave it out: report(..., progress=0.5) shows a bar",
        "stop": "return from the training function, or give a sweep SearchConfig(stop={metric: number})",
        "local_dir": "give storage, a path or a URL",
        "checkpoint_config": "give the flow checkpoint=CheckpointConfig(...)",
        "failure_config": "give the flow failure=FailureConfig(...)",
    }

    name: str | None = Field(
        default=None,
        title="Run name",
        description="The run's name in the storage. A flow run continues the run of that name; when empty, each flow run has a "
        "run of its own, which its retries, and those of the flows that call it, continue.",
        json_schema_extra={"pattern": f"^{RUN_NAME}$"},  # for forms; check_run_name raises the error
    )
    storage: StorageChoice = Field(
        default="./checkpoints",
        title="Storage",
        description="Where checkpoints are stored: a local path, a URL such as s3://bucket/prefix, "
        "'block-type-slug/block-name', or a saved block.",
    )
    resume: Literal["auto", "never", "must"] = Field(
        default="auto",
        title="Resume",
        description="auto: resume from the latest checkpoint if there is one. never: make a fresh start. must: fail if there "
        "is none.",
    )
    takeover: bool = Field(
        default=False,
        title="Take over",
        description="Take the run from a flow run that is still alive; that one is stopped at its next commit. The retries of "
        "this one do not take it back from another.",
    )
    yields_to_urgent: bool = Field(
        default=False,
        title="Give way",
        description="Leave the work pool to a flow run that waits in a more urgent work queue, after a last checkpoint, and go "
        "on when there is room again.",
    )
    storage_deadline_s: Seconds | None = Field(
        default=None,
        title="Storage deadline (seconds)",
        description="How long operations on a storage that does not answer are retried. When empty, the setting "
        "PREFECT_INTEGRATIONS_TORCH_STORAGE_DEADLINE_S (120).",
    )
    verify: VerifyLevel = Field(
        default="digest",
        title="Verify",
        description="How a checkpoint is verified before a training resumes from it, and when its ranks then read the files in "
        "place. digest: every byte. size: every file exists in its full size. none: not at all.",
    )

    working_dir: Directory | None = Field(
        default=None,
        title="Working directory",
        description="A directory of the flow's machine that comes along to all machines, of up to 100 MiB: ranks run in a copy "
        "of it, and import from it. When empty, ranks use the flow's own, where that exists.",
    )
    log_ranks: LogRanks = Field(
        default="all",
        title="Log ranks",
        description="Whose lines go to Prefect's log: those of all ranks, of rank 0, or of each machine's first rank. If not "
        "of all, or with a log level, every rank's lines are stored beside the run, too, for prefect-torch logs.",
    )
    log_level: LogLevel | None = Field(
        default=None,
        title="Log level",
        description="Only lines of at least this level go to Prefect's log: lines that begin with one, as loggers write them; "
        "others count as INFO, and tracebacks as ERROR. All lines when empty; otherwise all are stored beside the run, too.",
    )
    sync: SyncConfig | None = Field(
        default=None,
        title="Sync",
        description="How a command copies each node's directory to a storage that only a tool reaches. Not at all when empty.",
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str | None) -> str | None:
        try:
            return None if name is None else check_run_name(name)
        except ValueError as exc:  # pydantic's own would add the address of a page about ValueError
            raise PydanticCustomError("run_name", "{reason}", {"reason": str(exc)}) from exc


class CheckpointConfig(FormModel):
    """Which checkpoints are kept; the latest always is."""

    _instead_of: ClassVar = {
        "checkpoint_frequency": "report at any time, or when get_context().should_checkpoint() is true, as often as "
        "target_overhead allows",
        "checkpoint_at_end": "leave it out: the function reports at its end",
        "checkpoint_upload_mode": "give report(..., upload='sync' or 'async')",
    }

    num_to_keep: int | None = Field(
        default=None, ge=1, title="Keep best", description="How many of the best checkpoints to keep. All when empty."
    )
    checkpoint_score_attribute: str | None = Field(
        default=None,
        title="Score",
        description="The metric by which checkpoints are sorted, such as val_loss, or a/b for a nested one. When "
        "empty, the newest are the best.",
    )
    checkpoint_score_order: Order = Field(
        default="max", title="Better is", description="max: a high score is good. min: a low one, such as of a loss."
    )
    keep_last: int = Field(
        default=1, ge=1, title="Keep newest", description="How many of the newest checkpoints to keep in addition to the best."
    )
    keep_every_n_steps: int | None = Field(
        default=None,
        ge=1,
        title="Keep every n steps",
        description="Keep every checkpoint whose step is a multiple of this, for good. When empty, none is kept for its step.",
    )
    evaluation_timeout_s: float | None = Field(
        default=None,
        ge=0,
        le=1e9,
        title="Await evaluation (seconds)",
        description="For how many seconds a checkpoint that has no score yet is kept, since an evaluation may attach one; "
        "afterwards it counts as the worst, and immediately when empty.",
    )
    keep_quarantined_days: float = Field(
        default=7.0,
        ge=0,
        le=36_500,
        title="Keep damaged (days)",
        description="For how many days the data of a damaged checkpoint are kept, for prefect-torch restore; 36500: always.",
    )

    max_in_flight: int = Field(
        default=1,
        ge=1,
        title="Concurrent uploads",
        description="How many checkpoints of directories may be uploaded in the background at the same time; one more waits.",
    )
    target_overhead: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        title="Share of time for checkpoints",
        description="Such as 0.01 for one percent of the training's time: should_checkpoint() is true as often as that allows.",
    )

    @model_validator(mode="after")
    def _warn_of_the_worst(self) -> "CheckpointConfig":
        name = self.checkpoint_score_attribute or ""
        if "loss" in name.rpartition("/")[2].lower() and "checkpoint_score_order" not in self.model_fields_set:
            self._warn_of_default(
                "checkpoint_score_order",
                f"checkpoint_score_attribute={name!r} looks like a loss, and the default order, 'max', keeps the worst of it: "
                "give checkpoint_score_order='min', or 'max' if that is meant",
            )
        return self

    @model_validator(mode="after")
    def _check_policy(self) -> "CheckpointConfig":
        self.policy()
        return self

    def policy(self) -> RetentionPolicy:
        """Return the retention policy that these fields describe."""
        return RetentionPolicy(**self.model_dump(exclude={"max_in_flight", "target_overhead"}))


class FailureConfig(FormModel):
    """How often a training is restarted; every budget is counted per flow run, -1 means unlimited.

    A flow run that an automation starts after a crash (`max_restarts`) has new budgets.
    """

    _instead_of: ClassVar = {
        "fail_fast": "leave it out: max_failures is 0 by default, and a sweep ends with SearchConfig(max_failed_trials=0)",
        "controller_failure_limit": "give max_infrastructure_failures, for ranks that cannot start, too",
        "max_preemption_failures": "give max_preemptions, which is unlimited by default",
        "relax_collectives_on_preemption": "leave it out: a report needs all ranks",
    }

    max_failures: Budget = Field(
        default=0,
        title="After exceptions",
        description="Restarts after an exception of the training function. -1: unlimited.",
    )
    max_infrastructure_failures: Budget = Field(
        default=3,
        title="After lost processes",
        description="Restarts after a lost process, storage or network. -1: unlimited.",
    )
    max_out_of_memory_failures: Budget = Field(
        default=0,
        title="After running out of memory",
        description="Restarts after the GPU's memory, or the machine's or the container's, did not suffice. -1: unlimited.",
    )
    max_preemptions: Budget = Field(
        default=-1,
        title="After preemptions",
        description="Restarts after the flow's process was terminated, or, once its attempt had committed a checkpoint, was "
        "killed, or a rank's was terminated (SIGTERM). Before a checkpoint, these two count as lost processes. -1: unlimited.",
    )
    retry_delay_s: Delays = Field(
        default=[],
        title="Delays (seconds)",
        description="How long to wait before each restart; the last one holds for all that follow. No delay when empty.",
    )
    retry_jitter_factor: float | None = Field(
        default=None,
        ge=0,
        allow_inf_nan=False,
        title="Jitter",
        description="By which share the delays vary at random, such as 0.2. Not at all when empty.",
    )
    grace_s: Seconds = Field(
        default=20.0,
        title="Grace (seconds)",
        description="How long ranks have for a last checkpoint when the flow run is terminated.",
    )
    hang_timeout_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        title="Hang timeout (seconds)",
        description="Stop and restart a training that has not reported for so long: more than the longest time between two "
        "reports, before the first one, and after the last one, an upload included. Never when empty.",
    )

    @field_validator("retry_delay_s", mode="before")
    @classmethod
    def _as_list(cls, value: Any) -> Any:
        if isinstance(value, timedelta):
            value = value.total_seconds()
        return [value] if isinstance(value, (int, float)) else value
