"""Run a training in a process: run_training.py STORAGE TRAIN_FN CONFIG_JSON [RUN_JSON [CHECKPOINT_JSON [GRACE_S]]]."""

import json
import sys

from prefect_torch.flows import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, train

if __name__ == "__main__":
    storage, train_fn, config, *more = sys.argv[1:]
    run = RunConfig(name="run", storage=storage, **json.loads(more[0] if more else "{}"))
    checkpoint = CheckpointConfig(**json.loads(more[1] if len(more) > 1 else "{}"))
    failure = FailureConfig(grace_s=float(more[2] if len(more) > 2 else 10))
    result = train(train_fn, json.loads(config), ScalingConfig(num_workers=2), run, checkpoint, failure=failure)
    print(json.dumps({"returned": result.return_value, "resumed_from": result.resumed_from}))
