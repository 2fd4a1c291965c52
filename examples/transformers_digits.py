"""A Transformers training on real scans of digits with two ranks; another start with the same name continues it.

    python examples/transformers_digits.py [--name NAME] [--storage WHERE] [--epochs N]

Exits with 0 only if the validation accuracy is above 85 %.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from prefect_torch.flows import CheckpointConfig, Result, RunConfig, ScalingConfig, train


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="transformers-digits", help="the run's name; with more epochs it continues")
    parser.add_argument("--storage", default="demo-checkpoints", help="the directory for checkpoints")
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as scratch:  # a run continues from its storage alone
        result: Result = train(
            f"{Path(__file__).with_name('train_transformers_digits.py')}:train_digits",
            config={"epochs": options.epochs, "output_dir": scratch},
            scaling=ScalingConfig(num_workers=2),
            run=RunConfig(name=options.name, storage=options.storage),
            checkpoint=CheckpointConfig(num_to_keep=2, checkpoint_score_attribute="eval_loss", checkpoint_score_order="min"),
        )
    checkpoints = [record for record in result.history if record.attempt == result.attempts and record.checkpoint]
    print(f"epochs trained: {[record.metrics['epoch'] for record in checkpoints]}")
    print(f"validation accuracy {result.return_value:.1%}; best checkpoint {result.best_checkpoints[0][0].path}")
    return 0 if result.return_value > 0.85 else 1  # noqa: PLR2004 - the example's promise


if __name__ == "__main__":
    sys.exit(main())
