"""The checkpoints of a run as rows of a table: a pure description of what is in storage, and why."""

from collections.abc import Mapping, Sequence

from prefect_torch.ckpt.metrics import find_metric, flatten_metrics
from prefect_torch.ckpt.wording import show_age, show_bytes
from prefect_torch.flows.monitoring.text import show_number, show_time

from .stored_checkpoints import StoredCheckpoint

MAX_ROWS = 100
_MAX_METRICS = 8
_WORTH_SHOWING = ("best", "pinned", "in use")  # when there are more than fit
_NOT_KEPT = "nothing; goes with the next prune"


def checkpoint_rows(
    saved: Sequence[StoredCheckpoint],
    kept: Mapping[str, Sequence[str]],
    first_metric: str | None,
    now_s: float,
) -> list[dict[str, str | int]]:
    """Return a row for each checkpoint, newest first; of more than `MAX_ROWS`, the best, pinned, used and newest ones.

    Args:
        saved: What is in storage, oldest first.
        kept: Why each is kept, by id.
        first_metric: The metric that ranks them, which comes first; "a/b" for a nested one.
        now_s: The time that ages are counted to.

    """
    shown = _choose(saved, kept)
    names = _metric_names(shown, first_metric)
    return [
        {
            "id": checkpoint.id,
            "step": checkpoint.step,
            "kept because": ", ".join(kept.get(checkpoint.id, ())) or _NOT_KEPT,
            **{name: show_number(find_metric(checkpoint.metrics, name)) for name in names[:1]},
            "size": show_bytes(checkpoint.bytes),
            "age": show_age(now_s - checkpoint.created_s),
            **{name: show_number(find_metric(checkpoint.metrics, name)) for name in names[1:]},
            "committed (UTC)": show_time(checkpoint.created_s),
        }
        for checkpoint in shown
    ]


def _choose(saved: Sequence[StoredCheckpoint], kept: Mapping[str, Sequence[str]]) -> list[StoredCheckpoint]:
    newest_first = sorted(saved, key=lambda it: it.id, reverse=True)
    by_worth = sorted(newest_first, key=lambda it: not set(kept.get(it.id, ())) & set(_WORTH_SHOWING))
    return sorted(by_worth[:MAX_ROWS], key=lambda it: it.id, reverse=True)


def _metric_names(saved: Sequence[StoredCheckpoint], first: str | None) -> list[str]:
    names = dict.fromkeys(name for checkpoint in saved for name, _ in flatten_metrics(checkpoint.metrics))
    return sorted(names, key=lambda name: name != first)[:_MAX_METRICS]
