"""Trainings as Prefect deployments, and the command `prefect-torch`.

Imports are lazy so that the command can list checkpoints in a fraction of the seconds that importing prefect takes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .automations import evaluate_new_best, resume_crashed
    from .job_templates import create_work_pool, job_template
    from .planning import plan_deployment
    from .training import deploy, make_deployment, serve

_MODULES = {
    "create_work_pool": "job_templates",
    "deploy": "training",
    "evaluate_new_best": "automations",
    "job_template": "job_templates",
    "make_deployment": "training",
    "plan_deployment": "planning",
    "resume_crashed": "automations",
    "serve": "training",
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


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
