"""Mistakes, each made once: a line names it and the most lines that it may print, and what a person sees of it follows."""

import os
import signal
import sys
from unittest import mock

import torch
import torch.distributed as dist
from prefect_torch.ckpt import Checkpoint, get_checkpoint, get_context, report
from prefect_torch.flows import SearchConfig, evaluate, prune, sweep, train, uniform
from prefect_torch.tasks import FailureConfig, RunConfig, ScalingConfig

TWO = ScalingConfig(num_workers=2)


def wrong_key(config):
    report({"lr": config["learning_rat"]})


def list_metric():
    report({"losses": [1.0, 2.0]})


def model_step(config):
    model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(config["layers"])])
    state = {"model": model, "step": 0}
    checkpoint = get_checkpoint()
    if checkpoint is not None:
        checkpoint.load_state(state)
    report({"loss": 1.0}, state=state)


def one_rank_raises():
    dist.barrier()  # else torch may say of the other that it cannot connect
    if get_context().world_rank == 1:
        raise ZeroDivisionError("on rank 1")
    dist.all_reduce(torch.ones(3))


def second_group():
    dist.init_process_group("gloo")


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def plain():
    report({"loss": 1.0})


def folder_missing():
    report({"loss": 1.0}, Checkpoint.from_directory("/nowhere/at/all"))


def full_disk():
    raise OSError(28, "No space left on device", "/data/model.pt")


def out_of_steps():
    report({"loss": 1.0}, step=-3)


def mismatched():
    report({"loss": 1.0}, step=get_context().world_rank)


def no_budget():
    raise RuntimeError("always")


def run(**options):
    return RunConfig(**{"storage": "./checkpoints"} | options)


def changed_model():
    train(model_step, {"layers": 40}, run=run(name="changed"))


def without_optuna():
    with mock.patch.dict(sys.modules, optuna=None):
        sweep(plain, {"lr": uniform(0, 1)}, search=SearchConfig(metric="loss"), run=run(name="swept"))


MISTAKES = {
    "a wrong key on two ranks": (40, lambda: train(wrong_key, {"learning_rate": 1}, scaling=TWO, run=run())),
    "a list as a metric": (40, lambda: train(list_metric, scaling=TWO, run=run())),
    "a changed model": (40, changed_model),
    "one rank raises": (40, lambda: train(one_rank_raises, scaling=TWO, run=run())),
    "a second process group": (40, lambda: train(second_group, run=run())),
    "a rank dies": (40, lambda: train(dies, run=run(), failure=FailureConfig(max_infrastructure_failures=1))),
    "a folder that does not exist": (40, lambda: train(folder_missing, run=run())),
    "a full disk": (40, lambda: train(full_disk, run=run())),
    "a negative step": (40, lambda: train(out_of_steps, run=run())),
    "ranks that disagree": (40, lambda: train(mismatched, scaling=TWO, run=run())),
    "a budget of restarts": (40, lambda: train(no_budget, run=run(), failure=FailureConfig(max_failures=1))),
    "more ranks than GPUs": (15, lambda: train(plain, scaling=ScalingConfig(num_workers=2, use_gpu=True), run=run())),
    "a bucket that does not exist": (15, lambda: train(plain, run=run(storage="s3://no-such-bucket/x"))),
    "a wrong block": (15, lambda: train(plain, run=run(storage="checkpointstorage/no-such"))),
    "a missing extra": (15, without_optuna),
    "an unknown scheme": (15, lambda: train(plain, run=run(storage="floppy://a"))),
    "a storage without permission": (15, lambda: train(plain, run=run(storage="/proc/no-such-folder"))),
    "a misspelled keyword": (15, lambda: train(plain, scalin=TWO)),
    "a module that does not exist": (15, lambda: train("no_such_module:train_fn", run=run())),
    "a function that does not exist": (15, lambda: train("mistakes:nope", run=run())),
    "resume without a checkpoint": (15, lambda: train(plain, run=run(name="fresh", resume="must"))),
    "an evaluation of no run": (15, lambda: evaluate(plain, "./checkpoints", "no-run")),
    "a prune of no run": (15, lambda: prune("./checkpoints", ["no-run"])),
    "a wrong type of argument": (15, lambda: train(plain, scaling={"num_workers": "many"})),
    "a bad run name": (15, lambda: train(plain, run=RunConfig(name="a/b"))),
}

if __name__ == "__main__":
    train(model_step, {"layers": 2}, run=run(name="changed"))
    for name, (limit, make) in MISTAKES.items():
        print(f"=== {limit} {name}", file=sys.stderr, flush=True)
        try:
            make()
        except Exception as exc:  # noqa: BLE001 - what a terminal shows of it
            shown = exc.with_traceback(exc.__traceback__.tb_next)  # which has no frame of this module
            sys.excepthook(type(exc), shown, shown.__traceback__)
