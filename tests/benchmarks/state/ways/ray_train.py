"""Ray Train: rank 0 saves into a temporary folder and reports it, as its documentation shows for DDP."""

import os
import shutil
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import ray
import ray.train
from measure import ROOT, measure
from plan import WORLD_SIZE, Plan
from ray.train import Checkpoint, CheckpointConfig, CheckpointConsistencyMode, CheckpointUploadMode, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from training import Training

from ways import WAYS
from ways.files import load_training, save_training, sync_below


class Ray:
    def __init__(self, plan, training):
        self._plan, self._training = plan, training
        self._mode = CheckpointUploadMode[WAYS[plan.way].option]

    def save(self, number):
        if self._plan.rank:
            ray.train.report({"number": number}, checkpoint_upload_mode=self._mode)
            return
        folder = tempfile.mkdtemp(dir=self._plan.folder)
        save_training(self._training, number, f"{folder}/model.pt")
        ray.train.report({"number": number}, Checkpoint.from_directory(folder), checkpoint_upload_mode=self._mode)
        if self._mode is CheckpointUploadMode.SYNC:
            shutil.rmtree(folder)

    def wait(self):
        reported = ray.train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
        if self._plan.is_local and self._plan.rank == 0:
            sync_below(reported[-1].checkpoint.path)

    def forget(self):
        pass  # num_to_keep

    def load(self):
        with ray.train.get_checkpoint().as_directory() as folder:
            load_training(self._training, f"{folder}/model.pt")

    reload = load


def train(config):
    import torch

    torch.set_num_threads(1)
    plan = Plan.decode(config["plan"]).of_rank(ray.train.get_context().get_world_rank())
    training = Training(plan.mebibytes, plan.matmuls, fresh=plan.phase == "resume")
    measure(plan, Ray(plan, training), training)


def drive(plan):
    """Run Ray's cluster and its training in this process and its children."""
    os.environ[ROOT] = str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:  # sockets: short paths
        memory = 100 * 2**20  # nothing here goes through its object store
        ray.init(num_cpus=4, include_dashboard=False, _temp_dir=folder, object_store_memory=memory, configure_logging=False)
        path, filesystem = _storage(plan)
        TorchTrainer(
            train,
            train_loop_config={"plan": plan.encode()},
            torch_config=TorchConfig(backend="gloo"),
            scaling_config=ScalingConfig(num_workers=WORLD_SIZE),
            run_config=RunConfig(
                name="run",
                storage_path=path,
                storage_filesystem=filesystem,
                checkpoint_config=CheckpointConfig(num_to_keep=1),
            ),
        ).fit()
        ray.shutdown()


def _storage(plan):
    if plan.is_local:
        return str(Path(plan.url)), None
    from pyarrow.fs import FSSpecHandler, PyFileSystem, S3FileSystem

    if plan.where == "rclone":  # refuses what pyarrow's own client does: an object "folder/" for each folder
        import s3fs

        return plan.url.removeprefix("s3://"), PyFileSystem(FSSpecHandler(s3fs.S3FileSystem()))
    url = urlsplit(os.environ["AWS_ENDPOINT_URL"])
    return plan.url.removeprefix("s3://"), S3FileSystem(endpoint_override=url.netloc, scheme=url.scheme, region="us-east-1")
