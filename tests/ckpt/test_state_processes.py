"""States of real processes on gloo: sharded and replicated, killed, and resumed by another number of ranks."""

import subprocess
import sys
from pathlib import Path

import state_processes
import torch
from conftest import free_port
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.attempts import Owner, claim_attempt
from prefect_torch.tasks.rendezvous import Rendezvous
from states import check_equal

SCRIPT = Path(state_processes.__file__)


def launch(job, world_size, root):
    """Run one attempt and return the ranks' exit codes."""
    attempt = claim_attempt(CheckpointStore.open(root, "run"), Owner.current(), world_size=world_size)
    Path(root, "attempt").write_text(str(attempt.number))
    rendezvous = Rendezvous()
    served = rendezvous.serve()
    group_port = free_port()
    ports = (str(rendezvous.address.port), str(group_port))
    ranks = [
        subprocess.Popen([sys.executable, str(SCRIPT), job, str(rank), str(world_size), str(root), *ports])
        for rank in range(world_size)
    ]
    codes = [rank.wait(150) for rank in ranks]
    del served
    return codes


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
    assert launch("fsdp-kill", 2, tmp_path) == [-9, -9]
    for world_size, done in ((4, 5), (2, 8)):
        assert launch("fsdp-run", world_size, tmp_path) == [0] * world_size
        check_equal(torch.load(tmp_path / f"whole-{done}.pt"), whole_after(done))
    store = CheckpointStore.open(tmp_path, "run")
    assert [manifest.world_size for manifest in store.list()] == [2, 2, 4, 4, 4, 2, 2, 2]
    for manifest in store.list():
        store.verify(manifest)


def test_a_replicated_training_that_is_killed_goes_on_to_the_last_bit_and_each_rank_stores_a_part(tmp_path, one_thread):
    assert launch("ddp-kill", 2, tmp_path) == [-9, -9]
    assert launch("ddp-run", 2, tmp_path) == [0, 0]
    check_equal(torch.load(tmp_path / "whole-5.pt"), whole_after(5))
    newest = CheckpointStore.open(tmp_path, "run").latest()
    assert {"__0_0.distcp", "__1_0.distcp"} <= {entry.path for entry in newest.files}
