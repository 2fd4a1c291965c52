"""Ray Train's Transformers example, option 2: a callback of one's own.

python examples/ray_train/transformers_custom.py
"""

from typing import Any

import transformers
from prefect_torch.ckpt import Checkpoint, get_context, report
from transformers_callback import load_scans, make_model


class MyReportCallback(transformers.TrainerCallback):
    """Reports the values logged since the last save, with the saved files."""

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}

    def on_log(self, *_: Any, logs: dict[str, Any] | None = None, **__: Any) -> None:
        """Remember the logged values."""
        self.metrics.update(logs or {})

    def on_save(self, args: transformers.TrainingArguments, state: transformers.TrainerState, *_: Any, **__: Any) -> None:
        """Report the directory that rank 0 has saved."""
        checkpoint = None
        if get_context().get_world_rank() == 0:
            # Not Ray's get_last_checkpoint: an earlier run in the same directory may have left a later one.
            checkpoint = Checkpoint.from_directory(f"{args.output_dir}/checkpoint-{state.global_step}")
        report(self.metrics, checkpoint=checkpoint)
        self.metrics = {}


def train_func(config: dict[str, Any]) -> int:
    """Return the step that this attempt ended with."""
    args = transformers.TrainingArguments(
        output_dir=config["output_dir"],
        num_train_epochs=config["num_epochs"],
        per_device_train_batch_size=32,
        save_strategy="epoch",
        logging_strategy="epoch",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = transformers.Trainer(make_model(), args, train_dataset=load_scans(), callbacks=[MyReportCallback()])
    trainer.train()
    return int(trainer.state.global_step)


if __name__ == "__main__":
    from prefect_torch.flows import RunConfig, ScalingConfig, train

    result = train(
        f"{__file__}:train_func",
        config={"num_epochs": 3, "output_dir": "demo-checkpoints/transformers-custom-output"},
        scaling=ScalingConfig(num_workers=2),
        run=RunConfig(storage="demo-checkpoints"),
    )
    print(result.metrics, result.checkpoint)
