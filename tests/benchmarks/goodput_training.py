"""The training of goodput.py and goodput_machines.py: plain torch, the same for everybody; only how it checkpoints differs."""

import json
import os
import socket
import tempfile
import time
from pathlib import Path

STEP_S = 0.05
STEPS_PER_CHECKPOINT = 40
BALLAST = 12_500_000  # numbers that change with every checkpoint and train nothing: 50 MB


class Model:
    """A small network and its optimizer, wrapped for DDP, with ballast."""

    def __init__(self, config, rank):
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(rank)
        self.network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        self.network.register_parameter("ballast", torch.nn.Parameter(torch.zeros(BALLAST), requires_grad=False))
        self.wrapped = torch.nn.parallel.DistributedDataParallel(self.network)
        self.optimizer = torch.optim.AdamW(self.wrapped.parameters())
        self.step = 0
        self._config, self._rank = config, rank
        self._folder = Path(config["notes"])
        self._notes = (self._folder / f"notes-{rank}-{os.getpid()}.jsonl").open("a", buffering=1)

    def run(self, report):
        """Step until the time is up, which rank 0 decides; `report(loss)` makes a checkpoint."""
        import torch
        import torch.distributed as dist

        self._note(pid=os.getpid(), host=socket.gethostname(), first_step=self.step)
        goes_on = torch.ones(1)
        while goes_on.item():
            started_s = time.perf_counter()
            loss = self.wrapped(torch.randn(16, 64)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            goes_on.fill_(time.time() < self._ends_at())
            dist.broadcast(goes_on, 0)
            self.step += 1
            time.sleep(max(0.0, STEP_S - (time.perf_counter() - started_s)))
            self._note(step=self.step)
            if self.step % STEPS_PER_CHECKPOINT == 0:
                with torch.no_grad():
                    self.network.ballast.add_(1)
                started_s = time.perf_counter()
                report(loss.item())
                self._note(stall_s=time.perf_counter() - started_s)

    def save(self, folder):
        import torch

        state = {"network": self.network.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step}
        torch.save(state, f"{folder}/state.pt")

    def load(self, folder):
        import torch

        state = torch.load(f"{folder}/state.pt", weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]

    def _ends_at(self):
        began = self._folder / "began"
        if self._rank == 0 and not began.exists():
            began.write_text(repr(time.time()))
        return float(began.read_text()) + self._config["seconds"] if self._rank == 0 else 0.0

    def _note(self, **fields):
        self._notes.write(json.dumps({"at": time.time(), **fields}) + "\n")


def ours_state(config):
    from prefect_torch.ckpt import get_checkpoint, get_context, report

    model = Model(config, get_context().world_rank)
    state = {"network": model.network, "optimizer": model.optimizer, "step": 0}
    if checkpoint := get_checkpoint():
        checkpoint.load_state(state)
        model.step = state["step"]
    model.run(lambda loss: report({"loss": loss}, state={**state, "step": model.step}))


def ours_folder(config):
    from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report

    model = Model(config, rank := get_context().world_rank)
    if checkpoint := get_checkpoint():
        with checkpoint.as_directory() as folder:
            model.load(folder)

    def report_folder(loss):
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                model.save(folder)
            report({"loss": loss}, Checkpoint.from_directory(folder) if rank == 0 else None)

    model.run(report_folder)


def with_ray(config):
    import ray.train

    mode = ray.train.CheckpointUploadMode[config["mode"]]
    model = Model(config, rank := ray.train.get_context().get_world_rank())
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            model.load(folder)

    def report(loss):
        checkpoint = None
        if rank == 0:
            model.save(folder := tempfile.mkdtemp())
            checkpoint = ray.train.Checkpoint.from_directory(folder)
        ray.train.report({"loss": loss}, checkpoint, checkpoint_upload_mode=mode, delete_local_checkpoint_after_upload=True)

    model.run(report)
