"""Odd things to store, targets that want more than bytes in their memory, and torch's modes."""

import contextlib
import copy
import io
import itertools
import os
import pickle
import random
import sys
import traceback
import tracemalloc
from collections import OrderedDict, defaultdict
from decimal import Decimal

import numpy as np
import pytest
import torch
import torch.distributed as dist
from faulty_storage import FaultyStorage
from prefect_torch.ckpt import CheckpointStore, RankLocal, StateMismatchError
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.state.loading import read
from prefect_torch.ckpt.state.objects.flatten import Leaf, _Walk, flatten
from prefect_torch.ckpt.state.objects.tensors import local_part, share_elements
from prefect_torch.ckpt.state.objects.values import capture_values, read_value, why_unreadable
from prefect_torch.ckpt.state.staging.buffer import _is_readable
from ranks import Attempt
from states import check_equal
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import serialization


def stored(store, state, ranks=1):
    """Report what `state(rank)` returns, or `state`, and return the checkpoint."""

    def train(session, rank):
        session.report({}, state=state(rank) if callable(state) else state, upload="sync")

    assert Attempt(store, ranks).run(train) == [None] * ranks
    return store.checkpoint(store.latest())


def test_containers_are_filled_and_not_replaced_since_their_owner_may_hold_them_elsewhere(store):
    checkpoint = stored(store, {"losses": [1, 2], "seen": {7}, "extra": {"x": [3]}, "own": RankLocal([4])})
    losses, seen, extra, own = [], set(), {}, []
    state = {"losses": losses, "seen": seen, "extra": extra, "own": RankLocal(own)}
    checkpoint.load_state(state)
    assert (losses, seen, extra, own) == ([1, 2], {7}, {"x": [3]}, [4])
    assert state["losses"] is losses
    assert state["own"].value is own


class Options(dict):
    """A dict of a user's own, which notices what is set."""

    def __init__(self, **items):
        super().__init__(items)
        self.set = []

    def __setitem__(self, name, item):
        super().__setitem__(name, item)
        self.set.append(name)


class Cache:
    """An object whose items have an order that it changes."""

    def __init__(self):
        self.items = OrderedDict()

    def state_dict(self):
        return {"items": self.items}

    def load_state_dict(self, state):
        self.items = state["items"]


@pytest.mark.parametrize("kind", [OrderedDict, Options])
def test_a_kind_of_dict_that_begins_empty_is_filled_with_tensors(store, kind):
    held = kind()
    state = {"held": held}
    stored(store, {"held": kind(b=torch.ones(2), a=torch.zeros(1))}).load_state(state)
    assert state["held"] is held
    assert {name: tensor.tolist() for name, tensor in held.items()} == {"b": [1, 1], "a": [0]}
    assert list(held) == ["b", "a"]


@pytest.mark.parametrize("begun", [{}, {"c": torch.ones(1)}])
def test_a_kind_of_dict_with_setitem_of_its_own_notices_each_item(store, begun):
    held = Options(**begun)
    stored(store, {"held": Options(a=torch.zeros(1), b=torch.ones(2), **begun)}).load_state({"held": held})
    assert held.set == ["a", "b"]


def test_an_object_gets_an_ordered_dict_of_tensors_as_one(store):
    cache, loaded = Cache(), Cache()
    cache.items.update(b=torch.ones(2), a=torch.zeros(1))
    stored(store, {"cache": cache}).load_state({"cache": loaded})
    loaded.items.move_to_end("b")
    assert list(loaded.items) == ["a", "b"]


class History:
    """An object with a dict of lists that begin empty."""

    def __init__(self):
        self.losses = defaultdict(list)

    def state_dict(self):
        return {"losses": self.losses}

    def load_state_dict(self, state):
        self.losses = state["losses"]


def test_a_defaultdict_is_stored_and_goes_on_to_make_what_it_lacks(store):
    def make():
        of_tensors = defaultdict(lambda: torch.zeros(2))
        return {"losses": defaultdict(list), "of tensors": of_tensors, "it": History(), "in": {"losses": defaultdict(list)}}

    state = make()
    for losses in (state["losses"], state["it"].losses, state["in"]["losses"]):
        losses["train"].append(0.5)
    state["of tensors"]["train"] += 1
    loaded = make()
    stored(store, state).load_state(loaded)
    for losses in (loaded["losses"], loaded["it"].losses, loaded["in"]["losses"]):
        assert losses == {"train": [0.5]}
        losses["val"].append(0.25)
    loaded["of tensors"]["val"] += 2
    assert {name: it.tolist() for name, it in loaded["of tensors"].items()} == {"train": [1, 1], "val": [2, 2]}


def test_a_defaultdict_has_its_items_as_its_factory_makes_them(store):
    def make():
        return {
            "empty": defaultdict(lambda: defaultdict(list)),
            "begun": defaultdict(lambda: defaultdict(list), {"a": torch.ones(2)}),
        }

    state = make()
    for losses in state.values():
        losses["train"]["loss"].append(0.5)
    loaded = make()
    stored(store, state).load_state(loaded)
    for losses in loaded.values():
        losses["train"]["accuracy"].append(0.25)
        assert losses["train"] == {"loss": [0.5], "accuracy": [0.25]}


@pytest.mark.parametrize("target", [torch.nn.Linear(2, 2), [1], None])
def test_what_gives_nothing_a_name_is_told_how(store, target):
    checkpoint = stored(store, {"model": torch.nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"state must be a dict of names, such as {'model': model}, not a"):
        checkpoint.load_state(target)


def test_an_optimizer_without_its_module_is_told_to_come_with_it(store):
    model = torch.nn.Linear(2, 2)
    checkpoint = stored(store, {"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    with pytest.raises(StateMismatchError, match="they have their names from their module: load that, too"):
        checkpoint.load_state({"optimizer": torch.optim.SGD(model.parameters())})


def with_extra(model, *, first=True):
    """Return a model, a parameter of no module, and an optimizer of both after a step."""
    extra = torch.nn.Parameter(torch.rand(3))
    parameters = [extra, *model.parameters()] if first else [*model.parameters(), extra]
    optimizer = torch.optim.Adam(parameters)
    sum(parameter.sum() for parameter in parameters).backward()
    optimizer.step()
    return {"model": model, "extra": extra, "optimizer": optimizer}


@pytest.mark.parametrize("by_former", [False, True])
@pytest.mark.parametrize("kind", [lambda: torch.nn.Linear(2, 2), lambda: torch.nn.ParameterList([torch.ones(2)])])
def test_an_optimizer_may_have_a_parameter_of_no_module_beside_those_of_one(store, monkeypatch, by_former, kind):
    reported, fresh = with_extra(kind()), with_extra(kind())
    with monkeypatch.context() as patch:
        if by_former:
            patch.setattr("prefect_torch.ckpt.state.objects.flatten.joined_names", lambda found: list(range(len(found))))
        checkpoint = stored(store, reported)
    checkpoint.load_state(fresh)
    check_equal(fresh, reported)


def test_an_optimizer_with_a_parameter_of_no_module_at_another_place_or_without_the_module_is_refused(store):
    checkpoint = stored(store, with_extra(torch.nn.Linear(2, 2)))
    with pytest.raises(StateMismatchError, match=r"other parameters: .*; they have their names from their module"):
        checkpoint.load_state({"optimizer": with_extra(torch.nn.Linear(2, 2))["optimizer"]})
    with pytest.raises(StateMismatchError, match=r"group 0 of 'optimizer' has other parameters: 0, 2\. "):
        checkpoint.load_state(with_extra(torch.nn.Linear(2, 2), first=False))


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another, whose state is its own."""

    def __init__(self, inner, steps):
        super().__init__(inner.param_groups, {})
        self.inner, self.steps = inner, steps

    def state_dict(self):
        return {"inner": self.inner.state_dict(), "steps": self.steps}

    def load_state_dict(self, state_dict):
        self.inner.load_state_dict(state_dict["inner"])
        self.steps = state_dict["steps"]


def test_an_optimizer_that_keeps_its_state_in_a_way_of_its_own_gets_it_back(store):
    def make(lr, steps):
        model = torch.nn.Linear(2, 2)
        return {"model": model, "optimizer": Lookahead(torch.optim.SGD(model.parameters(), lr=lr), steps)}

    checkpoint = stored(store, make(0.1, 7))
    state = make(0.2, 0)
    checkpoint.load_state(state)
    assert (state["optimizer"].steps, state["optimizer"].inner.param_groups[0]["lr"]) == (7, 0.1)


class Meters:
    """Has the meters that were counted as attributes, and no others, whoever asks."""

    def __init__(self, **meters):
        self.meters = meters

    def __getattr__(self, name):
        return self.meters[name]

    def state_dict(self):
        return self.meters

    def load_state_dict(self, state):
        self.meters = state


def test_an_object_is_asked_for_no_attribute_but_those_of_its_state(store):
    fresh = Meters()
    stored(store, {"meters": Meters(loss=2.0)}).load_state({"meters": fresh})
    assert fresh.loss == 2.0


class Keyed(torch.optim.AdamW):
    """An optimizer that names its parameters in its state, like torch.distributed.optim._NamedOptimizer."""

    def __init__(self, model, lr):
        super().__init__(model.parameters(), lr=lr)
        self.names = list(dict(model.named_parameters()))

    def state_dict(self):
        state = super().state_dict()
        return {
            "state": {self.names[number]: value for number, value in state["state"].items()},
            "param_groups": [
                {**group, "params": [self.names[it] for it in group["params"]]} for group in state["param_groups"]
            ],
        }

    def load_state_dict(self, state):
        numbers = {name: number for number, name in enumerate(self.names)}
        super().load_state_dict(
            {
                "state": {numbers[name]: value for name, value in state["state"].items()},
                "param_groups": [
                    {**group, "params": [numbers[it] for it in group["params"]]} for group in state["param_groups"]
                ],
            }
        )


def test_an_optimizer_that_names_its_parameters_gets_its_state_back(store):
    def make(steps):
        model = torch.nn.Linear(2, 2)
        optimizer = Keyed(model, lr=0.1 + steps)
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    reported, fresh = make(3), make(0)
    stored(store, reported).load_state(fresh)
    check_equal(fresh, reported)


@pytest.mark.parametrize(("given", "told"), [(None, "a NoneType"), (torch.ones(7), r"a tensor of shape \[7\]")])
def test_what_rank_local_returns_must_fit(store, given, told):
    checkpoint = stored(store, lambda rank: {"t": torch.full((3,), float(rank))}, ranks=2)
    with pytest.raises(StateMismatchError, match=rf"rank_local returned {told} for 't', a tensor of shape \[3\]"):
        checkpoint.load_state({"t": torch.zeros(3)}, rank_local=lambda *_: given)


def test_a_module_gets_its_part_of_a_larger_one_by_its_state_dict(store):
    large, small = (torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(number))) for number in (2, 1))
    checkpoint = stored(store, {"m": large})
    with pytest.raises(StateMismatchError, match=r"in the module: give its state_dict\(\) to load what it has"):
        checkpoint.load_state({"m": small})
    checkpoint.load_state({"m": small.state_dict()})
    assert torch.equal(small[0].weight, large[0].weight)


def test_a_module_that_holds_nothing_is_loaded_wherever_it_is(store):
    """As a loss, or a metric of torchmetrics."""

    def make():
        return {"loss": torch.nn.MSELoss(), "parts": [torch.nn.Identity(), 1], "of": {"it": RankLocal(torch.nn.ModuleDict())}}

    checkpoint = stored(store, lambda _: make(), ranks=2)
    checkpoint.load_state(make(), rank=1, world_size=2)
    built = {"loss": None, "parts": None}
    checkpoint.load_state(built)
    assert built == {"loss": {}, "parts": [{}, 1]}
    with pytest.raises(StateMismatchError, match=r"'loss\.bias' is not in the checkpoint"):
        checkpoint.load_state({"loss": torch.nn.Linear(2, 2)})


def test_a_checkpoint_of_0_1_without_the_modules_that_hold_nothing_is_loaded(store, monkeypatch):
    def make():
        parts = [torch.nn.Identity(), torch.ones(2), RankLocal(torch.nn.ReLU())]
        return {"loss": torch.nn.MSELoss(), "losses": {"l1": [torch.nn.L1Loss()]}, "parts": parts}

    take = _Walk._take
    with monkeypatch.context() as as_in_0_1:
        as_in_0_1.setattr(_Walk, "_take", lambda self, value, *at: None if value == {} else take(self, value, *at))
        checkpoint = stored(store, make())
    state = make()
    state["parts"][1].zero_()
    checkpoint.load_state(state)
    assert torch.equal(state["parts"][1], torch.ones(2))
    with pytest.raises(StateMismatchError, match="'parts' has 1 items in the checkpoint, not 4"):
        checkpoint.load_state({"parts": [*make()["parts"], torch.ones(2)]})


def test_an_object_that_holds_modules_gets_the_versions_of_their_code(store):
    class Versioned(torch.nn.Linear):
        _version = 2

        def _load_from_state_dict(self, state_dict, prefix, local_metadata, *arguments):
            assert local_metadata["version"] == 2
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)

    class Trainer:
        def __init__(self):
            self.nets = [torch.nn.Sequential(Versioned(2, 2)), Versioned(3, 3)]
            self.steps = [0]

        def state_dict(self):
            nets = [net.state_dict() for net in self.nets]
            return {"nets": nets, "last": {"net": self.nets[1].state_dict()}, "steps": self.steps}

        def load_state_dict(self, state):
            for net, of_net in zip([*self.nets, self.nets[1]], [*state["nets"], state["last"]["net"]], strict=True):
                net.load_state_dict(of_net)
            self.steps = state["steps"]

    reported, fresh = Trainer(), Trainer()
    reported.steps = [0, 1]
    stored(store, {"trainer": reported}).load_state({"trainer": fresh})
    check_equal(fresh, reported)


def test_a_folder_is_no_file_to_write_a_model_to(store, tmp_path):
    checkpoint = stored(store, {"model": torch.nn.Linear(2, 2)})
    with pytest.raises(IsADirectoryError, match="is a directory: give the path of a file in it"):
        checkpoint.to_safetensors(tmp_path)


class Doubling(torch.nn.Linear):
    """A module that derives something when it is loaded."""

    twice = None

    def load_state_dict(self, state_dict, *args, **kwargs):
        loaded = super().load_state_dict(state_dict, *args, **kwargs)
        self.twice = 2 * self.weight.detach()
        return loaded


class DoublingInside(torch.nn.Linear):
    twice = None

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)
        self.twice = 2 * self.weight.detach()


@pytest.mark.parametrize(
    ("wrap", "kind"), [(lambda it: it, Doubling), (torch.nn.Sequential, DoublingInside), (torch.nn.Sequential, torch.nn.Linear)]
)
def test_a_module_with_code_of_its_own_for_loading_has_it_called(store, wrap, kind):
    checkpoint = stored(store, {"m": wrap(torch.nn.Linear(2, 2))})
    module = kind(2, 2)
    checkpoint.load_state({"m": wrap(module)})
    assert kind is torch.nn.Linear or torch.equal(module.twice, 2 * module.weight)


class GivesMore(torch.nn.Linear):
    """Gives what belongs to its weight and does not take it, as the 4-bit layers of bitsandbytes."""

    def __init__(self, kind):
        super().__init__(2, 2)
        self.scale, self.kind = torch.zeros(3), kind

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}weight.scale"] = self.scale
        destination[f"{prefix}weight.kind"] = torch.tensor([self.kind])


@pytest.mark.parametrize("wrap", [torch.nn.Sequential, lambda part: torch.nn.Sequential(checkpoint_wrapper(part))])
def test_a_module_need_not_take_what_it_gives_and_has(store, wrap):
    reported, fresh, other = GivesMore(1), GivesMore(1), GivesMore(2)
    reported.scale += 1
    checkpoint = stored(store, {"m": wrap(reported)})
    checkpoint.load_state({"m": wrap(fresh)})
    assert torch.equal(fresh.weight, reported.weight)
    assert torch.equal(fresh.scale, reported.scale)
    with pytest.raises(StateMismatchError, match=r"'m' does not take what is stored.*it does not take 0\.weight\.kind$"):
        checkpoint.load_state({"m": wrap(other)})


class Resizing(torch.nn.Module):
    """A module whose buffer gets the size that is stored, like torch's FakeQuantize."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def _load_from_state_dict(self, state, prefix, *rest):
        self.scale.resize_(state[f"{prefix}scale"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("wrap", [lambda part: part, lambda part: torch.nn.Sequential(torch.nn.Tanh(), part)])
def test_a_buffer_gets_another_size_where_its_module_gives_it_one(store, wrap):
    reported, fresh = Resizing(), Resizing()
    reported.scale = torch.arange(3.0)
    stored(store, {"m": wrap(reported)}).load_state({"m": wrap(fresh)})
    assert torch.equal(fresh.scale, reported.scale)


class Renaming(Resizing):
    """A module whose code for loading gives its buffer no other size, like torchvision's FrozenBatchNorm2d."""

    def _load_from_state_dict(self, state, prefix, *rest):
        state.pop(f"{prefix}num_batches_tracked", None)
        torch.nn.Module._load_from_state_dict(self, state, prefix, *rest)


class Losing(Resizing):
    """A module whose code for loading leaves out its buffer."""

    def _load_from_state_dict(self, state, prefix, *rest):
        del state[f"{prefix}scale"]
        torch.nn.Module._load_from_state_dict(self, state, prefix, *rest)


def test_a_buffer_of_another_size_that_its_module_leaves_out_is_a_mismatch(store):
    reported = Losing()
    reported.scale = torch.arange(3.0)
    with pytest.raises(StateMismatchError, match=r"'m' does not take what is stored.*it does not take scale$"):
        stored(store, {"m": reported}).load_state({"m": Losing()})


def test_a_buffer_of_another_size_that_its_module_does_not_take_is_a_mismatch(store):
    reported = Renaming()
    reported.scale = torch.arange(3.0)
    with pytest.raises(StateMismatchError, match=r"(?s)'m' does not take what is stored.*size mismatch for scale"):
        stored(store, {"m": reported}).load_state({"m": Renaming()})


@pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta state:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_module_is_loaded_though_it_has_a_sparse_tensor_that_is_not_stored(store, layout):
    def make():
        graph = torch.nn.Linear(2, 2)
        graph.register_buffer("edges", torch.eye(2).to_sparse(layout=layout), persistent=False)
        return graph

    reported, fresh = make(), make()
    stored(store, {"m": reported}).load_state({"m": fresh})
    check_equal(fresh, reported)


def test_tensors_of_a_dict_are_loaded_into_the_parts_of_sharded_ones(store):
    whole = {"small": torch.arange(6.0), "large": torch.arange(40_000.0)}
    checkpoint = stored(store, {"m": whole})
    with one_of(2, rank=1):
        mesh = DeviceMesh("cpu", [0, 1])
        parts = {name: torch.zeros(len(tensor) // 2) for name, tensor in whole.items()}
        sharded = {name: DTensor.from_local(part, mesh, [Shard(0)], run_check=False) for name, part in parts.items()}
        checkpoint.load_state({"m": sharded}, rank=1, world_size=2)
    for name, part in parts.items():
        assert torch.equal(part, whole[name][len(part) :])


class Optimizers(torch.optim.Optimizer):
    """Several optimizers as one, whose state has the names of its parameters, as torchtitan's."""

    def __init__(self, averages):
        super().__init__([torch.zeros(1)], {})
        self.averages = averages

    def __iter__(self):
        return iter([self])

    def state_dict(self):
        return {f"state.{name}.exp_avg": average for name, average in self.averages.items()}

    def load_state_dict(self, state_dict):
        self.given = state_dict


def test_an_optimizer_of_several_which_can_be_iterated_over_gets_its_own_parts_of_sharded_tensors(store):
    whole = torch.arange(80_000.0)
    checkpoint = stored(store, {"optimizer": Optimizers({"weight": whole})})
    with one_of(2, rank=1):
        part = DTensor.from_local(torch.zeros(40_000), DeviceMesh("cpu", [0, 1]), [Shard(0)], run_check=False)
        optimizer = Optimizers({"weight": part})
        checkpoint.load_state({"optimizer": optimizer}, rank=1, world_size=2)
        restored = optimizer.given["state.weight.exp_avg"]
        assert isinstance(restored, DTensor)
        assert torch.equal(restored.to_local(), whole[40_000:])


def test_how_an_optimizer_computes_a_step_is_for_the_program_that_loads(store):
    def make(lr, **how):
        model = torch.nn.Linear(2, 2)
        return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=lr, **how)}

    fresh = make(0.1, foreach=False)
    stored(store, make(0.5, capturable=True)).load_state(fresh)
    (group,) = fresh["optimizer"].param_groups
    assert (group["lr"], group["foreach"], group["capturable"]) == (0.5, False, False)


@contextlib.contextmanager
def one_of(world_size, rank):
    """Make this process one rank of a group of which the others do nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_the_parts_of_fsdp2_and_tensor_parallelism_are_known_where_neither_divides_a_size():
    with one_of(8, rank=7):
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("fsdp", "tp"))
        model = torch.nn.Sequential(torch.nn.Embedding(17, 4))
        parallelize_module(model, mesh["tp"], {"0": RowwiseParallel(input_layouts=Replicate())})
        fully_shard(model, mesh=mesh["fsdp"])
        offsets, local = local_part(model[0].weight)
    assert offsets == (15, 0)  # in the second half, rows 9 to 16
    assert tuple(local.shape) == (2, 4)


@pytest.mark.parametrize(
    ("placements", "told"),
    [
        ([Shard(0), _StridedShard(0, split_factor=2)], r"a DTensor \[8\] with placements .* is not known to be one box of it"),
        ([Replicate(), Partial()], "a DTensor with placements .* holds no values yet"),
    ],
)
def test_a_dtensor_whose_part_on_a_rank_is_no_box_of_it_is_refused(store, placements, told):
    checkpoint = stored(store, {"it": torch.zeros(8)})
    with one_of(4, rank=1):
        tensor = DTensor.from_local(torch.zeros(2), DeviceMesh("cpu", [[0, 1], [2, 3]]), placements, run_check=False)
        with pytest.raises(ValueError, match=f"'it' in the state is {told}: redistribute it"):
            Attempt(store).session().report({}, state={"it": tensor})
        with pytest.raises(StateMismatchError, match=f"'it' is to be loaded into a tensor that is {told}"):
            checkpoint.load_state({"it": tensor}, rank=0, world_size=1)


def test_a_dtensor_of_tensors_that_wrap_others_is_refused(store):
    what = "is a DTensor whose part on (a|this) rank is a TwoTensor, which wraps others"
    checkpoint = stored(store, {"layer": torch.nn.Linear(8, 8, bias=False)})
    with one_of(4, rank=1):
        part = TwoTensor(torch.zeros(2, 8), torch.zeros(2, 8))  # as the float8 weights of torchao in FSDP2
        layer = torch.nn.Linear(8, 8, bias=False, device="meta")
        layer.weight = torch.nn.Parameter(DTensor.from_local(part, DeviceMesh("cpu", range(4)), [Shard(0)], run_check=False))
        with pytest.raises(ValueError, match=f"'layer.weight' in the state {what}: report a directory"):
            Attempt(store).session().report({}, state={"layer": layer})
        with pytest.raises(StateMismatchError, match=f"'layer.weight' is to be loaded into a tensor that {what}"):
            checkpoint.load_state({"layer": layer}, rank=0, world_size=1)


def test_the_groups_of_an_optimizer_are_read_at_once(store):
    def make():
        model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(20)))
        return {"model": model, "optimizer": torch.optim.SGD([{"params": layer.parameters()} for layer in model], lr=0.1)}

    manifest = stored(store, make()).manifest
    counting = FaultyStorage(store.storage)
    CheckpointStore(counting, Layout("run"), store.spec).checkpoint(manifest).load_state(make())
    assert counting.counts()["get_range"] <= 4


def test_what_cannot_be_read_into_place_passes_through_little_memory(store, monkeypatch):
    """As for tensors on a GPU: all of a state at once would not fit into the memory of the host."""
    tensors = {str(number): torch.full((1300, 1000), float(number)) for number in range(20)}
    checkpoint = stored(store, {"it": tensors})
    sizes, made = [], read.HostMemory.__init__

    def count(self, size):
        sizes.append(size)
        made(self, size)

    monkeypatch.setattr(read.HostMemory, "__init__", count)
    targets = {name: torch.zeros(1000, 1300).t() for name in tensors}
    tracemalloc.start()
    checkpoint.load_state({"it": targets})
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert all(torch.equal(targets[name], tensor) for name, tensor in tensors.items())
    assert sizes == [8 * 4 * 2**20]
    assert most_bytes < 4 * 2**20  # of Python's own, such as a bytearray


def test_a_default_device_of_torch_moves_neither_the_copy_nor_what_is_read(store):
    state = {"large": torch.ones(300, 200), "small": torch.ones(3), "list": [torch.ones(20_000)]}
    with torch.device("meta"):
        Attempt(store).session().report({}, state=state, upload="sync")
    target = {"large": torch.zeros(200, 300).t(), "small": torch.zeros(3), "list": []}
    with torch.device("meta"):
        store.checkpoint(store.latest()).load_state(target)
    for name in ("large", "small"):
        assert torch.equal(target[name], state[name])
    assert torch.equal(target["list"][0], state["list"][0])


def test_a_user_may_have_torch_map_the_files_that_it_loads(store):
    """torch maps files alone, and values are read from memory."""
    _is_readable.cache_clear()
    with serialization.config.patch("load.mmap", True):
        stored(store, {"tensor": torch.arange(30_000), "list": [(1, torch.ones(2))]}).load_state(
            state := {"tensor": torch.zeros(30_000, dtype=torch.int64), "list": []}
        )
        assert _is_readable(torch.int64)
    assert (state["tensor"].tolist(), state["list"][0][1].tolist()) == ([*range(30_000)], [1, 1])


def test_reports_in_inference_mode_and_out_of_it_may_alternate(store):
    def train(session, rank):
        tensor = torch.zeros(30_000)
        for number in range(4):
            tensor.fill_(number)
            with torch.inference_mode(number % 2 == 0):
                session.report({}, state={"t": tensor}, upload="sync")

    assert Attempt(store).run(train) == [None]
    for manifest in store.list():
        state = {"t": torch.zeros(30_000)}
        store.checkpoint(manifest).load_state(state)
        assert state["t"].unique().tolist() == [manifest.step]


def test_a_load_in_inference_mode_fills_what_was_made_in_it_and_what_was_not(store):
    whole = torch.arange(4_000_000.0).reshape(2000, 2000)  # several reads, by threads that are not in it
    checkpoint = stored(store, {"mine": whole, "other": whole, "small": whole[:2, :3]})
    other = torch.zeros(2000, 2000).t()  # strided, which is filled as tensors on a GPU are
    with torch.inference_mode():
        state = {"mine": torch.zeros(2000, 2000).t(), "other": other, "small": torch.zeros(2, 3)}
        checkpoint.load_state(state)
    assert torch.equal(state["mine"], whole)
    assert torch.equal(other, whole)
    assert torch.equal(state["small"], whole[:2, :3])
    checkpoint.load_state(state)


def test_an_integer_is_stored_as_long_as_it_can_be_read(store):
    for number in (2**2039, {1: 2**3000}):
        with pytest.raises(ValueError, match=r"'it' in the state is a (int|dict) that .* cannot read"):
            Attempt(store).session().report({}, state={"it": number})
    state = {"it": 0}
    for number in (2**2039 - 1, 1 - 2**2039):
        stored(store, {"it": number}).load_state(state)
        assert state["it"] == number


@pytest.mark.parametrize("key", [(0, 1), None, 0.5, True])
def test_a_dict_with_keys_that_are_no_names_is_one_value_whatever_containers_it_holds(store, key):
    counts = {key: {"a": 1, "b": [{"c": 2}]}, "d": {"e": (3,)}}
    fresh = {"counts": {}, "nested": {"counts": {}}}
    stored(store, {"counts": counts, "nested": {"counts": counts}}).load_state(fresh)
    assert fresh == {"counts": counts, "nested": {"counts": counts}}
    assert {leaf.name for leaf in flatten({"it": {"counts": counts}}, 0).leaves} == {"it.counts"}
    with pytest.raises(ValueError, match=r"^the key .* under 'it' must be a string or an int, and not empty$"):
        flatten({"it": {key: {"a": torch.ones(2)}}}, 0)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="marshal wrote a set in the order that it has")
def test_sets_that_are_equal_are_one_value_however_they_were_filled(store):
    numbers = [8 * number for number in range(20)]  # they collide, so that a set keeps them in the order of their arrival
    checkpoint = stored(store, lambda rank: {"seen": set(numbers if rank else reversed(numbers))}, ranks=2)
    state = {"seen": set()}
    checkpoint.load_state(state, rank=0, world_size=1)
    assert state["seen"] == set(numbers)


CIRCLES = ("a circle through a tuple", "a circle of ints and tuples")


def odd_tensors():
    ones, circle = torch.ones(3), []
    circle.append(circle)
    through_tuple = ([],)
    through_tuple[0].append(through_tuple)
    return {
        "masked": (torch.masked.masked_tensor(ones, ones.bool()), "is a MaskedTensor, which wraps others"),
        "nested": (torch.nested.nested_tensor([ones, ones[:2]]), "is nested, which cannot be stored"),
        "lazy": (torch.nn.LazyLinear(3), r"'it\.weight' is not initialized \(lazy\)"),
        "frozen": (frozenset({1}), "Unsupported global: GLOBAL frozenset"),
        "a circle": (circle, "the state holds itself, or is nested too deeply"),
        "a circle through a tuple": (through_tuple, "'it' in the state holds itself, or is nested too deeply to be stored"),
        "a circle of ints and tuples": ({1: through_tuple}, "'it' in the state holds itself, or is nested too deeply"),
        "without a name": ({"": 1}, "must be a string or an int, and not empty"),
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("what", ["masked", "nested", "lazy", "frozen", "a circle", *CIRCLES, "without a name"])
def test_what_could_not_be_read_back_is_refused_by_name(store, what):
    value, message = odd_tensors()[what]
    with pytest.raises(ValueError, match=message):
        Attempt(store).session().report({}, state={"it": value})


class Named(torch.Tensor):
    """A tensor of a class that torch.load(weights_only=True) does not know."""


@pytest.mark.parametrize("size", [3, 30_000])
def test_a_tensor_of_a_class_of_its_own_is_stored_as_a_tensor(store, size):
    state = {"t": torch.zeros(size)}
    stored(store, {"t": torch.arange(float(size)).as_subclass(Named)}).load_state(state)
    assert torch.equal(state["t"], torch.arange(float(size)))


def test_a_target_whose_elements_share_memory_is_refused_before_anything_changes(store):
    checkpoint = stored(store, {"a": torch.ones(3), "t": torch.ones(3)})
    state = {"a": torch.zeros(3), "t": torch.zeros(1).expand(3)}
    with pytest.raises(StateMismatchError, match="'t' is to be loaded into a tensor that is expanded"):
        checkpoint.load_state(state)
    assert not state["a"].any()


@pytest.mark.parametrize("target", [torch.zeros(0, 1).expand(0, 3), np.zeros((0, 3), "f4")])
def test_what_has_no_elements_is_loaded_though_its_strides_are_0(store, target):
    state = {"t": target}
    stored(store, {"t": target}).load_state(state)
    assert state["t"] is target


def test_a_conjugated_view_on_one_rank_is_another_tensor_than_what_it_shows_on_another(store):
    tensor = torch.full((30_000,), 1j)
    checkpoint = stored(store, lambda rank: {"t": tensor.conj() if rank else tensor}, ranks=2)
    for rank, expected in enumerate((tensor, tensor.conj())):
        state = {"t": torch.zeros_like(tensor)}
        checkpoint.load_state(state, rank=rank, world_size=2)
        assert torch.equal(state["t"], expected)


class Holder:
    """An object that takes the tensor that it is given."""

    def __init__(self, tensor):
        self.tensor = tensor

    def state_dict(self):
        return {"tensor": self.tensor}

    def load_state_dict(self, state):
        self.tensor = state["tensor"]


def test_a_loader_that_a_load_has_not_begun_goes_on_behind_the_reported_batch(store):
    from torchdata.nodes import IterableWrapper, Loader  # noqa: PLC0415 - what is tested else must not find it loaded

    loader, other = Loader(IterableWrapper(range(6))), Loader(IterableWrapper(range(6)))
    batches = iter(loader)
    used = [next(batches) for _ in range(2)]
    stored(store, {"loader": loader}).load_state({"loader": other})
    assert (used, [*other], [*other]) == ([0, 1], [2, 3, 4, 5], [*range(6)])


@pytest.mark.parametrize("size", [3, 300])  # a value, and a tensor of its own
def test_what_begins_as_references_to_a_models_tensors_gets_its_values_and_the_model_its_own(store, size):
    def make(shift):
        model = torch.nn.Linear(size, size)
        tensors = model.state_dict()
        ema = {name: tensor + 1 if shift else tensor for name, tensor in tensors.items()}
        arrays = {name: tensor.numpy() + 2 if shift else tensor.numpy() for name, tensor in tensors.items()}
        holder = Holder(tensors["weight"] + 3 if shift else tensors["weight"])
        return {"best": RankLocal(ema["bias"]), "ema": ema, "arrays": arrays, "holder": holder, "model": model}

    reported, state = make(shift=True), make(shift=False)
    stored(store, reported).load_state(state)
    check_equal(dict(state["model"].state_dict()), dict(reported["model"].state_dict()))
    check_equal(state["ema"], reported["ema"])
    check_equal(state["best"], reported["best"])
    assert torch.equal(state["holder"].tensor, reported["holder"].tensor)
    for name, array in reported["arrays"].items():
        assert np.array_equal(state["arrays"][name], array)


@pytest.mark.parametrize("size", [3, 300])
def test_what_shares_memory_and_had_equal_values_still_shares_it(store, size):
    model, tensor = torch.nn.Linear(size, size), torch.ones(size, size)
    checkpoint = stored(
        store, {"model": model, "head": model.weight, "holder": Holder(model.weight), "one": tensor, "two": tensor}
    )
    fresh, zeros = torch.nn.Linear(size, size), torch.zeros(size, size)
    state = {"model": fresh, "head": fresh.weight, "one": zeros, "two": zeros}
    checkpoint.load_state(state)
    assert state["head"] is fresh.weight
    assert torch.equal(fresh.weight, model.weight)
    assert state["one"] is state["two"] is zeros
    assert torch.equal(zeros, tensor)


@pytest.mark.parametrize("size", [3, 300])
def test_two_tensors_of_a_state_that_share_memory_each_get_their_values(store, size):
    checkpoint = stored(store, {"one": {"w": torch.ones(size, size)}, "two": {"w": torch.full((size, size), 2.0)}})
    both = torch.zeros(size, size)
    state = {"one": {"w": both}, "two": {"w": both}}
    checkpoint.load_state(state)
    assert state["one"]["w"] is both
    assert (both == 1).all()
    assert (state["two"]["w"] == 2).all()


@pytest.mark.parametrize("size", [30, 300])
@pytest.mark.parametrize("columns", [False, True])
def test_two_tensors_of_a_state_that_overlap_each_get_their_values(store, size, columns):
    """They begin at different addresses; views of different columns are interleaved, and share no element."""
    ones, twos = torch.ones(size, size), torch.full((size // 2, size), 2.0)
    checkpoint = stored(store, {"one": ones, "two": twos, "left": ones[:, 2:], "right": twos[:, :2]})
    both = torch.zeros(size, size + (size if columns else 0))
    one = both[:, :size]
    two = both[1 : 1 + size // 2, size:] if columns else both[size // 2 :]
    state = {"one": one, "two": two}
    checkpoint.load_state(state)
    assert state["one"] is one
    assert (state["two"] is two) == columns
    assert (one == 1).all()
    assert (state["two"] == 2).all()


@pytest.mark.parametrize("size", [3, 300])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_values_that_differ_are_not_loaded_into_one_tied_parameter(store, size, num_ranks):
    """On several ranks the copies of equal tensors may be cut into other chunks, whose digests do not tell."""

    class Pair(torch.nn.Module):
        def __init__(self, *, is_tied, value=2.0):
            super().__init__()
            self.a, self.b = (torch.nn.Parameter(torch.full((size, size), it)) for it in (1.0, value))
            self.c = torch.nn.Parameter(torch.zeros(size + 1, size))
            self.b = self.a if is_tied else self.b

    tied = Pair(is_tied=True)
    with torch.no_grad():
        tied.a.fill_(5.0)
    apart = stored(store, {"model": Pair(is_tied=False)}, num_ranks)
    with pytest.raises(StateMismatchError, match=r"'model.a' and 'model.b' share memory .* and differ in the checkpoint"):
        apart.load_state({"model": tied}, rank=0, world_size=num_ranks)
    if num_ranks == 1 and size == 300:
        assert (tied.a == 5).all(), "nothing has changed"
    equal = stored(store, {"model": Pair(is_tied=False, value=1.0), "again": Pair(is_tied=True)}, num_ranks)
    equal.load_state({"model": tied, "again": tied}, rank=0, world_size=num_ranks)
    assert (tied.a == 1).all()


def test_a_load_between_forward_and_backward_is_seen_by_autograd(store):
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Tanh(), torch.nn.Linear(200, 200))
    checkpoint = stored(store, {"model": model})
    loss = model(torch.ones(1, 200, requires_grad=True)).sum()
    checkpoint.load_state({"model": model})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_part_of_a_large_tensor_in_a_tuple_is_stored_without_the_rest(store):
    large = torch.arange(200_000.0)
    state = {"pair": (large[1:3], {"item": [large[5:6]]})}
    checkpoint = stored(store, state)
    assert sum(entry.bytes for entry in store.list()[-1].files) < 50_000
    loaded = {"pair": ()}
    checkpoint.load_state(loaded)
    assert loaded["pair"][0].tolist() == [1.0, 2.0]
    assert loaded["pair"][1]["item"][0].tolist() == [5.0]


def test_the_tensors_of_a_tuple_are_copied_by_a_report_and_encoded_later(monkeypatch):
    whole = torch.arange(12.0).reshape(3, 4)
    reported = (whole, [whole, whole.T, {"n": {3}}], whole[:, 1], torch.ones(2, requires_grad=True), None)
    expected = copy.deepcopy(reported)
    with monkeypatch.context() as patch:
        patch.delattr(torch, "save")
        (value,) = capture_values([Leaf("it", ("it",), reported)])
    whole.zero_()
    reported[1][2]["n"].add(4)
    found = read_value(value.encode())
    check_equal(found, expected)
    assert found[3].requires_grad
    assert found[0].data_ptr() == found[1][0].data_ptr()


def test_tuples_have_one_digest_if_and_only_if_they_are_equal():
    one, other = torch.arange(4.0), torch.ones(4)
    values = [
        (one, None),
        (None, one),
        (one, other),
        (other, one),
        (one, other, one),
        (one, one, other),
        (one.reshape(2, 2), None),
        ((one,), None),
        (one.int(), None),
    ]
    values = [*values, copy.deepcopy(values[0]), copy.deepcopy(values[2])]
    digests = [it.digest for it in capture_values([Leaf("it", ("it",), value) for value in values])]
    assert len(set(digests)) == 9
    assert [digests[0], digests[2]] == digests[-2:]


def test_views_share_elements_if_numpy_says_so():
    drawn, found = random.Random(0), set()
    for _ in range(2000):
        base = torch.zeros(drawn.choice([12, 40, 300]), dtype=drawn.choice([torch.uint8, torch.int16, torch.float32]))
        views = []
        while len(views) < 2:
            shape, stride = ([drawn.randint(1, most) for _ in range(drawn.randint(0, 3))] for most in (5, 20))
            last = sum((size - 1) * step for size, step in zip(shape, stride, strict=False))
            if len(shape) == len(stride) and last < len(base):
                views.append(base.as_strided(shape, stride, drawn.randint(0, len(base) - 1 - last)))
        one, other = views
        found.add(share_elements(one, other))
        assert share_elements(one, other) == np.shares_memory(one.numpy(), other.numpy())
    assert found == {True, False}


def test_views_of_one_tensor_that_lie_apart_are_loaded_in_place(store):
    def make(flat):
        model = torch.nn.Linear(100, 100, bias=False)
        model.weight.data = flat[:10_000].view(100, 100)
        return {"model": model, "ema": flat[10_000:20_000], "a": flat[20_000:30_000], "b": flat[30_000:]}

    flat, into = torch.arange(40_000.0), torch.zeros(40_000)
    stored(store, make(flat)).load_state(make(into))
    assert torch.equal(into, flat)


def views():
    """Return tensors of 300 times 300 elements into which no data can be read, with what an error calls them."""
    return {
        "conj": (torch.zeros(300, 300, dtype=torch.complex64).conj(), "a view that conjugates or negates"),
        "neg": (torch.zeros(300, 300, dtype=torch.complex64).conj().imag, "a view that conjugates or negates"),
        "meta": (torch.zeros(300, 300, device="meta"), r"without data \(meta\)"),
        "expanded": (torch.zeros(300, 1).expand(300, 300), "expanded"),
        "unfolded": (torch.zeros(600).unfold(0, 300, 1)[:300], "a view whose elements share memory"),
        "sparse": (torch.zeros(300, 300).to_sparse(), "torch.sparse_coo"),
        "wrapping": (TwoTensor(torch.zeros(300, 300), torch.zeros(300, 300)), "a TwoTensor, which wraps others"),
    }


@pytest.mark.parametrize("size", [3, 300])
def test_the_tensor_of_an_object_is_read_into_the_one_that_it_has(store, size):
    checkpoint = stored(store, {"it": Holder(torch.full((size, size), 2.0))})
    tensor = torch.zeros(size, size)
    holder = Holder(tensor)
    checkpoint.load_state({"it": holder})
    assert torch.equal(tensor, torch.full((size, size), 2.0))
    assert holder.tensor.data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize("kind", views())
def test_an_object_whose_tensor_cannot_be_read_into_gets_a_new_one(store, kind):
    view, _ = views()[kind]
    expected = torch.arange(90_000.0).view(300, 300).to(view.dtype) + (2j if view.is_complex() else 0)
    checkpoint = stored(store, {"it": Holder(expected)})
    holder = Holder(view)
    checkpoint.load_state({"it": holder})
    assert torch.equal(holder.tensor, expected)
    assert holder.tensor.is_cpu


@pytest.mark.parametrize("kind", views())
def test_a_tensor_that_cannot_be_read_into_is_refused_by_what_it_is(store, kind):
    view, told = views()[kind]
    checkpoint = stored(store, {"it": torch.ones(300, 300, dtype=view.dtype)})
    with pytest.raises(StateMismatchError, match=f"'it' is to be loaded into a tensor that is {told}"):
        checkpoint.load_state({"it": view})


def test_an_optimizers_momentum_that_is_a_conjugated_view_is_loaded_as_it_was(store):
    parameter = torch.nn.Parameter(torch.ones(100, 100, dtype=torch.complex64))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    parameter.grad = torch.full((100, 100), 1 + 2j)
    optimizer.step()
    checkpoint = stored(store, {"optimizer": optimizer})
    optimizer.state[parameter]["momentum_buffer"] = torch.zeros(100, 100, dtype=torch.complex64).conj()
    checkpoint.load_state({"optimizer": optimizer})
    assert torch.equal(optimizer.state[parameter]["momentum_buffer"], parameter.grad)


def test_a_tensor_with_interleaved_elements_of_its_own_is_loaded_in_place(store):
    view = torch.zeros(8).as_strided((2, 3), (3, 2))  # at 0, 2, 4 and 3, 5, 7
    stored(store, {"it": torch.arange(6.0).view(2, 3)}).load_state({"it": view})
    assert torch.equal(view, torch.arange(6.0).view(2, 3))


@pytest.fixture
def two_ranks():
    """A process group of two ranks, of which this process is the first and the other does nothing."""
    with one_of(2, rank=0):
        yield


@pytest.mark.filterwarnings("ignore:.*`NO_SHARD`")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_fsdp1_shards_is_refused_unless_it_is_whole_on_each_rank(store, two_ranks, use_orig_params):
    def make(strategy):
        options = {"sharding_strategy": ShardingStrategy[strategy], "device_id": torch.device("cpu")}
        wrapped = FullyShardedDataParallel(torch.nn.Linear(2, 2), use_orig_params=use_orig_params, **options)
        model = torch.nn.Sequential(wrapped)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    model, optimizer = make("FULL_SHARD")
    with pytest.raises(
        ValueError, match=r"'it' in the state is sharded by FullyShardedDataParallel.*FSDP2 \(fully_shard\), or"
    ):
        Attempt(store).session().report({}, state={"it": model})
    if not use_orig_params:
        with pytest.raises(ValueError, match="'it' in the state has parts of the flat parameters"):
            Attempt(store).session().report({}, state={"it": optimizer})
    model, optimizer = make("NO_SHARD")
    stored(store, {"optimizer": optimizer})
    flatten({"own": RankLocal(make("FULL_SHARD")[1]), "model": model}, 0)


@pytest.mark.parametrize("value", [b"", [b"", b"x", b""], {1: b"", 2: (b"", {"k": b"\xff"})}])
def test_empty_bytes_are_stored_as_other_bytes_are(store, value):
    state = {"it": None}
    stored(store, lambda _: {"it": value}, ranks=2).load_state(state)
    assert state["it"] == value


class Wrapping:
    """An object whose state is that of its module."""

    def __init__(self, module):
        self.module = module

    def state_dict(self):
        return self.module.state_dict()

    def load_state_dict(self, state):
        self.module.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize("size", [4, 300])
def test_a_lazy_module_is_told_to_run_a_batch_before_it_is_loaded(store, size):
    checkpoint = stored(store, {"it": torch.nn.Linear(size, size)})
    with pytest.raises(
        StateMismatchError, match=r"'it' has parameters that are not initialized \(lazy\): run a batch through it"
    ):
        checkpoint.load_state({"it": torch.nn.LazyLinear(size)})
    with pytest.raises(StateMismatchError, match=r"'it.weight' is to be loaded into a tensor that is not initialized \(lazy\)"):
        checkpoint.load_state({"it": dict(torch.nn.LazyLinear(size).named_parameters())})
    wrapped = Wrapping(torch.nn.LazyLinear(size))
    checkpoint.load_state({"it": wrapped})
    assert wrapped.module.weight.shape == (size, size)


def test_a_value_of_a_type_that_this_process_does_not_allow_is_refused_before_anything_changes(store):
    with torch.serialization.safe_globals([Decimal]):
        state = {"large": torch.ones(300, 300), "small": torch.ones(3), "it": Decimal("1.5")}
        checkpoint = stored(store, state)
        own = {"large": torch.zeros(300, 300), "small": torch.zeros(3), "it": None}
        checkpoint.load_state(own)
        assert own["it"] == Decimal("1.5")
    own = {"large": torch.zeros(300, 300), "small": torch.zeros(3), "it": None}
    with pytest.raises(
        StateMismatchError, match=r"'it' in .*/__0_1.distcp is a value .* GLOBAL decimal.Decimal\): if"
    ) as caught:
        checkpoint.load_state(own)
    assert "weights_only=False" not in "".join(traceback.format_exception(caught.value))
    assert "`weights_only`" not in "".join(traceback.format_exception(caught.value))
    assert not own["large"].any()
    assert not own["small"].any()


class RunsCode:
    """A value that calls a function of the operating system when pickle loads it."""

    def __reduce__(self):
        return os.system, ("exit 1",)


def test_a_value_that_would_run_code_is_refused_without_the_advice_to_load_it_nevertheless():
    saved = io.BytesIO()
    torch.save(RunsCode(), saved)
    with pytest.raises(pickle.UnpicklingError) as caught:
        read_value(saved.getvalue())
    assert why_unreadable(caught.value) == (
        "UnpicklingError: Trying to load unsupported GLOBAL posix.system whose module posix is blocked."
    )


@pytest.mark.parametrize(
    ("value", "target"),
    [
        (3, {"averages": torch.zeros(3)}),
        (3, {"n": 1}),
        (None, [torch.zeros(3)]),
        ({}, {"n": 1}),
        ({1: 2}, {"n": 1}),
        ([], [{"n": 1}]),
        ([1, 2], [{"n": 1}]),
        ([1, 2], [torch.zeros(1), 1]),
        ({1: 2, "n": 3}, {"n": torch.zeros(1)}),
        (torch.zeros(300, 300), {"n": 1}),
    ],
)
def test_names_that_one_value_in_the_checkpoint_does_not_have_are_refused(store, value, target):
    checkpoint = stored(store, {"it": value})
    with pytest.raises(
        StateMismatchError, match=r"'it' is one value in the checkpoint, without the items of the (dict|list) to load into"
    ):
        checkpoint.load_state({"it": target})


@pytest.mark.parametrize(
    ("value", "target"),
    [({1: 2, "n": 3, "m": [1]}, {"n": np.float32(1), "m": []}), (OrderedDict(n=3, m=4), {"n": 1}), ({1: 2}, {}), (3, [7])],
)
def test_one_value_that_has_all_names_of_a_container_replaces_its_items(store, value, target):
    state = {"it": target}
    stored(store, {"it": value}).load_state(state)
    assert state["it"] == value


def trained(kind, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 3)
    optimizer = kind(model.parameters(), lr=0.1, **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


@pytest.mark.parametrize(
    ("stored_by", "loaded_by", "unset"),
    [
        (torch.optim.AdamW, torch.optim.SGD, "dampening, momentum"),
        (torch.optim.SGD, torch.optim.Adam, "betas, eps"),
        (torch.optim.Adam, torch.optim.Adagrad, "initial_accumulator_value, lr_decay"),
    ],
)
def test_a_checkpoint_of_another_kind_of_optimizer_is_refused_by_the_options_that_it_lacks(store, stored_by, loaded_by, unset):
    checkpoint = stored(store, trained(stored_by))
    state = trained(loaded_by)
    before = copy.deepcopy(state["optimizer"].state_dict())
    with pytest.raises(StateMismatchError, match=rf"group 0 of 'optimizer' has no {unset} in the checkpoint: another kind of"):
        checkpoint.load_state(state)
    check_equal(state["optimizer"].state_dict(), before)
    state["optimizer"].step()


class Newer(torch.optim.SGD):
    """An optimizer that has got another option since, which it does without."""

    def __init__(self, params, **options):
        super().__init__(params, **options)
        self.defaults["added"] = self.param_groups[0]["added"] = 1


@pytest.mark.parametrize(("kind", "more"), [(torch.optim.SGD, {"initial_lr": 0.5}), (Newer, {})])
def test_options_that_a_later_version_of_an_optimizer_adds_are_not_missed(store, kind, more):
    old = trained(torch.optim.SGD)
    options = old["optimizer"].param_groups[0]
    for name in ("maximize", "foreach", "fused"):
        del options[name]
    options.update(more)
    state = trained(kind)
    stored(store, old).load_state(state)
    assert state["optimizer"].param_groups[0].items() >= more.items()
    state["optimizer"].step()


class OnlyLr(torch.optim.Optimizer):
    """An optimizer without the options that all of torch's have, which sets one of its groups when it steps."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self):
        for group in self.param_groups:
            group["num_steps"] = group.get("num_steps", 0) + 1
            for parameter in group["params"]:
                parameter.data.sub_(parameter.grad, alpha=group["lr"])


class WithoutPrivate(OnlyLr):
    """An optimizer whose `state_dict()` leaves out some of its options, as those of HeavyBall do."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.defaults["_kind"] = self.param_groups[0]["_kind"] = type(self)

    def state_dict(self):
        state = super().state_dict()
        state["param_groups"][0].pop("_kind", None)
        return state


@pytest.mark.parametrize("kind", [OnlyLr, WithoutPrivate])
def test_an_optimizer_of_ones_own_gets_options_that_it_did_not_begin_with(store, kind):
    checkpoint, state = stored(store, trained(kind)), trained(kind)
    for _ in range(2):
        state["optimizer"].param_groups[0].pop("num_steps")
        checkpoint.load_state(state)
        assert state["optimizer"].param_groups[0]["num_steps"] == 1


def test_adam_and_adamw_load_each_other(store):
    for kinds in itertools.permutations((torch.optim.Adam, torch.optim.AdamW)):
        state = trained(kinds[1])
        stored(store, trained(kinds[0])).load_state(state)
        state["optimizer"].step()


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_zero_redundancy_optimizer_that_is_fresh_gets_what_its_rank_steps(store):
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415 - the import warns

    state = trained(torch.optim.AdamW)
    checkpoint = stored(store, state)
    with one_of(2, rank=1):
        model = torch.nn.Linear(3, 3)
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.2)
        for _ in range(2):  # the second time, it has no state of the first rank's parameter
            checkpoint.load_state({"model": model, "optimizer": optimizer}, rank=0, world_size=1)
        (inner,) = optimizer.optim.param_groups
        assert ([*inner["params"]], inner["lr"]) == ([model.bias], 0.1)
        check_equal(optimizer.optim.state[model.bias], state["optimizer"].state[state["model"].bias])
        assert model.weight not in optimizer.optim.state
