"""A training that takes longer for its last checkpoint than Prefect, hurried, waits before it kills: 1 s instead of 30.

And a flow that never ends.
"""

import json
import signal
import tempfile
import time
from pathlib import Path

from prefect import flow
from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report


def train_slowly(config: dict) -> str:
    if get_checkpoint() is not None:
        return "resumed"
    Path(config["started"]).touch()
    while not get_context().should_checkpoint():
        time.sleep(0.05)
    time.sleep(config["checkpoint_s"])  # this slowness is what is tested
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "state.json").write_text(json.dumps({}))
        report({}, Checkpoint.from_directory(directory), step=7)
    return "told"


@flow
def endless(started: str, failure: dict) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(started).touch()
    while True:
        time.sleep(60)
