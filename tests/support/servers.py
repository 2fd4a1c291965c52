"""Real servers on loopback: several that speak S3, since they differ, above all in the order they list in."""

import contextlib
import os
import pwd
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
from botocore.config import Config

ACCESS_KEY = "test-access-key"
SECRET_KEY = "test-secret-key"
START_S = 120  # for what takes seconds on an idle machine; a server that ends is not waited for


@cache
def _client(endpoint: str, access_key: str, secret_key: str):
    """Return boto3's client of a server, made once: it reads its models for 20 ms."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name="us-east-1",
        config=Config(s3={"addressing_style": "path"}),
    )


@dataclass(frozen=True)
class S3Server:
    """A running server and the way to look into it behind a storage's back."""

    endpoint: str
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY

    def options(self) -> dict[str, str]:
        return {
            "aws_endpoint_url": self.endpoint,
            "aws_access_key_id": self.access_key,
            "aws_secret_access_key": self.secret_key,
            "aws_region": "us-east-1",
        }

    def client(self):
        return _client(self.endpoint, self.access_key, self.secret_key)

    def new_bucket(self) -> str:
        name = f"bucket-{os.urandom(4).hex()}"
        self.client().create_bucket(Bucket=name)
        return name


@dataclass(frozen=True)
class ScriptedServer(S3Server):
    """Gives every request the same answer, and remembers the requests: what no S3 server does on demand."""

    requests: list[str] = field(default_factory=list)

    @classmethod
    @contextmanager
    def answering(cls, status: int, body: str) -> "Iterator[ScriptedServer]":
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                server.requests.append(f"{self.command} {self.path}")
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *args):
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
            server = cls(f"http://127.0.0.1:{http.server_port}")
            threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
            yield server
            http.shutdown()


@dataclass(frozen=True)
class AzureServer:
    """A running Azurite, with the one account that every Azurite has (https://learn.microsoft.com/azure/storage/common/storage-use-azurite)."""

    endpoint: str
    account: str = "devstoreaccount1"
    key: str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def connection_string(self, key: str | None = None) -> str:
        fields = {"DefaultEndpointsProtocol": "http", "AccountName": self.account, "AccountKey": key or self.key}
        fields["BlobEndpoint"] = f"{self.endpoint}/{self.account}"
        return ";".join(f"{name}={value}" for name, value in fields.items())

    def new_container(self) -> str:
        from azure.storage.blob import BlobServiceClient  # noqa: PLC0415 - for tests of blocks of prefect-azure alone

        name = f"container-{os.urandom(4).hex()}"
        BlobServiceClient.from_connection_string(self.connection_string()).create_container(name)
        return name


def free_port() -> int:
    """Return a port below those that the system gives to clients, so that none of them takes it before its server does."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


def program(name: str) -> str:
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert found is not None, f"{name} is not installed: pip install -e '.[dev]'"
    return found


@contextmanager
def running(command: list[str], port: int, **environment: str) -> Iterator[S3Server]:
    """Start a server, wait until it answers, and kill it: asked kindly, some take ten seconds to end."""
    variables = {**os.environ, **environment}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables)
    try:
        endpoint = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while True:
            try:
                urllib.request.urlopen(endpoint, timeout=5).close()
            except urllib.error.HTTPError:  # it answers, if only that it wants credentials
                break
            except OSError:
                assert process.poll() is None, f"{command[0]} ended with {process.returncode}"
                assert time.monotonic() < deadline, f"{command[0]} does not answer"
                time.sleep(0.05)
            else:
                break
        yield S3Server(endpoint)
    finally:
        process.kill()
        process.wait()


def rclone_command(port: int, folder: Path, secret: str = SECRET_KEY) -> list[str]:
    return [
        *(program("rclone"), "serve", "s3", "--auth-key", f"{ACCESS_KEY},{secret}"),
        *("--addr", f"127.0.0.1:{port}", "--config", os.devnull, "--vfs-cache-mode", "off", str(folder)),
    ]


@dataclass(frozen=True)
class SshServer:
    """A running OpenSSH server that lets this user in by a key of the test's own."""

    port: int
    key: Path

    def options(self) -> dict[str, object]:
        user = pwd.getpwuid(os.getuid()).pw_name
        key = {"key_filename": str(self.key), "look_for_keys": False, "allow_agent": False}
        return {"port": self.port, "username": user, "timeout": 30, **key}
