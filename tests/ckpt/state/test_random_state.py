"""RandomState(): the generators of each rank's process, stored as they are at the report and set as they were."""

import random

import numpy as np
import pytest
import simulated_gpu as gpu
import torch
from prefect_torch.ckpt import RandomState, RankLocal, RankLocalStateError, StateMismatchError
from prefect_torch.ckpt.lightning.random_states import read_random_state, save_random_state, set_random_state
from prefect_torch.ckpt.state.random_state import ProcessGenerators
from ranks import Attempt
from simulated_processes import on_simulated_gpu


@pytest.fixture(autouse=True)
def seeded():
    """Seed all generators, and leave them as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002 - the process's own
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])  # noqa: NPY002
    torch.set_rng_state(before[2])


def draw():
    """Draw from each; the normal ones keep a second number for the next call."""
    return [
        *(random.random(), random.gauss(0, 1)),
        *(float(np.random.random()), float(np.random.normal()), np.random.permutation(9).tolist()),  # noqa: NPY002
        *(torch.rand(3).tolist(), torch.randperm(9).tolist()),
    ]


def report(store, world_size=1):
    state = {"random": RandomState()}
    assert Attempt(store, world_size).run(lambda session, _: session.report({}, state=state)) == [None] * world_size


def load(store, state, **arguments):
    store.checkpoint(store.latest()).load_state(state, rank=0, **{"world_size": 1, **arguments})


def test_what_is_drawn_after_a_load_is_what_was_drawn_after_the_report(store):
    draw()
    report(store)
    first, second = draw(), draw()
    load(store, {"random": RandomState()})
    assert [draw(), draw()] == [first, second]


def own_generators():
    """Return generators that a program makes by itself, and draws from in the way of the last one."""
    mersenne = np.random.Generator(np.random.MT19937(1))
    return {
        "torch": torch.Generator().manual_seed(1),
        "numpy": np.random.default_rng(1),
        "mersenne": mersenne,
        "former": np.random.RandomState(1),
        "other former": np.random.RandomState(np.random.PCG64(1)),
        "python": random.Random(1),
    }


def draw_from(own):
    draws = {"torch": lambda it: torch.randn(3, generator=it).tolist(), "python": lambda it: [it.random(), it.gauss(0, 1)]}
    return {name: draws.get(name, lambda it: it.normal(size=3).tolist())(it) for name, it in own.items()}


@pytest.mark.parametrize("form", [lambda own: own, RankLocal, lambda own: {name: RankLocal(it) for name, it in own.items()}])
def test_generators_of_the_program_are_stored_and_set_as_they_are(store, form):
    own, resumed = own_generators(), own_generators()
    state = {"own": form(own)}  # made once, before the loop
    draw_from(own)
    assert Attempt(store).run(lambda session, _: session.report({}, state=state)) == [None]
    drawn = [draw_from(own), draw_from(own)]
    load(store, {"own": form(resumed)})
    assert [draw_from(resumed), draw_from(resumed)] == drawn


def test_each_rank_has_its_own_generator_back(store):
    def seeded_by(rank):
        return {"own": torch.Generator().manual_seed(rank), "common": random.Random(1)}

    assert Attempt(store, 2).run(lambda session, rank: session.report({}, state=seeded_by(rank))) == [None, None]
    for rank in range(2):
        state = {"own": torch.Generator(), "common": random.Random(7)}
        store.checkpoint(store.latest()).load_state(state, rank=rank, world_size=2)
        assert torch.equal(state["own"].get_state(), seeded_by(rank)["own"].get_state())
        assert state["common"].getstate() == seeded_by(rank)["common"].getstate()
    store.checkpoint(store.latest()).load_state({"common": random.Random(7)}, rank=0, world_size=1)
    with pytest.raises(RankLocalStateError, match="own"):
        load(store, {"own": torch.Generator()})


@pytest.mark.parametrize(
    ("kept", "loaded"),
    [
        (np.random.default_rng(1), np.random.Generator(np.random.MT19937(1))),
        (random.Random(1), torch.Generator()),
        (torch.Generator(), random.Random(1)),
        (np.random.default_rng(1), np.random.RandomState(1)),
    ],
)
def test_the_state_of_another_kind_of_generator_is_refused(store, kept, loaded):
    assert Attempt(store).run(lambda session, _: session.report({}, state={"own": {"it": kept}})) == [None]
    with pytest.raises(StateMismatchError, match=r"'own.it' in the checkpoint is not the state of a \S+ like the one to set"):
        load(store, {"own": {"it": loaded}})


def test_a_generator_in_the_state_of_an_object_is_refused(store):
    class Holding:
        def state_dict(self):
            return {"own": torch.Generator()}

        def load_state_dict(self, state):
            pass

    (error,) = Attempt(store).run(lambda session, _: session.report({}, state={"object": Holding()}))
    assert "'object.own' in the state is a Generator that torch.load(weights_only=True) cannot read" in str(error)


@pytest.mark.parametrize("kind", [list, tuple])
def test_generators_in_a_list_are_refused_by_what_to_do(store, kind):
    state = {"own": kind([torch.Generator(), torch.Generator()])}
    (error,) = Attempt(store).run(lambda session, _: session.report({}, state=state))
    assert "'own' in the state is a" in str(error)
    assert "or a random generator outside of lists, tuples and the states of objects" in str(error)


def test_another_generator_of_numpy_in_its_place_comes_back_too(store):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(7))
    try:
        report(store)
        drawn = np.random.random(5).tolist()  # noqa: NPY002
        load(store, {"random": RandomState()})
        assert np.random.random(5).tolist() == drawn  # noqa: NPY002
    finally:
        np.random.set_bit_generator(before)


def test_they_are_set_after_all_else_that_a_load_runs(store):
    class Drawing:
        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            draw()

    state = {"random": RandomState(), "drawing": Drawing()}
    assert Attempt(store).run(lambda session, _: session.report({}, state=state)) == [None]
    drawn = draw()
    load(store, {"random": RandomState(), "drawing": Drawing()})
    assert draw() == drawn


def test_another_number_of_ranks_is_refused_or_told_what_to_do(store):
    report(store, world_size=2)
    before = draw()
    with pytest.raises(RankLocalStateError, match=r"random\.python"):
        load(store, {"random": RandomState()})
    load(store, {"random": RandomState()}, rank_local=lambda name, values, rank, world_size: values[0])
    assert draw() == before


def test_a_checkpoint_of_a_gpu_loads_on_a_machine_without(store):
    stored = {**RandomState().value.state_dict(), "cuda": torch.zeros(16, dtype=torch.uint8)}
    assert Attempt(store).run(lambda session, _: session.report({}, state={"random": stored})) == [None]
    drawn = draw()
    load(store, {"random": RandomState()})
    assert draw() == drawn


@on_simulated_gpu
def test_the_generator_of_any_device_that_torch_has_is_one_of_them():
    gpu.generator.set_rng_state(torch.full((16,), 5, dtype=torch.uint8))
    generators = ProcessGenerators()
    stored = generators.state_dict()
    gpu.generator.set_rng_state(torch.zeros(16, dtype=torch.uint8))
    generators.load_state_dict(stored)
    assert gpu.generator.state.tolist() == [5] * 16
    torch.get_device_module(gpu.DEVICE).is_initialized = lambda: False
    assert gpu.NAME not in generators.state_dict()  # to ask it for its state would make a context


@on_simulated_gpu
def test_a_lightning_checkpoint_holds_the_generator_of_any_device(tmp_path):
    gpu.generator.set_rng_state(torch.full((16,), 5, dtype=torch.uint8))
    save_random_state(tmp_path, 0, [], within_epoch=True)
    gpu.generator.set_rng_state(torch.zeros(16, dtype=torch.uint8))
    set_random_state(read_random_state(tmp_path, 0))
    assert gpu.generator.state.tolist() == [5] * 16


def test_a_lightning_checkpoint_of_version_0_1_sets_the_generators(tmp_path):
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002 - the process's own
    stored = {
        "within_epoch": False,
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys), *rest),
        "torch": torch.get_rng_state(),
        "cuda": None,
    }
    torch.save(stored, tmp_path / "rng_state_0.pth")
    drawn = draw()
    set_random_state(read_random_state(tmp_path, 0))
    assert draw() == drawn
