"""Run a training on pretended GPUs in a process of its own: run_gpu_training.py STORAGE RUN CONFIG_JSON SCALING_JSON."""

import json
import sys

from prefect_torch.flows import RunConfig, ScalingConfig, train

if __name__ == "__main__":
    storage, run, config, scaling = sys.argv[1:]
    result = train(
        "gpu_trainings:tell_gpu",
        json.loads(config),
        ScalingConfig(use_gpu=True, **json.loads(scaling)),
        RunConfig(name=run, storage=storage),
    )
    print(json.dumps(result.return_value))
