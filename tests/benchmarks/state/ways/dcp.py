"""torch.distributed.checkpoint as its documentation shows it, to a folder, or through fsspec to S3."""

import shutil
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from measure import measure
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from training import Training

from ways import WAYS


class Dcp:
    def __init__(self, plan, training):
        self._plan, self._training = plan, training
        self._option = WAYS[plan.way].option
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(StagingOptions(False, False, False, False)) if self._option == "reused" else None
        self._done = lambda: None
        self._stored = []

    def save(self, number):
        target = f"{self._plan.url}/{number}"
        arguments = {"storage_writer": self._storage("Writer", target), "process_group": self._group}
        if self._option == "sync":
            dcp.save(self._state(), **arguments)
        else:
            future = dcp.async_save(self._state(), async_stager=self._stager, **arguments)
            self._done = getattr(future, "upload_completion", future).result
        self._stored.append(target)

    def wait(self):
        self._done()

    def forget(self):
        *older, newest = self._stored
        self._stored = [newest]
        for target in older if self._plan.rank == 0 else ():
            if self._plan.is_local:
                shutil.rmtree(target)
            else:
                _s3().rm(target, recursive=True)

    def load(self):
        state = self._state()
        dcp.load(state, storage_reader=self._storage("Reader", self._newest()), process_group=self._group)
        model, optimizer = self._training.model, self._training.optimizer
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    reload = load

    def _state(self):
        model_state, optimizer_state = get_state_dict(self._training.model, self._training.optimizer)
        return {"model": model_state, "optimizer": optimizer_state}

    def _storage(self, kind, target):
        if self._plan.is_local:
            return getattr(dcp, f"FileSystem{kind}")(target)
        from torch.distributed.checkpoint import _fsspec_filesystem

        return getattr(_fsspec_filesystem, f"Fsspec{kind}")(target)

    def _newest(self):
        if self._plan.is_local:
            return str(max(Path(self._plan.url).iterdir(), key=lambda folder: int(folder.name)))
        return "s3://" + max(_s3().ls(self._plan.url, detail=False), key=lambda key: int(key.rpartition("/")[2]))


def _s3():
    import fsspec

    return fsspec.filesystem("s3", use_listings_cache=False)


def run(plan):
    training = Training(plan.mebibytes, plan.matmuls, fresh=plan.phase == "resume", device=plan.device)
    measure(plan, Dcp(plan, training), training)
