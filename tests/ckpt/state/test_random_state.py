"""RandomState(): the generators of each rank's process, stored as they are at the report and set as they were."""

import random

import numpy as np
import pytest
import simulated_gpu as gpu
import torch
from prefect_torch.ckpt import CheckpointStore, RandomState, RankLocalStateError
from prefect_torch.ckpt.lightning.random_states import read_random_state, save_random_state, set_random_state
from prefect_torch.ckpt.state.random_state import ProcessGenerators
from ranks import Attempt
from simulated_processes import on_simulated_gpu


@pytest.fixture
def store(tmp_path):
    return CheckpointStore.open(tmp_path, "run")


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
    save_random_state(tmp_path, 0, within_epoch=True)
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
