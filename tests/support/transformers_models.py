"""A small ViT on scans of digits, with dropout, whose training is the same bit for bit whenever it is repeated."""

import ctypes
import os
import signal
from dataclasses import replace
from pathlib import Path

import torch
from exact_ends import weights, write_end
from prefect_torch.ckpt.context import set_context
from prefect_torch.ckpt.transformers import ReportCallback, prepare_trainer, resume_path
from rank_processes import joined
from sklearn.datasets import load_digits
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

STEPS = 12


def make_model():
    torch.manual_seed(0)
    size = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return ViTForImageClassification(
        ViTConfig(**size, image_size=8, patch_size=4, num_channels=1, num_labels=10, hidden_dropout_prob=0.1)
    )


def load_data(first, last):
    digits = load_digits()
    images = torch.tensor(digits.images[first:last], dtype=torch.float32).unsqueeze(1) / 16
    return [
        {"pixel_values": image, "labels": int(label), "input_ids": [0] * (int(label) + 1)}  # of a length, which no model reads
        for image, label in zip(images, digits.target[first:last], strict=True)
    ]


def make_trainer(output_dir, world_size=1, trainer_options=None, **arguments):
    """Return a Trainer of 12 steps in 3 epochs."""
    usual = {
        "learning_rate": 1e-2,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 16 // world_size,
        "save_steps": 3,
        "eval_strategy": "steps",
        "eval_steps": 6,
        "logging_steps": 2,
        "disable_tqdm": True,
        "report_to": "none",
        "use_cpu": True,
    }
    return Trainer(
        make_model(),
        TrainingArguments(str(output_dir), **{**usual, **arguments}),
        train_dataset=load_data(0, 64),
        eval_dataset=load_data(64, 96),
        **trainer_options or {},
    )


class Before(TrainerCallback):
    """Does something before a step."""

    def __init__(self, step, action):
        self.step = step
        self.action = action

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.action()


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def be_own_machine(session):
    """Be the only rank of a machine."""
    rank = session.context.world_rank
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank))
    session.context = replace(session.context, local_rank=0, node_rank=rank, local_world_size=1)
    set_context(session.context)


def take_own_machine(session, root, number):
    """Be a machine of one rank, on which root / "output" is a directory of its own, by a mount that others do not see."""
    be_own_machine(session)
    for folder in (own := root / f"machine-{number}", shared := root / "output"):
        folder.mkdir(exist_ok=True)
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, bound = 0x20000, (1 << 14) | (1 << 18), 1 << 12  # sched.h, sys/mount.h
    assert libc.unshare(new_mounts) == 0
    assert libc.mount(b"none", b"/", None, private, None) == 0
    assert libc.mount(str(own).encode(), str(shared).encode(), None, bound, None) == 0


def train_on_machines(job, *place):
    """Train on this rank as on a machine of its own: "killed on machines" at step 7, or "resumed on machines", on the other."""
    is_first = job.startswith("killed")
    with joined(*place) as session:
        root, rank = Path(session.run.storage.url), session.context.world_rank
        take_own_machine(session, root, rank if is_first else 1 - rank)
        trainer = make_trainer(root / "output", 2, save_total_limit=2, save_on_each_node=is_first)
        if is_first:
            trainer.add_callback(Before(7, kill))
        with resume_path() as path:
            prepare_trainer(trainer).train(resume_from_checkpoint=path)


def train_in_a_shared_directory(*place):
    """Train on this rank as on a machine of its own whose output directory is shared with the other one."""
    with joined(*place) as session:
        be_own_machine(session)
        prepare_trainer(make_trainer(Path(session.run.storage.url) / "output", 2, max_steps=3)).train()


def main(job, *place):
    if job == "shared by machines":
        train_in_a_shared_directory(*place)
        return
    ways = {"on machines": train_on_machines, "rebalanced": train_rebalanced}
    next((way for end, way in ways.items() if job.endswith(end)), train)(job, *place)


def train_rebalanced(job, *place):
    """Train on this rank with samples shared out by their length: "whole", "killed" before its step 8, or "resumed"."""
    with joined(*place) as session:
        root = Path(session.run.storage.url)
        trainer = make_trainer(root / "output", 2, train_sampling_strategy="batch_rebalance")
        if job.startswith("killed"):
            trainer.add_callback(Before(7, kill))
        with resume_path() as path:
            prepare_trainer(trainer).train(resume_from_checkpoint=path)
        torch.save(weights(trainer.model), root / f"weights-{session.context.world_rank}.pt")


def train(job, *place):
    """Train on this rank: "whole", "killed" before its step 9, or "resumed"."""
    with joined(*place) as session:
        context, root = session.context, Path(session.run.storage.url)
        if job == "whole":
            apart = make_trainer(root / f"rank-{context.world_rank}", 2)
            try:
                prepare_trainer(apart)
            except ValueError as exc:
                assert "give all ranks the same output_dir" in str(exc)  # noqa: PT017 - no test here
            else:
                raise AssertionError("ranks with folders of their own were accepted")
        trainer = make_trainer(root / "output", context.world_size, save_total_limit=2)
        trainer.add_callback(ReportCallback(upload="async" if job == "resumed" else "sync"))
        if job == "killed":
            trainer.add_callback(Before(8, kill))
        with resume_path() as path:
            prepare_trainer(trainer).train(resume_from_checkpoint=path)
        torch.save(weights(trainer.model), root / f"weights-{context.world_rank}.pt")
        write_end(trainer.optimizer, root / f"end-{context.world_rank}.pt")
