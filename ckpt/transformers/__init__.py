"""Reports of Transformers trainings: a callback for the Trainer, and the path to resume from.

    def train_fn(config):
        trainer = transformers.Trainer(model, transformers.TrainingArguments("output", ...), train_dataset=data)
        trainer = prepare_trainer(trainer)
        with resume_path() as path:
            trainer.train(resume_from_checkpoint=path)

Needs the extra `transformers`; nothing else of this package imports this module.
"""

from prefect_torch.ckpt.framework_folders import needs_extra

with needs_extra("transformers", "transformers", "accelerate"):
    from .callback import ReportCallback, prepare_trainer
    from .resumes import resume_path

__all__ = [
    "ReportCallback",
    "prepare_trainer",
    "resume_path",
]
