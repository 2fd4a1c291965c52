from pathlib import Path

import pytest
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.local_storage import LocalStorage
from prefect_torch.ckpt.opening import is_block_slug, open_storage, parse_storage
from prefect_torch.ckpt.retry import RetryingStorage


@pytest.mark.parametrize("storage", ["./ck", "ck", Path("ck"), "ck/"])
def test_a_relative_path_becomes_absolute(storage, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_storage(storage) == StorageSpec(str(tmp_path / "ck"))


def test_the_home_folder_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert parse_storage("~/ck").url == "/home/me/ck"


def test_a_file_url_is_a_path():
    assert parse_storage("file:///data/with%20space").url == "/data/with space"


@pytest.mark.parametrize("url", ["s3://bucket/prefix", "gs://bucket", "memory://x/y"])
def test_a_url_stays_one(url):
    assert parse_storage(url).url == url
    assert parse_storage(f"{url}/").url == url


def test_each_place_opens_its_backend(tmp_path):
    assert isinstance(open_storage(tmp_path), LocalStorage)
    assert isinstance(open_storage("memory://x"), RetryingStorage)
    assert isinstance(open_storage("s3://bucket/x"), RetryingStorage)


def test_an_open_storage_stays_what_it_is(tmp_path):
    storage = LocalStorage(tmp_path)
    assert open_storage(storage) is storage


@pytest.mark.parametrize(
    ("text", "is_slug"),
    [
        ("s3-bucket/prod", True),
        ("checkpoint-storage/x", True),
        ("./s3-bucket/prod", False),
        ("s3-bucket/a/b", False),
        ("s3-bucket", False),
        ("checkpoints/digits", False),
        ("s3-bucket/", False),
    ],
)
def test_a_block_is_told_from_a_path(text, is_slug):
    assert is_block_slug(text) == is_slug


@pytest.mark.parametrize("storage", ["", None, 3, ["x"]])
def test_what_is_no_storage_is_refused(storage):
    with pytest.raises(ValueError, match="give a path, a URL"):
        parse_storage(storage)


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ValueError, match="nosuch:// cannot be a storage"):
        open_storage("nosuch://x")


def test_secrets_are_not_shown():
    assert "secret" not in repr(StorageSpec("s3://b", {"aws_secret_access_key": "secret"}))
