"""Rows, links and keys, from what a run is made of; no server."""

import re

import pytest
from prefect_torch.ckpt import StorageSpec
from prefect_torch.flows.monitoring.pages.checkpoint_table import MAX_ROWS, checkpoint_rows
from prefect_torch.flows.monitoring.pages.live_artifact import artifact_key
from prefect_torch.flows.monitoring.pages.storage_console import StorageConsole
from prefect_torch.flows.monitoring.pages.stored_checkpoints import StoredCheckpoint
from run_stories import checkpoint_id


def saved(step, **metrics):
    return StoredCheckpoint(checkpoint_id(1, step), step, metrics, 3 * 2**20, 1_800_000_000.0 + step)


def rows(checkpoints, kept, first=None, link=lambda _: None):
    return checkpoint_rows(checkpoints, kept, first, 1_800_000_000.0 + 7200, link)


def test_a_row_tells_what_a_checkpoint_is_and_why_it_is_kept():
    found = rows(
        [saved(1, loss=0.5, acc=0.25), saved(2, loss=float("nan"))],
        {checkpoint_id(1, 1): ("best", "pinned")},
        "acc",
        lambda key: f"https://console/{key}",
    )
    assert found[0]["kept because"] == "nothing; goes with the next prune"
    assert found[0]["loss"] == "nan"
    assert found[1] == {
        "id": checkpoint_id(1, 1),
        "step": 1,
        "kept because": "best, pinned",
        "acc": "0.25",
        "size": "3.0 MiB",
        "age": "1 h",
        "loss": "0.5",
        "committed (UTC)": "2027-01-15 08:00:01",
        "look at it": f"https://console/{checkpoint_id(1, 1)}",
    }
    assert list(found[1])[:4] == ["id", "step", "kept because", "acc"]


def test_of_very_many_checkpoints_the_newest_and_those_with_a_reason_are_shown():
    many = [saved(step) for step in range(MAX_ROWS + 50)]
    found = rows(many, {it.id: ("all", "pinned") if it.step == 3 else ("all",) for it in many})
    assert [row["step"] for row in found] == [*range(MAX_ROWS + 49, 50, -1), 3]
    assert "look at it" not in found[0]


@pytest.mark.parametrize(
    ("url", "options", "page"),
    [
        ("/data/my runs", {}, "file:///data/my%20runs/run/checkpoints/x"),
        ("s3://bucket/deep/er", {}, "https://console.aws.amazon.com/s3/buckets/bucket?prefix=deep/er/run/checkpoints/x/"),
        ("s3://bucket", {}, "https://console.aws.amazon.com/s3/buckets/bucket?prefix=run/checkpoints/x/"),
        ("s3://bucket", {"aws_endpoint_url": "http://127.0.0.1:9000"}, None),
        (
            "s3://bucket",
            {"endpoint": "https://s3.eu-central-1.amazonaws.com"},
            "https://console.aws.amazon.com/s3/buckets/bucket?prefix=run/checkpoints/x/",
        ),
        ("gs://bucket/deep", {}, "https://console.cloud.google.com/storage/browser/bucket/deep/run/checkpoints/x"),
        ("az://container@account", {}, "https://portal.azure.com/#browse/Microsoft.Storage%2FStorageAccounts"),
        ("memory://x", {}, None),
        ("sftp://host/x", {}, None),
    ],
)
def test_a_folder_is_linked_where_a_person_can_look_at_it(url, options, page):
    assert StorageConsole(StorageSpec(url, options)).url_of("run/checkpoints/x") == page


def test_an_s3_endpoint_may_come_from_a_variable(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9000")
    assert StorageConsole(StorageSpec("s3://bucket")).url_of("x") is None


@pytest.mark.parametrize("run", ["plain-1", "Plain-1", "plain_1", "plain.1", "-", "a" * 200])
def test_a_key_is_what_prefect_takes_and_says_the_name(run):
    key = artifact_key(run, f"/storage/{run}")
    assert re.fullmatch("[a-z0-9]([a-z0-9-]*[a-z0-9])", key)
    assert key.startswith(f"{run}-") == (run in ("plain-1", "a" * 200))


def test_no_two_runs_have_the_same_key():
    runs = ("plain-1", "Plain-1", "plain_1", "plain.1", "plain--1", "plain-1-")
    assert len({artifact_key(run, f"{storage}/{run}") for run in runs for storage in ("/a", "s3://b/c")}) == 12
