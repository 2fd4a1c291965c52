"""Runs the training functions of examples one after the other on real ranks."""

import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path

import torch.distributed as dist
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.attempts.claims import claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.tasks.rank.rendezvous import Address, TcpKeyValue, connect
from rank_processes import process_group, training

EXAMPLES = Path(__file__).parents[2] / "examples"
# The config of each attempt; those that fail on purpose have the same twice.
CONFIGS = {
    "ray_parity": [{"num_epochs": 4, "every_rank": True}] * 2,
    "ray_train/pytorch_save": [{"num_epochs": 3}],
    "ray_train/pytorch_resume": [{"num_epochs": 4}] * 2,
    "ray_train/sharded": [{"num_epochs": 4}] * 2,
    "ray_train/dict_state": [{"num_epochs": 4}] * 2,
    "ray_train/rank_zero": [{"num_epochs": 2}, {"num_epochs": 4}],
    "ray_train/lightning_resume": [{"num_epochs": 4}] * 2,
    "ray_train/transformers_callback": [{"num_epochs": 1}, {"num_epochs": 2}],
    "ray_train/transformers_custom": [{"num_epochs": 2}] * 2,
    "numpy_folders": [{"rounds": 4}] * 2,
}


def load(name):
    path = EXAMPLES / f"{name}.py"
    sys.path.insert(0, str(path.parent))  # as the rank of a training finds what is beside its file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(train_func, config, store, server):
    """Be a rank of one attempt; return what the function returned, or the text of its error."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    claimed = [claim_attempt(store, Owner.current(), world_size=world_size).number if rank == 0 else 0]
    dist.broadcast_object_list(claimed)
    key_value = TcpKeyValue(dist.PrefixStore(f"{store.path}/{claimed[0]}", server.store))
    try:
        with training(store, claimed[0], key_value):
            told = train_func(config)
    except RuntimeError as exc:
        told = str(exc)
    dist.barrier()
    return told


def main(rank, world_size, root, _, key_value_port, group_port):
    warnings.simplefilter("ignore")
    os.chdir(root)
    with process_group(rank, world_size, group_port):
        server = connect(Address("127.0.0.1", int(key_value_port)))
        told = {}
        for name, configs in CONFIGS.items():
            store = CheckpointStore.open(Path(root, name), "run")
            train_func = load(name).train_func
            told[name] = [train(train_func, {"output_dir": f"{root}/output", **it}, store, server) for it in configs]
        if rank == "0":
            Path(root, "told.json").write_text(json.dumps(told))
