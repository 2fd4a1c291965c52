"""The connection between the leader of a training and the node agent of a machine: authenticated messages of JSON and bytes.

Both prove that they know the key by answering a challenge, and each message carries a code (HMAC-SHA256) under a key that is
made from both challenges: without the key, nobody can begin a connection or write into one. Nothing is encrypted.
"""

import hashlib
import hmac
import json
import secrets
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

LINK_HEARTBEAT_S = 1.0  # between two heartbeats, both ways
_PROTOCOL = b"prefect-torch agent, protocol 1\n"
_NONCE_BYTES = 32
_CODE_BYTES = 32
_LENGTHS = struct.Struct(">IQ")
_LONGEST_HEADER = 1 << 26
_LONGEST_BODY = 1 << 32
_CHUNK = 1 << 20
_HEARTBEAT = {"type": "heartbeat"}
_KEEPALIVE = {"TCP_KEEPIDLE": 3, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 4}  # tcp(7); seconds, seconds, a number
# Of linux/tcp.h, since 6.15. Else packets that were lost are sent again after 6 and then after 13 seconds: a network that is
# back after 7 counts as gone for 13.
_TCP_RTO_MAX_MS, _SEND_AGAIN_MS = 44, 1000


class LinkError(ConnectionError):
    """The other end of a link is gone, or does not know the key."""


class Link:
    """One end of an authenticated connection; any thread may send, one receives.

    Args:
        connection: The connection, on which both ends have proved that they know the key.
        sends: The key of the messages that this end sends.
        receives: The key of those that it receives.

    Attributes:
        heard_s: When the last bytes came, by this machine's monotonic clock.

    """

    def __init__(self, connection: socket.socket, sends: bytes, receives: bytes) -> None:
        self.heard_s = time.monotonic()
        self._connection = connection
        self._sends, self._receives = sends, receives
        self._num_sent = self._num_received = 0
        self._sending = threading.Lock()

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        """Send a message, without waiting for its arrival.

        Raises:
            LinkError: If the other end is gone.

        """
        with self._sending:
            self._send(header, body)

    def send_heartbeat(self) -> None:
        """Send a heartbeat, unless a message is being sent, which is as good as one.

        Raises:
            LinkError: If the other end is gone.

        """
        if self._sending.acquire(blocking=False):
            try:
                self._send(_HEARTBEAT, b"")
            finally:
                self._sending.release()

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Return the next message that is no heartbeat.

        Raises:
            LinkError: If the other end is gone, or the message is not from it.

        """
        while True:
            lengths = self._read(_LENGTHS.size)
            header_bytes, body_bytes = _LENGTHS.unpack(lengths)
            if header_bytes > _LONGEST_HEADER or body_bytes > _LONGEST_BODY:
                raise LinkError("a message is too long")
            code, header, body = self._read(_CODE_BYTES), self._read(header_bytes), self._read(body_bytes)
            if not hmac.compare_digest(code, _code(self._receives, self._num_received, lengths, header, body)):
                raise LinkError("a message is not from the other end of the connection")
            self._num_received += 1
            fields = json.loads(header)
            if fields != _HEARTBEAT:
                return fields, body

    def close(self) -> None:
        """Close the connection; a thread that receives gets a LinkError."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # the other end has closed it
            pass
        finally:
            self._connection.close()

    def _send(self, header: Mapping[str, Any], body: bytes) -> None:
        encoded = json.dumps(header).encode()
        lengths = _LENGTHS.pack(len(encoded), len(body))
        code = _code(self._sends, self._num_sent, lengths, encoded, body)
        self._num_sent += 1
        try:
            self._connection.sendall(lengths + code + encoded)
            if body:
                self._connection.sendall(body)
        except OSError as exc:
            raise LinkError(f"the connection is lost: {exc}") from exc

    def _read(self, num_bytes: int) -> bytes:
        parts, left = [], num_bytes
        while left:
            try:
                part = self._connection.recv(min(left, _CHUNK))
            except OSError as exc:
                raise LinkError(f"the connection is lost: {exc}") from exc
            if not part:
                raise LinkError("the other end has closed the connection")
            self.heard_s = time.monotonic()
            parts.append(part)
            left -= len(part)
        return b"".join(parts)


def greet_agent(connection: socket.socket, key: str, timeout_s: float, give_up_s: float) -> Link:
    """Return the leader's end of a link.

    Args:
        connection: A connection that may come from anybody.
        key: The secret that the agent must know.
        timeout_s: How long the other end may take to prove that.
        give_up_s: How long the kernel keeps the connection without an answer of the other machine.

    Raises:
        LinkError: If the other end does not know the key.

    """
    return _greet(connection, key, timeout_s, give_up_s, is_leader=True)


def greet_leader(connection: socket.socket, key: str, timeout_s: float, give_up_s: float) -> Link:
    """Return an agent's end of a link; see `greet_agent`."""
    return _greet(connection, key, timeout_s, give_up_s, is_leader=False)


def _greet(connection: socket.socket, key: str, timeout_s: float, give_up_s: float, *, is_leader: bool) -> Link:
    secret, own = key.encode(), secrets.token_bytes(_NONCE_BYTES)
    deadline_s = time.monotonic() + timeout_s
    try:
        connection.settimeout(timeout_s)
        connection.sendall(_PROTOCOL + own)
        if _exactly(connection, len(_PROTOCOL), deadline_s) != _PROTOCOL:
            raise LinkError("the other end speaks another protocol")
        other = _exactly(connection, _NONCE_BYTES, deadline_s)
        challenges = own + other if is_leader else other + own
        keys = {
            part: _digest(secret, part, challenges) for part in (b"proof of leader", b"proof of agent", b"leader", b"agent")
        }
        ours, theirs = (b"leader", b"agent") if is_leader else (b"agent", b"leader")
        if not is_leader:  # the end that connects proves it first
            connection.sendall(keys[b"proof of agent"])
        if not hmac.compare_digest(_exactly(connection, _CODE_BYTES, deadline_s), keys[b"proof of " + theirs]):
            raise LinkError("the other end does not know the key")
        if is_leader:
            connection.sendall(keys[b"proof of leader"])
        connection.settimeout(None)
        _set_options(connection, give_up_s)
    except OSError as exc:
        if isinstance(exc, LinkError):
            raise
        raise LinkError(f"the other end did not prove that it knows the key: {exc}") from exc
    return Link(connection, keys[ours], keys[theirs])


def _exactly(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        connection.settimeout(max(0.001, deadline_s - time.monotonic()))
        part = connection.recv(num_bytes - len(data))
        if not part:
            raise LinkError("the other end has closed the connection")
        data += part
    return data


def keep_alive(connection: socket.socket) -> None:
    """Have the kernel end a connection, on which nothing may be sent, a quarter of a minute after the other machine is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _set_options(connection: socket.socket, give_up_s: float) -> None:
    keep_alive(connection)  # heartbeats begin with the agent's hello
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # else a send into a cut link blocks for a quarter of an hour
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(give_up_s * 1000))
        with suppress(OSError):  # an older kernel
            connection.setsockopt(socket.IPPROTO_TCP, _TCP_RTO_MAX_MS, _SEND_AGAIN_MS)


def _code(key: bytes, number: int, lengths: bytes, header: bytes, body: bytes) -> bytes:
    code = hmac.new(key, struct.pack(">Q", number) + lengths + header, hashlib.sha256)
    code.update(body)
    return code.digest()


def _digest(secret: bytes, part: bytes, challenges: bytes) -> bytes:
    return hmac.new(secret, part + b"\n" + challenges, hashlib.sha256).digest()
