"""Hosts on this machine, each a network namespace with a name of its own, connected by a switch whose cables can be cut."""

import os
import random
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

NO_NAMESPACES = "namespaces cannot be made here: that takes root and iproute2"


def can_make_hosts() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nsenter") is None:
        return False
    name = f"ptprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


class Network:
    """Hosts that reach each other and this machine, at `address`."""

    def __init__(self, subnet: str, tag: str, names: tuple[str, ...]) -> None:
        self.address = f"{subnet}.254"
        self.command = f"nsenter --net=/run/netns/{tag}-{{host}} unshare --uts sh -c 'hostname {{host}}; exec {{agent}}'"
        self._switch = f"{tag}-switch"
        self._tag = tag
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self.names = list(names)
        self.addresses = {name: f"{subnet}.{number}" for name, number in self._numbers.items()}

    def namespace(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def cut(self, host: str) -> None:
        ip("-n", self._switch, "link", "set", f"port{self._numbers[host]}", "down")

    def mend(self, host: str) -> None:
        ip("-n", self._switch, "link", "set", f"port{self._numbers[host]}", "up")

    def processes(self, host: str) -> list[psutil.Process]:
        """Return what runs on a host."""
        pids = subprocess.run(["ip", "netns", "pids", self.namespace(host)], capture_output=True, check=True, text=True).stdout
        found = []
        for pid in pids.split():
            with suppress(psutil.Error):
                process = psutil.Process(int(pid))
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def find(self, host: str, word: str) -> list[psutil.Process]:
        """Return the processes of a host with `word` among their arguments."""
        found = []
        for process in self.processes(host):
            with suppress(psutil.Error):
                found += [process] if any(word in argument for argument in process.cmdline()) else []
        return found


@contextmanager
def network(*names: str) -> Iterator[Network]:
    """Yield hosts of these names, which are removed in the end."""
    tag = f"pt{os.getpid()}x{random.randrange(1000)}"
    subnet = f"198.{18 + random.randrange(2)}.{random.randrange(256)}"  # RFC 2544: for tests of networks
    made = Network(subnet, tag, names)
    switch, cable = f"{tag}-switch", f"{tag}c"[:15]
    namespaces = [switch, *(made.namespace(name) for name in names)]
    try:
        for namespace in namespaces:
            ip("netns", "add", namespace)
        ip("-n", switch, "link", "add", "sw0", "type", "bridge")
        ip("-n", switch, "link", "set", "sw0", "up")
        ip("link", "add", cable, "type", "veth", "peer", "name", "port0", "netns", switch)
        ip("addr", "add", f"{made.address}/24", "dev", cable)
        ip("link", "set", cable, "up")
        for number in range(len(names) + 1):
            if number:
                namespace = namespaces[number]
                ip("-n", namespace, "link", "add", "lan0", "type", "veth", "peer", "name", f"port{number}", "netns", switch)
                ip("-n", namespace, "addr", "add", f"{subnet}.{number}/24", "dev", "lan0")
                ip("-n", namespace, "link", "set", "lan0", "up")
                ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", switch, "link", "set", f"port{number}", "master", "sw0", "up")
        yield made
    finally:
        for namespace in namespaces:  # with their ends of the cables, also this machine's
            if Path("/run/netns", namespace).exists():
                ip("netns", "del", namespace)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
