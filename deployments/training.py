"""A user's training function as a deployment of the flow `train`."""

from collections.abc import Iterable
from typing import Any, cast

import prefect
from prefect.deployments.runner import RunnerDeployment
from prefect.schedules import Cron
from prefect.types.entrypoint import EntrypointType
from prefect_torch.flows import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, train
from pydantic import BaseModel


def make_deployment(
    name: str,
    train_fn: str,
    config: dict[str, Any] | None = None,
    scaling: ScalingConfig | None = None,
    run: RunConfig | None = None,
    checkpoint: CheckpointConfig | None = None,
    failure: FailureConfig | None = None,
    *,
    cron: str | None = None,
    timezone: str | None = None,
    tags: Iterable[str] = (),
) -> RunnerDeployment:
    """Return a deployment of `train` with these parameters as defaults, which its Run form can change.

    Args:
        name: The deployment's name.
        train_fn: "module:function" or "path/to/file.py:function", found where the flow runs.
        config: What the function is called with.
        scaling: How many ranks, and on what.
        run: Which run, where its checkpoints lie, how it begins; without a name, each scheduled run starts fresh.
        checkpoint: Which checkpoints are kept.
        failure: How often a training is restarted.
        cron: When to run it on its own, as in crontab(5); never if None.
        timezone: Of the cron expression, such as "Europe/Berlin"; UTC if None.
        tags: The deployment's tags.

    """
    given = {"scaling": scaling, "run": run, "checkpoint": checkpoint, "failure": failure}
    parameters = {
        "train_fn": train_fn,
        "config": config,
        **{key: value.model_dump(mode="json") for key, value in given.items() if isinstance(value, BaseModel)},
    }
    deployment = train.to_deployment(
        name=name,
        parameters=parameters,
        schedule=None if cron is None else Cron(cron, timezone=timezone),
        tags=list(tags),
        entrypoint_type=EntrypointType.MODULE_PATH,  # a path would load a second, different flow object
    )
    return cast("RunnerDeployment", deployment)


def serve(*deployments: RunnerDeployment) -> None:
    """Register `deployments` and run what is scheduled or triggered, on this machine, until interrupted."""
    prefect.serve(*deployments)
