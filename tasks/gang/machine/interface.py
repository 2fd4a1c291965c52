"""The network interface with an address; the standard library only."""

import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

_SIOCGIFADDR = 0x8915  # netdevice(7)
_INTERFACES_6 = Path("/proc/net/if_inet6")


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`; None if there is none, or outside of Linux.

    Gloo and NCCL otherwise take the interface of the host's name, or the first that they find, which other machines may not
    reach.
    """
    if sys.platform != "linux":
        return None
    if ":" in address:
        packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0]).hex()
        lines = (line.split() for line in _INTERFACES_6.read_text().splitlines())
        return next((fields[-1] for fields in lines if fields[0] == packed), None)
    return next((name for _, name in socket.if_nameindex() if _address_4(name) == address), None)


def _address_4(interface: str) -> str | None:
    import fcntl  # noqa: PLC0415 - not available on Windows

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked, suppress(OSError):  # it has no such address
        answer = fcntl.ioctl(asked.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return None
