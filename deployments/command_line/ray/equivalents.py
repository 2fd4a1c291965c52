"""What stands here for what Ray Train has: the one source of `migrate-check` and of the tables in the documentation."""

from . import launch, training
from .rows import UNKNOWN, Equivalent, Section


def sections() -> tuple[Section, ...]:
    """Return all tables, in the page's order."""
    return (*training.SECTIONS, *launch.SECTIONS)


class Equivalents:
    """Finds what stands here for a name of Ray's."""

    def __init__(self) -> None:
        rows = {row.ray: row for section in sections() for row in section.rows if row.ray}
        self._named = {name: row for name, row in rows.items() if not name.endswith("*")}
        self._covering = sorted((row for name, row in rows.items() if name.endswith("*")), key=lambda row: -len(row.ray))

    def of(self, name: str) -> Equivalent:
        """Return the row of a dotted name that begins with "ray"."""
        covering = (row for row in self._covering if name.startswith(row.ray.rstrip(".*")))
        return self._named.get(name) or next(covering)

    def of_argument(self, name: str, keyword: str, value: str) -> Equivalent | None:
        """Return the row of an argument of `name`; None where nothing needs to change.

        Args:
            name: The dotted name of what is called.
            keyword: The argument.
            value: Its value as Python writes it; "(…)" for any tuple.

        """
        for argument in (f"{name}({keyword}={value})", f"{name}({keyword}=)"):
            if argument in self._named:
                return self._named[argument]
        if keyword in PARAMETERS.get(name, (keyword,)):
            return None
        return Equivalent(f"{name}({keyword}=)", "missing", "", UNKNOWN)

    def has(self, name: str) -> bool:
        """Say whether `name` has a row of its own."""
        return name in self._named

    def leads_on(self, name: str) -> bool:
        """Say whether other rows are about what is in `name`: a module, or a class whose methods have rows."""
        return any(known.startswith(f"{name}.") for known in self._named)


# The arguments of Ray's functions and classes, in order: for those given by their place, and to know new ones. What has no row
# of its own is called the same here.
PARAMETERS: dict[str, tuple[str, ...]] = {
    "ray.train.report": (
        "metrics",
        "checkpoint",
        "checkpoint_dir_name",
        "checkpoint_upload_mode",
        "delete_local_checkpoint_after_upload",
        "checkpoint_upload_fn",
        "validation",
    ),
    "ray.train.get_all_reported_checkpoints": ("consistency_mode", "timeout_s"),
    "ray.train.Checkpoint": ("path", "filesystem"),
    "ray.train.ScalingConfig": (
        "trainer_resources",
        "num_workers",
        "use_gpu",
        "resources_per_worker",
        "placement_strategy",
        "accelerator_type",
        "label_selector",
        "use_tpu",
        "topology",
        "elastic_resize_monitor_interval_s",
    ),
    "ray.train.RunConfig": (
        "name",
        "storage_path",
        "storage_filesystem",
        "failure_config",
        "checkpoint_config",
        "callbacks",
        "worker_runtime_env",
        "logging_config",
        "sync_config",
        "verbose",
        "stop",
        "progress_reporter",
        "log_to_file",
        "local_dir",
    ),
    "ray.train.CheckpointConfig": (
        "num_to_keep",
        "checkpoint_score_attribute",
        "checkpoint_score_order",
        "checkpoint_frequency",
        "checkpoint_at_end",
    ),
    "ray.train.FailureConfig": (
        "max_failures",
        "fail_fast",
        "controller_failure_limit",
        "max_preemption_failures",
        "relax_collectives_on_preemption",
        "preemption_grace_s",
    ),
    "ray.train.torch.TorchTrainer": (
        "train_loop_per_worker",
        "train_loop_config",
        "torch_config",
        "scaling_config",
        "run_config",
        "datasets",
        "dataset_config",
        "validation_config",
        "metadata",
        "resume_from_checkpoint",
    ),
    "ray.train.torch.prepare_model": ("model", "move_to_device", "parallel_strategy", "parallel_strategy_kwargs"),
    "ray.train.torch.prepare_data_loader": ("data_loader", "add_dist_sampler", "move_to_device", "auto_transfer"),
    "ray.train.torch.TorchConfig": ("backend", "init_method", "timeout_s"),
    "ray.train.lightning.RayTrainReportCallback": ("checkpoint_upload_mode", "validation"),
    "ray.train.Result.get_best_checkpoint": ("metric", "mode"),
    "ray.train.Result.from_path": ("path", "storage_filesystem"),
}
# What calls give back, and attributes are; "[]" for each list or tuple around it.
RETURNS = {
    "ray.train.get_context": "ray.train.TrainContext",
    "ray.train.get_checkpoint": "ray.train.Checkpoint",
    "ray.train.get_preemption_info": "ray.train.PreemptionInfo",
    "ray.train.get_all_reported_checkpoints": "ray.train.ReportedCheckpoint[]",
    "ray.train.Checkpoint.from_directory": "ray.train.Checkpoint",
    "ray.train.torch.TorchTrainer.fit": "ray.train.Result",
    "ray.train.Result.from_path": "ray.train.Result",
    "ray.train.Result.get_best_checkpoint": "ray.train.Checkpoint",
    "ray.tune.Tuner.fit": "ray.tune.ResultGrid",
    "ray.tune.ResultGrid.get_best_result": "ray.train.Result",
}
ATTRIBUTES = {
    "ray.train.ReportedCheckpoint.checkpoint": "ray.train.Checkpoint",
    "ray.train.Result.checkpoint": "ray.train.Checkpoint",
    "ray.train.Result.best_checkpoints": "ray.train.Checkpoint[][]",
}
