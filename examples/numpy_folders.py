"""A training without torch in its loop: numpy, folders, and an intentional error after which it continues.

    python examples/numpy_folders.py

k-means on real scans of digits: each rank clusters its share of the scans, and stores its centers in a file of its own.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report
from sklearn.datasets import load_digits

NUM_CLUSTERS = 10
Centers = NDArray[np.float64]


def move_centers(scans: Centers, centers: Centers) -> tuple[Centers, float]:
    """Return each cluster's mean, and how far scans lie from their center on average."""
    distances = np.linalg.norm(scans[:, None] - centers[None], axis=2)
    nearest = distances.argmin(axis=1)
    moved = [
        scans[nearest == number].mean(axis=0) if (nearest == number).any() else centers[number]
        for number in range(len(centers))
    ]
    return np.stack(moved), float(distances.min(axis=1).mean())


def train_func(config: dict[str, Any]) -> dict[str, Any]:
    """Cluster this rank's share of the scans; return its first round, and the final distance."""
    context = get_context()
    digits: Any = load_digits()
    scans: Centers = digits.data[context.world_rank :: context.world_size]
    centers, start = scans[:NUM_CLUSTERS].copy(), 0
    own_file = f"centers-{context.world_rank}.npy"

    if checkpoint := get_checkpoint():
        with checkpoint.as_directory() as folder:
            centers = np.load(Path(folder, own_file))
            start = json.loads(Path(folder, "progress.json").read_text())["round"] + 1

    distance = float("inf")
    for number in range(start, config["rounds"]):
        centers, distance = move_centers(scans, centers)
        with tempfile.TemporaryDirectory() as folder:
            np.save(Path(folder, own_file), centers)
            if context.world_rank == 0:
                Path(folder, "progress.json").write_text(json.dumps({"round": number}))
            report({"distance": distance}, Checkpoint.from_directory(folder), step=number)
        if number == 1 and start == 0:
            raise RuntimeError("an error on purpose, after the second round")
    return {"start": start, "distance": distance}


def main() -> int:
    # Here, so that the ranks, which import this file for train_func, do not wait for Prefect.
    from prefect_torch.flows import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, train  # noqa: PLC0415

    result = train(
        f"{__file__}:train_func",
        config={"rounds": 6},
        scaling=ScalingConfig(num_workers=2),
        run=RunConfig(storage=sys.argv[1] if len(sys.argv) > 1 else "demo-checkpoints"),
        checkpoint=CheckpointConfig(num_to_keep=1),
        failure=FailureConfig(max_failures=1),
    )
    distances: list[Any] = [record.metrics["distance"] for record in result.history]
    print(f"went on with round {result.return_value['start']} in attempt {result.attempts}; distances {np.round(distances, 2)}")
    return 0 if result.return_value["start"] == 2 else 1  # noqa: PLR2004 - the round after the error


if __name__ == "__main__":
    sys.exit(main())
