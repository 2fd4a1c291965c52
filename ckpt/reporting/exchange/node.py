"""The ranks of one machine, whose messages to rank 0 are aggregated: one of them sends those of all."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from .key_value import KeyValue

_GET_S = 5.0  # for keys that are known to be set


@dataclass(frozen=True, slots=True)
class Node:
    """The machine of a rank, where neighbouring ranks share one.

    The last rank to arrive sends the messages of all its ranks, and the first one reads a decision for all. So no rank has to
    arrive before the others, and none sends more than one request to the store of all ranks.

    Attributes:
        key_value: The dictionary that its ranks share. It raises ConnectionError once the process that serves it is gone.
        number: Its number.
        num_nodes: The number of machines.
        ranks: Its ranks.

    """

    key_value: KeyValue
    number: int
    num_nodes: int
    ranks: range

    def bundle_key(self, topic: str, number: int | None = None) -> str:
        """Return the key of a node's messages, packed; of this one's by default."""
        return f"{topic}/node {self.number if number is None else number}"

    def gather(self, topic: str, rank: int, mine: bytes) -> list[bytes] | None:
        """Add a rank's message to those of the node; the last rank returns all of them, by rank, to send them.

        Raises:
            ConnectionError: If the process that serves the node's dictionary is gone.

        """
        self.key_value.set(f"{topic}/{rank}", mine)
        if self.key_value.add(_came(topic), 1) < len(self.ranks):  # its answer comes after the message was stored
            return None
        return self.key_value.get([f"{topic}/{each}" for each in self.ranks], _GET_S)

    def forget_message(self, topic: str, rank: int) -> None:
        """Delete a rank's message, which was forwarded."""
        self.key_value.delete(f"{topic}/{rank}")
        if rank == self.ranks[0]:
            self.key_value.delete(_came(topic))

    def takes_reading(self, topic: str) -> bool:
        """Return whether this rank is the one that reads a decision for its node, and calls `hand_on`."""
        return self.key_value.add(_readers(topic), 1) == 1

    def hand_on(self, topic: str, decision: bytes) -> None:
        """Hand a decision on to the other ranks of the node."""
        self.key_value.set(topic, decision)

    def forget_decision(self, topic: str) -> None:
        """Delete a decision, which every rank of the node has read."""
        self.key_value.delete(topic)
        self.key_value.delete(_readers(topic))


def pack(messages: Sequence[bytes]) -> bytes:
    """Return messages as one."""
    return struct.pack(f">{len(messages) + 1}I", len(messages), *map(len, messages)) + b"".join(messages)


def unpack(packed: bytes) -> list[bytes]:
    """Undo `pack`."""
    (count,) = struct.unpack_from(">I", packed)
    lengths = struct.unpack_from(f">{count}I", packed, 4)
    messages, start = [], 4 * (count + 1)
    for length in lengths:
        messages.append(packed[start : start + length])
        start += length
    return messages


def _came(topic: str) -> str:
    return f"{topic}/came"


def _readers(topic: str) -> str:
    return f"{topic}/readers"
