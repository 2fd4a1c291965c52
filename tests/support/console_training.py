"""Train at a terminal until Ctrl-C: console_training.py STORAGE."""

import sys

from prefect_torch.ckpt import get_context
from prefect_torch.flows import CheckpointConfig, RunConfig, train


def train_until_told() -> None:
    from trainings import report_epoch  # noqa: PLC0415 - imports torch, which the leader need not wait for

    epoch = 0
    while not get_context().should_checkpoint():
        print(f"the line of epoch {epoch} is whole")
        report_epoch(epoch, loss=1 / (epoch + 1))
        epoch += 1


if __name__ == "__main__":
    train(
        train_until_told,
        run=RunConfig(name="digits", storage=sys.argv[1]),
        checkpoint=CheckpointConfig(num_to_keep=2),
    )
