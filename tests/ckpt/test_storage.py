"""Every backend against the contract, and what is peculiar to each."""

import os
import sys
import traceback
from pathlib import Path

import fsspec
import obstore
import pytest
from conftest import ACCESS_KEY, SECRET_KEY, S3Server, ScriptedServer, free_port
from obstore.store import LocalStore
from prefect_torch.ckpt import StorageError, object_store_opening, obstore_storage
from prefect_torch.ckpt.fsspec_storage import FsspecStorage
from prefect_torch.ckpt.local_storage import LocalStorage
from prefect_torch.ckpt.obstore_storage import ObstoreStorage
from prefect_torch.ckpt.retry import RetryingStorage, RetryPolicy, classify
from storage_contract import StorageContract


class TestLocalStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return LocalStorage(tmp_path / "store")

    @pytest.fixture
    def raw_keys(self, tmp_path):
        root = tmp_path / "store"
        return lambda: {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

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
        (tmp_path / "store/run/.tmp-0123456789abcdef").write_bytes(b"half")
        (tmp_path / "outside").mkdir()
        (tmp_path / "outside/secret").write_bytes(b"1")
        (tmp_path / "store/run/link").symlink_to(tmp_path / "outside")
        assert [info.key for info in storage.list("run/")] == ["run/x"]

    @pytest.mark.parametrize("prefix", ["run/link/", "run/link/below/"])
    def test_a_listing_through_a_link_out_of_the_store_is_refused(self, storage, tmp_path, prefix):
        storage.put_bytes("run/x", b"1")
        (tmp_path / "outside/below").mkdir(parents=True)
        (tmp_path / "outside/below/secret").write_bytes(b"1")
        (tmp_path / "store/run/link").symlink_to(tmp_path / "outside")
        with pytest.raises(PermissionError, match=r"run/link.* leads out of the storage .*outside"):
            list(storage.list(prefix))

    def test_what_would_lie_below_a_file_or_is_a_folder_is_missing_to_reads_and_deletes(self, storage, raw_keys, tmp_path):
        storage.put_bytes("f/x", b"1")
        for read in (storage.get_bytes, storage.size, lambda key: storage.get_file(key, tmp_path / "out")):
            with pytest.raises(FileNotFoundError, match="f/x/y is no file"):
                read("f/x/y")
        storage.delete(["f", "f/x/y"])
        assert raw_keys() == {"f/x"}

    def test_the_store_itself_may_be_a_link(self, tmp_path):
        LocalStorage(tmp_path / "elsewhere").put_bytes("run/x", b"1")
        (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
        assert [info.key for info in LocalStorage(tmp_path / "link").list("run/")] == ["run/x"]

    def test_every_folder_that_a_put_makes_is_synced_into_its_parent(self, tmp_path, monkeypatch):
        synced, sync = [], os.fsync

        def record(descriptor):
            synced.append(Path(f"/proc/self/fd/{descriptor}").readlink())
            sync(descriptor)

        monkeypatch.setattr(os, "fsync", record)
        LocalStorage(tmp_path / "new/deep/root").put_bytes("run/x", b"1")
        made = [tmp_path, tmp_path / "new", tmp_path / "new/deep", tmp_path / "new/deep/root"]
        assert synced[:4] == made
        assert synced[5:] == [tmp_path / "new/deep/root/run"]
        synced.clear()
        LocalStorage(tmp_path / "new/deep/root").put_bytes("run/y", b"1")
        assert len(synced) == 2  # the file and its folder: a report pays for no more

    @pytest.mark.parametrize("victim", ["a/b", "a"])
    def test_a_folder_that_a_delete_removes_while_a_put_makes_it_is_made_again(self, storage, tmp_path, monkeypatch, victim):
        make, removed = Path.mkdir, []

        def mkdir(path, *args, **kwargs):
            make(path, *args, **kwargs)
            if path == tmp_path / "store" / victim and not removed:
                removed.append(path)
                path.rmdir()

        monkeypatch.setattr(Path, "mkdir", mkdir)
        storage.put_bytes("a/b/x", b"1")
        assert len(removed) == 1
        assert storage.get_bytes("a/b/x") == b"1"

    def test_a_folder_that_goes_while_mkdir_looks_at_it_is_made_again(self, storage, tmp_path, monkeypatch):
        make, gone = Path.mkdir, []

        def mkdir(path, *args, **kwargs):
            if path == tmp_path / "store/a" and not gone:
                gone.append(path)
                raise FileExistsError(17, "File exists", str(path))
            make(path, *args, **kwargs)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        storage.put_bytes("a/x", b"1")
        assert len(gone) == 1
        assert storage.get_bytes("a/x") == b"1"

    def test_a_file_in_the_place_of_a_folder_is_named(self, storage):
        storage.put_bytes("a", b"1")
        with pytest.raises(OSError, match="store/a"):
            storage.put_bytes("a/x", b"1")
        assert storage.get_bytes("a") == b"1"

    def test_where_no_folder_can_be_made_a_put_says_so(self):
        with pytest.raises(FileNotFoundError, match="/proc/nowhere"):
            LocalStorage(Path("/proc/nowhere")).put_bytes("run/x", b"1")

    def test_a_put_whose_object_is_deleted_at_once_has_succeeded(self, storage, tmp_path, monkeypatch):
        replace, deleted = Path.replace, []

        def replace_and_delete(path, target):
            replace(path, target)
            deleted.append(target)
            storage.delete(["a/x"])

        monkeypatch.setattr(Path, "replace", replace_and_delete)
        storage.put_bytes("a/x", b"1")
        assert len(deleted) == 1
        assert not (tmp_path / "store/a").exists()

    def test_what_a_killed_writer_left_is_removed_once_it_is_old(self, storage, tmp_path):
        storage.put_bytes("run/checkpoints/whole/x", b"1")
        left = tmp_path / "store/run/checkpoints/half/.tmp-0123456789abcdef"
        left.parent.mkdir()
        left.write_bytes(b"half")
        storage.remove_interrupted("run/", older_than_s=3600)
        assert left.exists()
        storage.remove_interrupted("run/", older_than_s=0)
        assert [path.name for path in (tmp_path / "store/run/checkpoints").iterdir()] == ["whole"]
        assert storage.get_bytes("run/checkpoints/whole/x") == b"1"

    def test_deleting_the_last_file_removes_its_folders(self, storage, tmp_path):
        storage.put_bytes("run/checkpoints/id/sub/x", b"1")
        storage.put_bytes("run/manifests/id.json", b"1")
        storage.delete(["run/checkpoints/id/sub/x"])
        assert sorted(path.name for path in (tmp_path / "store/run").iterdir()) == ["manifests"]


class TestMemoryStorage(StorageContract):
    @pytest.fixture
    def storage(self, tmp_path):
        return FsspecStorage(f"memory://{tmp_path}", {})

    @pytest.fixture
    def raw_keys(self, tmp_path):
        files = fsspec.filesystem("memory").store
        return lambda: {path.removeprefix(f"{tmp_path}/") for path in files if path.startswith(f"{tmp_path}/")}

    @pytest.mark.parametrize(
        ("raised", "expected", "words"),
        [
            (FileNotFoundError("/x"), FileNotFoundError, "memory://.*/run/x does not exist"),
            (PermissionError("no"), PermissionError, "memory://.*/run/x is refused"),
            (OSError(28, "No space left on device"), OSError, "No space left"),
            (EOFError("connection lost"), StorageError, "memory://.*/run/x: EOFError: connection lost"),
        ],
    )
    def test_what_a_filesystem_raises_is_named_in_the_protocols_words(self, storage, monkeypatch, raised, expected, words):
        def fail(*_, **__):
            raise raised

        monkeypatch.setattr(storage._fs, "cat_file", fail)
        with pytest.raises(expected, match=words):
            storage.get_bytes("run/x")

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

    @pytest.fixture
    def raw_keys(self, server: S3Server, bucket):
        def keys():
            pages = server.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
            return {item["Key"].removeprefix("some/prefix/") for page in pages for item in page.get("Contents", [])}

        return keys

    def test_objects_lie_below_the_prefix(self, server, bucket, storage):
        storage.put_bytes("run/latest.json", b"{}")
        listed = server.client().list_objects_v2(Bucket=bucket)["Contents"]
        assert [item["Key"] for item in listed] == ["some/prefix/run/latest.json"]

    @pytest.mark.parametrize(
        "call",
        [
            lambda storage: storage.put_bytes("run/x", b"1"),
            lambda storage: storage.put_file("run/x", Path(__file__)),
            lambda storage: storage.get_bytes("run/x"),
            lambda storage: list(storage.list("run/")),
        ],
        ids=["put_bytes", "put_file", "get_bytes", "list"],
    )
    def test_a_missing_bucket_is_named(self, server, call):
        storage = ObstoreStorage("s3://no-such-bucket-here/prefix", server.options())
        with pytest.raises(FileNotFoundError, match=r"bucket of s3://no-such-bucket-here/.* does not exist: create it"):
            call(storage)

    def test_a_put_that_breaks_off_leaves_no_parts_behind(self, server, bucket, storage, tmp_path, monkeypatch):
        (tmp_path / "in").write_bytes(bytes(20 * 2**20))

        class Unreadable(obstore_storage._DigestedParts):
            def __iter__(self):
                yield from list(super().__iter__())[:2]
                raise OSError(5, "Input/output error")

        monkeypatch.setattr(obstore_storage, "_DigestedParts", Unreadable)
        with pytest.raises(OSError, match="Input/output error"):
            storage.put_file("run/x", tmp_path / "in")
        assert "Uploads" not in server.client().list_multipart_uploads(Bucket=bucket)
        assert list(storage.list("")) == []

    def test_uploads_that_nobody_will_finish_are_aborted_once_they_are_old(self, server, bucket, storage):
        client = server.client()
        keys = ["some/prefix/run/checkpoints/a", "some/prefix/run/checkpoints/b", "some/prefix/run-2/x", "elsewhere/run/x"]
        for key in keys:
            upload = client.create_multipart_upload(Bucket=bucket, Key=key)["UploadId"]
            client.upload_part(Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=b"part")

        def left():
            return sorted(upload["Key"] for upload in client.list_multipart_uploads(Bucket=bucket).get("Uploads", []))

        began = client.list_multipart_uploads(Bucket=bucket)["Uploads"][0]["Initiated"]
        if began.year > 2010:  # moto says 2010 of every upload
            storage.remove_interrupted("run/", older_than_s=3600)
            assert left() == sorted(keys)
        storage.remove_interrupted("run/", older_than_s=-5)
        assert left() == ["elsewhere/run/x", "some/prefix/run-2/x"]

    def test_the_environment_configures_a_plain_url(self, server, bucket, monkeypatch):
        for name, value in server.options().items():
            monkeypatch.setenv(name.upper(), value)
        ObstoreStorage(f"s3://{bucket}", {}).put_bytes("run/x", b"1")
        assert server.client().get_object(Bucket=bucket, Key="run/x")["Body"].read() == b"1"

    def test_a_profile_configures_a_plain_url(self, server, bucket, monkeypatch, tmp_path):
        (tmp_path / "config").write_text(
            f"[profile lab]\nregion = eu-west-3\nendpoint_url = {server.endpoint}\n"
            f"aws_access_key_id = {ACCESS_KEY}\naws_secret_access_key = {SECRET_KEY}\n"
        )
        with monkeypatch.context() as machine:
            machine.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
            machine.setenv("AWS_PROFILE", "lab")
            ObstoreStorage(f"s3://{bucket}", {}).put_bytes("run/x", b"1")
        assert server.client().get_object(Bucket=bucket, Key="run/x")["Body"].read() == b"1"

    @pytest.mark.parametrize("variable", ["AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
    def test_every_variable_that_names_an_endpoint_counts(self, server, bucket, monkeypatch, variable):
        options = server.options()
        monkeypatch.setenv(variable, options.pop("aws_endpoint_url"))
        ObstoreStorage(f"s3://{bucket}", options).put_bytes("run/x", b"1")

    @pytest.mark.parametrize("name", ["aws_allow_http", "allow_http", "AWS_ALLOW_HTTP", "aws_timeout", "connect_timeout"])
    def test_settings_of_the_http_client_may_be_options(self, server, bucket, name):
        value = "true" if "http" in name.lower() else "30s"
        ObstoreStorage(f"s3://{bucket}", {**server.options(), name: value}).put_bytes("run/x", b"1")

    def test_options_may_be_written_in_capitals(self, server, bucket):
        capitals = {name.upper(): value for name, value in server.options().items()}
        ObstoreStorage(f"s3://{bucket}", capitals).put_bytes("run/x", b"1")

    def test_options_may_leave_out_aws_in_their_names(self, server, bucket):
        short = {name.removeprefix("aws_"): value for name, value in server.options().items()}
        ObstoreStorage(f"s3://{bucket}", short).put_bytes("run/x", b"1")


class TestS3OnMoto(S3Contract):
    @pytest.fixture
    def server(self, moto):
        return moto


class TestS3OnRclone(S3Contract):
    @pytest.fixture
    def server(self, rclone):
        return rclone

    def test_a_range_is_read_without_what_is_before_it(self, storage, monkeypatch):
        monkeypatch.delattr(ObstoreStorage, "_skim")
        storage.put_bytes("run/x", bytes(range(256)) * 1000)
        into = bytearray(300)
        for start, count in ((0, 300), (5, 300), (255_900, 100)):
            assert storage.get_range("run/x", start, memoryview(into)) == count
            assert into[:count] == (bytes(range(256)) * 1000)[start : start + 300]

    def test_where_a_range_cannot_be_asked_for_what_is_before_it_is_read(self, storage, monkeypatch):
        monkeypatch.setattr(obstore_storage, "read_unsaid_range", lambda *_: None)
        storage.put_bytes("run/x", bytes(range(256)))
        into = bytearray(10)
        assert storage.get_range("run/x", 100, memoryview(into)) == 10
        assert bytes(into) == bytes(range(100, 110))

    def test_wrong_credentials_are_refused_without_showing_them(self, server, bucket):
        options = {**server.options(), "aws_secret_access_key": "not-the-secret"}
        storage = ObstoreStorage(f"s3://{bucket}", options)
        with pytest.raises(PermissionError, match="check the credentials") as caught:
            storage.put_bytes("run/x", b"1")
        assert "not-the-secret" not in str(caught.value)
        assert ACCESS_KEY not in str(caught.value)


@pytest.fixture
def once(monkeypatch):
    monkeypatch.setattr(object_store_opening, "_REQUEST_RETRIES", {"max_retries": 0})


@pytest.mark.parametrize(
    ("status", "code", "expected", "kind", "words"),
    [
        (400, "ExpiredToken", PermissionError, "credentials", "have expired"),
        (403, "AccessDenied", PermissionError, "final", "check the credentials and their policy .*AccessDenied: what happened"),
        (401, "Unauthorized", PermissionError, "final", "check the credentials"),
        (503, "SlowDown", StorageError, "transient", "503.*SlowDown"),
        (500, "InternalError", StorageError, "transient", "500.*InternalError"),
        (429, "TooManyRequests", StorageError, "transient", "TooManyRequests"),
        (409, "OperationAborted", StorageError, "transient", "OperationAborted"),
        (400, "AuthorizationHeaderMalformed", OSError, "final", "AuthorizationHeaderMalformed: what happened"),
        (501, "NotImplemented", OSError, "final", "NotImplemented"),
        (404, "NoSuchBucket", FileNotFoundError, "final", "the bucket of s3://bucket/run/x does not exist"),
        (404, "NoSuchKey", FileNotFoundError, "final", "s3://bucket/run/x does not exist"),
    ],
)
def test_an_answer_of_s3_is_named_by_what_helps_and_shows_no_secret(once, status, code, expected, kind, words):
    body = f"<Error><Code>{code}</Code><Message>what happened</Message><CanonicalRequest>SESSION</CanonicalRequest></Error>"
    with ScriptedServer.answering(status, body) as server:
        storage = ObstoreStorage("s3://bucket", {**server.options(), "aws_session_token": "SESSION"})
        with pytest.raises(expected, match=words) as caught:
            storage.get_bytes("run/x")
    assert server.requests == ["GET /bucket/run/x"]
    assert classify(caught.value) == kind
    shown = "".join(traceback.format_exception(caught.value))
    assert [secret for secret in ("SESSION", ACCESS_KEY, SECRET_KEY) if secret in shown] == []


def test_a_profile_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    with pytest.raises(ValueError, match=r"nowhere.*fix AWS_PROFILE"):
        ObstoreStorage("s3://bucket", {})


def test_without_boto3_the_object_store_looks_for_credentials_itself(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    assert ObstoreStorage("s3://bucket", {})._store.credential_provider is None


def test_nothing_shows_the_credentials_it_was_given():
    storage = ObstoreStorage("s3://bucket/x", S3Server("http://127.0.0.1:1").options())
    assert SECRET_KEY not in f"{storage!r} {storage.url} {storage._store!r}"


def test_a_service_that_minds_missing_objects_still_deletes_the_others(tmp_path):
    storage = ObstoreStorage("s3://bucket", S3Server("http://127.0.0.1:1").options())
    storage._store = LocalStore(tmp_path)  # refuses to delete what is missing, as GCS does
    keys = [f"d/{number:03d}" for number in range(200)]
    for key in keys[1::2]:
        obstore.put(storage._store, key, b"1")
    storage.delete(keys)
    assert list(storage.list("")) == []


def test_a_server_that_is_gone_is_a_storage_error_after_the_deadline():
    options = S3Server(f"http://127.0.0.1:{free_port()}").options()
    storage = RetryingStorage(lambda: ObstoreStorage("s3://bucket", options), RetryPolicy(0.2, 0.01, 0.02))
    with pytest.raises(StorageError, match=r"storing s3://bucket/run/x failed \d+ times"):
        storage.put_bytes("run/x", b"1")
