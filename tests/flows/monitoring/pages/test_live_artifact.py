"""The keys of artifacts, and how often they are published, by a clock that no test waits for."""

import re
from itertools import pairwise
from types import SimpleNamespace
from uuid import uuid4

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort
from prefect_torch.flows.monitoring.pages import live_artifact
from prefect_torch.flows.monitoring.pages.live_artifact import LiveArtifact, add_version, artifact_key
from prefect_torch.tasks.training.backoff import Backoff


def published_within(seconds, asked_every_s=0.1):
    now_s = [0.0]
    backoff = Backoff(clock=lambda: now_s[0])
    times = []
    while now_s[0] < seconds:
        if backoff.wait_s() == 0:
            backoff.record()
            times.append(now_s[0])
        now_s[0] += asked_every_s
    return times


def test_a_hundred_seconds_of_news_publish_at_most_sixteen_times():
    times = published_within(100)
    assert times[0] == 0
    assert 14 <= len(times) <= 16
    assert times[1] < 2.2


def test_in_the_long_run_it_is_twice_a_minute():
    times = [at_s for at_s in published_within(7200, 1.0) if at_s >= 3600]
    assert len(times) <= 121
    assert max(later - at_s for at_s, later in pairwise(times)) <= 31


def test_it_tells_how_long_to_wait():
    now_s = [5.0]
    backoff = Backoff(clock=lambda: now_s[0])
    assert backoff.wait_s() == 0
    backoff.record()
    now_s[0] = 6.5
    assert backoff.wait_s() == 0.5


def test_the_first_time_can_be_delayed():
    now_s = [5.0]
    backoff = Backoff(clock=lambda: now_s[0], delay_s=1.0)
    assert backoff.wait_s() == 1.0
    now_s[0] = 6.0
    assert backoff.wait_s() == 0


@pytest.mark.parametrize("run", ["plain-1", "Plain-1", "plain_1", "plain.1", "-", "a" * 200])
def test_a_key_is_what_prefect_takes_and_says_the_name(run):
    key = artifact_key(run, f"/storage/{run}")
    assert re.fullmatch("[a-z0-9]([a-z0-9-]*[a-z0-9])", key)
    assert key.startswith(f"{run}-") == (run in ("plain-1", "a" * 200))


def test_no_two_runs_have_the_same_key():
    runs = ("plain-1", "Plain-1", "plain_1", "plain.1", "plain--1", "plain-1-")
    assert len({artifact_key(run, f"{storage}/{run}") for run in runs for storage in ("/a", "s3://b/c")}) == 12


def test_a_run_has_one_key_by_whatever_link_it_is_found(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    spellings = ("real", "link", "link/../real", "real/.")
    assert len({artifact_key("run", f"{tmp_path}/{spelling}/run") for spelling in spellings}) == 1
    assert artifact_key("run", "s3a://b/p/run") == artifact_key("run", "s3://b/p/run") != artifact_key("run", "gs://b/p/run")


def test_half_an_emoji_in_a_metric_name_is_shown_escaped():
    class Client:
        def create_artifact(self, artifact):
            made.append(artifact.model_dump_json())
            return SimpleNamespace(id=uuid4())

    made = []
    LiveArtifact("key", "markdown").show(Client(), None, "loss \ud83d", "of \ud83d")
    assert r"loss \\ud83d" in made[0]


@pytest.mark.parametrize("may_exist", [False, True])
def test_a_flow_run_that_runs_again_goes_on_with_its_artifact(may_exist):
    class Client:
        def read_artifacts(self, artifact_filter, sort):
            asked.append((artifact_filter.key.any_, artifact_filter.flow_run_id.any_))
            return [SimpleNamespace(id=earlier)]

        def create_artifact(self, artifact):
            return SimpleNamespace(id=uuid4())

        def update_artifact(self, artifact_id, update):
            updated.append((artifact_id, update.data))

    asked, updated, earlier, this = [], [], uuid4(), uuid4()
    artifact = LiveArtifact("key", "markdown", may_exist=may_exist)
    for data in ("a", "b"):
        artifact.show(Client(), this, data, "of it")
    assert asked == ([(["key"], [this])] if may_exist else [])
    assert updated[:-1] == ([(earlier, "a")] if may_exist else [])
    assert updated[-1][1] == "b"


@pytest.mark.parametrize(("is_known", "in_place"), [(False, True), (True, True), (True, False)])
def test_a_page_that_flow_runs_share_gets_no_version_in_place(is_known, in_place):
    """Each hourly prune left a version of the storage's page, which no server deletes."""

    class Client:
        def read_latest_artifacts(self, artifact_filter):
            assert artifact_filter.key.any_ == ["key"]
            return [SimpleNamespace(latest_id=earlier)] if is_known else []

        def create_artifact(self, artifact):
            made.append((artifact.key, artifact.type, artifact.data, artifact.flow_run_id))

        def read_artifacts(self, **_):
            return []

        def update_artifact(self, artifact_id, update):
            updated.append((artifact_id, update.data, update.description))

    made, updated, earlier, this = [], [], uuid4(), uuid4()
    add_version(Client(), this, "key", "page", "of it", in_place=in_place)
    assert made == ([] if is_known and in_place else [("key", "markdown", "page", this)])
    assert updated == ([(earlier, "page", "of it")] if is_known and in_place else [])


def test_a_page_that_flow_runs_share_keeps_its_newest_versions(prefect_server, monkeypatch):
    """Those of a training that is scheduled each hour filled the database, with 50 KB each."""
    monkeypatch.setattr(live_artifact, "_MOST_VERSIONS", 2)
    key = f"runs-{uuid4()}"
    wanted = {"artifact_filter": ArtifactFilter(key=ArtifactFilterKey(any_=[key])), "sort": ArtifactSort.CREATED_DESC}
    with get_client(sync_client=True) as client:
        client.create_artifact(ArtifactCreate(key=f"{key}-2", type="markdown", data="of another storage"))
        for number in range(5):
            add_version(client, None, key, f"page {number}", "of it", in_place=False)
        assert [it.data for it in client.read_artifacts(**wanted)] == ["page 4", "page 3"]
        for number in range(5, 8):  # as those of a version that deleted none
            client.create_artifact(ArtifactCreate(key=key, type="markdown", data=f"page {number}"))
        for number in range(8, 11):
            add_version(client, None, key, f"page {number}", "of it", in_place=False)
        assert [it.data for it in client.read_artifacts(**wanted)] == ["page 10", "page 9"]
        (other,) = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(any_=[f"{key}-2"])))
    assert other.data == "of another storage"
