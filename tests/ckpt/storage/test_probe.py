"""A storage that trainings cannot use is told in words: what fails, why, and what to do."""

import errno
import os
import pickle
from itertools import chain, islice
from unittest.mock import Mock

import pytest
from http_proxy import Response, proxied
from obstore.exceptions import GenericError
from odd_listings import Shuffled
from prefect.filesystems import LocalFileSystem, RemoteFileSystem
from prefect_aws.credentials import AwsCredentials
from prefect_aws.s3 import S3Bucket
from prefect_torch.ckpt import StorageSpec
from prefect_torch.ckpt.blocks import CheckpointStorage
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.object_store.errors import translate
from prefect_torch.ckpt.storage.opening import open_storage, parse_storage
from prefect_torch.ckpt.storage.probe import StorageUnfitError, probe_storage
from prefect_torch.ckpt.storage.protocol import INTERACTIVE_RETRY_POLICY, ObjectInfo, RetryPolicy
from servers import S3Server, free_port

PATIENCE_S = 30.0  # SeaweedFS makes a volume for the first object of a bucket


def at(server, bucket, deadline_s=0.0):
    return open_storage(StorageSpec(f"s3://{bucket}/below", server.options(), RetryPolicy(deadline_s, 0.01, 0.01)))


@pytest.fixture(params=["local", "memory", "moto", "rclone", "seaweedfs", "s3rver"])
def storage(request, tmp_path):
    if request.param == "local":
        return open_storage(tmp_path)
    if request.param == "memory":
        return open_storage(f"memory://{tmp_path}")
    server = request.getfixturevalue(request.param)
    return at(server, server.new_bucket(), PATIENCE_S)


def test_a_good_storage_is_tried_in_six_steps_and_keeps_nothing(storage):
    tried = probe_storage(storage)
    assert list(tried.took_s) == ["write", "list", "read", "write 8 MiB", "delete", "forget"]
    assert tried.url == storage.url
    assert 0 < tried.total_s == sum(tried.took_s.values())
    assert list(storage.list("")) == []


@pytest.mark.parametrize("server", ["moto", "seaweedfs", "s3rver"])
def test_how_a_server_lists_is_told(server, request):
    server, order = request.getfixturevalue(server), "keys" if server == "moto" else "folders"
    assert probe_storage(at(server, server.new_bucket(), PATIENCE_S)).order == order


def test_a_storage_that_lists_in_no_order_will_do(tmp_path):
    inner = LocalStorage(tmp_path)
    assert {probe_storage(Shuffled(inner, seed)).order for seed in range(5)} == {"none"}
    assert list(inner.list("")) == []


def test_a_block_checks_its_place_and_leaves_no_folder_behind(tmp_path):
    assert CheckpointStorage(location=str(tmp_path / "new/place")).check().url == f"{tmp_path}/new/place"
    assert list(tmp_path.iterdir()) == []


def test_a_block_without_a_place_says_what_to_give():
    with pytest.raises(ValueError, match="storage is empty: give a path, a URL"):
        CheckpointStorage().check()


def test_a_block_with_a_field_that_it_ignores_says_which_fields_there_are():
    with pytest.raises(ValueError, match="no location, and 'path', which is none of its fields: location, file_sys"):
        CheckpointStorage(path="/data").check()
    with pytest.raises(ValueError, match="the block has 'host_key_policy', which is none of its fields: location, file_sys"):
        CheckpointStorage(location="sftp://me@host/data", host_key_policy="reject").check()


@pytest.mark.parametrize(
    ("block", "given", "meant"),
    [
        (lambda: CheckpointStorage(location="runs", file_sytem=LocalFileSystem(basepath="/data")), "file_sytem", "file_system"),
        (lambda: CheckpointStorage(location="runs", file_system={"bucket_nmae": "b"}), "bucket_nmae", "bucket_name"),
        (lambda: LocalFileSystem(base_path="/data"), "base_path", "basepath"),
        (lambda: RemoteFileSystem(basepath="s3://b", setings={"key": "k"}), "setings", "settings"),
        (
            lambda: S3Bucket(bucket_name="b", credentials=AwsCredentials(aws_access_key="k")),
            "aws_access_key",
            "aws_access_key_id",
        ),
    ],
)
def test_a_misspelled_field_of_a_block_is_refused_with_the_one_that_is_meant(block, given, meant):
    """It was ignored, so that checkpoints were stored in the working directory, or without the credentials."""
    with pytest.raises(ValueError, match=f"has no field '{given}', which would be ignored; is '{meant}' meant"):
        parse_storage(block())


def test_other_things_beside_the_fields_of_a_block_are_left_alone():
    assert parse_storage(S3Bucket(bucket_name="b", block_type_slug="s3-bucket", bucket_foldr="")).url == "s3://b"
    assert parse_storage(CheckpointStorage(location="s3://b", block_type_slug="checkpoint-storage", other="")).url == "s3://b"


def test_refused_access_names_the_step_and_the_right(rclone):
    options = {**rclone.options(), "aws_secret_access_key": "wrong-secret"}
    with pytest.raises(StorageUnfitError) as caught:
        probe_storage(open_storage(StorageSpec(f"s3://{rclone.new_bucket()}/below", options)))
    assert "/below does not write: access to s3://" in caught.value.found
    assert "is refused: check the credentials and their policy" in caught.value.found
    assert caught.value.advice == (
        "let this user write there: the right to write (s3:PutObject) is missing, or give other credentials"
    )
    assert "wrong-secret" not in str(caught.value)


def test_missing_credentials_are_no_missing_right(monkeypatch):
    answer = (
        "Generic S3 error: Error performing PUT http://169.254.169.254/latest/api/token in 3s, after 3 retries - "
        "HTTP error: error sending request"
    )
    error = translate(GenericError(answer), "s3://bucket/x", has_answered=False)
    storage = open_storage("memory://no-credentials")
    monkeypatch.setattr(type(storage), "put_bytes", Mock(side_effect=error))
    with pytest.raises(StorageUnfitError, match="no credentials were found for s3://bucket/x: give a block") as caught:
        probe_storage(storage)
    assert caught.value.advice == "give them to this process, or another location"


def test_a_missing_bucket_is_named(moto):
    with pytest.raises(StorageUnfitError, match=r"the bucket of s3://no-such-bucket/below/.* does not exist") as caught:
        probe_storage(at(moto, "no-such-bucket"))
    assert caught.value.advice == "create the bucket, or fix its name in the URL or the block"


def test_an_object_that_is_listed_and_not_read_is_no_missing_bucket(moto, monkeypatch):
    storage = at(moto, moto.new_bucket())
    monkeypatch.setattr(type(storage), "get_bytes", Mock(side_effect=FileNotFoundError("a.json does not exist")))
    with pytest.raises(StorageUnfitError, match=r"does not read: a\.json does not exist; switch off the cache") as caught:
        probe_storage(storage)
    assert caught.value.advice == "switch off the cache that answers reads, or give another location"


def test_a_file_that_is_missing_is_no_bucket(tmp_path):
    with pytest.raises(StorageUnfitError) as caught:
        probe_storage(open_storage(f"zip://{tmp_path}/missing.zip"))
    assert caught.value.advice == "create what the URL names, or fix its name in the URL or the block"


PARTS_REFUSED = {
    "too large": (
        Response(413, b"<html>Request Entity Too Large</html>"),
        "413 Payload Too Large",
        "let the proxy or gateway before it accept requests of 8 MiB (nginx: client_max_body_size 9m)",
    ),
    "forbidden": (
        Response(403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"),
        "AccessDenied",
        "let this user write 8 MiB there: the right to write 8 MiB (s3:PutObject for uploads in parts, and kms:Decrypt",
    ),
}


@pytest.mark.parametrize("refused", PARTS_REFUSED)
def test_a_bucket_that_refuses_uploads_in_parts_is_unfit(moto, refused):
    """The small objects pass a proxy's limit on bodies, and policies and keys that allow no parts."""
    response, found, advice = PARTS_REFUSED[refused]
    bucket = moto.new_bucket()
    with proxied(moto.endpoint) as proxy:
        proxy.change = lambda _, path, answer: response if "partNumber=" in path else answer
        with pytest.raises(StorageUnfitError) as caught:
            probe_storage(at(S3Server(proxy.endpoint), bucket))
    assert "/below does not write 8 MiB: " in caught.value.found
    assert found in caught.value.found
    assert caught.value.advice.startswith(advice)
    assert list(at(moto, bucket).list("")) == []


def test_a_quick_probe_uploads_nothing_in_parts(moto):
    with proxied(moto.endpoint) as proxy:
        tried = probe_storage(at(S3Server(proxy.endpoint), moto.new_bucket()), quick=True)
        assert list(tried.took_s) == ["write", "list", "read", "delete", "forget"]
        assert [it for it in proxy.requests if "upload" in it] == []


class Refusing(LocalStorage):
    """A bucket of Google's, to all appearances, that allows single puts only."""

    url = "gs://bucket/below"

    def put_buffers(self, key, parts):
        raise PermissionError("who are you")


def test_googles_own_right_to_upload_in_parts_is_named(tmp_path):
    with pytest.raises(StorageUnfitError, match=r"the right to write 8 MiB \(storage\.multipartUploads\.create\) is missing"):
        probe_storage(Refusing(tmp_path))


def test_an_endpoint_that_speaks_no_tls_is_told_by_what_to_change(moto):
    with pytest.raises(StorageUnfitError, match="does not speak TLS at this port: write its address as http://") as caught:
        probe_storage(at(S3Server(moto.endpoint.replace("http://", "https://")), "bucket"))
    assert caught.value.advice == "change the setting that the error names, or give another location"


def test_an_endpoint_that_nobody_listens_at_is_told():
    with pytest.raises(StorageUnfitError, match="does not write") as caught:
        probe_storage(at(S3Server(f"http://127.0.0.1:{free_port()}"), "bucket"))
    assert caught.value.advice == "check the endpoint's address and the network, or try again later"


def test_a_place_that_cannot_be_written_to_is_told():
    with pytest.raises(StorageUnfitError, match="/sys/prefect-torch does not write: ") as caught:
        CheckpointStorage(location="/sys/prefect-torch").check()
    assert caught.value.advice.startswith(("let this user write there", "mount it writable"))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP])
def test_a_mount_that_cannot_rename_files_is_told(tmp_path, monkeypatch, number):
    """Such as Mountpoint for S3: no right to write helps."""
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(StorageUnfitError, match=r"does not write: .* \(this filesystem cannot rename files\)") as caught:
        probe_storage(LocalStorage(tmp_path))
    assert caught.value.advice == (
        "if a bucket is mounted there, give the bucket itself, as s3://bucket/prefix; else another location"
    )


class Forgetful(LocalStorage):
    """Does one thing wrong."""

    def __init__(self, root, wrong):
        super().__init__(root)
        self._wrong = wrong
        self._first = []

    def list(self, prefix, *, after=None, splits=None):
        if self._wrong == "fresh":
            self._first = self._first or list(super().list(prefix))
            return iter(self._first)
        if self._wrong == "after" and after is not None:
            return islice(super().list(prefix, after=after), 1)
        return iter(()) if self._wrong == "list" else super().list(prefix, after=after)

    def get_bytes(self, key):
        return b"something else" if self._wrong == "read" else super().get_bytes(key)

    def delete(self, keys):
        if self._wrong == "delete":
            raise PermissionError("who are you")
        if self._wrong != "forget":
            super().delete(keys)


class WithFolders(LocalStorage):
    """Lists the folders of deleted objects, as JuiceFS' gateway does."""

    def __init__(self, root):
        super().__init__(root)
        self._deleted = []

    def list(self, prefix, *, after=None, splits=None):
        folders = {key.rpartition("/")[0] for key in self._deleted if key.count("/") > 1}
        return chain(super().list(prefix, after=after), (ObjectInfo(folder, 0, 0.0) for folder in sorted(folders)))

    def delete(self, keys):
        self._deleted = list(keys)
        super().delete(self._deleted)


def test_folders_that_have_become_empty_and_are_listed_are_no_deleted_objects(tmp_path):
    storage = WithFolders(tmp_path)
    assert probe_storage(storage).order == "keys"
    assert [info.key.rpartition("/")[2] for info in storage.list("")] == ["a", "a-c"]


@pytest.mark.parametrize(
    ("step", "found"),
    [
        ("list", "does not list: it lists [] instead of"),
        (
            "fresh",
            "/c'], which were stored just before; switch off the cache that answers listings, or give another location",
        ),
        ("after", "/b, it leaves out ['prefect-torch-probe-"),
        ("read", "does not read: it gives back b'something else' instead of"),
        ("delete", "does not delete: who are you"),
        ("forget", "does not forget: it still lists"),
    ],
)
def test_the_step_that_fails_is_named_and_the_probe_removed_if_it_can_be(step, found, tmp_path):
    with pytest.raises(StorageUnfitError) as caught:
        probe_storage(Forgetful(tmp_path, step))
    assert found in str(caught.value)
    assert len(list(tmp_path.iterdir())) == (step in {"delete", "forget"})
    assert caught.value.advice


def test_an_unfit_storage_pickles():
    error = StorageUnfitError("it does not write", "mount it")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.found, again.advice) == ("it does not write; mount it", "it does not write", "mount it")


def test_a_probe_gives_up_sooner_than_a_training():
    assert INTERACTIVE_RETRY_POLICY.deadline_s < RetryPolicy().deadline_s
