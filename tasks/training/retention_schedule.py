"""Retention during a training: one prune at a time, as often as pages are published, and ever less often in months."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from prefect.context import TagsContext
from prefect.futures import PrefectFuture
from prefect_torch.ckpt import Plan, RetentionPolicy
from prefect_torch.ckpt.reporting.events import CommitEvent
from prefect_torch.ckpt.runs.deletion.limits import PruneLimits
from prefect_torch.ckpt.runs.manifest import ManifestMemory
from prefect_torch.ckpt.runs.metrics import find_score
from prefect_torch.ckpt.runs.retention import Committed, plan
from prefect_torch.ckpt.text import encodable
from prefect_torch.tasks.prune_task import REFUSED, prune_checkpoints
from prefect_torch.tasks.run_logs import get_run_logger

from .backoff import Backoff
from .job import TrainJob
from .observers import CheckpointsPruned, Observers

_LASTING = frozenset({"every", "pinned"})  # a checkpoint that is unpinned meanwhile is deleted in the next attempt
_GARBAGE_EVERY_S = 600.0  # a search lists all files of all checkpoints
_LONGEST_PAUSE_S = 600.0  # Prefect keeps each task run in its database, and an object of it in the flow's process
_LARGE_BYTES = 1 << 30  # once so much was committed, a prune is due without a pause


class RetentionSchedule:
    """Submits prunes after commits; at most one runs at a time, and one always runs after the last commit.

    Each prune is a task run, so there is a pause between two of them, unless 1 GiB was committed since the last one. It is half
    a minute in the first hours, and grows to ten minutes in the second day.

    Remembers only the checkpoints that the policy may yet delete, so that a decision costs the same after a million commits as
    after a hundred. A prune itself decides by the checkpoints in storage.

    Args:
        job: The training.
        claim: The key of the attempt's claim.
        known: The checkpoints that were committed before.
        restored: The id of the checkpoint that the ranks restore, which must be kept; or None.
        observers: They are notified of what was pruned.
        memory: The manifests that were read before; prunes read only others.
        clock: Returns the time in seconds, for the pauses.
        has_leftovers: Whether the attempt before was killed or has failed, so that it may have left data without a manifest:
            they are looked for at the beginning and at the end, even if the policy keeps all checkpoints.

    """

    def __init__(
        self,
        job: TrainJob,
        claim: str,
        known: Sequence[Committed],
        restored: str | None,
        observers: Observers,
        memory: ManifestMemory,
        clock: Callable[[], float] = time.monotonic,
        *,
        has_leftovers: bool = False,
    ) -> None:
        self._job = job
        self._policy = job.policy
        self._claim = claim
        self._observers = observers
        self._candidates: list[Committed] = list(known)
        self._in_use: tuple[str, ...] = () if restored is None else (restored,)
        self._memory = memory
        self._backoff = Backoff(clock, longest_s=_LONGEST_PAUSE_S)
        self._bytes_since_prune = 0
        self._garbage_due_s = time.monotonic()
        self._has_leftovers = self._is_search_owed = has_leftovers
        self._running: PrefectFuture[Any] | None = None
        self._done = False
        self._changed = True  # the policy may have changed since these were committed
        self._warned = False
        self._is_refused = False
        self._recorded: str | None = None

    def committed(self, checkpoint: CommitEvent) -> None:
        """Take a new checkpoint into account."""
        self._bytes_since_prune += checkpoint.bytes
        if self._policy.num_to_keep is not None:
            self._candidates.append(checkpoint)
            self._changed = True
        if self._policy.evaluation_timeout_s is None:  # with a timeout, its score may be attached later
            self._warn_of_missing_score(checkpoint, self._policy)

    def prune_due(self, recorded: str | None) -> None:
        """Submit a prune if one is due, there may be something to delete, and none is running; returns immediately.

        Args:
            recorded: The newest checkpoint whose report is in the metric history. Newer ones are kept for now: after a crash,
                their reports would be in their manifests alone.

        """
        self._prune(recorded, is_due=self._backoff.wait_s() == 0 or self._bytes_since_prune >= _LARGE_BYTES)

    def _prune(self, recorded: str | None, *, is_due: bool) -> None:
        if recorded != self._recorded:
            self._recorded, self._changed = recorded, True
        if self._running is not None and self._done:
            self._take_result(self._running)
        if self._is_refused or not self._changed or not is_due or recorded is None or self._running is not None:
            return
        self._changed = False
        if self._may_drop(recorded) or self._is_search_owed:
            self._done = False
            self._backoff.record()
            self._bytes_since_prune = 0
            with TagsContext(current_tags=set()):  # under a tag with a concurrency limit, it would wait for the attempt
                try:
                    self._running = prune_checkpoints.submit(
                        self._job.store.storage,
                        self._job.run,
                        self._policy,
                        limits=PruneLimits(self._in_use, recorded, self._claim),
                        memory=self._memory,
                        garbage=self._take_garbage_turn(),
                    )
                except RuntimeError as exc:  # no thread is left for the moment
                    get_run_logger().warning("a prune could not be started, and is tried again: %s", exc)
                    self._changed = True
                    return
            self._is_search_owed = False
            self._running.add_done_callback(self._finished)

    def _may_drop(self, recorded: str) -> bool:
        policy = self._policy
        if policy.evaluation_timeout_s is None:
            decided = plan(self._candidates, policy, in_use=self._in_use, up_to=recorded)
            self._forget_settled(decided)
            return bool(decided.drop)
        # The storage, at the time of the prune, decides which have been evaluated since and which were too late.
        return policy.num_to_keep is not None and len(self._candidates) > policy.num_to_keep

    def _forget_settled(self, decided: Plan[Any]) -> None:
        """Forget checkpoints that are kept whatever is committed later, and are not needed to find the best or the last."""
        settled = {checkpoint_id for checkpoint_id, why in decided.keep.items() if _LASTING.issuperset(why)}
        if settled:
            self._candidates = [checkpoint for checkpoint in self._candidates if checkpoint.id not in settled]

    def _take_garbage_turn(self) -> bool:
        """Return whether this prune looks for garbage, and put the next search off if it does."""
        due = time.monotonic() >= self._garbage_due_s
        if due:
            self._garbage_due_s = time.monotonic() + _GARBAGE_EVERY_S
        return due

    def finish(self, recorded: str | None, *, may_go_on: bool = False) -> None:
        """Return once the storage holds only what the policy keeps, or one more prune has failed.

        Args:
            recorded: As for `prune_due`.
            may_go_on: Whether another attempt may follow, which must not wait for a listing of all files. It looks for garbage
                with its own first prune.

        """
        self._wait()
        self._in_use = ()  # no rank is left to restore it
        self._garbage_due_s = math.inf if may_go_on else time.monotonic()
        self._is_search_owed = self._has_leftovers and not may_go_on
        self._changed = True
        self._prune(recorded, is_due=True)
        self._wait()

    def _wait(self) -> None:
        if self._running is not None:
            self._running.wait()
            self._take_result(self._running)

    def _finished(self, _: PrefectFuture[Any]) -> None:
        self._done = True

    def _take_result(self, prune: PrefectFuture[Any]) -> None:
        """Forget what was deleted; a prune that failed shows in its own task run, and the next one tries again."""
        self._running = None
        decided = prune.result(raise_on_failure=False)
        if not isinstance(decided, BaseException):
            self._is_refused = any(REFUSED in why for why in decided.keep.values())  # each further prune would leave objects
            self._observers.notify(CheckpointsPruned(decided))
            dropped = {manifest.id for manifest in decided.drop}
            self._candidates = [checkpoint for checkpoint in self._candidates if checkpoint.id not in dropped]
            self._forget_settled(decided)

    def _warn_of_missing_score(self, checkpoint: Committed, policy: RetentionPolicy) -> None:
        attribute = policy.checkpoint_score_attribute
        if attribute is None or self._warned or find_score(checkpoint.metrics, attribute) is not None:
            return
        self._warned = True
        get_run_logger().warning(
            "checkpoint %s has no metric %r that is a number, by which checkpoints are sorted; it has %s. "
            "Such checkpoints sort below all others, and the latest is kept in any case",
            checkpoint.id,
            attribute,
            encodable(", ".join(sorted(checkpoint.metrics))) or "none",
        )
