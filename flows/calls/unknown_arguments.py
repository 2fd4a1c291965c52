"""The error of an argument that a flow does not take: what to write instead, and which arguments the flow takes."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_args

from prefect_torch.tasks.options.run_form import FormModel

_RENAMED = {  # arguments of Ray's trainers and of its Tuner
    **dict.fromkeys(("train_loop_per_worker", "trainable", "run_or_experiment"), "train_fn"),
    "train_loop_config": "config",
    "scaling_config": "scaling",
    "run_config": "run",
    "checkpoint_config": "checkpoint",
    "failure_config": "failure",
    "tune_config": "search",
    "param_space": "space",
    "resume_from_checkpoint": "resume_from",
}
_INSTEAD_OF = {  # arguments without a counterpart here, also of Ray's tune.run
    "torch_config": "give scaling=ScalingConfig(backend=..., timeout_s=...)",
    **dict.fromkeys(("datasets", "dataset_config"), "load the data in the training function"),
    "validation_config": "call evaluate(eval_fn, ..., watch=True), a flow of its own",
    "metadata": "give it in config",
    "num_samples": "give search=SearchConfig(num_trials=...)",
    "max_concurrent_trials": "give search=SearchConfig(max_concurrent=...)",
    "search_alg": "give search=SearchConfig(sampler=...)",
    **dict.fromkeys(("storage_path", "local_dir"), "give run=RunConfig(storage=...)"),
}

_OF_EACH_FLOW = ("return_state", "wait_for")  # which Prefect takes away before it calls the function


def explain_unbound(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return in one line why `function` does not take these arguments, besides Prefect's own of each call; None if it does."""
    signature = inspect.signature(function)
    kwargs = {name: value for name, value in kwargs.items() if name not in _OF_EACH_FLOW}
    try:
        signature.bind(*args, **kwargs)
    except TypeError as exc:
        unknown = next((name for name in kwargs if name not in signature.parameters), None)
        hint = None if unknown is None else _instead_of(unknown, signature)
        takes = f"it takes {', '.join(signature.parameters)}"
        return "; ".join(filter(None, [f"{function.__name__}() {exc}", hint, takes]))
    return None


def _instead_of(name: str, signature: inspect.Signature) -> str | None:
    """Return what to write instead of an argument: one of Ray's, or a field of a config; None if nothing is known."""
    if _RENAMED.get(name) in signature.parameters:
        return f"give {_RENAMED[name]}"
    if name in _INSTEAD_OF:
        return _INSTEAD_OF[name]
    for parameter in signature.parameters.values():
        for config in _configs(parameter.annotation):
            if name in config.model_fields:
                return f"give {parameter.name}={config.__name__}({name}=...)"
    return None


def _configs(annotation: object) -> Iterator[type[FormModel]]:
    for part in get_args(annotation):
        if isinstance(part, type) and issubclass(part, FormModel):
            yield part
        else:
            yield from _configs(part)
