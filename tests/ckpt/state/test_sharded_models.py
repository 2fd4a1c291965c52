"""Models that are sharded with FSDP2, tensor parallelism and both: stored by 4, 2 and 4 processes, and loaded everywhere."""

from pathlib import Path

import pytest
import sharded_processes
import torch
from forked_ranks import launch
from prefect_torch.ckpt import CheckpointStore
from rank_processes import RUN
from safetensors.torch import load_file
from states import check_equal


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """Run 4, 2 and 4 ranks, which store, and load what each of the others stored."""
    root = tmp_path_factory.mktemp("sharded")
    for world_size in (4, 2, 4):
        codes = launch("sharded_processes", (), world_size, root)
        assert codes == [0] * world_size
    return CheckpointStore.open(root, RUN)


def test_what_is_sharded_in_one_way_is_loaded_in_every_other_by_as_many_ranks_and_others(stored):
    names = [manifest.metrics["whole"] for manifest in stored.list()]  # the ranks compare what they load with these
    assert names == ["fsdp on 4.pt", "tp on 4.pt", "fsdp x tp on 4.pt", "fsdp on 2.pt", "tp on 2.pt"]


@pytest.fixture
def plain():
    """A training of one process, which has gone elsewhere than the stored ones."""
    model, optimizer = sharded_processes.make_training(seed=1)
    sharded_processes.take_step(model, optimizer)
    return {"model": model, "optimizer": optimizer}


def test_what_is_sharded_is_loaded_by_one_process_that_shards_nothing(stored, plain):
    for manifest in stored.list():
        stored.checkpoint(manifest).load_state(plain)
        whole = torch.load(Path(stored.storage.url, str(manifest.metrics["whole"])))
        check_equal(dict(plain["model"].state_dict()), whole["model"])
        names = [name for name, _ in plain["model"].named_parameters()]
        moments = plain["optimizer"].state_dict()["state"]
        check_equal({names[number]: of for number, of in moments.items()}, whole["optimizer"]["state"])


def test_what_is_sharded_is_consolidated_in_one_file(stored, plain, tmp_path):
    for manifest in stored.list():
        path = stored.checkpoint(manifest).to_safetensors(tmp_path / "model.safetensors")
        whole = torch.load(Path(stored.storage.url, str(manifest.metrics["whole"])))
        check_equal(load_file(path), dict(whole["model"]))
        plain["model"].load_state_dict(load_file(path))
