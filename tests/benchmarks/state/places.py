"""Where checkpoints go: a local disk, an S3 server that stores, and one that only takes, far away."""

import os
import shutil
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from servers import ACCESS_KEY, SECRET_KEY, S3Server, free_port, rclone_command, running

SINK = Path(__file__).with_name("byte_sink.py")
LATENCY_MS = 50
BUCKET = "bench"


@dataclass(frozen=True)
class Place:
    """Room for one way's checkpoints.

    Attributes:
        url: A folder or `s3://bucket/prefix`.
        environment: How a client finds the server.
        keeps: Whether what was stored can be read.

    """

    url: str
    environment: dict = field(default_factory=dict)
    keeps: bool = True


@contextmanager
def local_disk(folder):
    (folder / "stored").mkdir()
    yield Place(str(folder / "stored"))


@contextmanager
def rclone(folder):
    (folder / "rclone").mkdir()
    port = free_port()
    with running(rclone_command(port, folder / "rclone"), port) as server:
        yield _on(server)


@contextmanager
def sink(folder):
    port = free_port()
    with running([sys.executable, str(SINK), str(port), "--latency-ms", str(LATENCY_MS)], port) as server:
        yield _on(server, keeps=False)


PLACES = {"disk": local_disk, "rclone": rclone, "sink": sink}


@contextmanager
def scratch(parent):
    """Yield a folder that is empty afterwards, with nothing of it left to be written to the disk."""
    folder = Path(tempfile.mkdtemp(prefix="state-benchmark-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
        os.sync()


def _on(server: S3Server, *, keeps=True):
    server.client().create_bucket(Bucket=BUCKET)
    environment = {
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        # rclone answers for a part of an object with the checksum of the whole, which newer clients of boto refuse.
        "AWS_RESPONSE_CHECKSUM_VALIDATION": "when_required",
        "AWS_REQUEST_CHECKSUM_CALCULATION": "when_required",
    }
    return Place(f"s3://{BUCKET}/runs", environment, keeps)
