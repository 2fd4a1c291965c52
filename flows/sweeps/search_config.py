"""The configuration of a search; the fields of the Run form in the Prefect UI."""

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Annotated, Any, ClassVar, Literal

from prefect_torch.ckpt.reporting.decisions import COUNTED_TIMES
from prefect_torch.ckpt.runs.metrics import flatten_metrics, with_numbers
from prefect_torch.ckpt.text import show_class
from prefect_torch.tasks.options.run_form import FormModel
from pydantic import Field, FiniteFloat, ValidationInfo, field_validator, model_validator

Mode = Literal["min", "max"]
_HIGH_IS_GOOD = frozenset({"acc", "accuracy", "auc", "auroc", "f1", "reward"})
_DEFAULTS = "Ray's default, which cannot be changed"
_OF_RAY = {  # names that Ray's create_scheduler takes
    **dict.fromkeys(("async_hyperband", "asynchyperband"), "give 'asha'"),
    **dict.fromkeys(("median_stopping_rule", "medianstopping"), "give 'median'"),
    "hb_bohb": "give 'hyperband', and sampler='tpe'",
    **dict.fromkeys(("pb2", "pbt_replay"), "there is 'pbt', without a model of the parameters"),
    "fifo": "leave it out",
    "resource_changing": "leave it out: ScalingConfig(num_workers=(fewest, most)) lets each attempt take what there is",
}
SAMPLERS = ("tpe", "gp", "cmaes", "nsga2", "qmc", "random", "grid")
_SEARCHERS_OF_RAY = {  # names that Ray's create_searcher takes
    **dict.fromkeys(("optuna", "hyperopt", "bohb"), "tpe"),
    **dict.fromkeys(("ax", "bayesopt", "hebo"), "gp"),
    "nevergrad": "cmaes",
    **dict.fromkeys(("variant_generator", "basic_variant"), "random"),
}
_READ_BY = {  # settings, by the schedulers that read them
    "grace_period": ("asha", "hyperband", "median", "pruner"),
    "reduction_factor": ("asha", "hyperband"),
    "perturbation_interval": ("pbt",),
}


class SearchConfig(FormModel):
    """The configuration of a search."""

    _instead_of: ClassVar = {
        "num_samples": "give num_trials, which counts the trials; with a grid leave it out, to try each combination once",
        "search_alg": "give sampler, by name, or an Optuna sampler as 'module:function'",
        "max_concurrent_trials": "give max_concurrent",
        "points_to_evaluate": "give initial_points",
        "reuse_actors": "leave it out: each trial has processes of its own",
        "chdir_to_trial_dir": "leave it out: ranks run in the directory that the flow runs in",
        **dict.fromkeys(
            ("trial_name_creator", "trial_dirname_creator"), "leave it out: a trial's run is called <sweep>/trial-0007-<8 hex>"
        ),
        "resources_per_trial": "give the flow scaling=ScalingConfig(num_workers=..., use_gpu=...), the ranks of each trial",
        **dict.fromkeys(("param_space", "space"), "give the flow space={...}"),
        **dict.fromkeys(("random_state", "random_state_seed"), "give seed"),
        "evaluated_rewards": "leave it out: initial_points are tried",
        "resume_unfinished": "leave it out: trials that ran go on",
        "hyperparam_mutations": "give the flow space={...}, all of which pbt mutates",
        "max_failures": "give the flow failure=FailureConfig(max_failures=...), of each trial",
        "fail_fast": "give max_failed_trials=0",
        **dict.fromkeys(("callbacks", "progress_reporter"), "leave it out: Prefect shows the trials, and has events of each"),
        **dict.fromkeys(("name", "storage_path"), "give the flow run=RunConfig(name=..., storage=...)"),
        "resume_errored": "give restart_errored",
        "brackets": "give scheduler='hyperband'",
        **dict.fromkeys(
            ("quantile_fraction", "resample_probability", "perturbation_factors"), f"leave it out: pbt has {_DEFAULTS}"
        ),
        **dict.fromkeys(("min_samples_required", "min_time_slice", "hard_stop"), f"leave it out: median has {_DEFAULTS}"),
        "burn_in_period": "leave it out: the first decision comes after one perturbation_interval",
        "custom_explore_fn": "compute in the training function what follows from the config",
        **dict.fromkeys(("stop_last_trials", "synch", "log_config", "require_attrs"), "leave it out"),
    }

    metric: Annotated[str, Field(title="One")] | Annotated[list[str], Field(title="Several", min_length=1)] = Field(
        title="Metric", description="The metric that is optimized, such as val_loss, or a/b for a nested one; or several."
    )
    mode: Annotated[Mode, Field(title="One")] | Annotated[list[Mode], Field(title="One each")] = Field(
        default="min", title="Better is", description="min: a low value is good, such as of a loss. max: a high one."
    )
    num_trials: int | None = Field(
        default=None,
        ge=1,
        le=10**9,  # their names have up to nine digits
        title="Trials",
        description="How many trials there are. When empty, 10, or as many as the first configs if these are more, or every "
        "combination of a grid; more trials repeat these.",
    )
    max_concurrent: int = Field(default=1, ge=1, title="Concurrent trials", description="How many trials run at once.")
    sampler: str | None = Field(
        default=None,
        title="Sampler",
        description="How configs are suggested: tpe, gp, cmaes, nsga2, qmc, random, grid, or 'module:function', which returns "
        "an Optuna sampler. When empty, tpe, or grid if the space has one.",
    )
    seed: int | None = Field(
        default=None, ge=0, le=2**32 - 1, title="Seed", description="The seed of all suggestions. Drawn once when empty."
    )
    initial_points: list[dict[str, Any]] = Field(
        default=[], title="First", description="Configs, or parts of them, that are tried first."
    )
    scheduler: Literal["asha", "hyperband", "median", "pbt", "pruner"] | None = Field(
        default=None,
        title="Scheduler",
        description="asha, hyperband: trials pause at rungs, and the best go on from their checkpoints. median: trials worse "
        "than the median stop. pbt: bad trials go on from the checkpoints of good ones. pruner: trials stop where an Optuna "
        "pruner would stop them. When empty, all run to the end.",
    )
    pruner: str | None = Field(
        default=None,
        pattern=r"^[\w.]+:\w+$",
        title="Pruner",
        description="With the scheduler pruner: 'module:function', which returns an Optuna pruner, such as "
        "optuna.pruners:MedianPruner.",
    )
    time_attr: str = Field(
        default="step",
        min_length=1,
        title="Time",
        description="What the times of the scheduler count: step, training_iteration (the number of reports), or a metric.",
    )
    grace_period: float = Field(
        default=1, gt=0, allow_inf_nan=False, title="Grace period", description="The first rung; no trial stops before it."
    )
    reduction_factor: float = Field(
        default=3, gt=1, allow_inf_nan=False, title="Reduction", description="One trial in this many goes on at each rung."
    )
    max_t: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        title="Longest",
        description="The time at which a trial is complete, with any scheduler.",
    )
    perturbation_interval: float | None = Field(
        default=None, gt=0, allow_inf_nan=False, title="Interval", description="The time between two decisions of pbt."
    )
    stop: dict[str, FiniteFloat] | None = Field(
        default=None,
        title="Stop",
        description="A trial is complete once one of these metrics, or step or training_iteration, is at or above its number.",
    )
    max_failed_trials: int | None = Field(
        default=None,
        ge=0,
        title="Failed trials",
        description="The sweep ends with an error when more trials than this have failed. Without limit when empty, unless "
        "all fail.",
    )
    time_budget_s: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        title="Time budget (seconds)",
        description="After it no trial starts; the time of earlier starts of the sweep counts, too. Without limit when empty.",
    )
    keep_best_trials: int | None = Field(
        default=None,
        ge=1,
        title="Keep best trials",
        description="How many of the best trials keep their checkpoints; others only have metrics, once they cannot go on any "
        "more. With several metrics, all trials that no other one beats keep theirs, too. All when empty.",
    )
    restart_errored: bool = Field(
        default=False,
        title="Restart failed trials",
        description="When the sweep is started again, its failed trials start again, from their latest checkpoints.",
    )

    @property
    def is_timed_by_metric(self) -> bool:
        """Whether times are a metric, which may be a fraction or missing, and not a count."""
        return self.time_attr not in COUNTED_TIMES

    @property
    def metrics(self) -> list[str]:
        """The metrics."""
        return [self.metric] if isinstance(self.metric, str) else list(self.metric)

    @property
    def modes(self) -> list[Mode]:
        """The mode of each metric."""
        return [self.mode for _ in self.metrics] if isinstance(self.mode, str) else list(self.mode)

    @field_validator("initial_points", mode="before")
    @classmethod
    def _with_numbers(cls, points: object) -> object:
        return with_numbers(points)  # the numbers in a row of a DataFrame are numpy's

    @field_validator("time_budget_s", mode="before")
    @classmethod
    def _as_seconds(cls, budget: object) -> object:
        return budget.total_seconds() if isinstance(budget, timedelta) else budget

    @field_validator("num_trials", mode="before")
    @classmethod
    def _refuse_no_end(cls, number: object) -> object:
        if number == -1:
            raise ValueError("a search has a limited number of trials: give more trials than time_budget_s lets begin")
        return number

    @field_validator("sampler", "pruner", mode="before")
    @classmethod
    def _refuse_objects(cls, made: object, info: ValidationInfo) -> object:
        if made is not None and not isinstance(made, str):
            often = "trial: what it remembers is in the study" if info.field_name == "sampler" else "start of a sweep"
            raise ValueError(
                f"a {info.field_name} is given by the location of a function that returns it, 'module:function', not "
                f"{show_class(made)}: it is made anew for each {often}"
            )
        return made

    @field_validator("stop", mode="before")
    @classmethod
    def _refuse_criteria(cls, stop: object) -> object:
        if stop is not None and not isinstance(stop, Mapping):
            raise ValueError(
                f"stop is a dict of metrics and numbers, not {show_class(stop)}: for another criterion, return from the "
                "training function"
            )
        nested: dict[str, Any] = {name: limit for name, limit in (stop or {}).items() if isinstance(limit, Mapping)}
        for name, _ in flatten_metrics(nested):
            raise ValueError(f"a metric in a dict is named with a slash: give {name!r}")
        return stop

    @field_validator("scheduler", mode="before")
    @classmethod
    def _refuse_rays(cls, scheduler: object) -> object:
        if scheduler is not None and not isinstance(scheduler, str):
            raise ValueError(
                f"a scheduler is a name, such as 'asha', and its arguments are fields here, not {show_class(scheduler)}"
            )
        if scheduler in _OF_RAY:
            raise ValueError(f"{scheduler!r} is Ray's name: {_OF_RAY[scheduler]}")
        return scheduler

    @field_validator("metric")
    @classmethod
    def _check_metric(cls, metric: str | list[str]) -> str | list[str]:
        names = [metric] if isinstance(metric, str) else metric
        if not all(names) or len(set(names)) != len(names):
            raise ValueError("give the name of a metric, or several that differ")
        return metric

    @model_validator(mode="after")
    def _check_modes(self) -> "SearchConfig":
        if len(self.modes) != len(self.metrics):
            raise ValueError(f"mode has {len(self.modes)} values for {len(self.metrics)} metrics: give one, or one each")
        if self.sampler in _SEARCHERS_OF_RAY:
            raise ValueError(f"sampler={self.sampler!r} is Ray's name: give {_SEARCHERS_OF_RAY[self.sampler]!r}")
        if self.sampler is not None and self.sampler not in SAMPLERS and ":" not in self.sampler:
            raise ValueError(f"sampler={self.sampler!r}: give {', '.join(SAMPLERS)}, or 'module:function'")
        return self

    @model_validator(mode="after")
    def _warn_of_the_worst(self) -> "SearchConfig":
        high = [name for name in self.metrics if _HIGH_IS_GOOD.intersection(re.split(r"[\W_]+", name.lower()))]
        if high and "mode" not in self.model_fields_set:
            self._warn_of_default(
                "mode",
                f"metric={high[0]!r} looks like one of which a high value is good, and the default mode, 'min', finds the "
                "worst of it: give mode='max', or 'min' if that is meant",
            )
        return self

    @model_validator(mode="after")
    def _refuse_untried_points(self) -> "SearchConfig":
        if self.num_trials is not None and self.num_trials < len(self.initial_points):
            raise ValueError(
                f"num_trials={self.num_trials} leaves some of the {len(self.initial_points)} initial_points untried: give as "
                "many trials, or fewer points"
            )
        return self

    @model_validator(mode="after")
    def _check_scheduler(self) -> "SearchConfig":
        if self.scheduler is not None and len(self.metrics) > 1:
            raise ValueError(f"scheduler={self.scheduler!r} decides by one metric: give one, or no scheduler")
        if self.scheduler in ("asha", "hyperband") and (self.max_t is None or self.max_t <= self.grace_period):
            raise ValueError(f"scheduler={self.scheduler!r} needs max_t, above grace_period={self.grace_period:g}")
        if self.scheduler == "pbt" and self.perturbation_interval is None:
            raise ValueError("scheduler='pbt' needs perturbation_interval, such as a tenth of the training")
        if (self.scheduler == "pruner") != (self.pruner is not None):
            raise ValueError("scheduler='pruner' and pruner='module:function' belong together: give both, or none")
        return self

    @model_validator(mode="after")
    def _refuse_unread_settings(self) -> "SearchConfig":
        """Refuse the setting of another scheduler, as those of Ray and Optuna do; a form may give the default of any."""
        for name, schedulers in _READ_BY.items():
            given = getattr(self, name)
            if self.scheduler not in schedulers and given != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name}={given!r} has no effect with scheduler={self.scheduler!r}: leave it out, or give "
                    f"scheduler={' or '.join(map(repr, schedulers))}"
                )
        return self
