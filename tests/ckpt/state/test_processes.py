"""States of real processes on gloo: sharded and replicated, killed, and resumed by another number of ranks."""

import state_processes
import torch
from forked_ranks import launch
from prefect_torch.ckpt import CheckpointStore
from states import check_equal


def whole_after(steps):
    """Return what one process without any of this comes to, in the form of `write_whole`."""
    model, optimizer = state_processes.make_training("plain")
    for number in range(steps):
        state_processes.take_step(model, optimizer, number)
    names = [name for name, _ in model.named_parameters()]
    state = optimizer.state_dict()
    groups = [{**group, "params": names} for group in state["param_groups"]]
    return {
        "model": dict(model.state_dict()),
        "optimizer": {"state": {names[number]: of for number, of in state["state"].items()}, "param_groups": groups},
    }


def test_a_sharded_training_that_is_killed_goes_on_on_4_and_2_ranks_to_the_last_bit(tmp_path, one_thread):
    assert launch("state_processes", ("fsdp-kill",), 2, tmp_path) == [-9, -9]
    for world_size, done in ((4, 5), (2, 8)):
        assert launch("state_processes", ("fsdp-run",), world_size, tmp_path) == [0] * world_size
        check_equal(torch.load(tmp_path / f"whole-{done}.pt"), whole_after(done))
    store = CheckpointStore.open(tmp_path, "run")
    assert [manifest.world_size for manifest in store.list()] == [2, 2, 4, 4, 4, 2, 2, 2]
    for manifest in store.list():
        store.verify(manifest)


def test_a_replicated_training_that_is_killed_goes_on_to_the_last_bit_and_each_rank_stores_a_part(tmp_path, one_thread):
    assert launch("state_processes", ("ddp-kill",), 2, tmp_path) == [-9, -9]
    assert launch("state_processes", ("ddp-run",), 2, tmp_path) == [0, 0]
    check_equal(torch.load(tmp_path / "whole-5.pt"), whole_after(5))
    newest = CheckpointStore.open(tmp_path, "run").latest()
    assert {"__0_0.distcp", "__1_0.distcp"} <= {entry.path for entry in newest.files}
