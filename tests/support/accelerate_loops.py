"""A loop with an Accelerator on scans of digits, with shuffling and dropout, the same bit for bit whenever it is repeated."""

import os
import signal
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from exact_ends import weights, write_end
from prefect_torch.ckpt import get_context
from prefect_torch.ckpt.accelerate import load_state, report_state
from rank_processes import joined
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 4


class Counter:
    """Stands for what a user registers."""

    def __init__(self):
        self.batches = 0

    def state_dict(self):
        return {"batches": self.batches}

    def load_state_dict(self, state):
        self.batches = state["batches"]


class Drawing(TensorDataset):
    """Has a state of its own on each rank, as of a random augmentation."""

    drawn = 0

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


def report_within_an_epoch(*place):
    """Report after the first batch of stateful loaders, or write what is restored."""
    with joined(*place) as session:
        context = session.context
        loading = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(cpu=True, dataloader_config=loading)
        data = [Drawing(torch.arange(32.0)) for _ in range(2)]
        loaders = accelerator.prepare(*(DataLoader(each, batch_size=4) for each in data))
        if load_state(accelerator) is None:
            for number, (each, loader) in enumerate(zip(data, loaders, strict=True)):
                each.drawn = 10 * number + context.world_rank + 1
                next(iter(loader))
            report_state(accelerator, {})
        else:
            restored = [(each, next(iter(loader))) for each, loader in zip(data, loaders, strict=True)]
            drawn = [(each.drawn, batch[0].tolist()) for each, batch in restored]
            torch.save(drawn, Path(session.run.storage.url, f"drawn-{context.world_rank}.pt"))


def report_on_machines(*place):
    """Report as on a machine of one rank: the temporary directory of rank 0's does not exist on rank 1's."""
    from transformers_models import take_own_machine  # noqa: PLC0415 - it imports Transformers

    with joined(*place) as session:
        root, rank = Path(session.run.storage.url), session.context.world_rank
        take_own_machine(session, root, rank)
        own = root / ("output/temporary" if rank == 0 else "temporary")
        own.mkdir()
        tempfile.tempdir = str(own)
        train(make_accelerator(), epochs=1, upload="async")


def make_loader(batch_size=8):
    digits = load_digits()
    images = torch.tensor(digits.images[:64], dtype=torch.float32) / 16
    return DataLoader(TensorDataset(images, torch.tensor(digits.target[:64])), batch_size=batch_size, shuffle=True)


def make_model():
    torch.manual_seed(0)
    layers = (torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, 10))
    return torch.nn.Sequential(*layers)


def make_accelerator(**arguments):
    shuffle = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=0)
    return Accelerator(cpu=True, dataloader_config=shuffle, **arguments)


def train(accelerator, epochs=EPOCHS, upload=None, before_epoch=lambda epoch: None):
    """Train, report after each epoch, and return the model and what was loaded."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    set_seed(get_context().world_rank)  # each rank drops out on its own
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, make_loader(), schedule)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    loaded = load_state(accelerator)
    for epoch in range(0 if loaded is None else loaded.step + 1, epochs):
        before_epoch(epoch)
        loader.set_epoch(epoch)
        for images, labels in loader:
            loss = torch.nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            counter.batches += 1
        report_state(accelerator, {"loss": loss.item(), "batches": counter.batches}, step=epoch, upload=upload)
    return accelerator.unwrap_model(model), loaded


def kill_before(last):
    def before_epoch(epoch):
        if epoch == last:
            os.kill(os.getpid(), signal.SIGKILL)

    return before_epoch


def main(job, *place):
    """Train on this rank: "whole", "killed" before its third epoch, or "resumed"; or report elsewhere."""
    elsewhere = {"within an epoch": report_within_an_epoch, "on machines": report_on_machines}
    if job in elsewhere:
        elsewhere[job](*place)
        return
    with joined(*place) as session:
        end = {"before_epoch": kill_before(2)} if job == "killed" else {}
        accelerator = make_accelerator()
        model, _ = train(accelerator, upload="async" if job == "resumed" else None, **end)
        root, rank = Path(session.run.storage.url), session.context.world_rank
        torch.save(weights(model), root / f"weights-{rank}.pt")
        write_end(accelerator._optimizers[0], root / f"end-{rank}.pt")
