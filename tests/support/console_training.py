"""Train at a terminal until Ctrl-C: console_training.py STORAGE."""

import sys
import time

from prefect_torch.flows import CheckpointConfig, RunConfig, train


def train_without_end() -> None:
    from trainings import report_epoch  # noqa: PLC0415 - imports torch, which the leader need not wait for

    epoch = 0
    while True:
        print(f"the line of epoch {epoch} is whole")
        report_epoch(epoch, loss=1 / (epoch + 1))
        time.sleep(0.05)
        epoch += 1


if __name__ == "__main__":
    train(
        train_without_end,
        run=RunConfig(name="digits", storage=sys.argv[1]),
        checkpoint=CheckpointConfig(num_to_keep=2),
    )
