import warnings
from datetime import timedelta

import pytest
from prefect_torch.flows import SearchConfig, sweep, train
from prefect_torch.tasks import CheckpointConfig, FailureConfig, Hosts, RunConfig, ScalingConfig
from pydantic import ValidationError


@pytest.mark.parametrize("score", ["loss", "val_loss", "eval/Loss"])
def test_a_loss_without_an_order_warns_where_it_is_given(score):
    with pytest.warns(UserWarning, match=f"'{score}' looks like a loss.* keeps the worst of it") as caught:
        CheckpointConfig(checkpoint_score_attribute=score)
    assert [it.filename for it in caught] == [__file__]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"checkpoint_score_attribute": "accuracy"},
        {"checkpoint_score_attribute": "losses/accuracy"},
        {"checkpoint_score_attribute": "loss", "checkpoint_score_order": "min"},
        {"checkpoint_score_attribute": "loss", "checkpoint_score_order": "max"},
    ],
)
def test_other_scores_and_a_given_order_warn_of_nothing(fields):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CheckpointConfig(**fields)


def test_a_timeout_of_what_is_never_attached_is_refused_where_it_is_given():
    with pytest.raises(ValidationError, match=r"evaluation_timeout_s=60\.0 waits for the metric that sorts checkpoints"):
        CheckpointConfig(evaluation_timeout_s=60)


@pytest.mark.parametrize("metric", ["val_accuracy", "eval/acc", "episode-reward.mean", ["loss", "F1"]])
def test_a_search_for_an_accuracy_without_a_mode_warns_where_it_is_given_and_once(metric):
    with pytest.warns(UserWarning, match="looks like one of which a high value is good.* finds the worst of it") as caught:
        given = SearchConfig(metric=metric)
    assert [it.filename for it in caught] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = sweep.validate_parameters({"train_fn": "module:function", "space": {}, "search": given})
        for fields in ({"metric": metric, "mode": "min"}, {"metric": metric, "mode": "max"}, {"metric": "accounted_loss"}):
            SearchConfig(**fields)
    assert again["search"] == given


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"grace_period": 5},
            r"grace_period=5\.0 has no effect with scheduler=None: leave it out, or give scheduler='asha' or ",
        ),
        (
            {"scheduler": "pbt", "perturbation_interval": 5, "grace_period": 20},
            "grace_period=20.0 has no effect with scheduler='pbt'",
        ),
        ({"scheduler": "median", "reduction_factor": 4}, "give scheduler='asha' or 'hyperband'"),
        ({"scheduler": "asha", "max_t": 9, "perturbation_interval": 5}, "give scheduler='pbt'"),
    ],
    ids=range(4),
)
def test_a_setting_that_the_scheduler_does_not_read_is_refused_unless_it_is_the_default(fields, problem):
    with pytest.raises(ValidationError, match=problem):
        SearchConfig(metric="loss", **fields)
    SearchConfig(metric="loss", grace_period=1, reduction_factor=3, perturbation_interval=None)


def test_a_flow_that_validates_its_arguments_again_repeats_no_warning():
    with pytest.warns(UserWarning, match="looks like a loss"):
        given = CheckpointConfig(checkpoint_score_attribute="loss")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = train.validate_parameters({"train_fn": "module:function", "checkpoint": given})
    assert again["checkpoint"] == given


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: FailureConfig(retry_delay_s=1e20), "less than or equal to 1000000000"),
        (lambda: ScalingConfig(timeout_s=1e-9), "greater than or equal to 0.001"),
        (lambda: ScalingConfig(num_workers=10**9), "less than or equal to 65536"),
        (lambda: SearchConfig(metric="loss", num_trials=10**9 + 1), "less than or equal to 1000000000"),
        (lambda: Hosts(["a"], environment={"A=B": "1"}), "'A=B', which no process can have"),
        (lambda: Hosts(["a"], environment={"": "1"}), "'', which no process can have"),
        (lambda: Hosts(["a"], environment={"A": "1\0"}), "'A', which no process can have"),
        (lambda: Hosts(["a", "b", "a"]), "hosts has 'a' twice: name a machine once, and give ranks_per_host"),
    ],
    ids=range(8),
)
def test_what_would_fail_late_is_refused_at_once(make, problem):
    with pytest.raises(ValueError, match=problem):
        make()


@pytest.mark.parametrize(
    ("config", "given", "hint"),
    [
        (RunConfig, {"failure_config": FailureConfig()}, "give the flow failure=FailureConfig(...)"),
        (RunConfig, {"sync_config": None}, "is 'sync' meant?"),
        (FailureConfig, {"preemption_grace_s": 1}, "is 'grace_s' meant?"),
        (ScalingConfig, {"num_worker": 1}, "is 'num_workers' meant?"),
        (SearchConfig, {"metric": "loss", "num_samples": 1}, "give num_trials, which counts the trials"),
        (SearchConfig, {"metric": "loss", "epochs": 1}, "there are metric, mode, num_trials, "),
    ],
)
def test_a_setting_that_does_not_exist_is_refused_with_the_one_that_may_be_meant(config, given, hint):
    with pytest.raises(ValidationError) as caught:
        config(**given)
    assert f"Extra inputs are not permitted; {hint}" in str(caught.value)


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: ScalingConfig(num_workers=0), "each rank is a process, and there is no mode without"),
        (lambda: SearchConfig(metric="loss", num_trials=-1), "give more trials than time_budget_s lets begin"),
        (lambda: SearchConfig(metric="loss", scheduler="async_hyperband"), "'async_hyperband' is Ray's name: give 'asha'"),
        (lambda: SearchConfig(metric="loss", scheduler=object()), "its arguments are fields here, not object"),
        (lambda: SearchConfig(metric="loss", sampler="hyperopt"), "sampler='hyperopt' is Ray's name: give 'tpe'"),
        (
            lambda: SearchConfig(metric="loss", sampler=object()),
            "a sampler is given by the location .*, not object: it is made anew for each trial: ",
        ),
        (
            lambda: SearchConfig(metric="loss", pruner=object()),
            "a pruner is given by the location .*, not object: it is made anew for each start",
        ),
        (lambda: SearchConfig(metric="loss", stop=len), "return from the training function"),
        (lambda: SearchConfig(metric="loss", stop={"a": {"b": 1}}), "named with a slash: give 'a/b'"),
        (lambda: SearchConfig(metric="loss", stop={"a": {"b": {"c": 1}}}), "named with a slash: give 'a/b/c'"),
        (lambda: ScalingConfig(init_method="tcp://a:1"), "ranks meet at the flow's own store"),
    ],
)
def test_values_of_rays_configs_are_refused_with_what_to_write(make, hint):
    with pytest.raises(ValidationError, match=hint):
        make()


def test_fields_without_names_are_refused_with_their_names():
    with pytest.raises(TypeError, match=r"by name only: RunConfig\(name=…, storage=…\)$"):
        RunConfig("name", "s3://user:password@bucket")
    assert FailureConfig(max_failures=3).model_copy() == FailureConfig.model_validate({"max_failures": 3})


def test_a_time_budget_may_be_a_timedelta():
    assert SearchConfig(metric="loss", time_budget_s=timedelta(hours=1)).time_budget_s == 3600


@pytest.mark.parametrize(
    ("given", "shown"), [(FailureConfig(), "prefect_torch.tasks.options.config.FailureConfig"), (2, "int")]
)
def test_what_is_no_config_is_refused_with_its_class_as_others_have_one_of_the_name(given, shown):
    with pytest.raises(ValidationError) as caught:
        ScalingConfig.model_validate(given)
    assert f"instance of ScalingConfig, not {shown} [" in str(caught.value)
