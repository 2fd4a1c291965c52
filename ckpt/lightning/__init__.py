"""Reports of Lightning trainings: checkpoints by a callback, metrics by a logger, on the ranks that exist, and the resume.

    def train_fn(config):
        trainer = lightning.Trainer(
            strategy=PrefectDDPStrategy(),
            plugins=[PrefectEnvironment()],
            callbacks=[ReportCallback()],
            logger=ReportLogger(),
        )
        with resume_path() as path:
            trainer.fit(Digits(), ckpt_path=path)

Needs the extra `lightning`; nothing else of this package imports this module.
"""

from prefect_torch.ckpt.framework_folders import needs_extra

with needs_extra("lightning", "lightning"):
    from .callback import ReportCallback, resume_path
    from .logger import ReportLogger
    from .ranks import PrefectDDPStrategy, PrefectEnvironment, PrefectModelParallelStrategy, prepare_trainer

__all__ = [
    "PrefectDDPStrategy",
    "PrefectEnvironment",
    "PrefectModelParallelStrategy",
    "ReportCallback",
    "ReportLogger",
    "prepare_trainer",
    "resume_path",
]
