"""A copy of a whole run has every record of it; what it leaves behind is listed here."""

import inspect

from memory_storage import MemoryStorage
from prefect_torch.ckpt.runs.layout import Layout
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.runs.whole.copying import copy_planned, plan_copy

WITH_THE_MANIFESTS = {"checkpoints", "manifests", "metadata"}
LEFT_BEHIND = {
    "answered",  # between processes that lead the sweep now
    "asked",
    "deletions",  # marks of deletions that are under way
    "deployed.json",
    "index",  # a cache of manifests, as is the hint
    "latest.json",
    "unreported",  # what a rank still writes
}


def every_key(layout):
    """Return a key of every kind that a layout has."""
    for name, member in inspect.getmembers(Layout):
        if isinstance(member, property):
            yield getattr(layout, name)
        elif inspect.isfunction(member) and not name.startswith("_"):
            parameters = list(inspect.signature(member).parameters.values())[1:]
            values = [1 if parameter.annotation is int else "x" for parameter in parameters]
            yield getattr(layout, name)(*values)
            yield getattr(layout, name)(*values[: sum(parameter.default is parameter.empty for parameter in parameters)])


def test_a_whole_copy_leaves_nothing_behind_but_what_belongs_to_this_storage():
    source, target = MemoryStorage(), MemoryStorage()
    run = Run.open(source, "run")
    for key in every_key(run.layout):
        if isinstance(key, str):
            source.put_bytes(f"{key}x" if key.endswith("/") else key, b"{}")
    copy_planned(plan_copy(run, (), whole=True), source, target, lambda _: None)
    there, here = ({info.key.split("/")[1] for info in storage.list("run/")} for storage in (target, source))
    assert here - there == WITH_THE_MANIFESTS | LEFT_BEHIND
    assert there
