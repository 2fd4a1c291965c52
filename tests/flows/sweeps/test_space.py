"""Spaces: what is refused, and what is suggested."""

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.flows import SearchConfig, choice, grid, loguniform, randint, uniform
from prefect_torch.flows.sweeps.definition import define, find_definition, store_definition
from prefect_torch.flows.sweeps.domains import parse_space
from prefect_torch.flows.sweeps.journal.recorded_trials import RecordedTrials
from prefect_torch.flows.sweeps.optuna_study.study import check_search, grid_points
from prefect_torch.flows.sweeps.schedulers.pbt import RandomDraw
from prefect_torch.flows.sweeps.search import Search
from prefect_torch.flows.sweeps.space import num_points

WRONG = [
    ({}, "is empty"),
    ({"lr": 1}, "holds constants only"),
    ({"lr": {"kind": "normal", "low": 0, "high": 1}}, r"space\['lr'\] has the unknown kind 'normal'"),
    ({"lr": uniform(2, 1)}, r"space\['lr'\]: low=2 is above high=1"),
    ({"lr": loguniform(0, 1)}, "low=0 has no logarithm"),
    ({"n": randint(0, 9, log=True)}, "low=0 has no logarithm"),
    ({"n": randint(3, 3)}, r"randint\(3, 3\) has no integer"),
    ({"n": {"kind": "randint", "low": 1.5, "high": 3}}, "low=1.5 of randint is no integer"),
    ({"lr": {"kind": "uniform", "low": 0}}, "uniform needs high"),
    ({"lr": {"kind": "uniform", "low": 0, "high": 1, "q": 2}}, "uniform has no q"),
    ({"lr": uniform(float("nan"), 1)}, "low=nan is no number"),
    ({"a": choice([])}, r"space\['a'\]: values=\[\] is no list"),
    ({"a": {"b": choice([{"c": loguniform(-1, 1)}])}}, r"space\['a'\]\['b'\]\[0\]\['c'\]: low=-1 has no logarithm"),
    ({"lr": uniform(0, 1), "layers": [8, choice([16, 32])]}, r"space\['layers'\]\[1\] is a domain in a list"),
    ({"net": choice([([{"width": randint(1, 9)}], "relu")])}, r"space\['net'\]\[0\]\[0\]\[0\]\['width'\] is a domain in a"),
    ({"a/b": uniform(0, 1), "a": {"b": uniform(0, 1)}}, "space has two parameters called 'a/b'"),
    ({"a[0]": {"b": uniform(0, 1)}, "a": choice([{"b": randint(0, 9)}])}, r"space has two parameters called 'a\[0\]/b'"),
    (uniform(0, 1), "space is a uniform itself: give it a name"),
    ({"optimizer": {"kind": "adam"}, "lr": uniform(0, 1)}, "a dict that is no domain needs another key than 'kind'"),
    (
        {"train_loop_config": {"lr": uniform(0, 1)}},
        "space has a 'train_loop_config', as Ray Tune's for a TorchTrainer: give what",
    ),
    ({"lr": {"grid_search": [1, 2]}, "b": uniform(0, 1)}, r"space\['lr'\] is a grid as Ray Tune has it: give grid\(\[1, 2\]\)"),
    ({"optimizer": choice("adam")}, r"space\['optimizer'\]: values='adam' is no list"),
    ({"optimizer": grid({"adam": 1})}, r"values=\{'adam': 1\} is no list"),
    ({"optimizer": choice({"adam"})}, r"values=\{'adam'\} is no list"),
    ({"lr": uniform(0, 10**400)}, "high=1000.* is no number"),
    ({"lr": uniform(-1.7e308, 1.7e308)}, r"space\['lr'\]: from low=-1.7e\+308 to high=1.7e\+308 is more than a float holds"),
    ({"net": choice([1, 2]), "layer": object()}, r"space\['layer'\]=.* is neither JSON nor a domain"),
]


@pytest.mark.parametrize(("space", "problem"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_searched_is_refused_with_its_place(space, problem):
    with pytest.raises(ValueError, match=problem):
        parse_space(space)


def test_a_domain_of_rays_is_told_from_other_objects():
    of_ray = type("Float", (), {"__module__": "ray.tune.search.sample"})
    with pytest.raises(ValueError, match=r"space\['lr'\]\[1\] is ray.tune.search.sample.Float, Ray's: give the domains of"):
        parse_space({"lr": choice([1, of_ray()])})


def test_a_config_that_json_cannot_hold_is_refused_with_its_name():
    with pytest.raises(ValueError, match=r"config\['data'\]=\{'path': .*Path\('data'\)\} is not JSON"):
        define("my:fn", {"lr": uniform(0, 1)}, {"epochs": 9, "data": {"path": Path("data")}}, SearchConfig(metric="loss"))


@pytest.mark.parametrize("domain", [uniform(0, 1), randint(1, 9), choice([True, False]), grid([1, 2])])
def test_a_domain_in_the_config_is_refused_since_every_trial_would_get_it_as_a_dict(domain):
    config = {"epochs": 9, "net": {"layers": [1, {"norm": domain}]}}
    with pytest.raises(ValueError, match=r"^config\['net'\]\['layers'\]\[1\]\['norm'\] is a domain, .* give it in the space$"):
        define("my:fn", {"lr": uniform(0, 1)}, config, SearchConfig(metric="loss"))


def test_a_dict_of_another_kind_in_the_config_is_no_domain():
    config = {"noise": {"kind": "uniform", "of": "images"}, "init": {"kind": "normal", "low": 0, "high": 1}}
    assert define("my:fn", {"lr": uniform(0, 1)}, config, SearchConfig(metric="loss")).config == config


def test_numbers_of_numpy_are_numbers_anywhere_in_a_space_and_a_config():
    space = {"lr": {"kind": "uniform", "low": np.float32(0), "high": 1}, "sizes": [np.int64(3), {"of": np.int64(4)}]}
    defined = define("my:fn", space, {"epochs": np.int64(9)}, SearchConfig(metric="loss"))
    assert defined.space == {"lr": uniform(0, 1), "sizes": [3, {"of": 4}]}
    assert defined.config == {"epochs": 9}
    assert parse_space(space) == parse_space(defined.space)


NESTED = {
    "lr": loguniform(1e-4, 1e-1),
    "optimizer": choice([{"name": "adam"}, {"name": "sgd", "momentum": uniform(0, 1), "layers": randint(1, 4)}]),
    "net": {"width": choice([16, 32]), "depth": 3},
}


def test_a_space_is_json_and_its_nested_domains_exist_only_where_they_are_chosen():
    space = parse_space(json.loads(json.dumps(NESTED)))
    configs = [space.suggest("", RandomDraw(random.Random(seed))) for seed in range(40)]
    assert all(1e-4 <= config["lr"] <= 1e-1 for config in configs)
    assert {config["net"]["width"] for config in configs} == {16, 32}
    assert {config["net"]["depth"] for config in configs} == {3}
    assert {tuple(config["optimizer"]) for config in configs} == {("name",), ("name", "momentum", "layers")}
    assert {config["optimizer"].get("layers") for config in configs} == {None, 1, 2, 3}


def test_an_integer_with_a_logarithm_is_drawn_as_often_from_each_power_of_ten():
    space = parse_space({"n": randint(1, 10001, log=True), "m": randint(1, 4, log=True)})
    drawn = [space.suggest("", RandomDraw(random.Random(seed))) for seed in range(1000)]
    numbers = sorted(config["n"] for config in drawn)
    assert 50 < numbers[500] < 100, "the middle of the logarithms, from 0.5 to 10000.5, is that of 71"
    assert (numbers[0], 9000 < numbers[-1] <= 10000) == (1, True)
    assert {type(number) for number in numbers} == {int}
    counts = [sum(config["m"] == number for config in drawn) for number in (1, 2, 3)]
    assert counts[0] > counts[1] > counts[2] > 100, "1 has log(3), 2 log(5 / 3), 3 log(7 / 5) of log(7)"


def test_what_was_suggested_is_found_by_its_parameters_again():
    space = parse_space(NESTED)
    for seed in range(20):
        config = space.suggest("", RandomDraw(random.Random(seed)))
        parameters = space.parameters("", config)

        class Known:
            def real(self, name, low, high, *, step, log, parameters=parameters):
                return parameters[name]

            integer = real

            def category(self, name, labels, parameters=parameters):
                return parameters[name]

        Known.integer = lambda _, name, low, high, *, step, log, parameters=parameters: parameters[name]
        assert space.suggest("", Known()) == config


@pytest.mark.parametrize(
    ("options", "value", "number"),
    [
        ([{"steps": randint(1, 100)}, {}], {}, 1),
        ([{"lr": uniform(0, 1), "momentum": uniform(0, 1)}, {"lr": uniform(0, 1)}], {"lr": 0.5}, 1),
        ([{"lr": uniform(0, 1), "momentum": uniform(0, 1)}, {"lr": uniform(0, 1)}], {"momentum": 0.5}, 0),
        ([{"net": choice([{"width": 3}, {}])}, {"net": {}, "a": 1}, {"net": {"depth": 2}}], {"net": {}}, 0),
        ([{"net": {"width": 3}}, {"net": {}}], {"net": {}}, 1),
        ([{"net": {"width": 3}}, {"net": "wide"}], {"net": "wide"}, 1),
    ],
    ids=str,
)
def test_a_value_is_that_of_the_option_of_which_it_is_all_before_one_of_which_it_is_a_part(options, value, number):
    assert parse_space({"a": choice(options)}).parameters("", {"a": value})["a"] == number


def test_an_initial_point_that_is_all_of_an_option_is_tried_as_it_is():
    space = parse_space({"warmup": choice([{"steps": randint(1, 100)}, {}])})
    search = Search(
        SearchConfig(metric="loss", initial_points=[{"warmup": {}}]), space, 0, RecordedTrials([], [].append), "sweep"
    )
    assert search.next_trial().config == {"warmup": {}}


def test_a_step_is_a_point_however_floats_are_rounded():
    space = parse_space(
        {"x": uniform(0.1, 0.7, 0.2), "far": uniform(1e6, 1e6 + 1, 1e-3), "n": randint(-3, 10, 2), "huge": randint(0, 10**401)}
    )
    for point in (
        {"x": 0.3},
        {"x": 0.1 + 2 * 0.2},
        {"x": 0.7},
        {"x": 0.1 + 3 * 0.2 - 1e-16},
        {"far": 1e6 + 0.7},
        {"n": 9},
        {"huge": 10**400},
    ):
        assert space.parameters("", point) == point
    for step in (1e-9, 0.1, 1 / 3):
        fine = parse_space({"x": uniform(0.3, 2, step)})
        for seed in range(100):
            fine.parameters("", fine.suggest("", RandomDraw(random.Random(seed))))


def test_a_grid_has_every_combination():
    points = list(parse_space({"a": grid([1, 2]), "b": choice([{"c": grid([3, 4])}, "none"])}).points(""))
    assert len(points) == 6
    with pytest.raises(ValueError, match="sampler='grid' tries every combination, and lr is continuous"):
        list(parse_space({"lr": uniform(0, 1), "a": grid([1])}).points(""))


def test_the_combinations_of_a_grid_are_counted_before_they_are_made():
    search = SearchConfig(metric="loss")
    space = {"lr": grid([1, 2]), "momentum": uniform(0.1, 0.7, 0.2), "net": choice([{"width": randint(0, 9, 2)}, "none"])}
    assert len(grid_points(search, parse_space(space))) == num_points(parse_space(space)) == 2 * 4 * 6
    with pytest.raises(ValueError, match="tries every combination, and the space has 20000000000: give fewer values"):
        check_search(search, parse_space({"lr": grid([1, 2]), "seed": randint(0, 10**10)}))


def test_numbers_of_numpy_are_those_of_python():
    space = {"a": choice(np.arange(3)), "b": uniform(np.float32(0), np.int64(1)), "c": randint(np.int64(0), np.int64(9))}
    assert json.loads(json.dumps(space)) == {"a": choice([0, 1, 2]), "b": uniform(0.0, 1), "c": randint(0, 9)}
    assert parse_space(space) == parse_space({"a": choice([0, 1, 2]), "b": uniform(0, 1), "c": randint(0, 9)})


@pytest.mark.parametrize(
    ("low", "high", "step", "last"),
    [(0, 1, 0.1, 1.0), (0.1, 0.7, 0.1, 0.7), (0, 1, 0.3, 0.9), (-0.3, 0.3, 0.1, 0.3), (0, 1e-3, 1e-4, 1e-3), (2, 2, 0.5, 2.0)],
)
def test_steps_reach_the_upper_end_where_they_do_in_decimals(low, high, step, last):
    space = parse_space({"x": uniform(low, high, step)})
    assert dict(space.items)["x"].high == last
    assert space.parameters("", {"x": last}) == {"x": last}


def test_a_point_by_paths_as_searchers_of_ray_take_it_is_answered_with_the_dicts_to_write():
    space = parse_space({"optimizer": {"lr": uniform(0, 1)}, "x": uniform(0, 1)})
    with pytest.raises(ValueError, match=r"^optimizer/lr is not in the space: of dicts in dicts, give {'optimizer': {'lr': "):
        space.parameters("", {"optimizer/lr": 0.5})
    with pytest.raises(ValueError, match=r"^rate is not in the space$"):
        space.parameters("", {"rate": 0.5})


def test_what_all_trials_have_is_as_it_is_stored_however_deep():
    space = parse_space({"x": uniform(0, 1), "plain": {"betas": (0.9, 0.99)}, "pair": (1, (2,)), "steps": [{"kind": "relu"}]})
    assert {name: node.value for name, node in space.items if name != "x"} == {
        "plain": {"betas": [0.9, 0.99]},
        "pair": [1, [2]],
        "steps": [{"kind": "relu"}],
    }


def test_very_many_options_are_not_compared_with_each_other():
    class Option(str):
        __slots__ = ()
        num_compared = 0

        def __eq__(self, other):
            Option.num_compared += 1
            return str(self) == str(other)

        def __ne__(self, other):
            return not self == other

        __hash__ = str.__hash__

    options = [Option(number) for number in range(1000)]
    chosen = dict(parse_space({"file": choice(options)}).items)["file"]
    assert chosen.labels[0] is options[0]
    assert Option.num_compared < 10_000


def defined(space):
    return define("module:function", space, {}, SearchConfig(metric="loss"))


@pytest.mark.parametrize("given", [{"n": randint(1, 5), "a": 1}, {"a": 1, "n": randint(1, 5)}])
def test_a_sweep_goes_on_with_an_equal_space_that_is_written_otherwise(given):
    """Without defaults, and in another order: PostgreSQL sorts the keys of a flow run's parameters."""
    run = Run.open("memory://", "a-sweep-of-integers")
    known = defined({"n": {"kind": "randint", "low": 1, "high": 5}, "a": 1})
    store_definition(run, known)
    assert find_definition(run, known) == find_definition(run, defined(given))
    with pytest.raises(ValueError, match="has space="):
        find_definition(run, defined({**given, "n": randint(1, 5, log=True)}))


def test_a_stored_space_that_this_version_does_not_parse_is_another_one():
    run, given = Run.open("memory://", "a-sweep-of-another-version"), defined({"n": randint(1, 5)})
    store_definition(run, replace(given, space={"n": {"kind": "weibull", "shape": 2}}))
    with pytest.raises(ValueError, match=r"has space=\{'n': \{'kind': 'weibull'.* give it another name"):
        find_definition(run, given)
    assert find_definition(run, given, may_differ=True) is None
