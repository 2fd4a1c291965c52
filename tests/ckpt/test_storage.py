"""Every backend against the contract, and what is peculiar to each."""

import os

import pytest
from conftest import ACCESS_KEY, S3Server, free_port
from prefect_torch.ckpt import StorageError
from prefect_torch.ckpt.fsspec_storage import FsspecStorage
from prefect_torch.ckpt.local_storage import LocalStorage
from prefect_torch.ckpt.obstore_storage import ObstoreStorage
from prefect_torch.ckpt.retry import RetryingStorage, RetryPolicy
from storage_contract import StorageContract


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return LocalStorage(tmp_path / "store")

    def test_an_interrupted_put_leaves_nothing(self, storage, tmp_path, monkeypatch):
        (tmp_path / "in").write_bytes(b"x")

        def full(_):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            storage.put_file("run/x", tmp_path / "in")
        assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []

    def test_a_listing_shows_neither_temporary_files_nor_what_links_lead_to(self, storage, tmp_path):
        storage.put_bytes("run/x", b"1")
        (tmp_path / "store/run/.tmp-0123").write_bytes(b"half")
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside/secret").write_bytes(b"1")
        (tmp_path / "store/run/link").symlink_to(tmp_path / "outside")
        assert [info.key for info in storage.list("run/")] == ["run/x"]

    def test_deleting_the_last_file_removes_its_folders(self, storage, tmp_path):
        storage.put_bytes("run/checkpoints/id/sub/x", b"1")
        storage.put_bytes("run/manifests/id.json", b"1")
        storage.delete(["run/checkpoints/id/sub/x"])
        assert sorted(path.name for path in (tmp_path / "store/run").iterdir()) == ["manifests"]


class TestMemoryStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return FsspecStorage(f"memory://{tmp_path}", {})

    def test_an_unknown_scheme_is_refused_with_what_can_be_used(self):
        with pytest.raises(ValueError, match=r"nosuch.*Give a local path, s3://"):
            FsspecStorage("nosuch://place", {})


class S3Contract(StorageContract):
    """What both servers must do."""

    @pytest.fixture
    def bucket(self, server: S3Server):
        return server.new_bucket()

    @pytest.fixture
    def storage(self, server: S3Server, bucket):
        return ObstoreStorage(f"s3://{bucket}/some/prefix", server.options())

    def test_objects_lie_below_the_prefix(self, server, bucket, storage):
        storage.put_bytes("run/latest.json", b"{}")
        listed = server.client().list_objects_v2(Bucket=bucket)["Contents"]
        assert [item["Key"] for item in listed] == ["some/prefix/run/latest.json"]

    def test_a_missing_bucket_is_named(self, server):
        storage = ObstoreStorage("s3://no-such-bucket-here/prefix", server.options())
        with pytest.raises(OSError, match="no-such-bucket-here"):
            storage.put_bytes("run/x", b"1")

    def test_the_environment_configures_a_plain_url(self, server, bucket, monkeypatch):
        for name, value in server.options().items():
            monkeypatch.setenv(name.upper(), value)
        ObstoreStorage(f"s3://{bucket}", {}).put_bytes("run/x", b"1")
        assert server.client().get_object(Bucket=bucket, Key="run/x")["Body"].read() == b"1"


class TestS3OnMoto(S3Contract):
    @pytest.fixture
    def server(self, moto):
        return moto


class TestS3OnRclone(S3Contract):
    @pytest.fixture
    def server(self, rclone):
        return rclone

    def test_wrong_credentials_are_refused_without_showing_them(self, server, bucket):
        options = {**server.options(), "aws_secret_access_key": "not-the-secret"}
        storage = ObstoreStorage(f"s3://{bucket}", options)
        with pytest.raises(PermissionError, match="check the credentials") as caught:
            storage.put_bytes("run/x", b"1")
        assert "not-the-secret" not in str(caught.value)
        assert ACCESS_KEY not in str(caught.value)


def test_a_server_that_is_gone_is_a_storage_error_after_the_deadline():
    options = S3Server(f"http://127.0.0.1:{free_port()}").options()
    storage = RetryingStorage(lambda: ObstoreStorage("s3://bucket", options), RetryPolicy(0.2, 0.01, 0.02))
    with pytest.raises(StorageError, match=r"storing s3://bucket/run/x failed \d+ times"):
        storage.put_bytes("run/x", b"1")
