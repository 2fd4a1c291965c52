"""Lightning on the ranks that exist: it starts no process and makes no process group of its own."""

import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from lightning_utilities.core import rank_zero
from prefect_torch.ckpt.context import TrainContext, context_or_none
from prefect_torch.ckpt.framework_folders import check_world_size
from prefect_torch.ckpt.reporting.api import get_context

if TYPE_CHECKING:
    from lightning.pytorch.strategies.parallel import ParallelStrategy as _Parallel
else:  # Lightning's strategies, the next base classes, are already subclasses of it
    _Parallel = object


class PrefectEnvironment(ClusterEnvironment):
    """Let Lightning use the running ranks and start none: `Trainer(plugins=[PrefectEnvironment()])`.

    The process group exists, so Lightning neither creates nor destroys one.

    Raises:
        RuntimeError: Outside of a training function.

    """

    def __init__(self) -> None:
        self._context = get_context()

    @property
    def creates_processes_externally(self) -> bool:
        """True: Lightning starts no processes."""
        return True

    @property
    def main_address(self) -> str:
        """The address of the ranks' rendezvous."""
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        """The port of the ranks' rendezvous."""
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        """Return whether this is a rank of a training."""
        return context_or_none() is not None

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._context.world_size

    def set_world_size(self, size: int) -> None:
        """Raise unless Lightning counts the ranks that exist.

        Raises:
            ValueError: If it counts another number.

        """
        check_trainer_size(size, self._context)

    def global_rank(self) -> int:
        """Return this rank."""
        return self._context.world_rank

    def set_global_rank(self, rank: int) -> None:
        """Ignore Lightning's number: each rank already has its own."""

    def local_rank(self) -> int:
        """Return this rank's number on its machine."""
        return self._context.local_rank

    def node_rank(self) -> int:
        """Return this machine's number."""
        return self._context.node_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Raise unless `devices` and `num_nodes` amount to the ranks that exist.

        Raises:
            ValueError: If they amount to another number.

        """
        if (num_devices, num_nodes) != (self._context.local_world_size, _num_machines()):  # machines may have other numbers
            check_trainer_size(num_devices * num_nodes, self._context)


class _OnExistingRanks(_Parallel):
    """Count the training's ranks, whatever the Trainer's `devices` and `num_nodes`, so that devices="auto" is right."""

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The devices of this machine's ranks, of the type of the Trainer's accelerator.

        Raises:
            ValueError: If the ranks have no device of that type, as with accelerator="auto" on a machine that has a GPU.

        """
        count = get_context().local_world_size
        if not self._parallel_devices or self._parallel_devices[0].type == "cpu":
            return [torch.device("cpu")] * count
        kind = self._parallel_devices[0].type
        if dist.is_initialized() and getattr(dist.group.WORLD, "bound_device_id", None) is None:
            raise ValueError(
                f"the Trainer takes a device of the type {kind}, but the training's ranks have none: give the Trainer "
                "accelerator='cpu', or the training ScalingConfig(use_gpu=True)"
            )
        return [torch.device(kind, index) for index in range(count)]

    @parallel_devices.setter
    def parallel_devices(self, parallel_devices: list[torch.device] | None) -> None:
        self._parallel_devices = parallel_devices

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return _num_machines()

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        """Ignore the Trainer's argument."""

    def process_dataloader(self, dataloader: object) -> object:
        """Set the epoch that the Trainer resumes in on the loader's sampler.

        Lightning sets it only after a loader that has a `state_dict` has moved to its position, in the order of epoch 0.
        """
        dataloader = super().process_dataloader(dataloader)
        if self.lightning_module is not None:
            progress: Any = self.lightning_module.trainer.fit_loop.epoch_progress.current
            for owner in (dataloader, getattr(dataloader, "batch_sampler", None)):
                set_epoch = getattr(getattr(owner, "sampler", None), "set_epoch", None)
                if callable(set_epoch):
                    set_epoch(progress.processed)
        return dataloader

    def set_world_ranks(self) -> None:
        """Set this rank in Lightning, which would assume that every machine has as many ranks as this one."""
        if isinstance(self.cluster_environment, PrefectEnvironment):
            decorator: Any = rank_zero.rank_zero_only
            decorator.rank = self.global_rank
        else:
            super().set_world_ranks()  # type: ignore[misc]  # of Lightning's strategies, the next base classes


class PrefectDDPStrategy(_OnExistingRanks, DDPStrategy):
    """Lightning's DDP on the ranks that exist: `Trainer(strategy=PrefectDDPStrategy(), plugins=[PrefectEnvironment()])`.

    Takes DDPStrategy's arguments.
    """

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The number of ranks, and this one's number."""
        context = get_context()
        return {"num_replicas": context.world_size, "rank": context.world_rank}


class PrefectModelParallelStrategy(_OnExistingRanks, ModelParallelStrategy):
    """Lightning's FSDP2 and tensor parallelism on the ranks that exist; takes ModelParallelStrategy's arguments.

    By default the ranks of a machine are tensor parallel, and get the same batches. FSDP2 alone needs `tensor_parallel_size=1`
    and the number of ranks as `data_parallel_size`, and a module that shards on `self.device_mesh["data_parallel"]`.
    """


def prepare_trainer(trainer: Trainer) -> Trainer:
    """Return `trainer` if it trains on exactly the ranks that exist, and any Trainer outside of a training function.

    Raises:
        ValueError: If it would start processes of its own, or counts other ranks, naming the arguments that it needs.

    """
    context = context_or_none()
    if context is None:
        return trainer
    check_trainer_size(trainer.world_size, context)
    environment = getattr(trainer.strategy, "cluster_environment", None)
    if context.world_size > 1 and not isinstance(environment, PrefectEnvironment):
        raise ValueError(
            f"the Trainer's cluster environment is {type(environment).__name__}; give it plugins=[PrefectEnvironment()]"
        )
    return trainer


def check_trainer_size(size: int, context: TrainContext) -> None:
    """Raise ValueError with the arguments that the Trainer needs, unless `size` is the number of ranks."""
    check_world_size("Trainer", size, context, "give it strategy=PrefectDDPStrategy() and plugins=[PrefectEnvironment()]")


def _num_machines() -> int:
    return int(os.environ.get("GROUP_WORLD_SIZE", "1"))  # torchrun's, which each rank has
