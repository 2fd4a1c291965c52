"""Transformers' own Trainer with the callback: one rank in this process, and two as processes."""

import shutil
import signal
import subprocess
import warnings
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from exact_ends import same_ends, weights
from forked_ranks import launch
from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore, TrainContext, get_context
from prefect_torch.ckpt.reporting.events import ReportEvent
from prefect_torch.ckpt.transformers import ReportCallback, prepare_trainer, resume_path
from prefect_torch.ckpt.transformers.callback import _warn_of_shared_folder
from prefect_torch.ckpt.transformers.resumes import load_renamed_weights
from ranks import Attempt, as_rank, folder, in_training, read_files
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback, ViTForImageClassification
from transformers_models import Before, make_model, make_trainer

pytestmark = pytest.mark.usefixtures("one_thread")
OF_RANK_0 = {
    "checkpoint/config.json",
    "checkpoint/model.safetensors",
    "checkpoint/optimizer.pt",
    "checkpoint/rng_state_0.pth",
    "checkpoint/scheduler.pt",
    "checkpoint/trainer_state.json",
    "checkpoint/training_args.bin",
}


def fit(attempt, output_dir, callback=None, before=None, **arguments):
    """Train as a rank's function would, and return the Trainer."""
    trainer = make_trainer(output_dir, **arguments)
    for added in (callback, before):
        if added is not None:
            trainer.add_callback(added)
    with in_training(attempt.session()), resume_path() as path:
        prepare_trainer(trainer).train(resume_from_checkpoint=path)
    return trainer


def test_a_trial_whose_output_dir_is_not_its_own_is_told():
    context = TrainContext(0, 0, 0, 1, 1, "sweep/trial-0000-0123abcd", 1)
    with pytest.warns(UserWarning, match="all trials of sweep 'sweep' write to output_dir='out'"):
        _warn_of_shared_folder(SimpleNamespace(output_dir="out"), context)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _warn_of_shared_folder(SimpleNamespace(output_dir=f"out/{context.run_name}"), context)
        _warn_of_shared_folder(SimpleNamespace(output_dir="out"), replace(context, run_name="run"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the folder of a training that was not disturbed, and of one that was killed and resumed, of two ranks."""
    whole, killed = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("killed")
    assert launch("transformers_models", ("whole",), 2, whole) == [0, 0]
    assert launch("transformers_models", ("killed",), 2, killed) == [-9, -9]
    assert [manifest.step for manifest in CheckpointStore.open(killed, "run").list()] == [3, 6]
    assert launch("transformers_models", ("resumed",), 2, killed) == [0, 0]
    return whole, killed


def test_two_killed_ranks_continue_to_the_very_weights_of_an_undisturbed_training(trained):
    whole, killed = (torch.load(root / "weights-0.pt") for root in trained)
    assert torch.equal(whole, killed)
    assert torch.equal(torch.load(trained[1] / "weights-1.pt"), killed)
    assert same_ends(*trained, num_ranks=2)
    manifests = CheckpointStore.open(trained[1], "run").list()
    assert [(manifest.attempt, manifest.step) for manifest in manifests] == [(1, 3), (1, 6), (2, 9), (2, 12)]


def test_two_killed_ranks_continue_in_the_order_of_their_epoch_with_balanced_batches(tmp_path):
    ends = []
    for name, jobs in [("whole", ["whole"]), ("resumed", ["killed", "resumed"])]:
        (root := tmp_path / name).mkdir()
        for job in jobs:
            assert launch("transformers_models", (f"{job} rebalanced",), 2, root) == [-9 if job == "killed" else 0] * 2
        ends.append(torch.load(root / "weights-0.pt"))
    assert [(it.attempt, it.step) for it in CheckpointStore.open(root, "run").list()] == [(1, 3), (1, 6), (2, 9), (2, 12)]
    assert torch.equal(*ends)


def test_each_rank_brings_what_it_owns_with_safetensors(trained):
    for root in trained:
        for manifest in CheckpointStore.open(root, "run").list():
            owners = {entry.path: entry.rank for entry in manifest.files}
            assert owners == {**dict.fromkeys(OF_RANK_0, 0), "checkpoint/rng_state_1.pth": 1}


@pytest.mark.parametrize("number", [0, 1])
def test_the_trainers_own_folders_are_rotated_and_whole(trained, number):
    folders = {path.name for path in (trained[number] / "output").iterdir()}
    assert folders == {"checkpoint-9", "checkpoint-12"}
    stored = read_files(
        CheckpointStore.open(trained[number], "run").checkpoint(CheckpointStore.open(trained[number], "run").latest())
    )
    own = trained[number] / "output/checkpoint-12"
    assert stored == {f"checkpoint/{path.name}": path.read_bytes() for path in own.iterdir()}


def may_mount():
    command = ["unshare", "--mount", "true"]
    return shutil.which(command[0]) is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not may_mount(), reason="may not mount a directory for a rank alone")
def test_machines_with_directories_of_their_own_report_what_they_have_written_and_rotate(tmp_path):
    """Not reported: copies (`save_on_each_node`), and what an earlier attempt left. Then rank 0 is on the other machine."""
    assert launch("transformers_models", ("killed on machines",), 2, tmp_path) == [-9, -9]
    store = CheckpointStore.open(tmp_path, "run")
    assert [manifest.step for manifest in store.list()] == [3, 6]
    for number in range(2):
        (left := tmp_path / f"machine-{number}/checkpoint-9").mkdir()
        (left / "model.safetensors").write_bytes(b"as an earlier attempt left it")
        (left / "model-00001-of-00002.safetensors").write_bytes(b"as an earlier attempt left it")
    assert launch("transformers_models", ("resumed on machines",), 2, tmp_path) == [0, 0]
    for manifest in store.list():
        owners = {entry.path: entry.rank for entry in manifest.files}
        assert owners == {**dict.fromkeys(OF_RANK_0, 0), "checkpoint/rng_state_1.pth": 1}
        assert store.verify(manifest, level="digest") is None
    for number in range(2):
        assert {path.name for path in (tmp_path / f"machine-{number}").iterdir()} == {"checkpoint-9", "checkpoint-12"}


def test_machines_that_share_a_directory_report_the_files_of_their_own_ranks(tmp_path):
    assert launch("transformers_models", ("shared by machines",), 2, tmp_path) == [0, 0]
    store = CheckpointStore.open(tmp_path, "run")
    owners = {entry.path: entry.rank for entry in store.latest().files}
    assert owners == {**dict.fromkeys(OF_RANK_0, 0), "checkpoint/rng_state_1.pth": 1}


def test_metrics_are_those_of_the_saved_step(trained):
    for root in trained:
        metrics = {manifest.step: manifest.metrics for manifest in CheckpointStore.open(root, "run").list()}
        for step, of_step in metrics.items():
            assert {"loss", "learning_rate", "grad_norm"} <= of_step.keys()  # logged since it was saved, at an odd step, too
            assert next(iter(of_step)) == "loss"  # what a flow run's state and the page of a storage show, without a score
            assert (of_step["step"], of_step["epoch"]) == (step, step / 4)
            assert ("eval_loss" in of_step) == (step in (6, 12))


def test_what_is_logged_is_recorded_and_the_checkpoint_is_a_model(store, tmp_path):
    def score(prediction):
        scores = [0.5] * 10
        return {"accuracy": 0.5, "accuracy_per_class": scores, "report": {"mean": 0.5, "per_class": scores}, "recall": {0: 0.5}}

    attempt = Attempt(store)
    trainer = fit(attempt, tmp_path / "output", save_steps=6, trainer_options={"compute_metrics": score})
    records = [event.record for event in attempt.events() if isinstance(event, ReportEvent)]
    logged = [record.step for record in records if "loss" in record.metrics and record.checkpoint is None]
    assert logged == [2, 4, 6, 8, 10, 12]
    assert records[-1].metrics["train_runtime"] > 0
    assert store.latest().metrics["eval_accuracy"] == 0.5
    assert "eval_accuracy_per_class" not in store.latest().metrics
    assert store.latest().metrics["eval_report"] == {"mean": 0.5}
    assert store.latest().metrics["eval_recall"] == {"0": 0.5}
    with store.checkpoint(store.latest()).as_directory() as directory:
        loaded = ViTForImageClassification.from_pretrained(f"{directory}/checkpoint")
    assert torch.equal(weights(loaded), weights(trainer.model))


def test_only_checkpoints_are_reported_where_logs_are_not_wanted(store, tmp_path):
    attempt = Attempt(store)
    fit(attempt, tmp_path / "output", ReportCallback(report_logs=False), max_steps=6, logging_strategy="no")
    records = [event.record for event in attempt.events() if isinstance(event, ReportEvent)]
    assert [(record.step, sorted(record.metrics)) for record in records] == [
        (3, ["epoch", "step"]),
        (6, ["epoch", "eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "step"]),
    ]


@pytest.mark.parametrize("start", [{}, {"eval_on_start": True}])
def test_a_resumed_training_with_early_stopping_stops_where_an_undisturbed_one_does(store, tmp_path, start):
    def end():
        raise ValueError("boom")

    def fit_with_patience(attempt, **others):
        patience = EarlyStoppingCallback(2, early_stopping_threshold=100)  # the first evaluation is the best
        stops = {"save_steps": 2, "eval_steps": 2, "metric_for_best_model": "loss", "load_best_model_at_end": True, **start}
        return fit(attempt, tmp_path / "output", patience, **stops, **others).state.global_step

    assert fit_with_patience(Attempt(CheckpointStore.open(tmp_path / "other", "run"))) == 6
    with pytest.raises(ValueError, match="boom"):
        fit_with_patience(Attempt(store), before=Before(5, end))
    assert store.latest().step == 4
    assert fit_with_patience(Attempt(store)) == 6


def fit_patiently(attempt, output_dir, patience=2):
    """Train with EarlyStoppingCallback, to which no evaluation is better than the first."""
    steps = {"save_steps": 2, "eval_steps": 2, "metric_for_best_model": "loss"}
    return fit(attempt, output_dir, EarlyStoppingCallback(patience, early_stopping_threshold=100), **steps)


def test_what_early_stopping_has_ended_is_trained_on_only_with_more_patience(store, tmp_path):
    first, again = (fit_patiently(Attempt(store), tmp_path / "output") for _ in range(2))
    assert first.state.global_step == again.state.global_step == 6
    assert torch.equal(weights(first.model), weights(again.model))
    assert {manifest.attempt for manifest in store.list()} == {1}
    assert fit_patiently(Attempt(store), tmp_path / "output", patience=3).state.global_step == 8


def test_what_early_stopping_has_ended_in_another_run_is_trained_on(store, tmp_path):
    fit_patiently(Attempt(store), tmp_path / "output")
    attempt = Attempt(CheckpointStore.open(tmp_path / "elsewhere", "run"))
    attempt.restored = store.checkpoint(store.latest())
    assert fit_patiently(attempt, tmp_path / "output").state.global_step == 10


class Streamed(IterableDataset):
    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


@pytest.mark.parametrize(
    ("data", "length"), [(list, {"max_steps": 6}), (list, {"num_train_epochs": 1.5}), (Streamed, {"max_steps": 6})]
)
def test_what_has_ended_within_an_epoch_is_not_trained_on_after_a_restart(store, tmp_path, data, length):
    for _ in range(2):
        trainer = make_trainer(tmp_path / "output", **length)
        trainer.train_dataset = data(trainer.train_dataset)
        with in_training(Attempt(store).session()), resume_path() as path:
            prepare_trainer(trainer).train(resume_from_checkpoint=path)
        assert trainer.state.global_step == 6
    assert {manifest.attempt for manifest in store.list()} == {1}


def test_a_trainer_that_begins_anew_from_the_end_of_another_run_is_trained(store, tmp_path):
    fit(Attempt(store), tmp_path / "output", max_steps=6)
    attempt = Attempt(CheckpointStore.open(tmp_path / "elsewhere", "run"))
    attempt.restored = store.checkpoint(store.latest())
    trainer = make_trainer(tmp_path / "output", max_steps=6)
    with in_training(attempt.session()), resume_path():
        prepare_trainer(trainer).train()
    assert trainer.state.global_step == attempt.store.latest().step == 6


class Impatient(EarlyStoppingCallback):
    """Takes arguments that its state lacks."""

    def __init__(self, patience, name):
        super().__init__(patience, early_stopping_threshold=100)
        self.name = name


def test_a_resume_keeps_callbacks_as_they_are_made_and_restores_what_they_counted(store, tmp_path):
    def fit_with(*callbacks, steps):
        trainer = make_trainer(tmp_path / "output", max_steps=steps, save_steps=2, eval_steps=2, metric_for_best_model="loss")
        for callback in callbacks:
            trainer.add_callback(callback)
        with in_training(Attempt(store).session()), resume_path() as path:
            prepare_trainer(trainer).train(resume_from_checkpoint=path)
        return trainer.state.global_step

    assert fit_with(Impatient(9, "first"), steps=4) == 4
    raised, added = Impatient(3, "second"), EarlyStoppingCallback(50)
    assert fit_with(raised, added, steps=50) == 8  # evaluations 2, 3 and 4 are no better than the first
    assert (raised.name, raised.early_stopping_patience, raised.early_stopping_patience_counter) == ("second", 3, 3)
    assert store.latest().step == 8


def fit_until(attempt, step, output_dir, **arguments):
    """Train up to `step`, where the training raises."""

    def end():
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fit(attempt, output_dir, before=Before(step, end), **arguments)


def pretend_another_number(store):
    """Have the newest checkpoint be of two ranks."""
    manifest = replace(store.latest(), world_size=2)
    store.storage.put_bytes(store.layout.manifest(manifest.id), manifest.encode())


class Seen(list):
    """Data that records which of them are read."""

    def __init__(self, data) -> None:
        super().__init__(data)
        self.order = []

    def __getitem__(self, index):
        self.order.append(index)
        return super().__getitem__(index)


def test_a_resume_with_fewer_steps_per_epoch_begins_the_interrupted_epoch_again(store, tmp_path):
    """As on more ranks with the same batch per rank: the Trainer alone takes step 6 for the end, or repeats whole epochs."""
    whole, resumed = (make_trainer(tmp_path / name, per_device_train_batch_size=32) for name in ("whole", "output"))
    for trainer in (whole, resumed):
        trainer.train_dataset = Seen(trainer.train_dataset)
    whole.train()
    fit_until(Attempt(store), 7, tmp_path / "output", save_steps=3)
    pretend_another_number(store)
    told = r"step 6, epoch 1\.50, had 2 steps, as they have now: the training begins epoch 1 again and ends at step 10"
    with in_training(Attempt(store).session()), resume_path() as path, pytest.warns(UserWarning, match=told):
        prepare_trainer(resumed).train(resume_from_checkpoint=path)
    assert (resumed.state.global_step, resumed.state.epoch) == (10, 3)
    assert resumed.train_dataset.order == whole.train_dataset.order[64:]
    reported = [(it.attempt, it.step, it.metrics["epoch"]) for it in store.list()]
    assert reported == [(1, 3, 0.75), (1, 6, 1.5), (2, 9, 2.5), (2, 10, 3)]
    assert all(entry["learning_rate"] > 0 for entry in resumed.state.log_history if "loss" in entry)


@pytest.mark.parametrize("batches", [{"per_device_train_batch_size": 24}, {"gradient_accumulation_steps": 3}])
def test_an_epoch_that_was_begun_again_continues_exactly_on_the_same_number_of_ranks(store, tmp_path, batches):
    """Else a training whose epochs are longer than its attempts would never end."""
    fit_until(Attempt(store), 3, tmp_path / "output", save_steps=2)
    pretend_another_number(store)
    ends = []
    for name, killed_at in [("whole", []), ("disturbed", [4, 5, 7])]:
        attempt = Attempt(other := CheckpointStore.open(tmp_path / name, "run"))
        attempt.restored = store.checkpoint(store.latest())
        each = {"output_dir": tmp_path / "output" / name, "save_steps": 1, **batches}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in killed_at:
                fit_until(attempt, step, **each)
                attempt = Attempt(other)
            trainer = fit(attempt, **each)
        (told,) = [str(it.message) for it in caught if "steps, as they have now" in str(it.message)]
        assert "begins epoch 0 again" in told
        ends.append((trainer.state.global_step, trainer.state.epoch, weights(trainer.model)))
    whole, disturbed = ends
    assert disturbed[:2] == whole[:2]
    assert torch.equal(disturbed[2], whole[2])


def test_a_resume_with_more_steps_per_epoch_continues_with_the_next_one(store, tmp_path):
    each_epoch = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    fit_until(Attempt(store), 3, tmp_path / "output", per_device_train_batch_size=32, **each_epoch)
    with pytest.warns(UserWarning, match=r"step 2, epoch 1\.00, had 4 steps.*continues in epoch 1 and ends at step 10"):
        fit(Attempt(store), tmp_path / "output", **each_epoch)
    assert [(it.step, it.metrics["epoch"]) for it in store.list()] == [(2, 1), (6, 2), (10, 3)]
    assert all("eval_loss" in manifest.metrics for manifest in store.list())


def test_a_batch_that_gets_smaller_after_a_report_continues_from_it_after_a_restart(store, tmp_path):
    """As `auto_find_batch_size` makes it; the Trainer alone would begin again with step 0 and weights that were trained."""
    begun = []

    def run_out():
        begun.append(True)
        if len(begun) < 3:
            raise RuntimeError("CUDA out of memory.")

    arguments = {"auto_find_batch_size": True, "per_device_train_batch_size": 8, "save_steps": 6, "num_train_epochs": 2}
    with pytest.raises(MemoryError, match="after step 6 was reported, and auto_find_batch_size begins again at step 0"):
        fit(Attempt(store), tmp_path / "output", before=Before(7, run_out), **arguments)
    with pytest.warns(UserWarning, match=r"had 10 steps, as they have now.*epoch 0 again and ends at step 26"):
        trainer = fit(Attempt(store), tmp_path / "output", before=Before(7, run_out), **arguments)
    assert (trainer.state.global_step, trainer.state.epoch) == (26, 2)
    assert [manifest.step for manifest in store.list()] == [6, 12, 18, 24, 26]


def test_a_complete_training_is_not_continued_with_other_epochs(store, tmp_path):
    fit(Attempt(store), tmp_path / "output", num_train_epochs=1.5)
    trainer = fit(Attempt(store), tmp_path / "output", num_train_epochs=1.5, per_device_train_batch_size=32)
    assert trainer.state.global_step == 6


def test_max_steps_counts_all_steps_whatever_the_number_per_epoch(store, tmp_path):
    fit_until(Attempt(store), 7, tmp_path / "output", max_steps=12)
    pretend_another_number(store)
    with pytest.warns(UserWarning, match="begins epoch 1 again and ends at step 12"):
        trainer = fit(Attempt(store), tmp_path / "output", max_steps=12, per_device_train_batch_size=32)
    assert (trainer.state.global_step, trainer.state.epoch) == (12, 4)


def test_a_batch_of_all_ranks_that_stays_the_same_is_continued_exactly(store, tmp_path):
    """Accumulated here, of several ranks elsewhere: the steps of an epoch are as many, and nothing is begun again."""
    fit_until(Attempt(store), 7, tmp_path / "output")
    trainer = fit(Attempt(store), tmp_path / "output", per_device_train_batch_size=8, gradient_accumulation_steps=2)
    assert (trainer.state.global_step, trainer.state.epoch) == (12, 3)


def test_a_trainer_that_would_continue_in_a_wrong_epoch_is_refused(store, tmp_path):
    fit(Attempt(store), tmp_path / "output", max_steps=6)
    trainer = make_trainer(tmp_path / "output", per_device_train_batch_size=32)
    trainer.add_callback(ReportCallback())  # without prepare_trainer
    with (
        as_rank(Attempt(store).session()),
        resume_path() as path,
        pytest.raises(ValueError, match=r"step 6, epoch 1\.50, had epochs of another number of steps.*prepare_trainer"),
    ):
        trainer.train(resume_from_checkpoint=path)


def test_a_training_about_to_be_ended_checkpoints_stops_and_continues(store, tmp_path):
    attempt = Attempt(store)

    def end_soon():
        attempt.ends_soon = True

    each_epoch = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    trainer = fit(attempt, tmp_path / "output", before=Before(5, end_soon), **each_epoch)
    assert trainer.state.global_step == 6
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [4]  # nothing holds it up
    assert [manifest.step for manifest in store.list()] == [4, 6]
    assert fit(Attempt(store), tmp_path / "elsewhere", **each_epoch).state.global_step == 12
    assert [manifest.step for manifest in store.list()] == [4, 6, 8, 12]
    assert all("loss" in manifest.metrics for manifest in store.list())


def test_after_train_the_context_says_whether_the_training_was_to_end(store, tmp_path):
    attempt = Attempt(store)

    def end_soon():
        attempt.ends_soon = True

    trainer = make_trainer(tmp_path / "output")
    trainer.add_callback(Before(5, end_soon))
    with in_training(attempt.session()):
        prepare_trainer(trainer).train()
        assert get_context().ends_soon()
    with in_training(Attempt(store).session()), resume_path() as path:
        prepare_trainer(make_trainer(tmp_path / "output")).train(resume_from_checkpoint=path)
        assert not get_context().ends_soon()


def test_a_training_about_to_be_ended_saves_before_an_evaluation_that_is_due(store, tmp_path):
    attempt = Attempt(store)

    def end_soon():
        attempt.ends_soon = True

    arguments = {"eval_steps": 1, "save_strategy": "best", "metric_for_best_model": "eval_loss", "greater_is_better": True}
    trainer = fit(attempt, tmp_path / "output", before=Before(4, end_soon), **arguments)
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [1, 2, 3, 4]
    assert store.latest().step == trainer.state.global_step == 5


def test_the_best_are_reported_with_a_loss(store, tmp_path):
    arguments = {"eval_steps": 3, "save_strategy": "best", "metric_for_best_model": "eval_loss", "logging_steps": 50}
    fit(Attempt(store), tmp_path / "output", max_steps=3, **arguments)
    assert {"loss", "eval_loss"} <= store.latest().metrics.keys()


def test_a_pace_leaves_the_end_of_an_epoch_to_the_save_that_knows_the_evaluation(store, tmp_path):
    each_epoch = {"save_strategy": "epoch", "eval_strategy": "epoch", "max_steps": 6}
    fit(Attempt(store, target_overhead=1e9), tmp_path / "output", **each_epoch)  # due after each step
    assert [manifest.step for manifest in store.list() if "eval_loss" in manifest.metrics] == [4, 6]
    assert len(store.list()) == 6


def test_a_save_at_the_last_step_of_an_epoch_waits_for_the_evaluation_that_a_resume_would_skip(store, tmp_path):
    arguments = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "epoch", "max_steps": 10}
    trainer = fit(Attempt(store), tmp_path / "output", **arguments)
    assert [manifest.step for manifest in store.list()] == [2, 4, 6, 8, 10]
    assert [manifest.step for manifest in store.list() if "eval_loss" in manifest.metrics] == [4, 8, 10]
    assert [entry["step"] for entry in trainer.state.log_history if "eval_loss" in entry] == [4, 8, 10]


class EndsEpoch(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 2


def test_a_save_waits_for_the_evaluation_of_an_epoch_that_a_callback_ends(store, tmp_path):
    fit(Attempt(store), tmp_path / "output", EndsEpoch(), eval_strategy="epoch", num_train_epochs=2, save_steps=2)
    assert [manifest.step for manifest in store.list() if "eval_loss" in manifest.metrics] == [2, 6]


def test_a_pace_asks_for_checkpoints_and_stops_nothing(store, tmp_path):
    trainer = fit(Attempt(store, target_overhead=0.5), tmp_path / "output", save_strategy="no")
    assert trainer.state.global_step == 12
    assert store.list()[0].step == 1  # the first is due at once


def test_outside_of_a_training_the_callback_only_warns(tmp_path):
    trainer = make_trainer(tmp_path / "output", max_steps=3)
    assert not any(isinstance(it, ReportCallback) for it in prepare_trainer(trainer).callback_handler.callbacks)
    trainer.add_callback(ReportCallback())
    with pytest.warns(UserWarning, match="ReportCallback reports nothing"), resume_path() as path:
        trainer.train(resume_from_checkpoint=path)
    assert path is None


def test_a_resume_that_was_forgotten_is_refused(store, tmp_path):
    fit(Attempt(store), tmp_path / "output", max_steps=3)
    with (
        as_rank(Attempt(store).session()),
        pytest.raises(ValueError, match=r"begins with step 0; give trainer\.train\(\) the resume_from_checkpoint"),
    ):
        prepare_trainer(make_trainer(tmp_path / "output")).train()


def test_a_trainer_may_begin_anew_from_a_checkpoint_of_another_run(store, tmp_path):
    """As with its weights alone; the steps of the other run are no steps of this one, nor are the counts of its callbacks."""
    patience = {"eval_steps": 1, "metric_for_best_model": "loss"}
    fit(Attempt(store), tmp_path / "output", EarlyStoppingCallback(50, 100), max_steps=4, save_steps=4, **patience)
    for resumes, steps in [(False, 2), (True, 6)]:
        attempt = Attempt(CheckpointStore.open(tmp_path / f"resumes {resumes}", "run"))
        attempt.restored = store.checkpoint(store.latest())
        trainer = make_trainer(tmp_path / "output", max_steps=steps, save_steps=2, **patience)
        trainer.add_callback(counting := EarlyStoppingCallback(50, 100))
        with in_training(attempt.session()), resume_path() as path:
            prepare_trainer(trainer).train(resume_from_checkpoint=path if resumes else None)
        assert counting.early_stopping_patience_counter < 3
        assert attempt.store.latest().step == steps


def test_a_trainer_that_begins_anew_within_resume_path_and_has_other_epochs_is_refused(store, tmp_path):
    fit(Attempt(store), tmp_path / "output", max_steps=6)
    pretend_another_number(store)
    attempt = Attempt(CheckpointStore.open(tmp_path / "elsewhere", "run"))
    attempt.restored = store.checkpoint(store.latest())
    trainer = make_trainer(tmp_path / "output", per_device_train_batch_size=32)
    with (
        as_rank(attempt.session()),
        resume_path(),
        pytest.warns(UserWarning, match="begins epoch 1 again"),
        pytest.raises(ValueError, match=r"begins anew within resume_path\(\)"),
    ):
        prepare_trainer(trainer).train()


def test_a_second_trainer_in_a_function_is_refused_before_it_trains(store, tmp_path):
    with in_training(Attempt(store).session()):
        prepare_trainer(make_trainer(tmp_path / "first", max_steps=3)).train()
        second = prepare_trainer(make_trainer(tmp_path / "second", max_steps=9))
        with pytest.raises(ValueError, match="has reported step 3, and another Trainer begins with step 0"):
            second.train()
    assert second.state.global_step == 0


def test_a_checkpoint_of_another_kind_is_refused(store, tmp_path):
    attempt = Attempt(store)
    attempt.run(lambda session, rank: session.report({}, folder(tmp_path / "folder", model=b"x")))
    with (
        as_rank(Attempt(store).session()),
        pytest.raises(CheckpointNotFoundError, match="ReportCallback did not report it"),
        resume_path(),
    ):
        pass


def test_a_trainer_that_does_not_use_the_ranks_is_refused(store, tmp_path):
    trainer = make_trainer(tmp_path / "output")
    trainer.add_callback(ReportCallback())
    with as_rank(Attempt(store, world_size=2).session()):
        for start in (lambda: prepare_trainer(trainer), trainer.train):
            with pytest.raises(ValueError, match="counts 1 ranks but the training has 2"):
                start()


def test_a_trainer_that_would_save_on_sigterm_by_itself_is_refused(store, tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    with as_rank(Attempt(store).session()):
        with pytest.raises(ValueError, match="enable_jit_checkpoint would keep a rank"):
            prepare_trainer(make_trainer(tmp_path / "output", enable_jit_checkpoint=True))
        signal.signal(signal.SIGTERM, handler)


def test_weights_that_are_stored_under_other_names_are_loaded_from_several_files(tmp_path):
    model, other = make_model(), make_model()
    torch.nn.init.zeros_(other.vit.layers[0].mlp.fc1.weight)
    model.save_pretrained(tmp_path, max_shard_size="4KB")
    assert not (tmp_path / "model.safetensors").exists()
    load_renamed_weights(other, tmp_path)
    assert torch.equal(weights(model), weights(other))


def test_the_best_model_is_loaded_at_the_end_with_the_weights_that_are_stored_under_other_names(store, tmp_path):
    scores = iter(range(9, 0, -1))
    trainer = fit(
        Attempt(store),
        tmp_path / "output",
        trainer_options={"compute_metrics": lambda _: {"score": next(scores)}},
        save_steps=2,
        eval_steps=2,
        metric_for_best_model="score",
        load_best_model_at_end=True,
    )
    best = tmp_path / "output/checkpoint-2"
    assert trainer.state.best_model_checkpoint == str(best)
    assert torch.equal(weights(trainer.model), weights(ViTForImageClassification.from_pretrained(best)))


def test_weights_that_are_stored_once_for_two_names_are_left_to_the_trainer(tmp_path):
    size = {"n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 8, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**size))
    model.save_pretrained(tmp_path)
    torch.nn.init.zeros_(model.transformer.h[0].mlp.c_fc.weight)
    load_renamed_weights(model, tmp_path)
    assert not model.transformer.h[0].mlp.c_fc.weight.any()


def test_arguments_are_checked_at_once():
    with pytest.raises(ValueError, match="give 'sync' or 'async'"):
        ReportCallback(upload="later")
