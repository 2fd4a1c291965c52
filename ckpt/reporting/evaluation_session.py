"""One rank's session of an evaluation: it has a checkpoint to read, and reports nothing."""

from typing import Any, NoReturn

from .session import RankSession


class EvaluationSession(RankSession):
    """A rank among others that evaluates the restored checkpoint; its function returns metrics instead of reporting them."""

    def report(self, *_: Any, **__: Any) -> NoReturn:
        """Raise: a report belongs to a training, and this run may have a live one.

        Raises:
            RuntimeError: Always.

        """
        raise RuntimeError(
            "report() was called inside an evaluation, which adds nothing to the run: return the metrics, as a dict, from the "
            "function instead"
        )

    def log_metrics(self, *_: Any, **__: Any) -> None:
        """Record nothing: a framework's logger may log here as in a training."""
