"""Modules below wrappers: of torch.compile, of activation checkpointing, and of users."""

import pytest
import torch
from prefect_torch.ckpt.state.objects.flatten import flatten
from prefect_torch.ckpt.state.objects.parameters import _FORMER_WRAPPERS
from ranks import Attempt
from states import check_equal
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper


def stored(store, state, ranks=1):
    """Report what `state(rank)` returns, or `state`, and return the checkpoint."""

    def train(session, rank):
        session.report({}, state=state(rank) if callable(state) else state, upload="sync")

    assert Attempt(store, ranks).run(train) == [None] * ranks
    return store.checkpoint(store.latest())


class WithHead(torch.nn.Module):
    """A head on a model, which has what the head lacks."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.head = torch.nn.Linear(4, 1)

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)


def test_what_passes_on_names_to_a_compiled_module_is_stored_whole(store):
    def make():
        return WithHead(torch.compile(torch.nn.Linear(4, 4), backend="eager"))

    model, fresh = make(), make()
    names = {leaf.name for leaf in flatten({"m": model}, 0).leaves}
    assert names == {"m.inner.weight", "m.inner.bias", "m.head.weight", "m.head.bias"}
    stored(store, {"m": model}).load_state({"m": fresh})
    check_equal(fresh, model)


class Prefixed(torch.nn.Module):
    """Leaves the name of its part out of its `state_dict()`."""

    def __init__(self, part):
        super().__init__()
        self.part = part
        self.register_state_dict_post_hook(self.shorten)
        self.register_load_state_dict_pre_hook(self.lengthen)

    @staticmethod
    def shorten(_, state, prefix, __):
        for key in [key for key in state if key.startswith(f"{prefix}part.")]:
            state[prefix + key.removeprefix(f"{prefix}part.")] = state.pop(key)

    @staticmethod
    def lengthen(_, state, prefix, *__):
        for key in [key for key in state if key.startswith(prefix)]:
            state[f"{prefix}part.{key.removeprefix(prefix)}"] = state.pop(key)


class Wide(torch.nn.Module):
    """Has buffers that each rank counts for itself, one of them large."""

    def __init__(self, value):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("few", torch.full((3,), float(value)))
        self.register_buffer("many", torch.full((600, 600), float(value)))


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, Prefixed])
def test_the_buffers_of_what_is_wrapped_are_those_of_rank_0(store, wrap):
    def make(value):
        return torch.nn.Sequential(*(wrap(Wide(value)) for _ in range(4)))

    fresh = make(7)
    stored(store, lambda rank: {"m": make(rank)}, ranks=2).load_state({"m": fresh})
    assert [it.unique().tolist() for it in fresh.buffers()] == [[0.0]] * 8


class Resizing(torch.nn.Module):
    """A module whose buffer gets the size that is stored, like torch's FakeQuantize."""

    def __init__(self, size):
        super().__init__()
        self.register_buffer("scale", torch.full((size,), float(size)))

    def _load_from_state_dict(self, state, prefix, *rest):
        self.scale.resize_(state[f"{prefix}scale"].shape)
        super()._load_from_state_dict(state, prefix, *rest)


@pytest.mark.parametrize("wrap", [checkpoint_wrapper, Prefixed])
@pytest.mark.parametrize("size", [0, 1])
def test_a_buffer_of_what_is_wrapped_gets_another_size_where_its_module_gives_it_one(store, wrap, size):
    reported, fresh = Resizing(3), Resizing(size)
    stored(store, {"m": torch.nn.Sequential(wrap(reported))}).load_state({"m": torch.nn.Sequential(wrap(fresh))})
    assert fresh.scale.tolist() == reported.scale.tolist()


class Adapted(torch.nn.Module):
    """A frozen layer and a trained one, of which `state_dict()` has the trained one."""

    def __init__(self, wrap):
        super().__init__()
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        self.adapter = wrap(torch.nn.Linear(3, 3))

    def state_dict(self, *args, **options):
        return {name: it for name, it in super().state_dict(*args, **options).items() if not name.startswith("frozen.")}


class AdaptedByHook(torch.nn.Module):
    """The same by a hook, with another one that a load calls."""

    def __init__(self, wrap):
        super().__init__()
        self.frozen = torch.nn.Linear(3, 3).requires_grad_(False)
        self.adapter = wrap(torch.nn.Linear(3, 3))
        self.register_state_dict_post_hook(self.leave_out)
        self.register_load_state_dict_pre_hook(lambda *args: None)

    @staticmethod
    def leave_out(_, state, prefix, __):
        for key in [key for key in state if key.startswith(f"{prefix}frozen.")]:
            del state[key]


@pytest.mark.parametrize("wrap", [torch.nn.Sequential, checkpoint_wrapper])
@pytest.mark.parametrize("kind", [Adapted, AdaptedByHook])
def test_frozen_weights_that_a_state_dict_leaves_out_are_not_missed(store, kind, wrap):
    reported, fresh = kind(wrap), kind(wrap)
    frozen = fresh.frozen.weight.clone()
    stored(store, {"m": reported}).load_state({"m": fresh})
    check_equal(fresh.adapter, reported.adapter)
    assert torch.equal(fresh.frozen.weight, frozen)


class Named(torch.nn.Module):
    """Has parts with names that end like those that wrappers insert."""

    def __init__(self):
        super().__init__()
        self.net_orig_mod = torch.nn.Linear(2, 2)
        self.body = torch.nn.Sequential(checkpoint_wrapper(torch.compile(torch.nn.Linear(2, 2), backend="eager")))
        self.a_checkpoint_wrapped_module = torch.nn.ModuleDict({"_orig_mod": torch.nn.Linear(2, 2)})


@pytest.mark.parametrize("by_former", [False, True])
def test_names_that_end_like_a_wrappers_are_kept_and_those_of_former_versions_are_loaded(store, monkeypatch, by_former):
    def make():
        model = Named()
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.1)
        sum(parameter.sum() for parameter in model.parameters()).backward()
        optimizer.step()
        return {"m": model, "optimizer": optimizer}

    reported, fresh = make(), make()
    with monkeypatch.context() as patch:
        if by_former:
            patch.setattr("prefect_torch.ckpt.state.objects.parameters._WRAPPERS", _FORMER_WRAPPERS)
        names = {leaf.name for leaf in flatten({"m": reported["m"]}, 0).leaves if leaf.name.endswith(".bias")}
        checkpoint = stored(store, reported)
    kept = {"m.net_orig_mod.bias", "m.a_checkpoint_wrapped_module.bias", "m.body.0.bias"}
    assert (names == kept) is not by_former
    checkpoint.load_state(fresh)
    check_equal(fresh, reported)
