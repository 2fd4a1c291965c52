"""A resumed training is an undisturbed one bit for bit: weights, their average, optimizer, random numbers, on every rank."""

import signal

import torch
from exact_ends import same
from forked_ranks import launch


def test_a_killed_training_with_dropout_and_loaders_of_every_kind_ends_as_an_undisturbed_one(tmp_path):
    for name, ends, expected in [
        ("undisturbed", False, [0, 0]),
        ("killed", True, [-signal.SIGKILL] * 2),
        ("killed", False, [0, 0]),
    ]:
        (tmp_path / name).mkdir(exist_ok=True)
        assert launch("exact_processes", (ends,), 2, tmp_path / name) == expected
    for rank in range(2):
        undisturbed, resumed = (torch.load(tmp_path / name / f"end-{rank}.pt") for name in ("undisturbed", "killed"))
        assert [name for name in undisturbed if not same(undisturbed[name], resumed[name])] == []
