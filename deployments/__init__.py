"""Trainings as Prefect deployments, and the command `prefect-torch`.

Imports are lazy so that the command can list checkpoints in a fraction of the seconds that importing prefect takes.
"""

from typing import TYPE_CHECKING

from prefect_torch.lazy_names import lazy_names

if TYPE_CHECKING:
    from .automations import evaluate_new_best
    from .planning import plan_deployment
    from .restarts import resume_crashed
    from .training import deploy, make_deployment, serve
    from .work_pools import create_work_pool, job_template

_MODULES = {
    "create_work_pool": ".work_pools",
    "deploy": ".training",
    "evaluate_new_best": ".automations",
    "job_template": ".work_pools",
    "make_deployment": ".training",
    "plan_deployment": ".planning",
    "resume_crashed": ".restarts",
    "serve": ".training",
}
__all__ = [
    "create_work_pool",
    "deploy",
    "evaluate_new_best",
    "job_template",
    "make_deployment",
    "plan_deployment",
    "resume_crashed",
    "serve",
]

if not TYPE_CHECKING:  # for which a name that does not exist is an error
    __getattr__, __dir__ = lazy_names(__name__, _MODULES)
