"""Exchanges between ranks in which no rank waits for a lost peer."""

import json
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from prefect_torch.ckpt.errors import PeerGoneError, ReportMismatchError
from prefect_torch.ckpt.text import show_some

from .exits import ExitStatus, RankExit, announce_exit, decode_exit, exit_key, has_failure, is_first_exit, read_exits
from .key_value import KeyValue
from .node import Node, pack, unpack

_logger = logging.getLogger(__name__)

_POLL_S = 0.2
_LATE_S = 0.002
_SILENT_S = 30.0  # how long a rank waits for others before it logs a warning, and ten times that before the next
_RANKS_PER_POLL_S = 1000  # all ranks wait for rank 0 concurrently, and one process answers them
_MOST_LISTED = 8  # the number of ranks that left and are named in an error
_ALL_LEFT = "all left"
_REPORTS_EQUALLY = "every rank must call report() equally often"


class _LongWait:
    """A wait of which a warning is logged after `_SILENT_S`, and then again each time ten times that has passed.

    Args:
        warn: Logs the warning; called with the seconds that were waited.

    """

    def __init__(self, warn: Callable[[float], None]) -> None:
        self._warn = warn
        self._began_s = time.monotonic()
        self._next_s = _SILENT_S

    def warn_if_due(self) -> None:
        """Log the warning if it is time for one."""
        if time.monotonic() > self._began_s + self._next_s:
            self._warn(self._next_s)
            self._next_s += 10 * _SILENT_S


class Peers:
    """The other ranks of one attempt, as seen from one rank.

    Args:
        key_value: The dictionary that the ranks share.
        rank: This rank.
        world_size: The number of ranks.
        node: The ranks of this rank's machine, whose messages are aggregated; None where each rank sends its own.

    """

    def __init__(self, key_value: KeyValue, rank: int, world_size: int, node: Node | None = None) -> None:
        self._key_value = key_value
        self.rank = rank
        self.world_size = world_size
        self._node = node
        self._read_for_node: set[str] = set()
        self._sent_for_node: set[str] = set()
        num_waiting = world_size if node is None else node.num_nodes
        self._poll_s = _POLL_S if rank == 0 else max(_POLL_S, num_waiting / _RANKS_PER_POLL_S)
        self._look_s = max(_POLL_S, world_size / _RANKS_PER_POLL_S)

    def exchange(
        self,
        topic: str,
        mine: bytes,
        meanwhile: Callable[[], None] | None = None,
        merge: Callable[[Sequence[bytes]], bytes] | None = None,
        reason: str = _REPORTS_EQUALLY,
    ) -> list[bytes] | None:
        """Send `mine` to rank 0 and return there the messages of all ranks, by rank; other ranks return None immediately.

        Args:
            topic: The name of the exchange.
            mine: This rank's message.
            meanwhile: Called on rank 0 before it waits for late ranks, and not called if none is late.
            merge: Merges the messages of a machine into one, where they are aggregated; rank 0 then returns the merged ones.
            reason: Why a rank may be late, or what it has to do, for the warning of a long wait.

        """
        self._send(topic, mine, merge or pack)
        if self.rank != 0:
            return None
        node = self._node
        if node is None:
            keys = [f"{topic}/{rank}" for rank in range(1, self.world_size)]
        else:
            keys = [node.bundle_key(topic, number) for number in range(node.num_nodes)]
        sent: list[bytes] | None = None
        if keys and meanwhile is not None and (sent := self._try_get(keys, _LATE_S)) is None:
            meanwhile()
        sent = sent or self._wait(keys, topic, reason)
        if node is None:
            return [mine, *sent]
        return sent if merge is not None else [message for packed in sent for message in unpack(packed)]

    def decide(self, topic: str, decision: bytes) -> bytes:
        """As rank 0, send `decision` to all ranks and return it."""
        if self.world_size > 1:
            self._key_value.set(topic, decision)
        return decision

    def decision(self, topic: str, *, unless: str | None = None, by: str = "rank 0", reason: str = _REPORTS_EQUALLY) -> bytes:
        """Return the decision of rank 0, or of the leader.

        Args:
            topic: The topic of the decision.
            unless: The topic that rank 0 would set instead of deciding; then this raises ReportMismatchError.
            by: Who decides, for the warning of a long wait.
            reason: Why the decision may be late, or what the ranks have to do, for that warning.

        """
        wait = partial(self._wait, [topic], topic, reason, by, unless)
        if self._node is None:
            return wait()[0]
        try:
            takes_reading = self._node.takes_reading(topic)
        except ConnectionError:
            return wait()[0]
        if not takes_reading:
            return wait(partial(self._listen_in_node, self._node, topic))[0]
        self._read_for_node.add(topic)
        (decision,) = wait()
        with suppress(ConnectionError):  # the other ranks see it, too, and read for themselves
            self._node.hand_on(topic, decision)
        return decision

    def scatter(self, topic: str, parts: Sequence[bytes]) -> None:
        """As rank 0, send each rank, including this one, its own message."""
        for rank, part in enumerate(parts):
            self._key_value.set(f"{topic}/{rank}", part)

    def scattered(self, topic: str) -> bytes:
        """Return rank 0's message for this rank, and delete it."""
        key = f"{topic}/{self.rank}"
        (part,) = self._wait([key], topic, _REPORTS_EQUALLY, "rank 0")
        self._key_value.delete(key)
        return part

    def forget_message(self, topic: str) -> None:
        """Delete this rank's message in the exchange `topic`, which rank 0 has read."""
        if self._node is None:
            if self.rank != 0:
                self._key_value.delete(f"{topic}/{self.rank}")
            return
        with suppress(ConnectionError):  # with its store, the message is gone
            self._node.forget_message(topic, self.rank)
        if topic in self._sent_for_node:  # of a long message, only the end that has stored its parts knows them
            self._sent_for_node.remove(topic)
            self._key_value.delete(self._node.bundle_key(topic))

    def forget_decision(self, topic: str) -> None:
        """Delete what this rank has set of the decision on `topic`, which every rank has read."""
        if self.rank == 0 and self.world_size > 1:
            self._key_value.delete(topic)
        self.forget_reading(topic)

    def forget_reading(self, topic: str) -> None:
        """Delete what this rank has handed on to its node of the decision on `topic`, which every rank has read."""
        if self._node is not None and topic in self._read_for_node:
            self._read_for_node.remove(topic)
            with suppress(ConnectionError):
                self._node.forget_decision(topic)

    def note(self, topic: str) -> None:
        """As another rank than 0, count this one among those for which `topic` holds."""
        self._key_value.add(topic, 1)

    def have_all_noted(self, topic: str) -> bool:
        """Return whether every rank but 0 has called `note` for `topic`."""
        return self.world_size == 1 or self._key_value.add(topic, 0) == self.world_size - 1

    def leave(self, own: RankExit) -> None:
        """Announce to all ranks that this one left; a rank that waits for it raises instead."""
        announce_exit(self._key_value, own)

    def wait_for_all_exits(self) -> list[RankExit]:
        """Wait until every rank left and return one exit of each kind; or the known exits once a rank failed.

        The exits of one kind have the same status and number of reports, and the lowest rank's stands for all. Rank 0 reads
        all of them and sends the result to the others, or each of ten thousand ranks would read ten thousand exits.
        """
        keys = [exit_key(rank) for rank in range(self.world_size)] if self.rank == 0 else [_ALL_LEFT]
        long_wait = _LongWait(self._warn_of_running)
        while (values := self._try_get(keys, self._poll_s)) is None:
            if has_failure(self._key_value):
                known = read_exits(self._key_value)
                if any(not it.has_returned for it in known):
                    return known
            long_wait.warn_if_due()
        if self.rank != 0:
            return [RankExit(**it) for it in json.loads(values[0])]
        first_alike: dict[tuple[ExitStatus, int | None], RankExit] = {}
        for each in map(decode_exit, values):
            first_alike.setdefault((each.status, each.reports), each)
        self.decide(_ALL_LEFT, json.dumps([asdict(it) for it in first_alike.values()]).encode())
        self._key_value.check(_ALL_LEFT)  # the reply proves that it has arrived, however soon this process ends
        return list(first_alike.values())

    def _send(self, topic: str, mine: bytes, merge: Callable[[Sequence[bytes]], bytes]) -> None:
        node = self._node
        if node is None:
            if self.rank != 0:
                self._key_value.set(f"{topic}/{self.rank}", mine)
            return
        try:
            messages = node.gather(topic, self.rank, mine)
        except ConnectionError as exc:
            raise PeerGoneError(
                f"rank {node.ranks[0]} is gone, which serves its machine, so {topic.replace('/', ' ')} of rank {self.rank} "
                "cannot complete"
            ) from exc
        if messages is not None:
            self._sent_for_node.add(topic)
            self._key_value.set(node.bundle_key(topic), merge(messages))

    def _listen_in_node(self, node: Node, topic: str) -> list[bytes] | None:
        """Return the decision that another rank of the node hands on, or after a while rank 0's own; None if neither is set."""
        look_s = time.monotonic() + self._look_s
        while (now_s := time.monotonic()) < look_s:
            try:
                return node.key_value.get([topic], min(_POLL_S, look_s - now_s))
            except TimeoutError:
                continue
            except ConnectionError:
                time.sleep(_POLL_S)
        return self._try_get([topic], 0.0)

    def _wait(
        self,
        keys: Sequence[str],
        topic: str,
        reason: str,
        by: str | None = None,
        unless: str | None = None,
        listen: Callable[[], list[bytes] | None] | None = None,
    ) -> list[bytes]:
        if not keys:
            return []
        long_wait = _LongWait(lambda waited_s: self._warn_of(topic, by or self._late(keys), reason, waited_s))
        listen = listen or partial(self._try_get, keys, self._poll_s)
        while True:
            if (values := listen()) is not None:
                return values
            if unless is not None and self._key_value.check(unless) and (values := self._try_get(keys, 0.0)) is None:
                raise ReportMismatchError(
                    f"rank {self.rank} asks should_checkpoint() while rank 0 reports; call both equally often on every rank"
                )
            if exits := [it for it in read_exits(self._key_value) if it.rank != self.rank]:
                if (values := self._try_get(keys, 0.0)) is not None:  # a message that a peer sent before it left still counts
                    return values
                self._raise_for(exits, topic)
            long_wait.warn_if_due()

    def _try_get(self, keys: Sequence[str], timeout_s: float) -> list[bytes] | None:
        try:
            return self._key_value.get(keys, timeout_s)
        except TimeoutError:
            return None

    def _late(self, keys: Sequence[str]) -> str:
        """As rank 0, return the ranks whose messages are missing, in words."""
        late = show_some([key.rpartition("/")[2] for key in keys if not self._key_value.check(key)])
        return f"rank {late}" if self._node is None else f"a rank of {late}"

    def _warn_of(self, topic: str, whom: str, reason: str, waited_s: float) -> None:
        _logger.warning(
            "rank %d has waited %g s in %s for %s, and still waits: %s",
            self.rank,
            waited_s,
            topic.replace("/", " "),
            whom,
            reason,
        )

    def _warn_of_running(self, waited_s: float) -> None:
        """As the first rank that left, log which have not: one may wait in a collective for a rank that left."""
        if not is_first_exit(self._key_value, self.rank):
            return
        left = read_exits(self._key_value)
        running = sorted(set(range(self.world_size)) - {it.rank for it in left})
        if running:
            (own,) = [it for it in left if it.rank == self.rank]
            _logger.warning(
                "%s %g s ago, and waits for rank %s to return: if it hangs, it is in a collective that every rank must join",
                own,
                waited_s,
                show_some([str(rank) for rank in running]),
            )

    def _raise_for(self, exits: list[RankExit], topic: str) -> None:
        exits = sorted(exits, key=lambda it: it.has_returned)
        listed = "; ".join(str(it) for it in exits[:_MOST_LISTED]) + (
            f"; and {len(exits) - _MOST_LISTED} more" if len(exits) > _MOST_LISTED else ""
        )
        if all(it.has_returned for it in exits):
            raise ReportMismatchError(
                f"{listed}, while rank {self.rank} waits for it in {topic.replace('/', ' ')}; "
                "call report() equally often on every rank"
            )
        raise PeerGoneError(f"{listed}, so {topic.replace('/', ' ')} of rank {self.rank} cannot complete")
