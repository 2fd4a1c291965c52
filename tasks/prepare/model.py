"""Making a model a distributed one: `model = prepare_model(Net())`."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from prefect_torch.ckpt.state.expected_size import note_module
from prefect_torch.ckpt.state.objects.parameters import fsdp_classes, uncompiled
from prefect_torch.ckpt.state.objects.tensors import is_dtensor
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from .device import get_device, get_rank_and_size

ParallelStrategy: TypeAlias = Literal["ddp", "fsdp2"]


def prepare_model(
    model: nn.Module,
    move_to_device: bool | str | torch.device = True,
    parallel_strategy: ParallelStrategy | None = "ddp",
    parallel_strategy_kwargs: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Return `model` on this rank's device, its gradients averaged over all ranks; call it on every rank.

    A single rank gets the bare model, whatever the other arguments. A model that is parallel already is only moved.

    With "fsdp2", each item of the outermost ModuleLists and Sequentials is sharded on its own, then the rest of the model, so
    that one item at a time is on the device as a whole. An item that shares a parameter with another module belongs to the
    rest. A model in which `fully_shard` was called on any part is sharded in those parts and the rest only: call it where a
    loop calls methods of an item other than its forward. A model on the meta device stays there: call its `to_empty` and then
    initialize it or load a checkpoint.

    Args:
        model: The module; it is moved in place, and sharded in place by "fsdp2".
        move_to_device: Whether to move it to `get_device()`, or the device to move it to.
        parallel_strategy: "ddp" gives every rank the whole model (`DistributedDataParallel`), "fsdp2" a part of it
            (`torch.distributed.fsdp.fully_shard`), None neither.
        parallel_strategy_kwargs: More arguments of `DistributedDataParallel`, or of every `fully_shard`; without `mesh` the
            model is sharded over all ranks.

    Raises:
        ValueError: If the strategy is none of these, or a part of the model is sharded already: "ddp" takes no such model,
            "fsdp2" takes a tensor parallel one with a `mesh` of another dimension.

    """
    _check_strategy(parallel_strategy)
    note_module(model)
    device = None if move_to_device is False else get_device() if move_to_device is True else torch.device(move_to_device)
    arguments = dict(parallel_strategy_kwargs or {})
    if parallel_strategy is None or _is_parallel(model) or get_rank_and_size()[1] == 1:
        return model if parallel_strategy == "fsdp2" and _is_meta(model) else _moved(model, device)
    if parallel_strategy == "ddp":
        return _replicated(_moved(model, device), arguments)
    mesh = arguments.get("mesh")
    if device is not None and device.type != (get_device().type if mesh is None else mesh.device_type):
        model = model.to(device)
    return _sharded(model, device, arguments)


def _check_strategy(strategy: str | None) -> None:
    if strategy == "fsdp":
        raise ValueError("parallel_strategy='fsdp': give 'fsdp2', which is torch's fully_shard")
    if strategy not in ("ddp", "fsdp2", None):
        raise ValueError(f"parallel_strategy={strategy!r}: give 'ddp', 'fsdp2' or None")


def _is_parallel(model: nn.Module) -> bool:
    return isinstance(uncompiled(model), (DistributedDataParallel, *fsdp_classes("FSDPModule", "FullyShardedDataParallel")))


def _is_meta(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _moved(model: nn.Module, device: torch.device | None) -> nn.Module:
    return model if device is None else model.to(device)


def _replicated(model: nn.Module, arguments: dict[str, Any]) -> nn.Module:
    if _has_shards(model):
        raise ValueError(
            "a part of the model is sharded already, which DDP does not take: give parallel_strategy='fsdp2' or None"
        )
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) == 1 and (device := devices.pop()).type != "cpu":  # a model on several devices must not name any
        arguments.setdefault("device_ids", [device])
    return DistributedDataParallel(model, **arguments)


def _sharded(model: nn.Module, device: torch.device | None, arguments: dict[str, Any]) -> nn.Module:
    """Shard `model`; each part is moved when it is sharded, since the whole may fit on no device."""
    from torch.distributed.fsdp import FSDPModule, fully_shard  # noqa: PLC0415 - slow, and the flow's process needs none

    is_begun = any(isinstance(module, FSDPModule) for module in model.modules())
    if "mesh" not in arguments:  # the default of fully_shard takes a GPU wherever there is one
        if _has_shards(model) and not is_begun:
            raise ValueError(
                "the model is tensor parallel: give the mesh of the other ranks to shard it over, as in "
                "parallel_strategy_kwargs={'mesh': mesh['fsdp']}"
            )
        arguments["mesh"] = init_device_mesh(get_device().type, (dist.get_world_size(),))
    if not is_begun:
        for block in list(_blocks(model)):
            fully_shard(block, **arguments)
    fully_shard(model, **arguments)
    for tensor in (*model.parameters(), *model.buffers()):  # such as `ignored_params`; offloaded shards stay where they are
        if device is not None and not is_dtensor(tensor) and tensor.device.type not in ("meta", device.type):
            tensor.data = tensor.to(device)
    return model


def _has_shards(model: nn.Module) -> bool:
    return any(is_dtensor(parameter) for parameter in model.parameters())


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the items of the outermost ModuleLists and Sequentials that have parameters, and share none."""
    everywhere = _uses(model)
    for item in _items(model):
        here = _uses(item)
        if here and all(everywhere[parameter] == count for parameter, count in here.items()):
            yield item


def _items(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and not isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield child
        else:
            yield from _items(child)


def _uses(module: nn.Module) -> Counter[nn.Parameter]:
    return Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
