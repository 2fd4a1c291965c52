"""Hosts on this machine, each a network namespace with a name and an OpenSSH server of its own.

They are connected by a switch, whose cables can be cut. What a host runs is no child of who asked for it, as on real hosts.
"""

import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
from servers import START_S

NO_HOSTS = "hosts cannot be made here: that takes root, iproute2 and an OpenSSH server"
SSHD = shutil.which("sshd", path=f"{os.environ['PATH']}{os.pathsep}/usr/sbin")


def can_make_hosts() -> bool:
    if os.geteuid() != 0 or None in {SSHD, *map(shutil.which, ("ip", "nsenter", "ssh"))}:
        return False
    name = f"ptprobe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made


class Network:
    """Hosts that reach each other and this machine, at `address`."""

    def __init__(self, subnet: str, tag: str, names: tuple[str, ...], folder: Path) -> None:
        self.address = f"{subnet}.254"
        self.command = f"ssh -F {folder / 'ssh_config'} {{host}}"
        self._folder = folder
        self._switch = f"{tag}-switch"
        self._tag = tag
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self.names = list(names)
        self.addresses = {name: f"{subnet}.{number}" for name, number in self._numbers.items()}

    def namespace(self, host: str) -> str:
        return f"{self._tag}-{host}"

    def serve_ssh(self, stack: ExitStack) -> None:
        """Serve this user on every host, until `stack` is left."""
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # sshd confines a part of itself there
        for name in ("host", "user"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", self._folder / name], check=True)
        lines = [f"AuthorizedKeysFile {self._folder / 'user.pub'}", "StrictModes no", "PermitRootLogin yes", "PidFile none"]
        (self._folder / "sshd_config").write_text("\n".join([*lines, "UsePAM no", "PasswordAuthentication no"]))
        here = [f"Host {host}\n  HostName {address}\n" for host, address in self.addresses.items()]
        known = "Host *\n  StrictHostKeyChecking no\n  UserKnownHostsFile /dev/null\n  LogLevel ERROR\n  ConnectTimeout 10\n"
        (self._folder / "ssh_config").write_text("".join([*here, known, f"  IdentityFile {self._folder / 'user'}\n"]))
        serve = f"exec {SSHD} -D -e -h {self._folder / 'host'} -f {self._folder / 'sshd_config'}"
        for host in self.names:
            enter = ["nsenter", f"--net=/run/netns/{self.namespace(host)}", "unshare", "--uts"]
            server = subprocess.Popen([*enter, "sh", "-c", f"hostname {host}; {serve}"], stderr=subprocess.DEVNULL)
            stack.callback(server.wait)
            stack.callback(server.terminate)
        for address in self.addresses.values():
            wait_for_port(address, 22)

    def cut(self, host: str) -> None:
        ip("-n", self._switch, "link", "set", f"port{self._numbers[host]}", "down")

    def mend(self, host: str) -> None:
        ip("-n", self._switch, "link", "set", f"port{self._numbers[host]}", "up")

    @contextmanager
    def parted(self, *hosts: str) -> Iterator[None]:
        """Keep these hosts from each other in the context; they reach all others."""
        try:
            for host in hosts:
                self._isolate(host, "on")
            yield
        finally:
            for host in hosts:
                self._isolate(host, "off")

    def _isolate(self, host: str, how: str) -> None:
        ip("-n", self._switch, "link", "set", f"port{self._numbers[host]}", "type", "bridge_slave", "isolated", how)

    def processes(self, host: str) -> list[psutil.Process]:
        """Return what runs on a host."""
        namespace, found = Path("/run/netns", self.namespace(host)).stat(), []
        for pid in psutil.pids():
            with suppress(OSError, psutil.Error):
                if not os.path.samestat(Path(f"/proc/{pid}/ns/net").stat(), namespace):
                    continue
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and "sshd" not in process.name():
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
def network(folder: Path, *names: str) -> Iterator[Network]:
    """Yield hosts of these names, which are removed in the end.

    Args:
        folder: For their keys.
        names: Their names.

    """
    tag = f"pt{os.getpid()}x{random.randrange(1000)}"
    subnet = f"198.{18 + random.randrange(2)}.{random.randrange(256)}"  # RFC 2544: for tests of networks
    made = Network(subnet, tag, names, folder)
    switch, cable = f"{tag}-switch", f"{tag}c"[:15]
    namespaces = [switch, *(made.namespace(name) for name in names)]
    stack = ExitStack()
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
        made.serve_ssh(stack)
        yield made
    finally:
        stack.close()
        for namespace in namespaces:  # with their ends of the cables, also this machine's
            if Path("/run/netns", namespace).exists():
                ip("netns", "del", namespace)


def wait_for_port(address: str, port: int) -> None:
    deadline_s = time.monotonic() + START_S
    while True:
        with suppress(OSError), socket.create_connection((address, port), 5):
            return
        assert time.monotonic() < deadline_s, f"nobody listens on {address}:{port}"
        time.sleep(0.05)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
