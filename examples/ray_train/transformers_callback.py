"""Ray Train's Transformers example, option 1: the ready-made callback reports whenever the Trainer saves.

python examples/ray_train/transformers_callback.py
"""

from typing import Any

import torch
import transformers
from prefect_torch.ckpt.transformers import ReportCallback, prepare_trainer, resume_path
from sklearn.datasets import load_digits


def load_scans() -> list[dict[str, Any]]:
    digits: Any = load_digits()
    scans = torch.tensor(digits.images[:200], dtype=torch.float32).unsqueeze(1) / 16
    return [{"pixel_values": scan, "labels": int(digit)} for scan, digit in zip(scans, digits.target, strict=False)]


def make_model() -> transformers.ViTForImageClassification:
    pixels = {"image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10}
    layers = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    config: dict[str, Any] = {**pixels, **layers}
    return transformers.ViTForImageClassification(transformers.ViTConfig(**config))


def train_func(config: dict[str, Any]) -> int:
    """Return the step that this attempt ended with."""
    args = transformers.TrainingArguments(
        output_dir=config["output_dir"],
        num_train_epochs=config["num_epochs"],
        per_device_train_batch_size=32,
        eval_strategy="epoch",
        save_strategy="epoch",
        logging_strategy="epoch",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    scans = load_scans()
    trainer = transformers.Trainer(make_model(), args, train_dataset=scans[:160], eval_dataset=scans[160:])
    trainer.add_callback(ReportCallback())
    trainer = prepare_trainer(trainer)
    with resume_path() as path:
        trainer.train(resume_from_checkpoint=path)
    return int(trainer.state.global_step)


if __name__ == "__main__":
    from prefect_torch.flows import CheckpointConfig, RunConfig, ScalingConfig, train

    result = train(
        f"{__file__}:train_func",
        config={"num_epochs": 3, "output_dir": "demo-checkpoints/transformers-output"},
        scaling=ScalingConfig(num_workers=2),
        run=RunConfig(storage="demo-checkpoints"),
        checkpoint=CheckpointConfig(num_to_keep=3, checkpoint_score_attribute="eval_loss", checkpoint_score_order="min"),
    )
    for checkpoint, metrics in result.best_checkpoints:
        print(metrics["eval_loss"], checkpoint.path)
