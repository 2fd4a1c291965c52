"""Lightning's own Trainer with the callback, one rank in this process."""

import ctypes
import re
import signal
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
import pytorch_lightning.demos.boring_classes
import torch
from exact_ends import same, same_ends, weights
from forked_ranks import launch
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks import BatchSizeFinder, EarlyStopping, LearningRateFinder
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning_models import BATCHES, Regression, make_trainer
from prefect_torch.ckpt import CheckpointNotFoundError, CheckpointStore, get_context
from prefect_torch.ckpt.lightning import PrefectEnvironment, ReportCallback, ReportLogger, prepare_trainer, resume_path
from prefect_torch.ckpt.lightning import callback as callback_module
from prefect_torch.ckpt.lightning.resumes import warn_of_unsafe_globals
from prefect_torch.ckpt.lightning.sigterm import SigtermAction
from prefect_torch.ckpt.reporting.events import ReportEvent
from prefect_torch.ckpt.runs.history import newest_metrics
from ranks import Attempt, as_rank, folder, in_training, read_files
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics.classification import MulticlassAccuracy

# Lightning's advice about workers, intervals and dataloaders that cannot resume.
pytestmark = pytest.mark.filterwarnings("ignore:::lightning", "ignore::DeprecationWarning", "ignore::FutureWarning")

THREE = {"max_epochs": 3}


def fit(attempt, callback=None, model=None, **arguments):
    """Train as a rank's function would, and return the model and the Trainer."""
    model = model or Regression()
    trainer = make_trainer(callbacks=[callback or ReportCallback()], **arguments)
    with in_training(attempt.session()), resume_path() as path:
        trainer.fit(model, ckpt_path=path)
    return model, trainer


def committed(store):
    return [(manifest.step, manifest.metrics["epoch"]) for manifest in store.list()]


@pytest.mark.parametrize(
    "arguments",
    [
        {"every_n_epochs": 1, "every_n_train_steps": 5},
        {"every_n_epochs": 1, "on_validation_end": True},
        {"every_n_train_steps": 5, "on_validation_end": True},
        {"every_n_epochs": 0},
        {"every_n_train_steps": -1},
        {"every_n_epochs": True},
        {"upload": "later"},
    ],
)
def test_arguments_that_contradict_are_refused(arguments):
    with pytest.raises(ValueError, match=r"contradict each other|give a whole number|give 'sync' or 'async'"):
        ReportCallback(**arguments)


@pytest.mark.parametrize(("upload", "precision"), [("sync", "32-true"), ("async", "32-true"), ("sync", "64-true")])
def test_a_training_that_raised_continues_to_the_very_weights_of_an_undisturbed_one(store, tmp_path, upload, precision):
    undisturbed, _ = fit(Attempt(CheckpointStore.open(tmp_path / "other", "run")), precision=precision)
    with pytest.raises(ValueError, match="boom from the training"):
        fit(Attempt(store), ReportCallback(upload=upload), Regression(raise_at=2), precision=precision)
    resumed, trainer = fit(Attempt(store), ReportCallback(upload=upload), precision=precision)
    assert torch.equal(weights(resumed), weights(undisturbed))
    assert trainer.current_epoch == 4
    assert committed(store) == [(BATCHES * (epoch + 1), epoch) for epoch in range(4)]
    assert [manifest.attempt for manifest in store.list()] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("chosen", "length", "schedule", "ends_at", "reported", "goes_on"),
    [
        ({}, THREE, "by epoch", 9, 8, False),
        ({}, THREE, "of all steps", 9, 8, False),
        ({"on_validation_end": True}, THREE, "by epoch", 9, 8, False),
        ({"every_n_train_steps": BATCHES}, THREE, "by epoch", 9, 8, False),
        ({"every_n_train_steps": 3}, THREE, "by epoch", 6, 6, True),
        ({"every_n_train_steps": 3}, THREE, "of all steps", 6, 6, True),
        ({"every_n_train_steps": 2}, {**THREE, "val_check_interval": 2}, "by epoch", 7, 6, True),
        (
            {"every_n_train_steps": 2},
            {**THREE, "val_check_interval": 3, "check_val_every_n_epoch": None},
            "by epoch",
            7,
            6,
            True,
        ),
        ({}, {"max_epochs": -1, "max_steps": 3 * BATCHES}, "by epoch", 9, 8, False),
        ({}, {"max_epochs": -1, "max_steps": 3 * BATCHES}, "by epoch", 9, 8, True),
        ({}, THREE, "by epoch", 9, 8, True),
    ],
)
def test_a_resumed_training_with_early_stopping_ends_as_an_undisturbed_one_bit_for_bit(
    tmp_path, chosen, length, schedule, ends_at, reported, goes_on
):
    """From the end of an epoch; from within one with a loader that goes on there; with `trainer.estimated_stepping_batches`."""
    loader = "where it was" if goes_on else "from the start"
    for name, early, code in [("undisturbed", None, 0), ("resumed", ends_at, 3), ("resumed", None, 0)]:
        (tmp_path / name).mkdir(exist_ok=True)
        assert launch("lightning_draws", (chosen, length, loader, schedule, early), 1, tmp_path / name) == [code]
        if code:
            assert CheckpointStore.open(tmp_path / name, "run").latest().step == reported
    undisturbed, resumed = tmp_path / "undisturbed", tmp_path / "resumed"
    assert same(torch.load(undisturbed / "model.pt"), torch.load(resumed / "model.pt"))
    assert same_ends(undisturbed, resumed, 1)


class Recording(Regression):
    """Records the first sample of each batch."""

    def __init__(self, **ends) -> None:
        super().__init__(**ends)
        self.seen = []

    def train_dataloader(self):
        loader = super().train_dataloader()
        return StatefulDataLoader(loader.dataset, batch_size=8) if self.ends.get("is_stateful") else loader

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, float(batch[1][0])))
        return super().training_step(batch, batch_idx)


def fit_on_another_number(store, callback, model, **arguments):
    """Resume from a checkpoint as of two ranks; return the Trainer and what it was warned of by this package."""
    manifest = replace(store.latest(), world_size=2)
    store.storage.put_bytes(store.layout.manifest(manifest.id), manifest.encode())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, trainer = fit(Attempt(store), callback, model, **arguments)
    return trainer, [str(it.message) for it in caught if "was reported within an epoch" in str(it.message)]


class Curriculum(Recording):
    def train_dataloader(self):
        return self.loader(self.current_epoch // 2)


@pytest.mark.parametrize("every_n", [1, 2, 3])
def test_dataloaders_are_made_again_in_the_same_epochs_after_a_resume(store, tmp_path, every_n):
    reloads = {"max_epochs": 6, "reload_dataloaders_every_n_epochs": every_n}
    undisturbed, _ = fit(Attempt(CheckpointStore.open(tmp_path / "other", "run")), model=Curriculum(), **reloads)
    with pytest.raises(ValueError, match="boom from the training"):
        fit(Attempt(store), model=Curriculum(raise_at=2), **reloads)
    resumed, _ = fit(Attempt(store), model=Curriculum(), **reloads)
    assert resumed.seen == undisturbed.seen[2 * BATCHES :]


def raise_boom():
    raise ValueError("boom from the training")


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("length", [THREE, {"max_epochs": -1, "max_steps": 6 + 2 * BATCHES}])
@pytest.mark.parametrize("is_stateful", [False, True])
def test_on_another_number_of_ranks_an_interrupted_epoch_begins_again(store, length, is_stateful):
    """The batches used before, of another share of the data each, are not counted as those of the new loader."""
    undisturbed = Recording()
    make_trainer(max_epochs=3).fit(undisturbed)
    model = Recording(is_stateful=is_stateful, at_step=7, then=raise_boom)
    with pytest.raises(ValueError, match="boom"):
        fit(Attempt(store), ReportCallback(every_n_train_steps=6), model, **length)
    assert store.latest().step == 6  # the second batch of epoch 1
    model = Recording(is_stateful=is_stateful)
    trainer, (warning,) = fit_on_another_number(store, ReportCallback(every_n_train_steps=6), model, **length)
    assert re.search("by 2 ranks, and there are 1 now, .*: epoch 1 begins with its first batch", warning)
    assert model.seen == undisturbed.seen[BATCHES:]
    assert (trainer.current_epoch, trainer.global_step) == (3, 6 + 2 * BATCHES)


def logged_steps(attempt, model, interval):
    """Train with a validation and a report every so many batches; return the steps at which the batches were logged."""
    with in_training(attempt.session()), resume_path() as path:
        chosen = {"val_check_interval": interval, "logger": ReportLogger(), "log_every_n_steps": 1}
        make_trainer(callbacks=[ReportCallback(on_validation_end=True)], **THREE, **chosen).fit(model, ckpt_path=path)
    records = [event.record for event in attempt.events() if isinstance(event, ReportEvent)]
    return [record.step for record in records if record.is_logged and "train/loss_step" in record.metrics]


@pytest.mark.filterwarnings("ignore:.*was reported within an epoch by 2 ranks")
@pytest.mark.parametrize(("world_size", "steps"), [(1, range(6, 3 * BATCHES)), (2, range(6, 6 + 2 * BATCHES))])
@pytest.mark.parametrize("interval", [2, 3])
def test_the_steps_of_loggers_continue_after_a_resume_from_a_validation_within_an_epoch(store, interval, world_size, steps):
    """Also on another number of ranks, and where no validation follows the batch any more."""
    with pytest.raises(ValueError, match="boom"):
        logged_steps(Attempt(store), Regression(at_step=7, then=raise_boom), interval=2)
    manifest = replace(store.latest(), world_size=world_size)
    store.storage.put_bytes(store.layout.manifest(manifest.id), manifest.encode())
    assert logged_steps(Attempt(store), Regression(), interval) == [*steps]


@pytest.mark.parametrize("length", [THREE, {"max_epochs": -1, "max_steps": 3 * BATCHES}])
def test_on_another_number_of_ranks_a_training_continues_after_a_whole_epoch(store, length):
    undisturbed = Recording()
    make_trainer(max_epochs=3).fit(undisturbed)
    with pytest.raises(ValueError, match="boom"):
        fit(Attempt(store), model=Recording(at_step=6, then=raise_boom), **length)
    model = Recording()
    trainer, told = fit_on_another_number(store, None, model, **length)
    assert told == []
    assert model.seen == undisturbed.seen[BATCHES:]
    assert (trainer.current_epoch, trainer.global_step) == (3, 3 * BATCHES)


@pytest.mark.parametrize("length", [THREE, {"max_epochs": -1, "max_steps": 3 * BATCHES}])
def test_on_another_number_of_ranks_an_epoch_without_a_batch_left_is_not_begun_again(store, length):
    attempt = Attempt(store)

    def end_soon():
        attempt.ends_soon = True

    undisturbed = Recording()
    make_trainer(max_epochs=3).fit(undisturbed)
    fit(attempt, model=Recording(at_step=BATCHES - 1, then=end_soon), **length)
    assert store.latest().step == BATCHES
    model = Recording()
    trainer, (warning,) = fit_on_another_number(store, None, model, **length)
    assert "epoch 1 begins with its first batch" in warning
    assert model.seen == undisturbed.seen[BATCHES:]
    assert (trainer.current_epoch, trainer.global_step) == (3, 3 * BATCHES)


class Generating(Regression):
    """Has a generator for its data, and records its states."""

    def __init__(self, draw, **ends):
        super().__init__(**ends)
        self.draw, self.states = draw, []

    def train_dataloader(self):
        self.generator = torch.Generator().manual_seed(0)
        data = super().train_dataloader().dataset
        return DataLoader(data, batch_size=8, **self.draw(data, self.generator))

    def on_train_batch_start(self, batch, batch_idx):
        super().on_train_batch_start(batch, batch_idx)
        self.states.append(self.generator.get_state())


def shuffled(data, generator):
    return {"shuffle": True, "generator": generator}


@pytest.mark.parametrize("length", [THREE, {"max_epochs": -1, "max_steps": 3 * BATCHES}])
@pytest.mark.parametrize(
    "draw",
    [
        shuffled,
        lambda data, generator: {"sampler": WeightedRandomSampler([1.0] * len(data), len(data), generator=generator)},
        lambda data, generator: {"sampler": RandomSampler(data), "generator": generator},
    ],
)
def test_the_generator_of_a_dataloader_or_its_sampler_continues_after_the_end_of_an_epoch(store, draw, length):
    make_trainer(**length).fit(undisturbed := Generating(draw))
    with pytest.raises(ValueError, match="boom"):
        fit(Attempt(store), model=Generating(draw, at_step=2 * BATCHES + 1, then=raise_boom), **length)
    resumed, _ = fit(Attempt(store), model=Generating(draw), **length)
    assert not torch.equal(resumed.states[0], undisturbed.states[0])
    assert same(resumed.states, undisturbed.states[2 * BATCHES :])


def test_the_generator_of_a_dataloader_continues_within_an_epoch(store):
    with pytest.raises(ValueError, match="boom"):
        fit(Attempt(store), ReportCallback(every_n_train_steps=6), stopped := Generating(shuffled, at_step=6, then=raise_boom))
    resumed, _ = fit(Attempt(store), ReportCallback(every_n_train_steps=6), Generating(shuffled))
    torch.randperm(8 * BATCHES, generator=stopped.generator)
    assert torch.equal(resumed.states[0], stopped.generator.get_state())


class OfEachEpoch:
    """Has another order in each epoch, which is asked for as soon as there is an iterator, as by workers."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return BATCHES

    def __iter__(self):
        return iter([(batch + self.epoch) % BATCHES for batch in range(BATCHES)])


@pytest.mark.parametrize("resume", [fit, fit_on_another_number])
@pytest.mark.parametrize("length", [THREE, {"max_epochs": -1, "max_steps": 3 * BATCHES}])
def test_after_the_end_of_an_epoch_an_order_asked_for_early_is_that_of_the_next(store, length, resume):
    class Ordered(Recording):
        def train_dataloader(self):
            return DataLoader([*super().train_dataloader()], batch_size=None, sampler=OfEachEpoch())

    make_trainer(**length).fit(undisturbed := Ordered())
    with pytest.raises(ValueError, match="boom"):
        fit(Attempt(store), model=Ordered(at_step=BATCHES + 1, then=raise_boom), **length)
    assert store.latest().step == BATCHES
    resume(store if resume is fit_on_another_number else Attempt(store), None, resumed := Ordered(), **length)
    assert resumed.seen == undisturbed.seen[BATCHES:]


def test_a_checkpoint_of_before_random_states_were_stored_resumes(store):
    fit(Attempt(store), max_epochs=1)
    (manifest,) = store.list()
    without = replace(manifest, files=tuple(entry for entry in manifest.files if entry.path == "checkpoint.ckpt"))
    store.storage.delete([store.layout.data(manifest.id, "rng_state_0.pth")])
    store.storage.put_bytes(store.layout.manifest(manifest.id), without.encode())
    _, trainer = fit(Attempt(store), max_epochs=2)
    assert trainer.current_epoch == 2


def test_what_was_logged_is_reported_as_numbers_with_epoch_and_step(store):
    _, trainer = fit(Attempt(store), max_epochs=2)
    metrics = store.latest().metrics
    assert metrics["step"] == 2 * BATCHES
    assert metrics["late"] == metrics["epoch"] == 1  # "late" is logged in the module's own on_train_epoch_end
    assert {"train/loss", "train/loss_epoch", "train/loss_step", "val_loss"} <= metrics.keys()
    assert metrics["train/loss"] == pytest.approx(trainer.callback_metrics["train/loss"].item())
    assert {type(value) for value in metrics.values()} == {int, float}


def test_the_checkpoint_is_lightnings_own_and_nothing_is_said_of_it(store, caplog):
    model, _ = fit(Attempt(store), max_epochs=1)
    assert "weights_only" not in caplog.text
    files = read_files(store.checkpoint(store.latest()))
    assert sorted(files) == ["checkpoint.ckpt", "rng_state_0.pth"]
    with store.checkpoint(store.latest()).as_directory() as directory:
        loaded = Regression.load_from_checkpoint(f"{directory}/checkpoint.ckpt")
    assert torch.equal(weights(loaded), weights(model))


class Placed(Regression):
    """Has a hyperparameter that torch loads only on request."""

    def __init__(self, place=PurePosixPath("data"), **ends):  # noqa: B008 - not changed
        super().__init__(**ends)
        self.save_hyperparameters("place")


def warnings_of_safety(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(it.message) for it in caught if "contains" in str(it.message)]


def test_the_first_report_says_that_torch_will_load_the_checkpoint_only_on_request(store):
    told = warnings_of_safety(lambda: fit(Attempt(store), model=Placed(), max_epochs=2))
    (warning,) = told
    assert "checkpoint.ckpt contains pathlib.PurePosixPath, which torch loads only on request" in warning
    assert "weights_only=False" in warning
    with in_training(Attempt(store).session()), resume_path() as path:
        trainer = make_trainer(callbacks=[ReportCallback()], max_epochs=3)
        assert warnings_of_safety(lambda: trainer.fit(Placed(), ckpt_path=path, weights_only=False)) == []
    assert trainer.current_epoch == 3


def test_nothing_is_said_of_what_torch_has_been_told_to_load(store):
    with torch.serialization.safe_globals([PurePosixPath]):
        assert warnings_of_safety(lambda: fit(Attempt(store), model=Placed(), max_epochs=1)) == []
        assert fit(Attempt(store), model=Placed(), max_epochs=2)[1].current_epoch == 2


def test_of_a_sharded_checkpoint_what_is_beside_the_shards_is_looked_at(tmp_path):
    """Where the strategy shards, Lightning does not hand `weights_only` on."""
    torch.save({"place": PurePosixPath("data")}, tmp_path / "meta.pt")
    (warning,) = warnings_of_safety(lambda: warn_of_unsafe_globals(make_trainer(), tmp_path))
    assert f"{tmp_path.name} contains pathlib.PurePosixPath" in warning
    assert "weights_only" not in warning


def test_a_checkpoint_of_another_format_is_not_looked_at(store):
    class Zipped(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint, path, storage_options=None):
            ZipFile(path, "w").close()

    assert warnings_of_safety(lambda: fit(Attempt(store), model=Placed(), max_epochs=1, plugins=[Zipped()])) == []
    assert len(store.list()) == 1


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({"every_n_epochs": 2}, [(8, 1), (16, 3)]),
        ({"every_n_train_steps": 3}, [(3, 0), (6, 1), (9, 2), (12, 2), (15, 3)]),
        ({"on_validation_end": True}, [(8, 1), (16, 3)]),
    ],
)
def test_reports_come_at_the_chosen_moments_and_never_in_a_sanity_check(store, chosen, expected):
    fit(Attempt(store), ReportCallback(**chosen), check_val_every_n_epoch=2, num_sanity_val_steps=2)
    assert committed(store) == expected


def test_several_callbacks_report_a_step_once(store):
    attempt = Attempt(store)
    with in_training(attempt.session()):
        make_trainer(callbacks=[ReportCallback(), ReportCallback(every_n_train_steps=3)]).fit(Regression())
    assert committed(store) == [(3, 0), (4, 0), (6, 1), (8, 1), (9, 2), (12, 2), (15, 3), (16, 3)]


@pytest.mark.parametrize(
    "callbacks",
    [
        [ReportCallback(every_n_train_steps=2)],
        [ReportCallback(every_n_train_steps=2), ReportCallback(on_validation_end=True)],
        [ReportCallback(on_validation_end=True), ReportCallback(every_n_train_steps=2)],
    ],
)
def test_a_report_at_a_batch_that_a_validation_follows_has_its_metrics(store, callbacks):
    class Validated(Regression):
        def __init__(self):
            super().__init__()
            self.losses = {}

        def on_validation_epoch_end(self):
            self.losses[self.global_step] = self.trainer.callback_metrics["val_loss"].item()

    with in_training(Attempt(store).session()):
        trainer = make_trainer(callbacks=callbacks, val_check_interval=2, num_sanity_val_steps=0, max_epochs=2)
        trainer.fit(model := Validated())
    assert {manifest.step: manifest.metrics["val_loss"] for manifest in store.list()} == model.losses
    assert [*model.losses] == [2, 4, 6, 8]


class Stopping(Regression):
    """Stops the Trainer at step 6, within epoch 1, as `Trainer(max_time=)` does."""

    def on_train_batch_end(self, *_):
        self.trainer.should_stop = self.global_step == 6


@pytest.mark.parametrize("chosen", [{"every_n_train_steps": 2}, {"every_n_train_steps": 3}, {"on_validation_end": True}])
def test_a_report_at_the_batch_at_which_the_trainer_stops_has_the_metrics_of_the_last_validation(store, chosen):
    _, trainer = fit(Attempt(store), ReportCallback(**chosen), Stopping(), num_sanity_val_steps=0)
    assert trainer.global_step == store.latest().step == 6
    assert store.latest().metrics["val_loss"] == trainer.callback_metrics["val_loss"].item()


def test_the_steps_of_loggers_continue_after_a_stop_within_an_epoch(store):
    logged_steps(Attempt(store), Stopping(), interval=BATCHES)
    assert logged_steps(Attempt(store), Regression(), interval=BATCHES) == [*range(6, 3 * BATCHES)]


@pytest.mark.parametrize("least", [{"min_epochs": 3}, {"min_steps": 10}])
def test_a_report_does_not_wait_for_a_stop_that_the_trainer_may_not_make_yet(store, least):
    with pytest.raises(ValueError, match="boom"):
        fit(Attempt(store), ReportCallback(every_n_train_steps=2), Stopping(at_step=6, then=raise_boom), **least)
    assert store.latest().step == 6


def test_the_sanity_check_of_a_second_fit_reports_nothing(store):
    attempt, model = Attempt(store), Regression()
    trainer = make_trainer(callbacks=[ReportCallback(on_validation_end=True)], check_val_every_n_epoch=2, max_epochs=3)
    with as_rank(attempt.session()):
        trainer.fit(model)
        trainer.fit_loop.max_epochs = 4
        trainer.fit(model)
    assert committed(store) == [(8, 1), (16, 3)]


def test_batches_without_an_optimizer_step_report_nothing_twice(store):
    fit(Attempt(store), ReportCallback(every_n_train_steps=1), accumulate_grad_batches=2, max_epochs=2)
    assert committed(store) == [(1, 0), (2, 0), (3, 1), (4, 1)]


def test_an_epoch_without_a_step_that_lightning_counts_is_warned_of(store):
    class Manual(Regression):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.optimizers(use_pl_optimizer=False).zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers(use_pl_optimizer=False).step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Attempt(store), model=Manual())
    assert not committed(store)
    assert any("nothing is reported, since trainer.global_step is 0: with manual" in str(it.message) for it in caught)


@pytest.mark.parametrize(
    ("chosen", "length", "expected"),
    [
        ({}, {"max_epochs": 4}, [0.25, 0.5, 0.75, 1.0]),
        ({}, {"max_epochs": -1, "max_steps": 10}, [0.4, 0.8, 1.0]),
        ({}, {"max_epochs": 8, "max_steps": 2 * BATCHES}, [0.5, 1.0]),
        ({"every_n_train_steps": 3}, {"max_epochs": 2}, [3 / 8, 6 / 8]),
        ({"on_validation_end": True}, {"max_epochs": 2, "val_check_interval": 2}, [0.25, 0.5, 0.75, 1.0]),
        ({}, {"max_epochs": -1, "max_steps": -1}, [None, None]),
    ],
)
def test_reports_have_the_share_of_the_epochs_or_steps_that_is_done(store, chosen, length, expected):
    attempt = Attempt(store)

    class Ending(Regression):
        def on_train_epoch_end(self):
            super().on_train_epoch_end()
            self.trainer.should_stop = None in expected and self.current_epoch == 1

    fit(attempt, ReportCallback(**chosen), Ending(), **length)
    progress = [event.progress for event in attempt.events() if isinstance(event, ReportEvent)]
    assert progress == expected


def test_validating_alone_reports_nothing(store):
    attempt = Attempt(store)
    with as_rank(attempt.session()):
        make_trainer(callbacks=[ReportCallback(on_validation_end=True)]).validate(Regression(), verbose=False)
    assert attempt.events() == []


def test_the_best_model_is_said_to_be_elsewhere():
    trainer = make_trainer(callbacks=[ReportCallback()])
    assert not hasattr(trainer.checkpoint_callback, "best_model_path")  # Lightning and loggers ask so
    with pytest.raises(AttributeError, match=r"trainer\.test\(model\).*Result\.best_checkpoints"):
        trainer.validate(Regression(), ckpt_path="best", verbose=False)


def test_a_fast_dev_run_reports_metrics_alone(store):
    attempt = Attempt(store)
    fit(attempt, fast_dev_run=True)
    assert [event.record.metrics["step"] for event in attempt.events()] == [1]
    assert store.list() == []


def test_a_training_about_to_be_ended_checkpoints_stops_and_continues(store):
    attempt = Attempt(store)

    def end_soon():
        attempt.ends_soon = True

    _, trainer = fit(attempt, model=Regression(at_step=BATCHES + 1, then=end_soon))
    assert trainer.should_stop
    assert committed(store) == [(BATCHES, 0), (BATCHES + 2, 1)]  # the batch after which it heard of it
    _, trainer = fit(Attempt(store))
    assert trainer.current_epoch == 4
    assert committed(store)[-1] == (4 * BATCHES, 3)


class GoingOn(Regression):
    def train_dataloader(self):
        return StatefulDataLoader(super().train_dataloader().dataset, batch_size=8)


class Validated(GoingOn):
    """Tells of its first batch of the validation after step `at_step`."""

    def __init__(self, at_step=None, tell=None, num_loaders=1):
        super().__init__()
        self.at_step, self.tell, self.num_loaders = at_step, tell, num_loaders
        self.validated = []

    def val_dataloader(self):
        loaders = [self.loader(1) for _ in range(self.num_loaders)]
        return loaders if self.num_loaders > 1 else loaders[0]

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)
        if not self.trainer.sanity_checking:
            self.validated.append((self.global_step, dataloader_idx, batch_idx))
            if self.global_step == self.at_step:
                self.tell()


def fit_validated(attempt, other_callbacks=(), at_step=None, **arguments):
    """Train, about to be ended in the validation after step `at_step`; return the module and EarlyStopping."""

    def tell():
        attempt.ends_soon = True

    stopping = EarlyStopping("val_loss", patience=99, min_delta=100)
    trainer = make_trainer(callbacks=[*other_callbacks, stopping, ReportCallback()], max_epochs=3, **arguments)
    with in_training(attempt.session()), resume_path() as path:
        trainer.fit(model := Validated(at_step, tell), ckpt_path=path)
    return model, stopping


def ema():
    return [callbacks.EMAWeightAveraging(decay=0.5)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("others", [list, ema])
@pytest.mark.parametrize(
    ("at_step", "validations"),
    [(BATCHES, {}), (2 * BATCHES, {}), (2, {"val_check_interval": 2}), (6, {"val_check_interval": 2})],
)
def test_a_training_about_to_be_ended_breaks_its_validation_off_and_continues_after_it(
    store, tmp_path, at_step, validations, others
):
    other = Attempt(CheckpointStore.open(tmp_path / "other", "run"))
    undisturbed, stopping = fit_validated(other, others(), **validations)
    told, _ = fit_validated(Attempt(store), others(), at_step, **validations)
    assert [of_step for of_step in told.validated if of_step[0] == at_step] == [(at_step, 0, 0)]
    assert committed(store)[-1] == (at_step, (at_step - 1) // BATCHES)
    resumed, stopping_again = fit_validated(Attempt(store), others(), **validations)
    assert resumed.validated == [of_step for of_step in undisturbed.validated if of_step[0] > at_step]
    assert stopping_again.wait_count == stopping.wait_count - 1
    assert torch.equal(weights(resumed), weights(undisturbed))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
def test_a_validation_that_was_broken_off_has_no_metrics(store):
    class Seeing(callbacks.Callback):
        def on_train_epoch_end(self, trainer, module):
            seen.append(trainer.callback_metrics["val_loss"].item())

    seen = []
    fit_validated(Attempt(store), [Seeing()], 2 * BATCHES)
    before, broken_off = (manifest.metrics for manifest in store.list())
    assert broken_off["val_loss"] == before["val_loss"] == seen[0] == seen[1]
    assert broken_off["train/loss"] != before["train/loss"]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
def test_a_validation_that_is_complete_is_not_broken_off(store):
    with pytest.raises(SystemExit):  # in the report after the next batch: the last checkpoint is stored
        fit_validated(Attempt(store), at_step=BATCHES, limit_val_batches=1)
    assert committed(store) == [(BATCHES, 0)]
    assert "val_loss" in store.latest().metrics


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
def test_a_validation_is_broken_off_once_each_of_its_dataloaders_has_had_a_batch(store):
    attempt = Attempt(store)

    def end_soon():
        attempt.ends_soon = True

    model, _ = fit(attempt, model=Validated(BATCHES, end_soon, num_loaders=2))
    assert model.validated == [*((BATCHES, 0, number) for number in range(BATCHES)), (BATCHES, 1, 0)]
    assert committed(store) == [(BATCHES, 0)]


def test_after_fit_the_context_says_whether_the_training_was_to_end(store):
    attempt = Attempt(store)

    def end_soon():
        attempt.ends_soon = True

    with in_training(attempt.session()):
        make_trainer(callbacks=[ReportCallback()]).fit(Regression(at_step=5, then=end_soon))
        assert get_context().ends_soon()
    with in_training(Attempt(store).session()), resume_path() as path:
        make_trainer(callbacks=[ReportCallback()]).fit(Regression(), ckpt_path=path)
        assert not get_context().ends_soon()


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("limit", [{}, {"limit_train_batches": 3}])
def test_after_an_end_at_the_last_batch_of_an_epoch_the_next_has_all_its_batches(store, limit):
    """A loader that goes to its stored position would have none left."""
    attempt = Attempt(store)

    def end_soon():
        attempt.ends_soon = True

    undisturbed = Recording(is_stateful=True)
    make_trainer(**THREE, **limit).fit(undisturbed)
    batches = limit.get("limit_train_batches", BATCHES)
    fit(attempt, model=Recording(is_stateful=True, at_step=batches - 1, then=end_soon), **THREE, **limit)
    assert store.latest().step == batches
    resumed, trainer = fit(Attempt(store), model=Recording(is_stateful=True), **THREE, **limit)
    assert resumed.seen == undisturbed.seen[batches:]
    assert trainer.global_step == 3 * batches


class Stream(IterableDataset):
    """Goes on where it was left, in the next epoch and after a resume."""

    def __init__(self, items):
        self.items, self.position = items, 0

    def __iter__(self):
        while True:
            self.position += 1
            yield self.items[(self.position - 1) % len(self.items)]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Streaming(Recording):
    def train_dataloader(self):
        return StatefulDataLoader(Stream(self.loader(0).dataset), batch_size=8)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("resume", [fit, fit_on_another_number])
@pytest.mark.parametrize(
    ("model", "batches"), [(Recording, BATCHES), (Recording, BATCHES - 1), (Streaming, BATCHES - 1), (Streaming, BATCHES + 1)]
)
def test_with_max_steps_a_loader_with_a_position_begins_the_next_epoch_after_an_ended_one(store, model, batches, resume):
    """No epoch ends without a batch, and no stream begins again."""
    chosen = {"max_epochs": -1, "max_steps": 3 * batches, "limit_train_batches": batches}
    undisturbed = model(is_stateful=True)
    make_trainer(**chosen).fit(undisturbed)
    with pytest.raises(ValueError, match="boom"):
        fit(Attempt(store), model=model(is_stateful=True, at_step=batches + 1, then=raise_boom), **chosen)
    assert store.latest().step == batches
    resumed = model(is_stateful=True)
    resume(store if resume is fit_on_another_number else Attempt(store), None, resumed, **chosen)
    assert resumed.seen == undisturbed.seen[batches:]


class Averaging(GoingOn):
    """Averages its weights where many modules do, and logs there."""

    def __init__(self, **ends):
        super().__init__(**ends)
        self.register_buffer("average", torch.zeros(4))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.average.lerp_(self.layers[0].weight[0].detach(), 0.1)
        self.log("averaged", float(self.global_step))


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("callback", [ReportCallback(every_n_train_steps=1), ReportCallback()])
def test_a_report_has_what_the_module_does_at_the_end_of_its_batch(store, tmp_path, callback):
    undisturbed, _ = fit(Attempt(CheckpointStore.open(tmp_path / "other", "run")), model=Averaging())
    attempt = Attempt(store)

    def end_soon():
        attempt.ends_soon = True

    fit(attempt, callback, Averaging(at_step=5, then=end_soon))
    assert store.latest().step == store.latest().metrics["averaged"] == 6
    resumed, _ = fit(Attempt(store), callback, Averaging())
    assert torch.equal(resumed.average, undisturbed.average)


class OnAPlateau(GoingOn):
    def __init__(self, plan, **ends):
        super().__init__(**ends)
        self.plan = plan

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.7, patience=0, threshold=0.05)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", **self.plan}}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize("plan", [{"monitor": "train/loss"}, {"monitor": "val_loss", "frequency": 2}])
@pytest.mark.parametrize("callback", [{"on_validation_end": True}, {"every_n_train_steps": 2}])
def test_a_plateau_by_steps_takes_its_step_after_a_resume_from_the_validation_before_it(store, tmp_path, plan, callback):
    chosen = {"val_check_interval": 2, "max_epochs": 3, "num_sanity_val_steps": 0}
    undisturbed, trainer = fit(Attempt(CheckpointStore.open(tmp_path / "other", "run")), model=OnAPlateau(plan), **chosen)
    with pytest.raises(ValueError, match="boom"):
        fit(Attempt(store), ReportCallback(**callback), OnAPlateau(plan, at_step=7, then=raise_boom), **chosen)
    assert store.latest().step == 6
    resumed, trainer_again = fit(Attempt(store), ReportCallback(**callback), OnAPlateau(plan), **chosen)
    assert trainer.optimizers[0].param_groups[0]["lr"] < 0.05
    assert same(trainer_again.optimizers[0].state_dict(), trainer.optimizers[0].state_dict())
    assert torch.equal(weights(resumed), weights(undisturbed))


def test_a_training_with_nothing_left_has_its_metrics_again(store):
    first, again = (fit(Attempt(store), max_epochs=2)[1].callback_metrics for _ in range(2))
    assert {manifest.attempt for manifest in store.list()} == {1}
    assert same(dict(again), dict(first))


@pytest.mark.parametrize("least", [{"min_epochs": 3}, {"min_steps": 10}])
def test_a_training_about_to_be_ended_stops_whatever_it_must_train_at_least(store, least):
    attempt = Attempt(store)

    def end_soon():
        attempt.ends_soon = True

    _, trainer = fit(attempt, model=Regression(at_step=5, then=end_soon), **least)
    assert trainer.global_step == store.latest().step == 6
    _, trainer = fit(Attempt(store), **least)
    assert trainer.current_epoch == 4


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
def test_a_training_about_to_be_ended_takes_the_optimizer_step_first_and_loses_no_gradients(store, tmp_path):
    undisturbed, _ = fit(Attempt(CheckpointStore.open(tmp_path / "other", "run")), model=GoingOn(), accumulate_grad_batches=2)
    attempt = Attempt(store)

    def end_soon():
        attempt.ends_soon = True

    _, trainer = fit(attempt, model=GoingOn(at_step=2, then=end_soon), accumulate_grad_batches=2)
    assert committed(store) == [(2, 0), (3, 1)]
    assert trainer.should_stop
    resumed, _ = fit(Attempt(store), model=GoingOn(), accumulate_grad_batches=2)
    assert torch.equal(weights(resumed), weights(undisturbed))


class Streamed(IterableDataset):
    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return (self.items[number] for number in range(len(self.items)))


class Sized(Streamed):
    def __len__(self):
        return len(self.items)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize(
    ("dataset", "loader", "num_warnings"),
    [(Streamed, StatefulDataLoader, 1), (Sized, StatefulDataLoader, 0), (Streamed, DataLoader, 0)],
)
def test_a_loader_that_lightning_reads_ahead_of_its_stored_position_is_warned_of(store, dataset, loader, num_warnings):
    class Streaming(Regression):
        def train_dataloader(self):
            return loader(dataset(super().train_dataloader().dataset), batch_size=8)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(Attempt(store), model=Streaming(), max_epochs=1)
    assert sum("has no length" in str(warning.message) for warning in caught) == num_warnings


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
@pytest.mark.parametrize(
    ("set_up_at_the_start_of_an_epoch", "killed_at"),
    [
        (lambda: callbacks.GradientAccumulationScheduler({0: 2, 2: 4}), [3, 5]),
        (lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=2, annealing_epochs=2), [6, 7, 9, 13]),
    ],
)
def test_what_lightning_sets_up_at_the_start_of_an_epoch_is_set_up_after_a_resume_within_it(
    store, tmp_path, set_up_at_the_start_of_an_epoch, killed_at
):
    def run(store, **ends):
        model = GoingOn(**ends)
        reports = [ReportCallback(every_n_train_steps=1), ReportCallback()]
        trainer = make_trainer(callbacks=[set_up_at_the_start_of_an_epoch(), *reports])
        with in_training(Attempt(store).session()), resume_path() as path:
            trainer.fit(model, ckpt_path=path)
        return model, trainer

    def killed():
        raise ValueError("killed")

    undisturbed, trainer = run(CheckpointStore.open(tmp_path / "other", "run"))
    for at_step in killed_at:
        with pytest.raises(ValueError, match="killed"):
            run(store, at_step=at_step, then=killed)
        assert store.latest().step == at_step
    resumed, trainer_again = run(store)
    assert trainer_again.global_step == trainer.global_step
    assert torch.equal(weights(resumed), weights(undisturbed))


@pytest.mark.parametrize(
    ("validations", "grace_s", "at_step"),
    [({}, 60.0, 3), ({}, 0.0, 2), ({"val_check_interval": 1, "limit_val_batches": 1}, 60.0, 2)],
)
def test_a_training_about_to_be_ended_awaits_no_step_that_comes_late(store, validations, grace_s, at_step):
    """With `accumulate_grad_batches=3`, steps follow the third batch of an epoch and the last."""
    attempt = Attempt(store, grace_s=grace_s)

    class Told(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            attempt.ends_soon = self.current_epoch == 1

    fit(attempt, ReportCallback(every_n_epochs=9), Told(), accumulate_grad_batches=3, **validations)
    assert committed(store) == [(at_step, 1)]


def test_a_termination_awaits_the_optimizer_step_though_an_earlier_request_was_withdrawn(store, monkeypatch):
    attempt, clock = Attempt(store, grace_s=60.0), SimpleNamespace(now_s=1.0)
    monkeypatch.setattr(callback_module, "time", SimpleNamespace(monotonic=lambda: clock.now_s))

    class Told(Regression):
        def on_train_batch_start(self, batch, batch_idx):
            attempt.ends_soon = (self.global_step == 0 and batch_idx == 0) or self.current_epoch == 2
            clock.now_s += 1000.0 if batch_idx == 3 else 0.0

    fit(attempt, ReportCallback(every_n_epochs=9), Told(), accumulate_grad_batches=3)
    assert committed(store) == [(1, 0), (5, 2)]


def test_a_validation_within_an_accumulation_is_reported_after_the_optimizer_step(store):
    chosen = {"check_val_every_n_epoch": None, "val_check_interval": 5}
    fit(Attempt(store), ReportCallback(on_validation_end=True), accumulate_grad_batches=2, **chosen)
    assert committed(store) == [(3, 1), (5, 2), (8, 3)]  # after batches 6, 10 and 16


def test_a_pace_asks_for_checkpoints_and_stops_nothing(store):
    _, trainer = fit(Attempt(store, target_overhead=0.5), ReportCallback(every_n_epochs=9))
    assert trainer.global_step == 4 * BATCHES
    assert committed(store)[0] == (1, 0)  # the first is due at once


def test_a_pace_leaves_the_end_of_an_epoch_to_the_report_that_knows_the_validation(store):
    fit(Attempt(store, target_overhead=1e9), max_epochs=2)  # due after each batch
    assert [it.metrics.get("late") for it in store.list() if it.step % BATCHES == 0] == [0, 1]


def test_a_score_per_class_is_left_out_of_the_metrics(store):
    class PerClass(Regression):
        def __init__(self):
            super().__init__()
            self.per_class = MulticlassAccuracy(3, average=None)

        def validation_step(self, batch, batch_idx):
            self.per_class.update(torch.tensor([0, 1, 2]), torch.tensor([0, 1, 1]))
            self.log("per_class", self.per_class)

    _, trainer = fit(Attempt(store), model=PerClass(), max_epochs=1)
    assert trainer.callback_metrics["per_class"].tolist() == [1.0, 0.5, 0.0]
    assert "per_class" not in store.latest().metrics


def test_other_callbacks_are_stored_as_they_are_at_the_end_of_the_epoch(store):
    stopping = EarlyStopping("late", mode="max", patience=9)
    attempt = Attempt(store)
    with as_rank(attempt.session()):
        make_trainer(callbacks=[ReportCallback(), stopping], max_epochs=2, limit_val_batches=0).fit(Regression())
    with store.checkpoint(store.latest()).as_directory() as directory:
        stored = torch.load(f"{directory}/checkpoint.ckpt", weights_only=False)
    assert [state["best_score"] for key, state in stored["callbacks"].items() if "EarlyStopping" in key] == [1.0]


def test_a_sigterm_is_left_to_end_the_process(store):
    """Lightning's handler turns it into a SystemExit without a code, which looks like a finished training."""
    handlers = []
    fit(Attempt(store), model=Regression(at_step=1, then=lambda: handlers.append(signal.getsignal(signal.SIGTERM))))
    assert handlers == [signal.getsignal(signal.SIGTERM)] == [signal.SIG_DFL]


def test_a_trainer_fits_in_a_thread_of_the_training_function(store):
    with ThreadPoolExecutor(1) as pool:
        pool.submit(fit, Attempt(store), max_epochs=2).result()
    assert len(store.list()) == 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_handler_of_sigterm_in_c_is_restored_too():
    """A rank has one, by which it outlasts the first SIGTERM; Python knows nothing of it."""
    libc, before = ctypes.CDLL(None), signal.getsignal(signal.SIGTERM)
    libc.sysv_signal(signal.SIGTERM, ctypes.cast(libc.abs, ctypes.c_void_p))
    try:
        action = SigtermAction()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        action.restore()
        caught = int(re.search(r"SigCgt:\t(\w+)", Path("/proc/self/status").read_text())[1], 16)
        assert caught >> (signal.SIGTERM - 1) & 1
        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("function", ["validate", "test", "predict"])
def test_a_sigterm_is_left_to_end_what_only_looks_at_a_model(store, function):
    class Looked(Regression):
        def validation_step(self, batch):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

        test_step = predict_step = validation_step

    with as_rank(Attempt(store).session()):
        model, trainer = Looked(), make_trainer(callbacks=[ReportCallback()])
        getattr(trainer, function)(model, model.val_dataloader())


@pytest.mark.filterwarnings("ignore:The `srun` command is available")  # on a machine that has Slurm
def test_outside_of_a_training_the_callback_only_warns():
    with pytest.warns(UserWarning, match="ReportCallback reports nothing"), resume_path() as path:
        make_trainer(callbacks=[ReportCallback()], max_epochs=1).fit(Regression(), ckpt_path=path)
    assert path is None
    assert not PrefectEnvironment.detect()


def test_a_resume_that_was_forgotten_is_refused(store):
    fit(Attempt(store), max_epochs=1)
    with (
        as_rank(Attempt(store).session()),
        pytest.raises(ValueError, match=r"begins with step 0; give trainer\.fit\(\) the ckpt_path"),
    ):
        make_trainer(callbacks=[ReportCallback()]).fit(Regression())


def test_a_trainer_may_begin_anew_from_a_checkpoint_of_another_run(store, tmp_path):
    """As with its weights alone; the steps of the other run are no steps of this one."""
    fit(Attempt(store), max_epochs=2)
    attempt = Attempt(CheckpointStore.open(tmp_path / "elsewhere", "run"))
    attempt.restored = store.checkpoint(store.latest())
    with in_training(attempt.session()):
        make_trainer(callbacks=[ReportCallback()], max_epochs=1).fit(Regression())
        with pytest.raises(ValueError, match=rf"has reported step {BATCHES}, and another Trainer begins with step 0"):
            make_trainer(callbacks=[ReportCallback()]).fit(Regression())
    assert committed(attempt.store) == [(BATCHES, 0)]


def test_until_its_first_validation_a_run_from_another_ones_checkpoint_reports_the_other_ones_metrics(store, tmp_path):
    fit(Attempt(store), max_epochs=1)
    attempt = Attempt(CheckpointStore.open(tmp_path / "elsewhere", "run"))
    attempt.restored = store.checkpoint(store.latest())
    fit(attempt, max_epochs=4, check_val_every_n_epoch=4)
    before = store.latest().metrics["val_loss"]
    assert [manifest.metrics["val_loss"] == before for manifest in attempt.store.list()] == [True, True, False]


def test_a_second_trainer_in_a_function_is_refused_before_it_trains(store):
    with in_training(Attempt(store).session()):
        make_trainer(callbacks=[ReportCallback()], max_epochs=2).fit(Regression())
        trainer = make_trainer(callbacks=[ReportCallback(every_n_epochs=9)], max_epochs=9)
        with pytest.raises(ValueError, match=rf"has reported step {2 * BATCHES}, and another Trainer begins with step 0"):
            trainer.fit(Regression())
    assert trainer.global_step == 0


def test_a_checkpoint_of_another_kind_is_refused(store, tmp_path):
    attempt = Attempt(store)
    attempt.run(lambda session, rank: session.report({}, folder(tmp_path / "folder", model=b"x")))
    with (
        as_rank(Attempt(store).session()),
        pytest.raises(CheckpointNotFoundError, match="ReportCallback did not report it"),
        resume_path(),
    ):
        pass


def test_a_trainer_that_does_not_use_the_ranks_is_refused(store):
    with as_rank(Attempt(store, world_size=2).session()):
        with pytest.raises(ValueError, match="counts 1 ranks but the training has 2; give it strategy=PrefectDDP"):
            make_trainer(callbacks=[ReportCallback()]).fit(Regression())
        with pytest.raises(ValueError, match="counts 3 ranks"):
            PrefectEnvironment().validate_settings(num_devices=3, num_nodes=1)


def test_a_trainer_that_writes_in_the_background_by_itself_is_refused(store):
    with (
        as_rank(Attempt(store).session()),
        pytest.raises(ValueError, match=r'AsyncCheckpointIO would have half a file reported; .* upload="async"'),
    ):
        make_trainer(callbacks=[ReportCallback()], plugins=[AsyncCheckpointIO()]).fit(Regression())


def test_the_checkpoint_is_written_into_the_file_that_is_reported(store, monkeypatch):
    """Lightning would write it to memory, then to tmpXXXXXXXX in the temporary directory, where a kill leaves it for ever."""
    save, targets = torch.save, []

    def note(content, target, *arguments, **options):
        targets.append(target)
        save(content, target, *arguments, **options)

    monkeypatch.setattr(torch, "save", note)
    _, trainer = fit(Attempt(store), max_epochs=1)
    assert type(trainer.strategy.checkpoint_io) is TorchCheckpointIO
    (written,) = [target for target in targets if Path(str(target)).name == ReportCallback.CHECKPOINT_NAME]
    assert written.is_relative_to(Path(store.storage.url, "run/unreported"))
    assert store.latest().metrics["epoch"] == 0


def test_a_checkpoint_io_of_the_users_own_is_used(store):
    class Own(TorchCheckpointIO):
        saved = 0

        def save_checkpoint(self, *arguments, **options):
            self.saved += 1
            super().save_checkpoint(*arguments, **options)

    fit(Attempt(store), max_epochs=2, plugins=[own := Own()])
    assert own.saved == len(store.list()) == 2


@pytest.mark.parametrize("stops", [{"patience": 1, "min_delta": 100}, {"stopping_threshold": 100.0}])
@pytest.mark.parametrize("length", [{"max_epochs": 4}, {"max_epochs": -1, "max_steps": 4 * BATCHES}])
def test_what_early_stopping_has_ended_is_not_trained_on_after_a_restart(store, stops, length):
    def stopped():
        trainer = make_trainer(callbacks=[EarlyStopping("val_loss", **stops), ReportCallback()], **length)
        with in_training(Attempt(store).session()), resume_path() as path:
            trainer.fit(model := Regression(), ckpt_path=path)
        return weights(model), trainer.current_epoch, trainer.global_step

    (before, *end), (after, *end_again) = stopped(), stopped()
    assert end[0] < 4
    assert end_again == end
    assert torch.equal(before, after)


@pytest.mark.parametrize(
    "averaging",
    [
        callbacks.WeightAveraging,
        lambda: callbacks.EMAWeightAveraging(decay=0.5),
        lambda: callbacks.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
    ],
)
def test_a_training_with_nothing_left_ends_with_the_averaged_weights_again(store, averaging):
    def ended():
        trainer = make_trainer(callbacks=[averaging(), ReportCallback()])
        with in_training(Attempt(store).session()), resume_path() as path:
            trainer.fit(model := Regression(), ckpt_path=path)
        return weights(model)

    first, again = ended(), ended()
    assert {manifest.attempt for manifest in store.list()} == {1}
    assert torch.equal(first, again)


def test_what_early_stopping_has_ended_in_a_run_of_this_name_elsewhere_is_trained_on(store, tmp_path):
    def num_steps(attempt):
        trainer = make_trainer(callbacks=[EarlyStopping("val_loss", patience=1, min_delta=100), ReportCallback()], max_epochs=4)
        with in_training(attempt.session()), resume_path() as path:
            trainer.fit(Regression(), ckpt_path=path)
        return trainer.global_step

    before = num_steps(Attempt(store))
    attempt = Attempt(CheckpointStore.open(tmp_path / "elsewhere", "run"))
    attempt.restored = store.checkpoint(store.latest())
    assert num_steps(attempt) > before


@pytest.mark.parametrize("finder", [LearningRateFinder(num_training_steps=2), BatchSizeFinder(steps_per_trial=1, max_trials=1)])
def test_a_callback_that_searches_at_every_start_is_refused_at_the_first(store, finder):
    class Sized(Regression):
        lr, batch_size = 0.05, 8

    with (
        as_rank(Attempt(store).session()),
        pytest.raises(ValueError, match=rf"{type(finder).__name__} searches at every start"),
    ):
        make_trainer(callbacks=[finder, ReportCallback()]).fit(Sized())
    assert store.list() == []


def test_a_trainer_of_the_other_package_is_refused(tmp_path):
    quiet = {"logger": False, "accelerator": "cpu", "max_epochs": 1, "default_root_dir": tmp_path}
    trainer = pytorch_lightning.Trainer(callbacks=[ReportCallback()], **quiet)
    with pytest.raises(TypeError, match=r"one of pytorch_lightning\.trainer\.trainer: take it from lightning\.pytorch"):
        trainer.fit(pytorch_lightning.demos.boring_classes.BoringModel())


def test_what_is_logged_is_recorded_without_a_callback_and_without_a_report(store):
    attempt = Attempt(store)
    with as_rank(attempt.session()) as session:
        trainer = make_trainer(logger=ReportLogger(), log_every_n_steps=2, max_epochs=1, enable_checkpointing=False)
        trainer.fit(Regression())
        session.finish()
    records = [event.record for event in attempt.events()]
    assert [record.step for record in records if "train/loss_step" in record.metrics] == [1, 3]
    assert "val_loss" in newest_metrics(records)
    assert all(record.is_logged and record.checkpoint is None for record in records)
    assert (trainer.logger.name, trainer.logger.version) == ("run", 0)


def test_outside_of_a_training_the_logger_only_warns():
    with pytest.warns(UserWarning, match="ReportLogger records nothing"):
        logger = ReportLogger()
    logger.log_metrics({"loss": 1.0}, step=1)
    assert (logger.name, logger.version) == (None, None)


def test_outside_of_a_training_any_trainer_is_right():
    trainer = make_trainer()
    assert prepare_trainer(trainer) is trainer


def test_a_trainer_that_would_start_ranks_of_its_own_is_refused(store):
    with (
        as_rank(Attempt(store, world_size=2).session()),
        pytest.raises(ValueError, match=r"environment is LightningEnvironment; give it plugins=\[PrefectEnvironment"),
    ):
        prepare_trainer(make_trainer(strategy="ddp", devices=2))
