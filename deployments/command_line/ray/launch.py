"""What starts a training and reads its result: names of Ray, and ours. People read the rows as tables of the documentation."""

from .rows import UNKNOWN, Equivalent, Section

_TRAIN = ("prefect_torch.flows.train",)
_SCALING = ("prefect_torch.flows.ScalingConfig",)
_RUN = ("prefect_torch.flows.RunConfig",)
_CHECKPOINT = ("prefect_torch.flows.CheckpointConfig",)
_FAILURE = ("prefect_torch.flows.FailureConfig",)
_RESULT = ("prefect_torch.flows.Result",)
_EVALUATE = ("prefect_torch.flows.evaluate",)
_POOL = "what a flow run has, all its ranks have: [Schedules, work pools, containers](schedule.md)"
_NO_TRAINER = (
    "no trainer; [a callback in ten lines](own-training-code.md#a-callback-for-any-other-loop) reports what any loop writes"
)
_NO_SEARCH = "there is no hyperparameter search: [one `train` for each setting](#raytune)"

_TRAINERS = (
    Equivalent(
        "ray.train.torch.TorchTrainer",
        "same",
        "`train(train_fn, config=, scaling=, run=, checkpoint=, failure=)`",
        'one call; give the function as `"my_training:train_fn"`, so that schedules and the UI find it. Where both are in one '
        'file, the call stands below `if __name__ == "__main__":`, since ranks import that file',
        _TRAIN,
    ),
    Equivalent(
        "ray.train.torch.TorchTrainer.fit",
        "same",
        "`train(…)`",
        "returns the result; a training that failed raises its error, and its result is in storage all the same",
        _TRAIN,
    ),
    Equivalent("ray.train.torch.TorchTrainer(train_loop_per_worker=)", "same", "`train(train_fn, …)`", "", _TRAIN),
    Equivalent(
        "ray.train.torch.TorchTrainer(train_loop_config=)",
        "same",
        "`train(…, config=)`",
        "a dict, which Prefect keeps with the flow run: it refuses more than half a MiB, so name data by its path",
        _TRAIN,
    ),
    Equivalent("ray.train.torch.TorchTrainer(scaling_config=)", "same", "`train(…, scaling=)`", "", _TRAIN),
    Equivalent(
        "ray.train.torch.TorchTrainer(run_config=)", "same", "`train(…, run=, checkpoint=, failure=)`", "three in one", _TRAIN
    ),
    Equivalent("ray.train.torch.TorchTrainer(torch_config=)", "same", "`ScalingConfig(backend=)`", "", _SCALING),
    Equivalent("ray.train.torch.TorchTrainer(datasets=)", "missing", "", "there is no Ray Data: load it in your function"),
    Equivalent("ray.train.torch.TorchTrainer(dataset_config=)", "missing", "", "there is no Ray Data"),
    Equivalent(
        "ray.train.torch.TorchTrainer(validation_config=)",
        "different",
        "`evaluate(eval_fn, …, watch=True)`",
        "a flow of its own: [Evaluation](evaluate.md)",
        _EVALUATE,
    ),
    Equivalent(
        "ray.train.torch.TorchTrainer(metadata=)", "different", "`train(…, config=)`", "it is gone from Ray Train", _TRAIN
    ),
    Equivalent(
        "ray.train.torch.TorchTrainer(resume_from_checkpoint=)",
        "better",
        "`train(…, resume_from=)`",
        "the checkpoint of another run, while this run has none of its own; it is gone from Ray Train",
        _TRAIN,
    ),
    Equivalent(
        "ray.train.torch.TorchTrainer.restore",
        "better",
        "`train(…, run=RunConfig(name=, storage=))`",
        "the same name continues; it is gone from Ray Train",
        (*_TRAIN, *_RUN),
    ),
    Equivalent("ray.train.torch.TorchTrainer.can_restore", "different", "", "the same name continues where it can"),
    Equivalent("ray.train.BackendConfig", "different", "`ScalingConfig(backend=)`", "of torch.distributed", _SCALING),
    Equivalent("ray.train.TRAIN_DATASET_KEY", "missing", "", "there is no Ray Data"),
    Equivalent("ray.train.DataConfig", "missing", "", "there is no Ray Data: use a `DataLoader`, `prepare_data_loader`"),
    Equivalent("ray.train.ValidationConfig", "different", "`evaluate(…)`", "its arguments", _EVALUATE),
    Equivalent("ray.train.ValidationTaskConfig", "different", "`evaluate(…, config=)`", "", _EVALUATE),
    Equivalent(
        "ray.train.ValidationFn",
        "different",
        "`evaluate(eval_fn, …)`",
        "a function of the `config` that calls `get_checkpoint()` and returns a dict",
        _EVALUATE,
    ),
    Equivalent("ray.train.tensorflow*", "missing", "", _NO_TRAINER),
    Equivalent("ray.train.xgboost*", "missing", "", _NO_TRAINER),
    Equivalent("ray.train.lightgbm*", "missing", "", _NO_TRAINER),
    Equivalent("ray.train.jax*", "missing", "", _NO_TRAINER),
    Equivalent("ray.train.horovod*", "missing", "", _NO_TRAINER),
    Equivalent("ray.train.v2.jax*", "missing", "", _NO_TRAINER),
)
_CONFIGS = (
    Equivalent("ray.train.ScalingConfig", "same", "`ScalingConfig(num_workers=, use_gpu=)`", "on one machine", _SCALING),
    Equivalent(
        "ray.train.ScalingConfig(num_workers=(…))",
        "missing",
        "",
        "an attempt has as many ranks as the one before; a state loads at another number when you change it",
    ),
    Equivalent(
        "ray.train.ScalingConfig(num_workers=0)",
        "different",
        "`ScalingConfig(num_workers=1)`",
        "no mode without processes; a rank imports no Prefect and starts in a second or two",
        _SCALING,
    ),
    Equivalent("ray.train.ScalingConfig(resources_per_worker=)", "different", "a work pool's job variables", _POOL),
    Equivalent("ray.train.ScalingConfig(placement_strategy=)", "different", "", "leave it out: ranks share a machine"),
    Equivalent("ray.train.ScalingConfig(accelerator_type=)", "different", "a work pool's job variables", _POOL),
    Equivalent("ray.train.ScalingConfig(label_selector=)", "different", "a work pool's job variables", _POOL),
    Equivalent("ray.train.ScalingConfig(trainer_resources=)", "different", "", "leave it out; it is gone from Ray Train"),
    Equivalent("ray.train.ScalingConfig(use_tpu=)", "missing", "", "there are no TPUs"),
    Equivalent("ray.train.ScalingConfig(topology=)", "missing", "", "there are no TPUs"),
    Equivalent("ray.train.ScalingConfig(elastic_resize_monitor_interval_s=)", "missing", "", "the number of ranks stays"),
    Equivalent("ray.train.RunConfig", "same", "`RunConfig(name=, storage=)`", "", _RUN),
    Equivalent(
        "ray.train.RunConfig(name=)",
        "better",
        "`RunConfig(name=)`",
        "the same name and storage continue; damaged checkpoints are set aside and the one before is used; a name "
        "that is alive elsewhere is refused. Names have letters, digits, `.`, `_` and `-`",
        _RUN,
    ),
    Equivalent(
        "ray.train.RunConfig(storage_path=)",
        "different",
        "`RunConfig(storage=)`",
        "a path, a URL or a Prefect block; the default is `./checkpoints`, not `~/ray_results`",
        _RUN,
    ),
    Equivalent("ray.train.RunConfig(local_dir=)", "different", "`RunConfig(storage=)`", "it is gone from Ray Train", _RUN),
    Equivalent(
        "ray.train.RunConfig(storage_filesystem=)", "different", "`RunConfig(storage=)`", "a block, or an fsspec URL", _RUN
    ),
    Equivalent(
        "ray.train.RunConfig(callbacks=)",
        "different",
        "[events and automations](monitor.md#events-and-assets)",
        "outside of the training; of rank 0's metrics alone",
    ),
    Equivalent(
        "ray.train.UserCallback",
        "different",
        "[events and automations](monitor.md#events-and-assets)",
        "outside of the training; of rank 0's metrics alone",
    ),
    Equivalent("ray.train.RunConfig(checkpoint_config=)", "same", "`train(…, checkpoint=)`", "", _TRAIN),
    Equivalent("ray.train.RunConfig(failure_config=)", "same", "`train(…, failure=)`", "", _TRAIN),
    Equivalent("ray.train.RunConfig(worker_runtime_env=)", "different", "a work pool's job variables", _POOL),
    Equivalent("ray.train.RunConfig(logging_config=)", "different", "`PREFECT_LOGGING_LEVEL`", "Prefect's own setting"),
    Equivalent("ray.train.LoggingConfig", "different", "`PREFECT_LOGGING_LEVEL`", "Prefect's own setting"),
    Equivalent("ray.train.RunConfig(sync_config=)", "different", "", "leave it out; it is gone from Ray Train"),
    Equivalent("ray.train.SyncConfig", "different", "", "leave it out; it is gone from Ray Train"),
    Equivalent("ray.train.RunConfig(verbose=)", "different", "", "leave it out; it is gone from Ray Train"),
    Equivalent("ray.train.RunConfig(log_to_file=)", "different", "", "leave it out: a rank's output is its task run's log"),
    Equivalent("ray.train.RunConfig(progress_reporter=)", "different", "`report(…, progress=)`", "it is gone from Ray Train"),
    Equivalent("ray.train.RunConfig(stop=)", "different", "", "return from your function; it is gone from Ray Train"),
    Equivalent(
        "ray.train.CheckpointConfig",
        "same",
        "`CheckpointConfig(num_to_keep=, checkpoint_score_attribute=, checkpoint_score_order=)`",
        'as Ray\'s: the latest is never deleted, `"a/b"` names nested metrics, NaN is worst, ties go to the newer. A missing '
        "score is worse than NaN, in both orders",
        _CHECKPOINT,
    ),
    Equivalent(
        "ray.train.CheckpointConfig(checkpoint_frequency=)",
        "different",
        "`CheckpointConfig(target_overhead=)`",
        "report when you like, or when `get_context().should_checkpoint()` says so; it is gone from Ray Train",
        _CHECKPOINT,
    ),
    Equivalent(
        "ray.train.CheckpointConfig(checkpoint_at_end=)", "different", "", "report at the end; it is gone from Ray Train"
    ),
    Equivalent(
        "",
        "more",
        "`CheckpointConfig(keep_last=, keep_every_n_steps=, evaluation_timeout_s=, target_overhead=)`",
        "and pins: `prefect-torch pin`",
    ),
    Equivalent(
        "ray.train.FailureConfig",
        "different",
        "`FailureConfig(max_failures=)`",
        "exceptions of your function alone; lost processes and preemptions have budgets of their own",
        _FAILURE,
    ),
    Equivalent(
        "ray.train.FailureConfig(max_preemption_failures=)",
        "same",
        "`FailureConfig(max_preemptions=)`",
        "without end",
        _FAILURE,
    ),
    Equivalent(
        "ray.train.FailureConfig(preemption_grace_s=)",
        "different",
        "`FailureConfig(grace_s=)`",
        "what ranks have for a last report",
        _FAILURE,
    ),
    Equivalent("ray.train.FailureConfig(relax_collectives_on_preemption=)", "missing", "", "a report needs all ranks"),
    Equivalent(
        "ray.train.FailureConfig(controller_failure_limit=)",
        "different",
        "`serve(…, max_restarts=)`, `resume_crashed`",
        "an automation runs the flow again",
        ("prefect_torch.deployments.serve",),
    ),
    Equivalent("ray.train.FailureConfig(fail_fast=)", "different", "`FailureConfig(max_failures=0)`", "the default", _FAILURE),
    Equivalent(
        "ray.train.TrainingFailedError",
        "different",
        "`Exception`",
        "`train` raises what your function raised; `TrainingFailedError` is what `Result.from_storage` tells",
    ),
    Equivalent(
        "ray.train.WorkerGroupError",
        "different",
        "`RankFailedError`",
        "the cause of what `train` raises, with the rank's own traceback",
        ("prefect_torch.flows.RankFailedError",),
    ),
    Equivalent(
        "ray.train.WorkerGroupError.worker_failures",
        "different",
        "`Result.from_storage(storage, run).errors`",
        "by rank, as text",
        _RESULT,
    ),
    Equivalent(
        "ray.train.ControllerError",
        "different",
        "`CheckpointError`",
        "of the storage or the run",
        ("prefect_torch.ckpt.CheckpointError",),
    ),
    Equivalent("ray.train.PreemptionError", "different", "", "the flow run ends Crashed or Cancelled, and says what is safe"),
    Equivalent(
        "ray.train.NCCLHangError", "different", "`FailureConfig(hang_timeout_s=)`", "counts as infrastructure", _FAILURE
    ),
)
_RESULTS = (
    Equivalent("ray.train.Result", "better", "`Result`", "also of a training that runs or failed", _RESULT),
    Equivalent(
        "ray.train.Result.metrics",
        "better",
        "`result.metrics`",
        "what rank 0 reported last, with a checkpoint or without; Ray keeps those of checkpoints alone",
    ),
    Equivalent("ray.train.Result.checkpoint", "same", "`result.checkpoint`", "the latest"),
    Equivalent(
        "ray.train.Result.best_checkpoints", "different", "`result.best_checkpoints`", "best first; Ray has them best last"
    ),
    Equivalent(
        "ray.train.Result.metrics_dataframe",
        "better",
        "`result.metrics_dataframe`",
        "every report in order, with a checkpoint or without, pruned ones too; also `history`, without pandas",
    ),
    Equivalent(
        "ray.train.Result.get_best_checkpoint",
        "same",
        "`result.get_best_checkpoint(metric, mode)`",
        "of those that were kept",
    ),
    Equivalent("ray.train.Result.return_value", "same", "`result.return_value`", "rank 0's; from storage where JSON holds it"),
    Equivalent("ray.train.Result.path", "same", "`result.path`", "a path or a URL"),
    Equivalent("ray.train.Result.filesystem", "different", "`CheckpointStore.open(storage, run).storage`", "no pyarrow"),
    Equivalent("ray.train.Result.error", "better", "`result.error`", "from storage, too"),
    Equivalent("ray.train.Result.config", "different", "the flow run's parameters", "it is gone from Ray Train"),
    Equivalent(
        "ray.train.Result.from_path",
        "better",
        "`Result.from_storage(storage, run)`",
        "with errors and the return value",
        _RESULT,
    ),
    Equivalent(
        "ray.train.Result.from_path(storage_filesystem=)",
        "different",
        "`Result.from_storage(block, run)`",
        "a block, or an fsspec URL",
        _RESULT,
    ),
    Equivalent("", "more", "`result.attempts`, `errors`, `resumed_from`, `completed`, `history`", ""),
)
_AROUND = (
    Equivalent("ray.init", "same", "", "nothing to call; without `PREFECT_API_URL`, Prefect starts a server for the flow"),
    Equivalent("ray.shutdown", "same", "", "nothing to call"),
    Equivalent("ray.is_initialized", "same", "", "nothing to call"),
    Equivalent("ray.data*", "missing", "", "there is no Ray Data: use a `DataLoader`, `prepare_data_loader`"),
    Equivalent("ray.tune.Tuner", "missing", "", _NO_SEARCH),
    Equivalent("ray.tune.Tuner.fit", "missing", "", _NO_SEARCH),
    Equivalent(
        "ray.tune.ResultGrid.get_best_result", "missing", "", "`min(results, key=lambda result: result.metrics[…])` of a list"
    ),
    Equivalent("ray.tune*", "missing", "", _NO_SEARCH),
    Equivalent("ray.air.integrations*", "missing", "", "call the tracker in your function, on rank 0"),
    Equivalent("ray.train.*", "missing", "", UNKNOWN),
    Equivalent("ray.air.*", "missing", "", UNKNOWN),
    Equivalent("ray.*", "missing", "", "Ray Core, Serve and RLlib are none of it; Prefect's tasks do what Ray's tasks do"),
)
SECTIONS = (
    Section("Trainers", "ray.train.", _TRAINERS),
    Section("Configuration", "ray.train.", _CONFIGS),
    Section("Results", "ray.train.", _RESULTS),
    Section("Around it", "", _AROUND),
)
