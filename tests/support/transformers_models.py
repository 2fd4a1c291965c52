"""A small ViT on scans of digits, with dropout, whose training is the same bit for bit whenever it is repeated."""

import os
import signal
from pathlib import Path

import torch
from exact_ends import write_end
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
        {"pixel_values": image, "labels": int(label)} for image, label in zip(images, digits.target[first:last], strict=True)
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


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def main(job, *place):
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
