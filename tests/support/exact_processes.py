"""Trainings that draw random numbers wherever trainings do, as one of two ranks; what they end with is written down."""

import os
import random
import signal
import warnings
from pathlib import Path

import numpy as np
import torch
import torch._dynamo  # DDP imports it in each process otherwise, for seconds
import torch.distributed as dist
from prefect_torch.ckpt import RandomState
from prefect_torch.tasks import prepare_data_loader
from rank_processes import joined
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

KILLED_AT, STEPS = 6, 9


class Noisy:
    """Draws with every item."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        return torch.full((4,), float(number)) + torch.randn(4)


class Plain(Noisy):
    """Draws nothing."""

    def __getitem__(self, number):
        return torch.full((4,), float(number))


class NoisyStream(IterableDataset):
    """Draws with every item, and cannot go to a position: it is read again."""

    def __iter__(self):
        return (torch.full((4,), float(number)) + torch.randn(4) for number in range(dist.get_rank(), 32, 2))


def make_loaders():
    """Return loaders by what is particular about them; with 16 items an epoch has 4 batches, with 12 it has 3."""

    def resumable(dataset, **arguments):
        if "num_workers" in arguments:
            arguments["multiprocessing_context"] = "fork"  # as a rank's are: a forked test's would be a fork server's
        loader = DataLoader(dataset, batch_size=2, shuffle=True, **arguments)
        return prepare_data_loader(loader, resumable=True)

    return {
        "within an epoch": resumable(Noisy(16)),
        "between epochs": resumable(Noisy(12)),
        "workers within an epoch": resumable(Plain(16), num_workers=1),
        "workers between epochs": resumable(Noisy(12), num_workers=1),
        "lasting workers": resumable(Plain(12), num_workers=1, persistent_workers=True),
        "a generator": resumable(Noisy(16), generator=torch.Generator().manual_seed(3)),
        "a stream": prepare_data_loader(
            StatefulDataLoader(NoisyStream(), batch_size=2), add_distributed_sampler=False, resumable=True
        ),
    }


class Training:
    """A model with dropout, its moving average, and an optimizer, trained in bfloat16 with DDP."""

    def __init__(self, loader):
        inner = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.GELU(), torch.nn.Linear(8, 1))
        self.model = DistributedDataParallel(inner)
        self.average = AveragedModel(inner, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.loader = loader

    def state(self):
        return {"model": self.model, "average": self.average, "optimizer": self.optimizer, "loader": self.loader}

    def batches(self):
        while True:
            yield from self.loader

    def step(self, batch):
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        self.average.update_parameters(self.model.module)


def main(ends, *place):
    """Train all of them side by side, with one process's random numbers; `ends` says whether they are killed."""
    warnings.filterwarnings("ignore", "'set_vital' is deprecated")  # torchdata's
    with joined(*place) as session:
        rank = session.context.world_rank
        torch.manual_seed(rank)
        random.seed(rank)
        np.random.seed(rank)  # noqa: NPY002 - the process's own
        trainings = {name: Training(loader) for name, loader in make_loaders().items()}
        state = {
            "step": 0,
            "random": RandomState(),
            "noise": np.zeros(STEPS + 1),
            "mean": np.float32(0),
            **{name: training.state() for name, training in trainings.items()},
        }
        if session.restored is not None:
            session.restored.load_state(state, rank=rank, world_size=2)
        batches = {name: training.batches() for name, training in trainings.items()}
        for step in range(state["step"] + 1, STEPS + 1):
            state["noise"][step] = random.gauss(0, 1) + np.random.normal()  # noqa: NPY002 - the process's own
            state["mean"] = state["noise"].mean(dtype="float32")
            for name, training in trainings.items():
                training.step(next(batches[name]) + state["noise"][step])
            state["step"] = step
            if step == KILLED_AT:
                session.report({}, state=state, upload="sync", step=step)
                if ends:
                    dist.barrier()
                    os.kill(os.getpid(), signal.SIGKILL)
        whole = {name: [training.model, training.average, training.optimizer] for name, training in trainings.items()}
        found = {name: [part.state_dict() for part in parts] for name, parts in whole.items()}
        drawn = [torch.from_numpy(state["noise"]), float(state["mean"]), random.random(), np.random.random()]  # noqa: NPY002
        torch.save({"random": torch.get_rng_state(), "drawn": drawn, **found}, Path(session.run.storage.url, f"end-{rank}.pt"))
