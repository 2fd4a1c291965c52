"""Runs a program of the loggers' page as two attempts of one run: the first is killed between its logger and its third report.

python logged_training.py PROGRAM STORAGE RUN
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.reporting.api import start_session
from ranks import Attempt


def main():
    program, storage, name = sys.argv[1:]
    spec = importlib.util.spec_from_file_location("program", program)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    store = CheckpointStore.open(storage, name)
    ends = [in_process_of_its_own(lambda left=left: train(module, store, left)) for left in (2, None)]
    print(*ends, *[manifest.step for manifest in store.list()])


def in_process_of_its_own(work):
    """Fork, as the imports take seconds and nothing has started a thread yet; return the exit status."""
    pid = os.fork()
    if pid == 0:
        work()
        sys.stdout.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def train(module, store, reports_left):
    """Train four epochs, or be killed in place of the report after `reports_left`."""
    real = module.report

    def report(*args, **kwargs):
        nonlocal reports_left
        if reports_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        reports_left = None if reports_left is None else reports_left - 1
        real(*args, **kwargs)

    module.report = report
    attempt = Attempt(store)
    os.environ["WANDB_DIR"] = f"attempt-{attempt.number}"  # W&B names folders by the second, and two attempts fit in one
    Path(os.environ["WANDB_DIR"]).mkdir()
    session = attempt.session()
    start_session(session)
    module.train_fn({"epochs": 4})
    session.finish()


if __name__ == "__main__":
    main()
