"""Run a training on GPUs in a process of its own: run_on_gpus.py STORAGE TRAIN_FN CONFIG_JSON SCALING_JSON FAILURE_JSON."""

import json
import sys

from prefect_torch.flows import FailureConfig, RunConfig, ScalingConfig, train

if __name__ == "__main__":
    storage, train_fn, *settings = sys.argv[1:]
    config, scaling, failure = map(json.loads, settings)
    scaling = ScalingConfig(**{"use_gpu": True, **scaling})
    result = train(train_fn, config, scaling, RunConfig(name="run", storage=storage), failure=FailureConfig(**failure))
    print(json.dumps(result.return_value))
