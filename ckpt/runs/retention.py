"""Which checkpoints to keep: a pure decision over manifests, separate from any deletion."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Generic, Literal, Protocol, TypeAlias, TypeVar

from prefect_torch.ckpt.runs.metrics import Metrics, find_score, flatten_metrics

Order: TypeAlias = Literal["max", "min"]

_LONGEST_TIMEOUT_S = 1e9  # thirty years; datetime has a last year


class Committed(Protocol):
    """The properties of a checkpoint that a decision needs; a Manifest has them."""

    @property
    def id(self) -> str:
        """Its id, which sorts by age."""
        ...

    @property
    def step(self) -> int:
        """Its step."""
        ...

    @property
    def metrics(self) -> Metrics:
        """Its reported metrics, and those attached since."""
        ...


class Dated(Committed, Protocol):
    """The properties that a decision depending on the time needs in addition; a Manifest has them."""

    @property
    def created_at(self) -> datetime:
        """The time of the commit, with a time zone."""
        ...


C = TypeVar("C", bound=Committed)


@dataclass(frozen=True)
class RetentionPolicy:
    """A retention policy; the newest, pinned and protected checkpoints are kept in addition.

    Attributes:
        num_to_keep: The number of the best to keep by `checkpoint_score_attribute`, or of the newest if that is None.
            None keeps everything.
        checkpoint_score_attribute: A metric's name, or an "a/b" path into nested metrics; "eval/accuracy" is the accuracy that
            the evaluation "eval" attaches.
        checkpoint_score_order: Whether a high ("max") or a low ("min") score is good.
        keep_last: The number of the newest to keep in addition to the best.
        keep_every_n_steps: Keep every checkpoint whose step is a multiple of this, permanently.
        evaluation_timeout_s: Keep every checkpoint without a score for this many seconds after its commit, by the clocks of
            the committing and the pruning process, since its evaluation may yet attach one. None waits for no evaluation.
        keep_quarantined_days: The number of days that a damaged checkpoint's data stay after its quarantine, by the storage's
            clock, for an investigation or a restore. None keeps them until they are removed by hand.

    """

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: Order = "max"
    keep_last: int = 1
    keep_every_n_steps: int | None = None
    evaluation_timeout_s: float | None = None
    keep_quarantined_days: float | None = 7.0

    def __post_init__(self) -> None:
        """Raise ValueError for numbers that would keep nothing or have no meaning."""
        for name in ("num_to_keep", "keep_every_n_steps"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), "at least 1, or None")
        check_count("keep_last", self.keep_last)
        _check_order(self.checkpoint_score_order)
        _check_timeout(self.evaluation_timeout_s, self.checkpoint_score_attribute)
        days = self.keep_quarantined_days
        if days is not None and (isinstance(days, bool) or not isinstance(days, (int, float)) or not days >= 0):
            raise ValueError(f"keep_quarantined_days={days!r}: give days, 0 or more, or None to keep them")

    def __setstate__(self, state: "list[object] | dict[str, object]") -> None:
        """Restore a pickle, also one of version 0.1: a list of its fields; later fields get their defaults."""
        given = state if isinstance(state, dict) else dict(zip([it.name for it in fields(self)], state, strict=False))
        self.__dict__.update({it.name: given.get(it.name, it.default) for it in fields(self)})


@dataclass(frozen=True, slots=True)
class Plan(Generic[C]):
    """The decision of a policy.

    Attributes:
        keep: The reasons to keep each kept id: "latest", "best", "last", "every", "pinned", "in use",
            "awaiting evaluation", "recent", "all"; for a prune by a training also "deletion refused".
        drop: The checkpoints to delete, oldest first.

    """

    keep: dict[str, tuple[str, ...]]
    drop: tuple[C, ...]


def score(metrics: Metrics, attribute: str, order: Order) -> tuple[int, float]:
    """Return a key that sorts a better score higher: missing < NaN < numbers, in both orders.

    Text, None and nested metrics count as missing.
    """
    value = find_score(metrics, attribute)
    if value is None:
        return (0, 0.0)
    if value != value:  # noqa: PLR0124 - NaN is the one number that differs from itself
        return (1, 0.0)
    return (2, value if order == "max" else -value)  # unconverted: float() would overflow, and round values above 2**53


def check_count(name: str, value: object, wanted: str = "at least 1") -> None:
    """Raise ValueError unless `value` is an integer of at least 1.

    Raises:
        ValueError: If it is anything else.

    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}: give {wanted}")


def _check_timeout(timeout_s: object, attribute: str | None) -> None:
    if timeout_s is None:
        return
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, (int, float)) or not 0 <= timeout_s <= _LONGEST_TIMEOUT_S:
        raise ValueError(f"evaluation_timeout_s={timeout_s!r}: give seconds, {_LONGEST_TIMEOUT_S:g} at most, or None")
    if attribute is None:
        raise ValueError(
            f"evaluation_timeout_s={timeout_s!r} waits for the metric that sorts checkpoints, and there is none: give "
            "checkpoint_score_attribute, such as 'eval/accuracy'"
        )


def _check_order(order: str) -> None:
    if order not in ("max", "min"):
        raise ValueError(f"the order {order!r} is unknown: give 'max' or 'min'")


def sort_by_score(manifests: Sequence[C], attribute: str | None, order: Order) -> list[C]:
    """Return `manifests` best first; among equals, and without an attribute among all, the newer is first.

    Raises:
        ValueError: If `order` is neither "max" nor "min".

    """
    _check_order(order)
    newest_first = sorted(manifests, key=lambda manifest: manifest.id, reverse=True)
    if attribute is None:
        return newest_first
    return sorted(newest_first, key=lambda manifest: score(manifest.metrics, attribute, order), reverse=True)


def require_score(run: str, manifests: Sequence[Committed], attribute: str | None) -> None:
    """Raise unless one of the checkpoints, if there are any, has a number as the metric `attribute`: any would be the best.

    Raises:
        ValueError: Naming the run, and the metrics that they have. Not without an attribute, which sorts them by age.

    """
    if attribute is None or not manifests or any(find_score(it.metrics, attribute) is not None for it in manifests):
        return
    flat = {name for it in manifests for name, _ in flatten_metrics(it.metrics) if find_score(it.metrics, name) is not None}
    has = ", ".join(sorted(flat)) or "none"
    raise ValueError(f"no checkpoint of run {run!r} has a number as the metric {attribute!r}; they have {has}")


def overdue_evaluations(manifests: Sequence[Dated], policy: RetentionPolicy, now: datetime) -> frozenset[str]:
    """Return the ids whose evaluation has timed out without a score.

    Args:
        manifests: All committed checkpoints, in any order.
        policy: The policy with the evaluation timeout.
        now: The time, with a time zone.

    """
    if policy.evaluation_timeout_s is None:
        return frozenset()
    committed_before = now - timedelta(seconds=policy.evaluation_timeout_s)
    return frozenset(it.id for it in manifests if it.created_at <= committed_before and _lacks_score(it, policy))


def _lacks_score(checkpoint: Committed, policy: RetentionPolicy) -> bool:
    attribute = policy.checkpoint_score_attribute
    return attribute is not None and find_score(checkpoint.metrics, attribute) is None


def plan(
    manifests: Sequence[C],
    policy: RetentionPolicy,
    *,
    pinned: Collection[str] = (),
    in_use: Collection[str] = (),
    up_to: str | None = None,
    overdue: Collection[str] = (),
) -> Plan[C]:
    """Decide which checkpoints to keep and which to delete; the newest checkpoint is always kept.

    Args:
        manifests: All committed checkpoints, in any order.
        policy: The retention policy.
        pinned: The ids of pinned checkpoints.
        in_use: The ids that a training restores or another process reads.
        up_to: Checkpoints newer than this id stay, as "recent"; None for no such limit.
        overdue: The ids whose evaluation is no longer awaited; see `overdue_evaluations`.

    """
    pinned, in_use = frozenset(pinned), frozenset(in_use)  # perhaps sequences of half of a hundred thousand
    newest_first = sorted(manifests, key=lambda manifest: manifest.id, reverse=True)
    reasons: dict[str, list[str]] = defaultdict(list)

    def keep(kept: Sequence[C], reason: str) -> None:
        for manifest in kept:
            reasons[manifest.id].append(reason)

    best = sort_by_score(newest_first, policy.checkpoint_score_attribute, policy.checkpoint_score_order)
    keep(newest_first[:1], "latest")
    if policy.num_to_keep is None:
        keep(newest_first, "all")
    else:
        keep(best[: policy.num_to_keep], "best" if policy.checkpoint_score_attribute else "last")
    if policy.keep_last > 1:
        keep(newest_first[: policy.keep_last], "last")
    if policy.keep_every_n_steps is not None:
        keep([manifest for manifest in newest_first if manifest.step % policy.keep_every_n_steps == 0], "every")
    keep([manifest for manifest in newest_first if manifest.id in pinned], "pinned")
    keep([manifest for manifest in newest_first if manifest.id in in_use], "in use")
    if policy.evaluation_timeout_s is not None:
        waiting = [manifest for manifest in newest_first if _lacks_score(manifest, policy) and manifest.id not in overdue]
        keep(waiting, "awaiting evaluation")
    if up_to is not None:
        keep([manifest for manifest in newest_first if manifest.id > up_to], "recent")
    return Plan(
        keep={it.id: tuple(dict.fromkeys(reasons[it.id])) for it in newest_first if it.id in reasons},
        drop=tuple(manifest for manifest in reversed(newest_first) if manifest.id not in reasons),
    )
