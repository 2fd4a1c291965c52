"""Checkpoints as Prefect assets, compared on a real server with what Prefect's own `@materialize` makes."""

import pytest
from prefect import flow
from prefect.assets import Asset, AssetProperties, materialize
from prefect_torch.flows.monitoring.events.observer import asset_key
from prefect_torch.tasks.training.observers import AttemptStarted
from told_trainings import Job, events_about, tell_all

SEED = "s3://bucket/seeds/checkpoints/000001-00000009-0123abcd"
FORM = ("prefect.resource.id", "prefect.resource.name", "prefect.asset.url")


@pytest.mark.parametrize(
    ("place", "key"),
    [
        ("s3://bucket/a/run", "s3://bucket/a/run"),
        ("memory://run", "memory://run"),
        ("/data/run", "file:///data/run"),
        ("/my data/50%/[x]", "file:///my~20data/50~25/~5bx~5d"),
    ],
)
def test_a_key_is_the_url_in_letters_that_prefect_allows(place, key):
    assert asset_key(place) == key
    assert Asset(key=key).key == key


def test_a_long_place_keeps_its_end_and_is_told_from_others():
    keys = {asset_key(f"s3://bucket/{letter}{'long' * 200}/checkpoints/id") for letter in "ab"}
    assert len(keys) == 2
    for key in keys:
        assert Asset(key=key).key == key
        assert key.startswith("s3://")
        assert key.endswith("/checkpoints/id")


@pytest.fixture(scope="module")
def training(tmp_path_factory):
    """A training that began from another run's checkpoint and has committed two; and what Prefect's own decorator made."""
    job = Job(str(tmp_path_factory.mktemp("assets")))
    commits = [job.commit(1, 10, loss=0.5), job.commit(1, 20, loss=0.25)]
    tell_all(job, AttemptStarted(job.claim(), SEED), *commits)
    making()
    return job.store, commits, events_about(f"file://{job.store.path}/checkpoints/", 2)


THEIRS = Asset(key="s3://bucket/theirs", properties=AssetProperties(name="theirs", url="s3://bucket/theirs"))


@materialize(THEIRS, asset_deps=["s3://bucket/upstream"], by="a tool")
def make():
    THEIRS.add_metadata({"step": 1})


@flow
def making():
    make()


def form(event):
    """Return what the server's asset pages look at, without the values."""
    related = {(resource.role, resource.id.split(".")[0] == "prefect") for resource in event.related}
    return event.event, set(event.resource.root), related - {("task-run", True)}


def test_a_checkpoint_is_an_asset_in_the_form_of_prefects_own(training):
    _, _, (event, _) = training
    (theirs,) = events_about(THEIRS.key, 1)
    (their_reference,) = events_about("s3://bucket/upstream", 1)
    assert form(event) == form(theirs)
    assert theirs.payload == {"step": 1}
    (reference,) = events_about(SEED, 1)
    assert form(reference) == form(their_reference)


def test_a_checkpoint_tells_where_it_is_and_what_it_came_from(training):
    store, commits, events = training
    place = f"{store.path}/checkpoints/{commits[1].id}"
    event = events[1]
    assert [event.resource[label] for label in FORM] == [f"file://{place}", "run step 20", place]
    upstream = [resource.id for resource in event.related if resource.role == "asset"]
    assert upstream == [f"file://{store.path}", SEED]
    assert [it.id for it in event.related if it.role == "asset-materialized-by"] == ["prefect-torch"]
    assert event.payload["metrics"] == {"loss": 0.25}
    assert (event.payload["step"], event.payload["bytes"], event.payload["run"]) == (20, 7, "run")
