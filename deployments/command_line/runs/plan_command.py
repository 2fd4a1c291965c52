"""`plan`: what a training would do, before it costs anything."""

import json
from typing import TYPE_CHECKING, Any

import click
from prefect_torch.deployments.command_line.arguments import json_option
from prefect_torch.deployments.command_line.terminal import STATUS_STYLES, console, plain, print_json, say
from rich.text import Text

if TYPE_CHECKING:
    from prefect_torch.flows import TrainingPlan

_MOST_SHOWN = 20


@click.command
@click.argument("deployment", metavar="[DEPLOYMENT]", required=False)
@click.option("--params", metavar="JSON", default="{}", help="Parameters of train, as for `prefect deployment run`.")
@json_option
def plan(deployment: str | None, params: str, as_json: bool) -> int:
    """Show what a training would do if it began now.

    DEPLOYMENT is a deployment of the flow train, such as "train/nightly"; --params replaces its parameters, or gives all of
    them without a deployment. Shows what would be resumed, kept and pruned, the GPUs, a probe of the storage, and the grace
    compared with the platform's. Starts nothing, and leaves nothing; exits with 1 if the training would fail.

    \b
    --json: would_begin, resumes_from (or null), keeps (id: reasons), prunes
      lines: a list of subject, status (ok, warning, wrong), text
    """  # noqa: D301 - click's mark for lines that it must not fill
    parameters = _parse(params)
    from prefect_torch.deployments.planning import plan_deployment, plan_parameters  # noqa: PLC0415 - prefect takes seconds

    planned = plan_parameters(parameters) if deployment is None else plan_deployment(deployment, parameters)
    if as_json:
        print_json(_as_json(planned))
    else:
        _print(planned)
    return int(not planned.would_begin)


def _parse(params: str) -> dict[str, Any]:
    try:
        parsed = json.loads(params)
    except ValueError as exc:
        raise click.UsageError(f"--params is no JSON: {exc}") from exc
    if not isinstance(parsed, dict):
        raise click.UsageError('--params is no JSON object, such as {"train_fn": "module:function"}')
    return parsed


def _as_json(planned: "TrainingPlan") -> dict[str, Any]:
    return {
        "would_begin": planned.would_begin,
        "resumes_from": planned.resumes_from,
        "keeps": {checkpoint_id: list(why) for checkpoint_id, why in planned.keeps.items()},
        "prunes": list(planned.prunes),
        "lines": [{"subject": line.subject, "status": line.status, "text": line.text} for line in planned.lines],
    }


def _print(planned: "TrainingPlan") -> None:
    for line in planned.lines:
        status = f"{line.status:<9}", STATUS_STYLES[line.status]
        console().print(Text.assemble(status, f"{line.subject:<13}", plain(line.text)))
    for checkpoint_id in planned.prunes[:_MOST_SHOWN]:
        say(f"  goes  {checkpoint_id}")
    for checkpoint_id, why in list(planned.keeps.items())[-_MOST_SHOWN:]:
        say(f"  stays {checkpoint_id}: {', '.join(why)}")
