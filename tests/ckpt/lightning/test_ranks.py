"""Lightning on two ranks that exist already: replicated and sharded, ended early and gone on with."""

import pytest
import torch
import torch.distributed as dist
from forked_ranks import launch
from lightning.pytorch.utilities import CombinedLoader
from lightning_models import Regression, make_trainer
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.lightning import PrefectDDPStrategy, PrefectEnvironment
from prefect_torch.ckpt.lightning.moments import may_end_validation
from ranks import Attempt, as_rank
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader, DistributedSampler

pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore::DeprecationWarning", "ignore::FutureWarning")

SHARDED = (".metadata", "__0_0.distcp", "__1_0.distcp", "meta.pt")


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_a_training_of_two_ranks_counts_them_itself_and_goes_on_where_it_was(tmp_path, kind):
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    for root, epochs in ((whole, 2), (halved, 1), (halved, 2)):
        root.mkdir(exist_ok=True)
        assert launch("lightning_ranks", (kind, str(epochs), "complete"), 2, root) == [0, 0]
    expected = torch.load(whole / f"weights-{kind}-1.pt")
    assert all(map(torch.equal, torch.load(halved / f"weights-{kind}-2.pt"), expected))
    manifests = CheckpointStore.open(halved, "run").list()
    assert [(manifest.attempt, manifest.metrics["epoch"]) for manifest in manifests] == [(1, 0), (2, 1)]
    owners = {entry.path: entry.rank for entry in manifests[-1].files}
    assert [owners.pop(f"rng_state_{rank}.pth") for rank in range(2)] == [0, 1]
    if kind == "ddp":
        assert owners == {"checkpoint.ckpt": 0}
    else:
        assert owners == {f"checkpoint.ckpt/{name}": int("__1" in name) for name in SHARDED}


@pytest.mark.parametrize("kind", ["ddp", "sharded"])
def test_two_ranks_break_a_validation_off_at_the_same_batch(tmp_path, kind):
    for ends in ("in a validation", "complete"):
        assert launch("lightning_ranks", (kind, "2", ends), 2, tmp_path) == [0, 0]
    manifests = CheckpointStore.open(tmp_path, "run").list()
    assert [(it.attempt, it.metrics["epoch"], "val_loss" in it.metrics) for it in manifests] == [(1, 0, False), (2, 1, True)]


@pytest.fixture
def one_of_two(tmp_path):
    """Rank 0 of a training of two, the other of which only answers."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    with as_rank(Attempt(CheckpointStore.open(tmp_path / "store", "run"), 2).session()):
        yield
    dist.destroy_process_group()


def test_a_trainer_that_takes_a_gpu_is_refused_where_the_ranks_have_none(one_of_two):
    """On a machine with one GPU, rank 1 would look for a second."""
    strategy = PrefectDDPStrategy()
    strategy.parallel_devices = [torch.device("cpu")]
    assert strategy.parallel_devices == [torch.device("cpu")] * 2
    strategy.parallel_devices = [torch.device("cuda", 0)]
    with pytest.raises(ValueError, match=r"takes a device of the type cuda.*accelerator='cpu'"):
        strategy.parallel_devices  # noqa: B018 - Lightning asks for it
    dist.group.WORLD.bound_device_id = torch.device("cuda", 0)
    assert strategy.parallel_devices == [torch.device("cuda", 0), torch.device("cuda", 1)]


def test_a_stateful_loader_goes_to_its_position_in_the_order_of_the_resumed_epoch(one_of_two):
    """Lightning would tell the sampler the epoch only after it: samples were used twice, others never."""
    trainer = make_trainer(devices="auto", strategy=PrefectDDPStrategy(), plugins=[PrefectEnvironment()])
    trainer.strategy.connect(model := Regression())
    model.trainer = trainer
    trainer.fit_loop.epoch_progress.current.processed = 3
    loader = DataLoader(range(8), sampler=DistributedSampler(range(8)))
    assert trainer.strategy.process_dataloader(loader).sampler.epoch == 3


@pytest.mark.parametrize(
    ("loaders", "may_end"),
    [
        ([DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0))], True),
        ([DataLoader(range(8))], False),
        ([DataLoader(range(8), sampler=DistributedSampler(range(8), 2, 0)), range(8)], False),
    ],
)
def test_validations_that_ranks_may_not_end_at_the_same_batch_are_not_broken_off(one_of_two, loaders, may_end):
    trainer = make_trainer(devices="auto", strategy=PrefectDDPStrategy(), plugins=[PrefectEnvironment()])
    trainer.fit_loop.epoch_loop.val_loop._combined_loader = CombinedLoader(loaders, "sequential")
    assert may_end_validation(trainer) is may_end
