"""Serve a training with a concurrency limit and one without: serve_limited.py FOLDER."""

import sys
from pathlib import Path

from prefect_torch.deployments import make_deployment, serve
from prefect_torch.flows import CheckpointConfig, RunConfig


def deployment(name, folder, limit):
    made = make_deployment(
        name,
        f"{Path(__file__).parent / 'mortal_training.py'}:train_until_told",
        {"folder": str(folder / name)},
        run=RunConfig(name="run", storage=str(folder / name)),
        checkpoint=CheckpointConfig(num_to_keep=None),
    )
    made.entrypoint = "limited_training.train"
    made.concurrency_limit = limit
    return made


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    serve(deployment("limited", folder, 1), deployment("free", folder, None), max_restarts=1)
