"""Serve a training that its first flow run does not survive, and what resumes it: served_training.py FOLDER."""

import sys
from pathlib import Path

from prefect_torch.deployments import make_deployment, serve
from prefect_torch.flows import RunConfig

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    serve(
        make_deployment(
            "mortal",
            f"{Path(__file__).parent / 'mortal_training.py'}:train_until_killed",
            {"folder": str(folder)},
            run=RunConfig(storage=str(folder / "store")),
            tags=["mortal"],
        ),
        max_restarts=1,
    )
