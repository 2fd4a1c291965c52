"""What version 0.1 pickled is loaded: specs in Prefect's results, functions that cloudpickle carried by reference."""

import base64
import importlib
import json
import pickle
import sys
from pathlib import Path

import pytest
from prefect_torch import ckpt, flows, tasks
from prefect_torch.ckpt import blocks
from prefect_torch.moved_modules import MOVED

PICKLED = {
    name: base64.b64decode(data)
    for name, data in json.loads((Path(__file__).parent / "support/pickled_by_0_1.json").read_text()).items()
}
KINDS = {
    "spec": ckpt.StorageSpec,
    "store": ckpt.CheckpointStore,
    "manifest": ckpt.Manifest,
    "policy": ckpt.RetentionPolicy,
    "context": ckpt.TrainContext,
    "checkpoint": ckpt.Checkpoint,
    "corrupt": ckpt.CheckpointCorruptError,
    "busy": ckpt.RunBusyError,
    "rank_local": ckpt.RankLocal,
    "info": ckpt.ObjectInfo,
    "transfer": ckpt.Transfer,
    "run_config": tasks.RunConfig,
    "scaling": tasks.ScalingConfig,
    "checkpoint_config": tasks.CheckpointConfig,
    "failure": tasks.FailureConfig,
    "block": blocks.CheckpointStorage,
    "result": flows.Result,
    "training_failed": flows.TrainingFailedError,
}


@pytest.mark.parametrize("name", KINDS)
def test_a_pickle_of_0_1_is_loaded_as_what_it_was_and_pickled_anew(name):
    loaded = pickle.loads(PICKLED[name])
    assert type(loaded) is KINDS[name]
    assert type(pickle.loads(pickle.dumps(loaded))) is KINDS[name]
    assert "object at" in repr(loaded) or repr(pickle.loads(PICKLED[name])) == repr(loaded)


def test_what_a_pickle_of_0_1_holds_is_there():
    assert pickle.loads(PICKLED["spec"]) == ckpt.StorageSpec("/tmp/nowhere")
    assert (pickle.loads(PICKLED["store"]).run, pickle.loads(PICKLED["store"]).path) == ("run", "/tmp/nowhere/run")
    manifest = pickle.loads(PICKLED["manifest"])
    assert (manifest.step, manifest.attempt, manifest.metrics, manifest.files[0].path) == (3, 1, {"loss": 0.5}, "m")
    checkpoint = pickle.loads(PICKLED["checkpoint"])
    assert (checkpoint.id, checkpoint.step, checkpoint.store.run) == (manifest.id, 3, "run")
    result = pickle.loads(PICKLED["result"])
    assert (result.metrics, result.checkpoint.manifest, result.history[0].step) == ({"loss": 0.5}, manifest, 3)
    assert result.first_attempt == 1
    assert pickle.loads(PICKLED["policy"]) == ckpt.RetentionPolicy(2, "loss", "min")
    assert pickle.loads(PICKLED["run_config"]).name == "run"
    assert pickle.loads(PICKLED["ref"]).checkpoint_id == manifest.id


def test_a_config_that_0_1_pickled_has_the_defaults_of_todays_fields():
    assert pickle.loads(PICKLED["run_config"]) == tasks.RunConfig(name="run", storage="/tmp/nowhere")
    assert pickle.loads(PICKLED["scaling"]) == tasks.ScalingConfig(num_workers=2)
    assert pickle.loads(PICKLED["checkpoint_config"]) == tasks.CheckpointConfig(num_to_keep=3)
    assert pickle.loads(PICKLED["failure"]) == tasks.FailureConfig(max_failures=2)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a function that another version of Python pickled is bytecode of that")
def test_a_training_function_of_0_1_finds_what_it_calls():
    function = pickle.loads(PICKLED["train_fn"])
    assert function.__globals__["report"] is ckpt.report
    assert function.__globals__["prepare_model"] is tasks.prepare_model


@pytest.mark.parametrize("name", MOVED)
def test_a_moved_module_is_imported_under_its_old_name(name):
    old, present = importlib.import_module(name), importlib.import_module(MOVED[name])
    assert all(getattr(old, attribute) is value for attribute, value in vars(present).items() if attribute[0] != "_")
