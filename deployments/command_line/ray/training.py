"""What a training function calls: names of Ray, and ours. People read the rows as tables of the documentation."""

from .rows import Equivalent, Section

_CKPT = "prefect_torch.ckpt"
_TASKS = "prefect_torch.tasks"
_LIGHTNING = "prefect_torch.ckpt.lightning"
_TRANSFORMERS = "prefect_torch.ckpt.transformers"
_REPORT = (f"{_CKPT}.report",)
_CONTEXT = (f"{_CKPT}.get_context",)
_STORE = (f"{_CKPT}.CheckpointStore",)
_CHECKPOINT = (f"{_CKPT}.Checkpoint",)
_EVALUATE = ("prefect_torch.flows.evaluate",)

_IN_THE_FUNCTION = (
    Equivalent(
        "ray.train.report",
        "better",
        "`report(metrics, checkpoint=)`",
        "as Ray's: called equally often on every rank, rank 0's metrics count, all ranks' files are one directory, one rank "
        "with a checkpoint is enough. A returned report is durable; ranks that disagree are an error on every rank, not a "
        "hang; files of one name must be equal, else the report fails. Metrics are numbers, texts and dicts of them: no lists",
        _REPORT,
    ),
    Equivalent(
        "ray.train.report(checkpoint_dir_name=)",
        "different",
        "`report(…, step=)`",
        "ids are made of attempt and step; a name of your own goes into `Checkpoint.set_metadata`",
        _REPORT,
    ),
    Equivalent(
        "ray.train.report(checkpoint_upload_mode=)",
        "same",
        "`report(…, upload=)`",
        "see the modes; one mode for all ranks that bring a checkpoint",
        _REPORT,
    ),
    Equivalent("ray.train.CheckpointUploadMode.SYNC", "same", '`upload="sync"`', "the default for folders"),
    Equivalent(
        "ray.train.CheckpointUploadMode.ASYNC",
        "better",
        '`upload="async"`',
        "takes the folder's files over, so a `TemporaryDirectory` will do; at most `CheckpointConfig.max_in_flight` (1) are on "
        "their way, one more waits; a failure is raised by the next report, on every rank",
    ),
    Equivalent("ray.train.CheckpointUploadMode.NO_UPLOAD", "missing", "", "what the report does not store is no checkpoint"),
    Equivalent("ray.train.CheckpointUploadMode", "different", "", 'a text: `"sync"` or `"async"`'),
    Equivalent(
        "ray.train.report(delete_local_checkpoint_after_upload=)",
        "different",
        "",
        "leave it out: a sync report leaves your folder as it is, an async one takes its files and leaves it empty",
    ),
    Equivalent(
        "ray.train.report(checkpoint_upload_fn=)", "missing", "", "what is stored by other means is not in the manifest"
    ),
    Equivalent(
        "ray.train.report(validation=)",
        "different",
        "`evaluate(…, watch=True)`",
        "a flow of its own, beside the training or later, or `evaluate_new_best`; its metrics go under the evaluation's name "
        "and replace none of the training's: [Evaluation](evaluate.md)",
        _EVALUATE,
    ),
    Equivalent(
        "ray.train.get_checkpoint",
        "different",
        "`get_checkpoint()`",
        "the checkpoint that this attempt continues, the same on every rank, its files verified before ranks start; it stays "
        "that one during the attempt, while Ray's becomes what this rank reported last",
        (f"{_CKPT}.get_checkpoint",),
    ),
    Equivalent(
        "ray.train.get_all_reported_checkpoints",
        "different",
        "`CheckpointStore.open(storage, run).list()`",
        "what is committed, from any process, while it trains or later; nobody waits",
        _STORE,
    ),
    Equivalent(
        "ray.train.get_all_reported_checkpoints(consistency_mode=)", "different", "", "leave it out: a listed one is committed"
    ),
    Equivalent("ray.train.get_all_reported_checkpoints(timeout_s=)", "different", "", "leave it out: nobody waits"),
    Equivalent("ray.train.CheckpointConsistencyMode*", "different", "", "leave it out: a listed checkpoint is committed"),
    Equivalent("ray.train.ReportedCheckpoint", "different", "`Manifest`", "id, step, metrics, files", (f"{_CKPT}.Manifest",)),
    Equivalent(
        "ray.train.ReportedCheckpoint.checkpoint", "same", "`store.checkpoint(manifest)`", "a handle to read it with", _STORE
    ),
    Equivalent(
        "ray.train.ReportedCheckpoint.metrics",
        "same",
        "`manifest.metrics`",
        "what rank 0 reported, and what evaluations attached",
    ),
    Equivalent("ray.train.ReportedCheckpoint.status", "missing", "", "an evaluation that is done is in `manifest.metrics`"),
    Equivalent("ray.train.ReportedCheckpointStatus*", "missing", "", "an evaluation that is done is in `manifest.metrics`"),
    Equivalent("ray.train.get_context", "same", "`get_context()`", "", _CONTEXT),
    Equivalent("ray.train.TrainContext", "same", "`TrainContext`", "", (f"{_CKPT}.TrainContext",)),
    Equivalent(
        "ray.train.TrainContext.get_world_rank",
        "same",
        "`get_context().get_world_rank()`",
        "or the attribute `world_rank`",
        _CONTEXT,
    ),
    Equivalent(
        "ray.train.TrainContext.get_world_size",
        "same",
        "`get_context().get_world_size()`",
        "or the attribute `world_size`",
        _CONTEXT,
    ),
    Equivalent(
        "ray.train.TrainContext.get_local_rank",
        "same",
        "`get_context().get_local_rank()`",
        "or the attribute `local_rank`",
        _CONTEXT,
    ),
    Equivalent(
        "ray.train.TrainContext.get_local_world_size",
        "same",
        "`get_context().get_local_world_size()`",
        "or the attribute `local_world_size`",
        _CONTEXT,
    ),
    Equivalent(
        "ray.train.TrainContext.get_node_rank",
        "same",
        "`get_context().get_node_rank()`",
        "or the attribute `node_rank`",
        _CONTEXT,
    ),
    Equivalent(
        "ray.train.TrainContext.get_experiment_name",
        "same",
        "`get_context().get_experiment_name()`",
        "or the attribute `run_name`",
        _CONTEXT,
    ),
    Equivalent(
        "ray.train.TrainContext.get_storage",
        "missing",
        "",
        "a training function does not write to the storage; give its place in the `config` if it reads there",
    ),
    Equivalent("ray.train.TrainContext.get_metadata", "different", "", "give it in the `config`; it is gone from Ray, too"),
    Equivalent("ray.train.TrainContext.get_trial_*", "missing", "", "there are no trials"),
    Equivalent(
        "ray.train.get_preemption_info",
        "different",
        "`get_context().should_checkpoint()`",
        "a question that all ranks are answered alike, true before a preemption or a cancel; `ends_soon()` tells these from a "
        "pace (`target_overhead`)",
        _CONTEXT,
    ),
    Equivalent(
        "ray.train.PreemptionInfo*", "missing", "", "there is one deadline, `FailureConfig.grace_s`, and no nodes' names"
    ),
    Equivalent("ray.train.get_dataset_shard", "missing", "", "there is no Ray Data: use a `DataLoader`, `prepare_data_loader`"),
    Equivalent(
        "ray.train.collective.barrier", "same", "`torch.distributed.barrier()`", "the process group is ready", ("torch",)
    ),
    Equivalent(
        "ray.train.collective.broadcast_from_rank_zero",
        "different",
        "`box = [data]`, `torch.distributed.broadcast_object_list(box)`",
        "rank 0's data is `box[0]` then; of any size",
        ("torch",),
    ),
    Equivalent(
        "",
        "more",
        "`report(…, state=)`",
        "live objects, copied and then stored in the background, sharded: [Own training code](own-training-code.md)",
        _REPORT,
    ),
    Equivalent("", "more", "`report(…, progress=)`", "a bar in the UI and at the terminal", _REPORT),
    Equivalent("", "more", "`get_context().attempt`", "counts restarts over the life of the run", _CONTEXT),
)
_CHECKPOINTS = (
    Equivalent(
        "ray.train.Checkpoint",
        "different",
        "`Checkpoint(path)`",
        "a local folder, or the path or URL of a committed checkpoint; other URLs are refused",
        _CHECKPOINT,
    ),
    Equivalent(
        "ray.train.Checkpoint(filesystem=)",
        "different",
        "`CheckpointStore.open(block, run).checkpoint(manifest)`",
        "credentials come from the environment, or from a Prefect block",
        _STORE,
    ),
    Equivalent("ray.train.Checkpoint.from_directory", "same", "`Checkpoint.from_directory(path)`", "", _CHECKPOINT),
    Equivalent(
        "ray.train.Checkpoint.as_directory",
        "better",
        "`checkpoint.as_directory()`",
        "in place where the files are local, else one download per node for all processes, also from equal handles; verified; "
        "what killed readers left is swept; `include=` and `own_files=` take a part",
    ),
    Equivalent("ray.train.Checkpoint.to_directory", "better", "`checkpoint.to_directory(path)`", "a verified copy of your own"),
    Equivalent("ray.train.Checkpoint.get_metadata", "same", "`checkpoint.get_metadata()`", ""),
    Equivalent("ray.train.Checkpoint.set_metadata", "same", "`checkpoint.set_metadata({…})`", "after the report, too"),
    Equivalent("ray.train.Checkpoint.update_metadata", "same", "`checkpoint.update_metadata({…})`", "after the report, too"),
    Equivalent("ray.train.Checkpoint.path", "different", "`checkpoint.path`", "with the URL's scheme, which Ray strips"),
    Equivalent("ray.train.Checkpoint.filesystem", "different", "`checkpoint.store.storage`", "a `Storage`, no pyarrow"),
    Equivalent(
        "ray.train.Checkpoint.from_dict",
        "better",
        "`report(…, state={…})`",
        "live objects and plain values; it is gone from Ray",
        _REPORT,
    ),
    Equivalent("ray.train.Checkpoint.to_dict", "better", "`checkpoint.load_state(state)`", "in place, at any number of ranks"),
    Equivalent("ray.train.Checkpoint.from_uri", "different", "`Checkpoint(url)`", "of a committed checkpoint", _CHECKPOINT),
    Equivalent("ray.train.Checkpoint.uri", "different", "`checkpoint.path`", ""),
    Equivalent(
        "ray.train.torch.TorchCheckpoint*",
        "different",
        '`report(…, state={"model": model})`',
        "and `checkpoint.load_state` to read it",
        _REPORT,
    ),
    Equivalent("", "more", "`checkpoint.id`, `step`, `metrics`, `verify()`", "of a committed checkpoint"),
    Equivalent(
        "",
        "more",
        "`checkpoint.to_safetensors(path)`, `prefect-torch pull --consolidate`",
        "the model of a sharded state as one file",
    ),
)
_PYTORCH = (
    Equivalent(
        "ray.train.torch.prepare_model",
        "same",
        "`prepare_model(model, move_to_device, parallel_strategy, parallel_strategy_kwargs)`",
        "a single rank gets the bare model",
        (f"{_TASKS}.prepare_model",),
    ),
    Equivalent(
        "ray.train.torch.prepare_model(parallel_strategy='fsdp')",
        "better",
        '`prepare_model(…, parallel_strategy="fsdp2")`',
        "FSDP2 (`fully_shard`), also on CPUs",
        (f"{_TASKS}.prepare_model",),
    ),
    Equivalent(
        "ray.train.torch.prepare_data_loader",
        "better",
        "`prepare_data_loader(loader)`",
        "every argument of the loader stays; it counts epochs, so nobody calls `set_epoch` but once after a resume; a sampler "
        "or an IterableDataset that cannot be shared is refused, not replaced or left alone; `resumable=True` goes on in the "
        "middle of an epoch",
        (f"{_TASKS}.prepare_data_loader",),
    ),
    Equivalent(
        "ray.train.torch.prepare_data_loader(add_dist_sampler=)",
        "same",
        "`prepare_data_loader(…, add_distributed_sampler=)`",
        "",
        (f"{_TASKS}.prepare_data_loader",),
    ),
    Equivalent(
        "ray.train.torch.prepare_data_loader(auto_transfer=)",
        "same",
        "",
        "leave it out: with GPUs batches are moved ahead on a side stream",
    ),
    Equivalent("ray.train.torch.get_device", "same", "`get_device()`", "", (f"{_TASKS}.get_device",)),
    Equivalent("ray.train.torch.get_devices", "different", "`[get_device()]`", "a rank has one", (f"{_TASKS}.get_device",)),
    Equivalent(
        "ray.train.torch.enable_reproducibility",
        "different",
        "`torch.manual_seed(…)`, `torch.use_deterministic_algorithms(True)`",
        "torch's own settings, in your function",
    ),
    Equivalent("ray.train.torch.accelerate", "different", "`torch.amp`", "it is gone from Ray, too"),
    Equivalent("ray.train.torch.prepare_optimizer", "different", "`torch.amp`", "it is gone from Ray, too"),
    Equivalent("ray.train.torch.backward", "different", "`loss.backward()`", "it is gone from Ray, too"),
    Equivalent(
        "ray.train.torch.TorchConfig",
        "same",
        "`ScalingConfig(backend=)`",
        "chosen by `use_gpu` where nothing is said",
        ("prefect_torch.flows.ScalingConfig",),
    ),
    Equivalent(
        "ray.train.torch.TorchConfig(init_method=)", "different", "", "leave it out: ranks meet at the flow's own store"
    ),
    Equivalent(
        "ray.train.torch.TorchConfig(timeout_s=)",
        "different",
        "`FailureConfig(hang_timeout_s=)`",
        "the time between two reports; a collective's own is torch's default",
        ("prefect_torch.flows.FailureConfig",),
    ),
)
_LIGHTNING_ROWS = (
    Equivalent(
        "ray.train.lightning.RayTrainReportCallback",
        "better",
        "`ReportCallback()`",
        "every n epochs or steps or each validation, async, stops in time when the training is ended; the file is "
        "`checkpoint.ckpt` in both. Leave out `enable_checkpointing=False`: it would refuse the callback; and import "
        "`lightning`, not `pytorch_lightning`",
        (f"{_LIGHTNING}.ReportCallback",),
    ),
    Equivalent(
        "ray.train.lightning.RayTrainReportCallback(checkpoint_upload_mode=)",
        "same",
        "`ReportCallback(upload=)`",
        "",
        (f"{_LIGHTNING}.ReportCallback",),
    ),
    Equivalent(
        "ray.train.lightning.RayTrainReportCallback(validation=)",
        "different",
        "`evaluate(…, watch=True)`",
        "a flow of its own: [Evaluation](evaluate.md)",
        _EVALUATE,
    ),
    Equivalent(
        "ray.train.lightning.RayTrainReportCallback.CHECKPOINT_NAME",
        "same",
        "`ReportCallback.CHECKPOINT_NAME`",
        "`with resume_path() as path` yields the file's path",
        (f"{_LIGHTNING}.ReportCallback",),
    ),
    Equivalent(
        "ray.train.lightning.RayDDPStrategy",
        "same",
        "`PrefectDDPStrategy()`",
        'Lightning\'s own `"ddp"` does as well, with `devices=get_context().local_world_size`',
        (f"{_LIGHTNING}.PrefectDDPStrategy",),
    ),
    Equivalent(
        "ray.train.lightning.RayFSDPStrategy",
        "different",
        "`PrefectModelParallelStrategy()`",
        "FSDP2, which a module sets up in `configure_model`",
        (f"{_LIGHTNING}.PrefectModelParallelStrategy",),
    ),
    Equivalent("ray.train.lightning.RayDeepSpeedStrategy", "missing", "", "Lightning's DeepSpeedStrategy was not tried here"),
    Equivalent(
        "ray.train.lightning.RayLightningEnvironment",
        "same",
        "`PrefectEnvironment()`",
        "",
        (f"{_LIGHTNING}.PrefectEnvironment",),
    ),
    Equivalent(
        "ray.train.lightning.prepare_trainer",
        "same",
        "`prepare_trainer(trainer)`",
        "refuses a Trainer that counts other ranks than there are, or would start its own",
        (f"{_LIGHTNING}.prepare_trainer",),
    ),
    Equivalent("", "more", "`ReportLogger()`", "what `self.log` logs is in the run, without a callback"),
)
_TRANSFORMERS_ROWS = (
    Equivalent(
        "ray.train.huggingface.transformers.RayTrainReportCallback",
        "better",
        "`ReportCallback()`",
        "at every save, with what was logged at that very step; the files are below `checkpoint/` in both; only ranks that own "
        "files upload; `with resume_path() as path` goes on",
        (f"{_TRANSFORMERS}.ReportCallback",),
    ),
    Equivalent(
        "ray.train.huggingface.transformers.RayTrainReportCallback.CHECKPOINT_NAME",
        "same",
        "`ReportCallback.CHECKPOINT_NAME`",
        "`with resume_path() as path` yields the folder's path",
        (f"{_TRANSFORMERS}.ReportCallback",),
    ),
    Equivalent(
        "ray.train.huggingface.transformers.prepare_trainer",
        "different",
        "`prepare_trainer(trainer)`",
        "adds the callback, and refuses a Trainer that counts other ranks than there are; there is no Ray Data to feed it",
        (f"{_TRANSFORMERS}.prepare_trainer",),
    ),
    Equivalent(
        "ray.train.huggingface*", "missing", "", "gone from Ray, too: a training function with the callback takes their place"
    ),
)
SECTIONS = (
    Section("Inside the training function", "ray.train.", _IN_THE_FUNCTION),
    Section("Checkpoints", "ray.train.", _CHECKPOINTS),
    Section("PyTorch", "ray.train.torch.", _PYTORCH),
    Section("Lightning", "ray.train.lightning.", _LIGHTNING_ROWS),
    Section("Transformers", "ray.train.huggingface.transformers.", _TRANSFORMERS_ROWS),
)
