"""Modules below wrappers: of torch.compile, of activation checkpointing, and of users."""

import torch
from prefect_torch.ckpt.state.objects.flatten import flatten
from ranks import Attempt
from states import check_equal


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
