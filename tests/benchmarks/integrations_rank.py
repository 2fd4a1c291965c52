"""One rank of tests/benchmarks/integrations.py: trains with one framework, bare and with ours, and writes down each step."""

import json
import statistics
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from prefect_torch.ckpt import Checkpoint, CheckpointStore, get_context, report
from prefect_torch.ckpt.reporting.checkpoint_requests import CheckpointRequests
from prefect_torch.ckpt.reporting.session import RankSession
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.tasks.rank.rendezvous import Address, Rendezvous, connect
from rank_processes import process_group, training
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS, BATCH, SAVED_STEP, LEARNT = 60, 128, 20, 20  # by then the pace of the loop is known
KINDS = ["bare", "ours", "stall bare", "stall sync", "stall async"]


class Classifier(nn.Module):
    """Notes when each forward pass of a training begins; gives what every framework wants of a model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        wide = [layer for _ in range(2) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        self.layers = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), *wide, nn.Linear(1024, 10))
        self.begun_s = []

    def forward(self, pixels, labels):
        self.begun_s.append(time.perf_counter())
        scores = self.layers(pixels)
        return {"loss": nn.functional.cross_entropy(scores, labels), "logits": scores}


def digits():
    loaded = load_digits()
    pixels, labels = torch.tensor(loaded.data, dtype=torch.float32), torch.tensor(loaded.target)
    times = -(-STEPS * BATCH * 2 // len(labels))  # one epoch has all steps of both ranks
    return TensorDataset(pixels.repeat(times, 1), labels.repeat(times))


def with_pytorch(kind, upload):
    from prefect_torch.tasks import prepare_data_loader, prepare_model

    model, data = Classifier(), digits()
    if kind == "bare":
        wrapped = nn.parallel.DistributedDataParallel(model)
        loader = DataLoader(data, BATCH, sampler=DistributedSampler(data))
    else:
        wrapped, loader = prepare_model(model), prepare_data_loader(DataLoader(data, BATCH, shuffle=True))
    optimizer = torch.optim.Adam(wrapped.parameters())
    for step, (pixels, labels) in enumerate(loader, 1):
        optimizer.zero_grad()
        wrapped(pixels, labels)["loss"].backward()
        optimizer.step()
        is_due = kind == "ours" and get_context().should_checkpoint()
        if step == SAVED_STEP and (upload or is_due):
            _save_by_hand(wrapped, optimizer, upload)
        if step > STEPS:
            break
    return model


def _save_by_hand(model, optimizer, upload):
    with tempfile.TemporaryDirectory() as folder:
        if dist.get_rank() == 0:
            torch.save([model.state_dict(), optimizer.state_dict()], Path(folder, "training.pt"))
        if upload == "bare":
            dist.barrier()
        else:
            report({}, Checkpoint.from_directory(folder) if dist.get_rank() == 0 else None, upload=upload)


def with_lightning(kind, upload):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from prefect_torch.ckpt.lightning import PrefectDDPStrategy, PrefectEnvironment, ReportCallback, ReportLogger

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Classifier()

        def training_step(self, batch):
            loss = self.model(*batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    every = SAVED_STEP if upload else 10**9
    own = ModelCheckpoint(tempfile.gettempdir(), every_n_train_steps=every, save_top_k=1)
    ours = ReportCallback(every_n_train_steps=every, upload="async" if upload == "async" else "sync")
    module = Module()
    Trainer(
        max_steps=STEPS,
        accelerator="cpu",
        strategy=PrefectDDPStrategy(),
        plugins=[PrefectEnvironment()],
        callbacks=[own if kind == "bare" else ours],
        logger=False if kind == "bare" else ReportLogger(),
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(module, DataLoader(digits(), BATCH, shuffle=True))
    return module.model


def with_transformers(kind, upload):
    from prefect_torch.ckpt.transformers import ReportCallback
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_callback import PrinterCallback

    model = Classifier()
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        dist.broadcast_object_list(folders)
        arguments = TrainingArguments(
            folders[0],
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
            logging_steps=10,
            save_strategy="steps" if upload else "no",
            save_steps=SAVED_STEP,
        )
        trainer = Trainer(model, arguments, train_dataset=digits(), data_collator=_as_batch)
        trainer.remove_callback(PrinterCallback)
        if kind == "ours":
            trainer.add_callback(ReportCallback(upload="async" if upload == "async" else "sync"))
        trainer.train()
        dist.barrier()
    return model


def _as_batch(items):
    pixels, labels = zip(*items, strict=True)
    return {"pixels": torch.stack(pixels), "labels": torch.stack(labels)}


def with_accelerate(kind, upload):
    from accelerate import Accelerator
    from prefect_torch.ckpt.accelerate import report_state

    accelerator, model = Accelerator(cpu=True), Classifier()
    optimizer = torch.optim.Adam(model.parameters())
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(digits(), BATCH, shuffle=True))
    for step, (pixels, labels) in enumerate(loader, 1):
        optimizer.zero_grad()
        accelerator.backward(wrapped(pixels, labels)["loss"])
        optimizer.step()
        is_due = kind == "ours" and get_context().should_checkpoint()
        if step == SAVED_STEP and (upload or is_due):
            if upload == "bare":
                with tempfile.TemporaryDirectory() as folder:
                    accelerator.save_state(folder)
            else:
                report_state(accelerator, {}, upload=upload)
        if step > STEPS:
            break
    return model


WITH = {"PyTorch": with_pytorch, "Lightning": with_lightning, "Transformers": with_transformers, "Accelerate": with_accelerate}


@contextmanager
def one_training(root, number):
    """Be a rank of a run of its own, led by rank 0."""
    store, told = CheckpointStore.open(root, f"run-{number}"), [0, 0]
    if dist.get_rank() == 0:
        rendezvous = Rendezvous()
        served = rendezvous.serve()
        claimed = claim_attempt(store, Owner.current(), world_size=dist.get_world_size())
        told = [claimed.number, rendezvous.address.port]
    dist.broadcast_object_list(told)
    with training(store, told[0], connect(Address("127.0.0.1", told[1]))) as session:
        yield session
    if dist.get_rank() == 0:
        del served


class TimeInside:
    """How long the training was in what ours calls at each step or log: the question for a checkpoint, and the record."""

    def __init__(self):
        self.calls = []
        for owner, name in ((CheckpointRequests, "should_checkpoint"), (RankSession, "log_metrics")):
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function):
        def timed(*arguments, **options):
            started_s = time.perf_counter()
            try:
                return function(*arguments, **options)
            finally:
                self.calls.append((started_s, time.perf_counter() - started_s))

        return timed


def main(framework, rounds, folder, rank, world_size, root, *ports):
    warnings.simplefilter("ignore")
    measured, inside = defaultdict(list), TimeInside()
    with process_group(rank, world_size, ports[-1]):
        for number in range(int(rounds)):
            for kind in KINDS if number % 2 else reversed(KINDS):
                inside.calls.clear()
                with one_training(root, f"{number}-{KINDS.index(kind)}"):
                    model = WITH[framework](*_what(kind))
                steps_s = [after - before for before, after in pairwise(model.begun_s)][2:]
                middle_s = statistics.median(steps_s)
                if kind == "ours":
                    in_calls_s = sum(took_s for at_s, took_s in inside.calls if at_s >= model.begun_s[LEARNT])
                    measured["inside"].append(in_calls_s / (len(model.begun_s) - LEARNT))
                measured[kind].append(max(steps_s) - middle_s if kind.startswith("stall") else middle_s)
    Path(folder, f"measured-{rank}.json").write_text(json.dumps(measured))


def _what(kind):
    """Return whether to train bare or with ours, and how to save, None for not at all."""
    if not kind.startswith("stall"):
        return kind, None
    upload = kind.removeprefix("stall ")
    return ("bare", "bare") if upload == "bare" else ("ours", upload)


if __name__ == "__main__":
    main(*sys.argv[1:])
