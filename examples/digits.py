"""A small CNN on real scans of digits: two ranks, one of them killed on purpose, resumed from the latest checkpoint.

    python examples/digits.py [--name NAME] [--storage WHERE] [--epochs N] [--no-kill]

Exits with 0 only if a resume happened (unless --no-kill) and the validation accuracy is above 95 %.
"""

import argparse
import shutil
import sys
from pathlib import Path

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.flows import CheckpointConfig, Result, RunConfig, ScalingConfig, train

KEPT = CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="val_loss", checkpoint_score_order="min")


def show_kept(result: Result) -> None:
    """Print the stored checkpoints, and why each is kept."""
    run = Path(result.path)
    store = CheckpointStore.open(run.parent, run.name)
    reasons = store.prune(KEPT.policy(), dry_run=True).keep
    print(f"\n{'checkpoint':<26} {'step':>4} {'val_loss':>9} {'accuracy':>9}  kept because")
    for manifest in store.list():
        loss, accuracy = manifest.metrics["val_loss"], manifest.metrics["val_accuracy"]
        why = ", ".join(reasons.get(manifest.id, ()))
        print(f"{manifest.id:<26} {manifest.step:>4} {loss:>9.4f} {accuracy:>9.1%}  {why}")
    print(f"\n{result.attempts} attempts; checkpoints in {result.path}/checkpoints")


def start_over_if_completed(storage: str, name: str) -> None:
    """Remove a demo that ran to its end, so that the next one has something to show; one that was killed continues."""
    run = Path(storage) / name
    if any((run / "attempts").glob("*.json")) and Result.from_storage(storage, name).completed:
        shutil.rmtree(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="digits", help="the run's name; an unfinished run of that name continues")
    parser.add_argument("--storage", default="demo-checkpoints", help="the directory for checkpoints")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--no-kill", dest="kill", action="store_false", help="do not kill rank 1")
    options = parser.parse_args()

    start_over_if_completed(options.storage, options.name)
    result = train(
        f"{Path(__file__).with_name('train_digits.py')}:train_digits",
        config={"epochs": options.epochs, "kill": options.kill},
        scaling=ScalingConfig(num_workers=2),
        run=RunConfig(name=options.name, storage=options.storage),
        checkpoint=KEPT,
    )
    show_kept(result)
    print(f"validation accuracy {result.return_value:.1%}; resumed from {result.resumed_from}")
    if options.kill and result.resumed_from is None:
        print("no resume happened", file=sys.stderr)
        return 1
    return 0 if result.return_value > 0.95 else 1  # noqa: PLR2004 - the demo's promise


if __name__ == "__main__":
    sys.exit(main())
