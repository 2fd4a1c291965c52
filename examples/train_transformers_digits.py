"""The training of examples/transformers_digits.py: plain Transformers, except two names of prefect_torch.ckpt.transformers."""

from typing import Any

import torch
from prefect_torch.ckpt.transformers import prepare_trainer, resume_path
from sklearn.datasets import load_digits
from torch.utils.data import random_split
from transformers import EvalPrediction, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification


def load_data() -> tuple[Any, Any]:
    digits: Any = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    data: Any = [{"pixel_values": image, "labels": int(label)} for image, label in zip(images, digits.target, strict=True)]
    training, validation = random_split(data, [0.8, 0.2], torch.Generator().manual_seed(0))
    return training, validation


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    scores: Any = prediction.predictions
    return {"accuracy": float((scores.argmax(1) == prediction.label_ids).mean())}


def train_digits(config: dict[str, Any]) -> float:
    """Train on this rank; Transformers shares the data among the ranks."""
    torch.manual_seed(0)
    training, validation = load_data()
    trainer = Trainer(
        ViTForImageClassification(
            ViTConfig(
                hidden_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                intermediate_size=128,
                image_size=8,
                patch_size=4,
                num_channels=1,
                initializer_range=0.1,
                id2label={digit: str(digit) for digit in range(10)},
            )
        ),
        TrainingArguments(
            config["output_dir"],
            num_train_epochs=config["epochs"],
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            warmup_steps=10,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=training,
        eval_dataset=validation,
        compute_metrics=accuracy,
    )
    with resume_path() as path:
        prepare_trainer(trainer).train(resume_from_checkpoint=path)
    return trainer.evaluate()["eval_accuracy"]
