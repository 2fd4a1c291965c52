"""Lightning's `self.log` as the run's metrics."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_warn
from prefect_torch.ckpt.context import context_or_none
from prefect_torch.ckpt.reporting.api import log_metrics


class ReportLogger(Logger):
    """Record the values of `self.log` as metrics of the run, without a callback: `Trainer(logger=ReportLogger())`.

    Rank 0's values are recorded, as by Lightning's other loggers, when Lightning logs: every `log_every_n_steps` and at the end
    of epochs. They appear in the metric history and the curves; a checkpoint's own metrics are those of its report. It is no
    report: no other rank takes part, and nothing waits. Outside of a training function it warns once and records nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self._context = context_or_none()
        if self._context is None:
            rank_zero_warn("ReportLogger records nothing: this is no training function of prefect_torch.flows.train()")

    @property
    def name(self) -> str | None:
        """The run's name."""
        return None if self._context is None else self._context.run_name

    @property
    def version(self) -> int | None:
        """0 in all attempts: a ModelCheckpoint forgets its best checkpoints if its default directory, named by it, changes."""
        return None if self._context is None else 0

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Record `metrics` at `step`; None means the step after the last report's.

        Raises:
            ValueError: If a value is invalid in a report.

        """
        if self._context is not None:
            log_metrics(metrics, step=step)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Record nothing: the training's `config` is among its flow run's parameters."""
