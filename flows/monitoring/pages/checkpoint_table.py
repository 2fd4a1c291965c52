"""The table of a run's checkpoints, and why each is kept; pure."""

from collections.abc import Mapping, Sequence

from prefect_torch.ckpt.runs.metrics import find_metric, flatten_metrics
from prefect_torch.ckpt.text import show_age, show_bytes
from prefect_torch.flows.monitoring.text import show_number, show_time

from .stored_checkpoints import StoredCheckpoint

MAX_ROWS = 100
_MAX_METRICS = 8
_SHOWN_FIRST = ("best", "pinned", "in use")  # if there are more checkpoints than rows
_NOT_KEPT = "not kept; the next prune deletes it"


def checkpoint_rows(
    checkpoints: Sequence[StoredCheckpoint],
    kept: Mapping[str, Sequence[str]],
    first_metric: str | None,
    now_s: float,
) -> list[dict[str, str | int]]:
    """Return a row for each checkpoint, newest first; of more than `MAX_ROWS`, the best, pinned, used and newest ones.

    Args:
        checkpoints: The checkpoints in storage, oldest first.
        kept: The reasons to keep each, by id.
        first_metric: The score, whose column comes first; "a/b" for a nested one; None without a score.
        now_s: The time to which ages are counted.

    """
    shown = _choose(checkpoints, kept)
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


def _choose(checkpoints: Sequence[StoredCheckpoint], kept: Mapping[str, Sequence[str]]) -> list[StoredCheckpoint]:
    newest_first = sorted(checkpoints, key=lambda it: it.id, reverse=True)
    by_priority = sorted(newest_first, key=lambda it: not set(kept.get(it.id, ())) & set(_SHOWN_FIRST))
    return sorted(by_priority[:MAX_ROWS], key=lambda it: it.id, reverse=True)


def _metric_names(checkpoints: Sequence[StoredCheckpoint], first: str | None) -> list[str]:
    names = dict.fromkeys(name for checkpoint in checkpoints for name, _ in flatten_metrics(checkpoint.metrics))
    return sorted(names, key=lambda name: name != first)[:_MAX_METRICS]
