"""Answers that are not the storage's, responses that are lost, and connections that fall silent."""

import contextlib
import ftplib
import os
import pickle
import socket
import threading
import time
import traceback
from dataclasses import replace
from datetime import timedelta
from itertools import count
from types import SimpleNamespace

import obstore
import pytest
from certificates import make_certificate
from http_proxy import Response, proxied
from obstore.exceptions import GenericError
from prefect_servers import wait_until
from prefect_torch.ckpt import CheckpointCorruptError, CheckpointStore, StorageError, StorageSpec
from prefect_torch.ckpt.errors import CommitFailedError, MalformedRecordError
from prefect_torch.ckpt.runs.attempts.attempt import claim_key
from prefect_torch.ckpt.runs.attempts.begun import check_begun
from prefect_torch.ckpt.runs.attempts.claims import _put_claim, check_fence, claim_attempt
from prefect_torch.ckpt.runs.attempts.owner import Owner
from prefect_torch.ckpt.runs.history import HistoryWriter, MetricRecord, read_history
from prefect_torch.ckpt.runs.resume import choose_checkpoint
from prefect_torch.ckpt.storage import server_codes
from prefect_torch.ckpt.storage.fsspec_files import backend as fsspec_backend
from prefect_torch.ckpt.storage.fsspec_files import connections as fsspec_connections
from prefect_torch.ckpt.storage.fsspec_files import reads as fsspec_reads
from prefect_torch.ckpt.storage.fsspec_files.backend import FsspecStorage
from prefect_torch.ckpt.storage.keys import temporary_name
from prefect_torch.ckpt.storage.object_store import backend
from prefect_torch.ckpt.storage.object_store import config as object_store_config
from prefect_torch.ckpt.storage.object_store.backend import ObstoreStorage
from prefect_torch.ckpt.storage.object_store.errors import translate
from prefect_torch.ckpt.storage.object_store.ranged_reads import read_range_with_status_200
from prefect_torch.ckpt.storage.object_store.waits import Waits, waits_of
from prefect_torch.ckpt.storage.opening import open_storage
from prefect_torch.ckpt.storage.protocol import INTERACTIVE_RETRY_POLICY, RetryPolicy
from prefect_torch.ckpt.storage.retry import CredentialsExpiredError, NoCredentialsError, classify
from ranks import Attempt, folder
from servers import S3Server, ScriptedServer
from tcp_relay import TcpRelay

NOTHING = Response(404, b"default backend - 404", {"Content-Type": "text/plain"})
REFUSED = Response(403, b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")
BAD_LISTINGS = [b"<Error><Code>InternalError</Code></Error>", b"<html><body>maintenance</body></html>"]
LARGE = bytes(20 * 2**20)


def read_range(storage, key):
    return storage.get_range(key, 0, memoryview(bytearray(1)))


@pytest.fixture
def proxy(moto):
    with proxied(moto.endpoint) as started:
        yield started


@pytest.fixture
def storage(moto, proxy):
    return ObstoreStorage(f"s3://{moto.new_bucket()}/some", {**moto.options(), "aws_endpoint_url": proxy.endpoint})


@pytest.fixture
def once(monkeypatch):
    monkeypatch.setattr(object_store_config, "_REQUEST_RETRIES", {"max_retries": 0})


@pytest.mark.parametrize(
    "call",
    [
        lambda storage: storage.get_bytes("run/x"),
        lambda storage: storage.size("run/x"),
        lambda storage: storage.digest("run/x"),
        lambda storage: storage.get_range("run/x", 0, memoryview(bytearray(3))),
        lambda storage: storage.put_bytes("run/y", b"1"),
        lambda storage: list(storage.list("run/")),
        lambda storage: list(storage.folders("")),
        lambda storage: storage.delete(["run/x"]),
    ],
    ids=["get_bytes", "size", "digest", "get_range", "put_bytes", "list", "folders", "delete"],
)
def test_a_gateways_404_is_no_missing_object(storage, proxy, call):
    storage.put_bytes("run/x", b"123")
    proxy.change = lambda *_: NOTHING
    with pytest.raises(StorageError, match="something in front of the object store answers that nothing exists") as caught:
        call(storage)
    assert classify(caught.value) == "transient"


def test_an_object_that_is_missing_is_told_by_every_verb(storage):
    for call in (storage.get_bytes, storage.size, storage.digest):
        with pytest.raises(FileNotFoundError, match="run/x does not exist"):
            call("run/x")


def test_a_gateways_404_for_a_while_costs_no_checkpoint(moto, proxy, tmp_path):
    options = {**moto.options(), "aws_endpoint_url": proxy.endpoint}
    store = CheckpointStore.open(StorageSpec(f"s3://{moto.new_bucket()}", options, RetryPolicy(60, 0.01, 0.1)), "run")
    session = Attempt(store).session()
    for score in range(3):
        session.report({"score": score}, folder(tmp_path / "c", model=str(score)))
    ids = [it.id for it in store.list()]
    answered = count()

    def change(method, path, response):
        is_read = method == "HEAD" or (method == "GET" and "list-type" not in path)
        return NOTHING if is_read and next(answered) < 6 else response

    proxy.change = change
    again = CheckpointStore.open(store.storage, "run")
    assert choose_checkpoint(again, lineage=1, verify="digest").id == ids[-1]
    assert [it.id for it in again.list()] == ids
    assert next(answered) > 6


@pytest.mark.parametrize("size", [0, 99])
def test_a_200_with_a_part_of_an_object_for_a_while_costs_no_checkpoint(moto, proxy, tmp_path, size):
    options = {**moto.options(), "aws_endpoint_url": proxy.endpoint}
    store = CheckpointStore.open(StorageSpec(f"s3://{moto.new_bucket()}", options, RetryPolicy(60, 0.01, 0.1)), "run")
    session = Attempt(store).session()
    for score in range(2):
        session.report({"score": score}, folder(tmp_path / "c", model=f"{score}" * 1000))
    ids = [it.id for it in store.list()]
    answered = {"manifests": count(), "checkpoints": count()}

    def change(method, path, response):
        is_one = method == "GET" and "list-type" not in path
        asked = next((it for name, it in answered.items() if is_one and f"run/{name}/" in path), None)
        cut = Response(response.status, response.body[:size], response.headers)
        return cut if asked is not None and next(asked) < 5 else response

    proxy.change = change
    assert choose_checkpoint(CheckpointStore.open(store.storage, "run"), lineage=1, verify="digest").id == ids[-1]
    assert [it.id for it in store.list()] == ids
    assert all(next(asked) > 5 for asked in answered.values())


@pytest.mark.parametrize("size", [0, 99])
def test_a_200_with_a_part_of_an_object_for_a_while_leaves_nothing_out_of_the_history(moto, proxy, size):
    """A report without a checkpoint is only there."""
    options = {**moto.options(), "aws_endpoint_url": proxy.endpoint}
    store = CheckpointStore.open(StorageSpec(f"s3://{moto.new_bucket()}", options, RetryPolicy(60, 0.01, 0.1)), "run")
    writer = HistoryWriter(store, 1)
    for step in range(3):
        writer.append(MetricRecord(1, step, {"score": step}, None, "2026-11-30T00:00:00+00:00"))
    writer.flush()
    answered = count()

    def change(method, path, response):
        is_one = method == "GET" and "/run/metrics/" in path and next(answered) < 3
        return Response(response.status, response.body[:size], response.headers) if is_one else response

    proxy.change = change
    assert [record.step for record in read_history(store)] == [0, 1, 2]
    assert next(answered) > 3


PAGES = [b"", BAD_LISTINGS[1]]
OF = {
    "data": lambda method, path: "/run/checkpoints/" in path,
    "manifests": lambda method, path: "/run/manifests/" in path,
    "objects": lambda method, path: "list-type" not in path,
    "everything": lambda method, path: True,
}


@pytest.fixture
def behind_gateway(moto, proxy, tmp_path):
    """A run with three checkpoints, behind a gateway that passes all on."""
    options = {**moto.options(), "aws_endpoint_url": proxy.endpoint}
    store = CheckpointStore.open(StorageSpec(f"s3://{moto.new_bucket()}", options, RetryPolicy(60, 0.01, 0.05)), "run")
    session = Attempt(store).session()
    for step in range(3):
        session.report({"step": step}, folder(tmp_path / "c", model=f"{step}" * 1000), state={"step": step}, upload="sync")
    return store


def answer_with_a_page(proxy, page, number, is_answered):
    """Let the gateway answer as many reads itself, with status 200, each after it was asked for; return the count of them."""
    answered = count()

    def change(method, path, response):
        is_one = method in ("GET", "HEAD") and "partNumber" not in path and is_answered(method, path)
        return Response(200, page, {"Content-Type": "text/html"}) if is_one and next(answered) < number else response

    proxy.change = change
    return answered


@pytest.mark.parametrize("page", PAGES, ids=["empty", "html"])
@pytest.mark.parametrize("of", OF)
@pytest.mark.parametrize("number", [3, 14, 40])
def test_a_gateways_page_for_a_while_costs_no_checkpoint(behind_gateway, proxy, of, page, number):
    """Neither the newest one nor, since the training would start afresh and prune, all of them."""
    store = behind_gateway
    ids = [it.id for it in store.list()]
    answered = answer_with_a_page(proxy, page, number, OF[of])
    again = CheckpointStore.open(store.storage.reopened(), "run")
    assert choose_checkpoint(again, lineage=1, verify="digest").id == ids[-1]
    proxy.change = lambda _method, _path, response: response
    assert [it.id for it in store.list()] == ids
    assert store.keys(store.layout.quarantined) == []
    assert next(answered) > 2


@pytest.mark.parametrize("page", PAGES, ids=["empty", "html"])
def test_a_state_is_loaded_and_a_file_is_read_through_a_gateways_pages(behind_gateway, proxy, page, tmp_path):
    newest = behind_gateway.checkpoint(behind_gateway.latest())
    answer_with_a_page(proxy, page, 12, OF["data"])
    newest.load_state(state := {"step": None})
    assert state == {"step": 2}
    answer_with_a_page(proxy, page, 12, OF["data"])
    newest.to_directory(tmp_path / "copy")
    assert (tmp_path / "copy/model").read_text() == "2" * 1000


def test_a_cut_answer_that_looks_complete_is_not_taken_for_damage(behind_gateway, proxy):
    newest, answered = behind_gateway.checkpoint(behind_gateway.latest()), count()

    def change(method, path, response):
        is_one = method == "GET" and "distcp" in path and next(answered) < 5
        return Response(response.status, response.body[:-3], response.headers) if is_one else response

    proxy.change = change
    newest.load_state(state := {"step": None})
    assert (state, next(answered) > 5) == ({"step": 2}, True)


def test_an_object_that_is_shorter_indeed_is_damage_at_once(behind_gateway):
    newest = behind_gateway.latest()
    (state_file,) = [entry.path for entry in newest.files if entry.path.endswith(".distcp")]
    behind_gateway.storage.put_bytes(behind_gateway.layout.data(newest.id, state_file), b"short")
    started_s = time.monotonic()
    with pytest.raises(CheckpointCorruptError):
        behind_gateway.checkpoint(newest).load_state({"step": None})
    with pytest.raises(CheckpointCorruptError, match="has 5 bytes instead of"):
        behind_gateway.verify(newest)
    assert time.monotonic() - started_s < 20


@pytest.mark.parametrize("name", ["/run/manifests/", "/run/checkpoints/"])
def test_an_odd_size_after_a_put_fails_no_report(behind_gateway, proxy, name, tmp_path):
    answered = count()
    session, page = Attempt(behind_gateway).session(), Response(200, b"", {"Content-Type": "text/html"})
    is_asked = {"HEAD": lambda path: name in path, "GET": lambda path: "list-type" in path and name.strip("/") in path}

    def change(method, path, response):
        is_one = method in is_asked and is_asked[method](path.replace("%2F", "/"))
        return page if is_one and next(answered) < 4 else response

    proxy.change = change
    session.report({}, folder(tmp_path / "d", model="new"), step=7)
    assert next(answered) > 4
    assert behind_gateway.latest().step == 7


def test_a_server_that_does_not_tell_the_size_of_a_manifest_is_not_said_to_lose_it(behind_gateway, proxy, once, tmp_path):
    """Nor is the manifest deleted, which may well be there."""
    spec = replace(behind_gateway.spec, retry=RetryPolicy(0.5, 0.01, 0.05))
    session = Attempt(CheckpointStore.open(spec, "run")).session()
    proxy.change = lambda method, path, response: None if method == "HEAD" and "/run/manifests/" in path else response
    with pytest.raises(CommitFailedError) as raised:
        session.report({}, folder(tmp_path / "d", model="new"), step=7)
    proxy.change = lambda _method, _path, response: response
    assert "loses writes" not in str(raised.value)
    assert behind_gateway.latest().step == 7


@pytest.mark.parametrize("body", BAD_LISTINGS)
def test_a_200_that_is_no_listing_is_not_believed_to_be_an_empty_one(storage, proxy, body):
    storage.put_bytes("run/x/a", b"123")
    for call in (lambda: [info.key for info in storage.list("run/")], lambda: list(storage.folders("run/"))):
        bad = iter([Response(200, body)])
        proxy.change = lambda _method, _path, response, bad=bad: next(bad, response)
        assert call() in (["run/x/a"], ["x"])
        assert next(bad, None) is None


def test_a_200_that_is_no_listing_is_not_believed_to_be_the_end_of_one(rclone):
    """The page before is full; rclone takes its objects in a third of moto's time."""
    keys, url = [f"run/{number:04d}" for number in range(1003)], f"s3://{rclone.new_bucket()}/some"
    behind = ObstoreStorage(url, rclone.options())
    for key in keys:
        behind.put_bytes(key, b"")
    with proxied(rclone.endpoint) as proxy:
        for body in BAD_LISTINGS:
            storage, pages = ObstoreStorage(url, {**rclone.options(), "aws_endpoint_url": proxy.endpoint}), count()

            def change(_method, path, response, body=body, pages=pages):
                return Response(200, body) if "list-type" in path and next(pages) == 1 else response

            proxy.change = change
            assert [info.key for info in storage.list("run/")] == keys, body
            assert next(pages) > 2, body


@pytest.mark.parametrize("body", BAD_LISTINGS)
def test_nobody_is_fenced_and_no_run_is_missing_for_listings_that_stay_none(storage, proxy, body):
    store = CheckpointStore.open(storage, "run")
    claimed = claim_attempt(store, Owner.current(), world_size=1)
    proxy.change = lambda _method, path, response: Response(200, body) if "list-type" in path else response
    for ask in (lambda: check_fence(store, claim_key(store, claimed)), lambda: check_begun(store)):
        with pytest.raises(StorageError, match=r"lists nothing of run 'run', but has its run/run.json: something before"):
            ask()
    with pytest.raises(FileNotFoundError, match="there is no run 'other'"):
        check_begun(CheckpointStore.open(storage, "other"))


@pytest.mark.parametrize("number", [2, 4, 5, 12])
def test_listings_that_are_none_for_a_while_are_waited_for(moto, proxy, number):
    options = {**moto.options(), "aws_endpoint_url": proxy.endpoint}
    spec = StorageSpec(f"s3://{moto.new_bucket()}", options, RetryPolicy(20.0, 0.01, 0.01))
    store = CheckpointStore.open(spec, "run")
    claimed = claim_attempt(store, Owner.current(), world_size=1)
    for ask in (
        lambda: check_fence(store, claim_key(store, claimed)),
        lambda: check_begun(store),
        lambda: _put_claim(store, store.layout.attempt(2, "0123abcd"), replace(claimed, number=2)),
    ):
        bad = iter([Response(200, BAD_LISTINGS[1])] * number)
        proxy.change = lambda _method, path, response, bad=bad: next(bad, response) if "list-type" in path else response
        ask()
        assert next(bad, None) is None


def test_what_is_too_large_for_a_record_is_not_read_from_a_bucket(storage, proxy, monkeypatch):
    storage.put_bytes("run/x", bytes(11))
    monkeypatch.setattr(backend, "MOST_RECORD_BYTES", 10)
    with pytest.raises(OSError, match=r"File too large: .*/some/run/y"):
        storage.put_bytes("run/y", bytes(11))
    with pytest.raises(MalformedRecordError, match=r"/some/run/x has 11 bytes, and a record 10 at most"):
        storage.get_bytes("run/x")
    storage.put_bytes("run/x", bytes(10))
    assert storage.get_bytes("run/x") == bytes(10)


def test_what_is_too_large_for_a_record_is_not_read_through_fsspec(monkeypatch, tmp_path):
    storage = FsspecStorage(f"memory://{tmp_path}", {})
    storage.put_bytes("x", bytes(11))
    monkeypatch.setattr(fsspec_backend, "MOST_RECORD_BYTES", 10)
    with pytest.raises(MalformedRecordError, match=r"/x has 11 bytes, and a record 10 at most"):
        storage.get_bytes("x")
    with pytest.raises(OSError, match="File too large"):
        storage.put_bytes("y", bytes(11))
    storage.put_bytes("x", bytes(10))
    assert storage.get_bytes("x") == bytes(10)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("token", "the address of AWS' STS must begin with https://"),
        ("missing", "read token file '/.*/missing'.*; fix AWS_WEB_IDENTITY_TOKEN_FILE"),
    ],
)
def test_a_login_by_web_identity_that_can_never_come_is_told_at_once(monkeypatch, tmp_path, file, words):
    (tmp_path / "token").write_text("token")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://127.0.0.1:1")
    role = {"aws_web_identity_token_file": str(tmp_path / file), "aws_role_arn": "arn:aws:iam::123456789012:role/x"}
    storage = open_storage(StorageSpec("s3://bucket", {"aws_endpoint_url": "http://127.0.0.1:1", **role}))
    with pytest.raises(OSError, match=f"the credentials for .* cannot be fetched: .*{words}"):
        storage.get_bytes("x")


def test_a_server_that_gives_one_page_for_ever_is_an_error(storage, proxy):
    entry = "<Contents><Key>some/run/{:04d}</Key><Size>0</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified></Contents>"
    rest = "<IsTruncated>true</IsTruncated><NextContinuationToken>again</NextContinuationToken>"
    page = f"<ListBucketResult>{''.join(map(entry.format, range(1000)))}{rest}</ListBucketResult>"
    proxy.change = lambda *_: Response(200, page.encode())
    with pytest.raises(StorageError, match=r"lists one page below run/ again and again"):
        list(storage.list("run/"))
    assert len(proxy.requests) < 5


@pytest.mark.parametrize("kind", ["moto", "rclone", "s3rver", "seaweedfs"])
def test_an_upload_whose_last_response_is_lost_is_stored_again(kind, request, monkeypatch, tmp_path):
    monkeypatch.setitem(object_store_config._PART_RETRIES, "max_retries", 3)  # s3rver answers 500 to another completion
    server: S3Server = request.getfixturevalue(kind)
    (tmp_path / "large").write_bytes(LARGE)
    with proxied(server.endpoint) as proxy:
        options = {**server.options(), "aws_endpoint_url": proxy.endpoint}
        spec = StorageSpec(f"s3://{server.new_bucket()}", options, RetryPolicy(60, 0.01, 0.1))
        storage, completions = open_storage(spec), count()

        def change(method, path, response):
            is_completion = method == "POST" and "uploadId=" in path
            return None if is_completion and next(completions) == 0 else response

        proxy.change = change
        stored = storage.put_file("run/x", tmp_path / "large")
        assert next(completions) > 0
        assert storage.digest("run/x") == stored


@pytest.mark.parametrize("answer", [Response(503, b"<Error><Code>SlowDown</Code></Error>"), None], ids=["503", "lost"])
def test_a_part_of_a_large_object_that_fails_for_a_while_is_transferred_again_alone(moto, proxy, monkeypatch, tmp_path, answer):
    pause = timedelta(milliseconds=1)
    monkeypatch.setitem(
        object_store_config._PART_RETRIES, "backoff", {"init_backoff": pause, "max_backoff": pause, "base": 2.0}
    )
    options = {**moto.options(), "aws_endpoint_url": proxy.endpoint}
    storage = ObstoreStorage(f"s3://{moto.new_bucket()}", options, 300.0)
    failed = {"PUT": count(), "GET": count()}

    def change(method, path, response):
        is_part = "partNumber=2&" in path or method == "GET"
        return answer if is_part and next(failed[method]) < 4 else response

    proxy.change = change
    stored = storage.put_buffers("run/x", [memoryview(LARGE)])
    assert storage.get_file("run/x", tmp_path / "x") == stored
    assert sum("partNumber=" in request for request in proxy.requests) == 3 + 4
    assert sum(request.startswith("GET ") for request in proxy.requests) == 5 + 4


@pytest.mark.parametrize(("deadline_s", "longest_s"), [(20.0, 20), (120.0, 120), (3600.0, 300)])
def test_a_part_that_was_sent_for_a_minute_is_transferred_again_alone_too(moto, deadline_s, longest_s):
    storage = ObstoreStorage("s3://bucket", moto.options(), deadline_s)
    retries = [store.retry_config["retry_timeout"] for store in (storage._reading, storage._uploading)]
    assert retries == [timedelta(seconds=longest_s)] * 2


def test_credentials_that_have_expired_are_named_for_requests_without_a_body(storage, proxy, once):
    storage.put_bytes("run/x", b"123")
    proxy.change = lambda *_: Response(400, b"<Error><Code>ExpiredToken</Code><Message>The token has expired</Message></Error>")
    for call in (storage.size, storage.digest, lambda key: storage.get_range(key, 0, memoryview(bytearray(3)))):
        with pytest.raises(CredentialsExpiredError, match="have expired"):
            call("run/x")


@pytest.mark.parametrize("code", server_codes.UNKNOWN)
def test_credentials_that_a_server_does_not_know_any_more_are_read_anew(storage, proxy, once, code):
    proxy.change = lambda *_: Response(403, f"<Error><Code>{code}</Code></Error>".encode())
    with pytest.raises(CredentialsExpiredError, match=code) as caught:
        storage.get_bytes("run/x")
    assert classify(caught.value) == "credentials"


@pytest.mark.parametrize("key", ["run/status-404/x", "run/expiredtoken/x", "run/token-has-expired/AccessDenied"])
def test_words_in_a_key_are_not_those_of_an_error(storage, proxy, once, key):
    proxy.change = lambda *_: Response(503, b"<Error><Code>SlowDown</Code></Error>")
    with pytest.raises(StorageError, match="SlowDown") as caught:
        storage.get_bytes(key)
    assert classify(caught.value) == "transient"


def test_a_right_to_delete_that_is_missing_for_one_object_is_told_at_once(storage, proxy):
    storage.put_bytes("run/x", b"1")
    answer = (
        b'<?xml version="1.0"?><DeleteResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Error><Key>some/run/x</Key>'
        b"<Code>AccessDenied</Code><Message>Access Denied</Message></Error></DeleteResult>"
    )
    proxy.change = lambda *_: Response(200, answer)
    with pytest.raises(PermissionError, match="AccessDenied"):
        storage.delete(["run/x"])


def test_objects_go_one_by_one_where_the_response_to_a_request_to_delete_many_names_none(storage, proxy):
    """As JuiceFS' gateway answers, which has deleted them."""
    named_none = b"<DeleteResult xmlns='http://s3.amazonaws.com/doc/2006-03-01/'><Deleted></Deleted></DeleteResult>"
    storage.put_bytes("run/x", b"1")
    proxy.change = lambda method, _, response: Response(200, named_none) if method == "POST" else response
    storage.delete(["run/x"])
    assert list(storage.list("run")) == []


@pytest.mark.parametrize(
    "refusal", [REFUSED, Response(501, b"<Error><Code>NotImplemented</Code><Message>no</Message></Error>")]
)
def test_objects_go_one_by_one_where_a_request_to_delete_many_is_refused(storage, proxy, once, refusal):
    keys = [f"run/{number}" for number in range(3)]
    for key in (*keys, "run/x"):
        storage.put_bytes(key, b"1")
    proxy.change = lambda method, _path, response: refusal if method == "POST" else response
    storage.delete([*keys, "run/missing"])
    storage.delete(["run/x"])
    assert [it.partition(" ")[0] for it in proxy.requests if "run" in it or "delete" in it][-6:] == ["POST", *["DELETE"] * 5]
    assert list(storage.list("")) == []


def test_one_refused_deletion_is_an_error_where_deletions_of_many_are_refused_too(storage, proxy):
    storage.put_bytes("run/x", b"1")
    proxy.change = lambda *_: REFUSED
    with pytest.raises(PermissionError, match=r"run/x is refused.*AccessDenied"):
        storage.delete(["run/x"])


@pytest.mark.parametrize("call", [ObstoreStorage.get_bytes, ObstoreStorage.size, ObstoreStorage.digest, read_range])
def test_a_missing_object_is_told_from_a_refused_one_by_the_listing(storage, proxy, call):
    """As under a policy that allows s3:ListBucket for a prefix alone."""
    storage.put_bytes("run/x", b"1")
    proxy.change = lambda _method, path, response: response if "list-type" in path else REFUSED
    with pytest.raises(FileNotFoundError, match=r"/some/run/y does not exist"):
        call(storage, "run/y")
    with pytest.raises(PermissionError, match=r"/some/run/x is refused"):
        call(storage, "run/x")
    proxy.change = lambda *_: REFUSED
    with pytest.raises(PermissionError, match=r"/some/run/y is refused"):
        call(storage, "run/y")


def test_a_missing_object_with_a_long_key_is_told_from_a_refused_one(storage, proxy):
    proxy.change = lambda _method, path, response: response if "list-type" in path else REFUSED
    key = f"{'r' * 200}/trials/{'t' * 200}/latest.json"
    with pytest.raises(FileNotFoundError, match=f"{key} does not exist"):
        storage.get_bytes(key)


@pytest.mark.parametrize("body", BAD_LISTINGS)
def test_a_refused_object_is_not_missing_for_a_200_that_is_no_listing(storage, proxy, body):
    storage.put_bytes("run/x", b"1")
    bad = iter([Response(200, body)])
    proxy.change = lambda _method, path, response: next(bad, response) if "list-type" in path else REFUSED
    with pytest.raises(PermissionError, match=r"/some/run/x is refused"):
        storage.get_bytes("run/x")


def test_an_upload_may_take_as_long_as_the_line_needs_and_other_requests_may_not(moto):
    storage = open_storage(StorageSpec(f"s3://{moto.new_bucket()}", moto.options()))._storage
    waits = [store.client_options["read_timeout"] for store in (storage._store, storage._uploading)]
    assert waits == ["120s", "600s"]


@pytest.mark.parametrize(
    ("put", "wait"),
    [
        (lambda storage: storage.put_bytes("x", bytes(2**20)), "10s"),
        (lambda storage: storage.put_bytes("x", bytes(2**20 + 1)), "600s"),
        (lambda storage: storage.put_buffers("x", [memoryview(b"1")]), "600s"),
    ],
    ids=["small record", "large record", "data"],
)
def test_only_a_small_record_is_given_up_early(moto, monkeypatch, put, wait):
    storage = ObstoreStorage(f"s3://{moto.new_bucket()}", moto.options(), 10.0)
    waits, real = [], backend.obstore.put

    def record(store, *args, **kwargs):
        waits.append(store.client_options["read_timeout"])
        return real(store, *args, **kwargs)

    monkeypatch.setattr(backend.obstore, "put", record)
    put(storage)
    assert waits == [wait]


@contextlib.contextmanager
def silent_server():
    """Run a server that accepts every connection and never answers; yield it, and the connections."""
    opened = []

    def accept():
        with contextlib.suppress(OSError):
            while True:
                opened.append(server.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield S3Server(f"http://127.0.0.1:{server.getsockname()[1]}"), opened
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in opened:
        connection.close()


def test_a_server_that_accepts_and_never_answers_is_given_up_in_the_time_that_a_person_waits():
    with silent_server() as (server, _):
        policy = replace(INTERACTIVE_RETRY_POLICY, deadline_s=1.0, first_wait_s=0.01, longest_wait_s=0.01)
        storage = open_storage(StorageSpec("s3://bucket", server.options(), policy))
        with pytest.raises(StorageError, match=r"failed \d+ times in 1?\d s"):
            storage.get_bytes("run/x")


@pytest.fixture
def refusing():
    """The address of a port that refuses every connection."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def metadata_error(endpoint):
    """Return the error for a bucket of a machine whose metadata service is at `endpoint`."""
    place = {"aws_region": "eu-west-1", "aws_endpoint_url": endpoint, "aws_metadata_endpoint": endpoint}
    with pytest.raises(GenericError, match="/latest/api/token") as caught:
        obstore.head(ObstoreStorage("s3://bucket", place, 1.0)._store, "run/x")
    text = str(caught.value).replace(endpoint, "http://169.254.169.254")
    return translate(GenericError(text), "s3://bucket/run/x", has_answered=False)


def test_a_metadata_service_that_takes_a_request_and_does_not_answer_may_be_too_many_hops_away(refusing):
    with silent_server() as (server, _):
        silent = metadata_error(server.endpoint)
    none = metadata_error(f"http://{refusing}")
    assert type(silent) is type(none) is NoCredentialsError
    assert ["--http-put-response-hop-limit 2" in str(error) for error in (silent, none)] == [True, False]


@pytest.mark.parametrize("options", [{"read_timeout": "200ms"}, {}], ids=["option", "deadline"])
def test_a_range_that_another_client_reads_is_given_up_as_early(options):
    """A server that sends ranges with the status of whole objects is asked by another client than object_store's."""
    with silent_server() as (server, opened):
        storage = ObstoreStorage("s3://bucket", {**server.options(), **options}, 1.0)
        started_s = time.monotonic()
        assert read_range_with_status_200(storage._store, "run/x", 0, memoryview(bytearray(3))) is None
        assert time.monotonic() - started_s < 10
        wait_until(lambda: opened, "the server takes it")
        assert len(opened) == 1


@pytest.mark.parametrize(("options", "deadline_s"), [({"read_timeout": "200ms"}, 120.0), ({}, 0.0)], ids=["option", "deadline"])
def test_the_search_for_unfinished_uploads_is_given_up_as_early(options, deadline_s, caplog):
    with silent_server() as (server, opened), caplog.at_level("DEBUG", logger="prefect_torch.ckpt"):
        storage = ObstoreStorage("s3://bucket", {**server.options(), **options}, deadline_s)
        started_s = time.monotonic()
        storage.remove_interrupted("run/", older_than_s=0)
        assert time.monotonic() - started_s < 20
        wait_until(lambda: len(opened) >= 3, "the server takes them")
        assert len(opened) == 3
    assert "Read timeout" in caplog.text


@pytest.mark.parametrize(
    ("duration", "seconds"),
    [("250ms", 0.25), ("2s", 2), ("1.5 secs", 1.5), ("1m 30s", 90), ("2 hours", 7200), ("3weeks", 604800)],
)
def test_another_client_waits_as_long_as_object_store(duration, seconds):
    options = {"aws_skip_signature": "true", "read_timeout": duration, "connect_timeout": "7s"}
    assert waits_of(ObstoreStorage("s3://bucket", options)._store) == Waits(7, seconds)
    assert waits_of(ObstoreStorage("s3://bucket", {"aws_skip_signature": "true"}, 8.0)._store) == Waits(10, 8)


@contextlib.contextmanager
def tls_server(folder, *, is_authority):
    """Run a server of HTTPS that answers nothing, with a certificate of its own; yield its address and the certificate."""
    context, certificate = make_certificate(folder, is_authority=is_authority)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def refuse():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True):
                        pass

        thread = threading.Thread(target=refuse, daemon=True)
        thread.start()
        yield f"https://127.0.0.1:{server.getsockname()[1]}", certificate
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    ("is_authority", "is_given", "words"),
    [
        (False, False, r"is not accepted \(UnknownIssuer\): give that of its authority, in AWS_CA_BUNDLE"),
        (True, True, r"is not accepted \(CaUsedAsEndEntity\): .*basicConstraints=CA:FALSE"),
    ],
)
def test_a_certificate_that_is_not_accepted_is_told_by_its_remedy_and_not_tried_again(
    once, tmp_path, is_authority, is_given, words
):
    with tls_server(tmp_path, is_authority=is_authority) as (endpoint, certificate):
        options = {**S3Server(endpoint).options(), **({"root_certificate": certificate} if is_given else {})}
        storage = ObstoreStorage("s3://bucket", options)
        with pytest.raises(OSError, match=words) as caught:
            storage.get_bytes("run/x")
        assert classify(caught.value) == "final"
        storage._has_answered = True  # the one that it had before may come back
        with pytest.raises(StorageError):
            storage.get_bytes("run/x")


def test_an_object_whose_key_no_path_can_have_is_named(moto, storage):
    bucket = storage.url.split("/")[2]
    moto.client().put_object(Bucket=bucket, Key="some/run//notes.txt", Body=b"x")
    with pytest.raises(OSError, match=r"notes\.txt.*delete or rename that object") as caught:
        list(storage.list("run/"))
    assert classify(caught.value) == "final"


class SilentRelay(TcpRelay):
    """Passes nothing on while it is told to be silent."""

    def __init__(self, server_port):
        super().__init__(server_port)
        self.may_pass = threading.Event()
        self.may_pass.set()

    def change(self, data, *, is_answer):
        self.may_pass.wait(60)
        return data


@pytest.mark.parametrize(
    "call",
    [
        lambda storage: storage.get_bytes("run/x"),
        lambda storage: list(storage.list("")),
        lambda storage: storage.put_bytes("y", LARGE),
    ],
    ids=["get_bytes", "list", "put_bytes"],
)
def test_a_server_behind_a_connection_that_fell_silent_is_given_up(sshd, tmp_path, monkeypatch, call):
    relay = SilentRelay(sshd.port)
    relay.accept()
    with contextlib.ExitStack() as ended:
        ended.callback(relay.refuse)
        ended.callback(relay.may_pass.set)
        storage, other = (
            FsspecStorage(f"sftp://127.0.0.1{tmp_path}/store", {**sshd.options(), "port": relay.port}) for _ in range(2)
        )
        other.put_bytes("run/x", b"1")
        with monkeypatch.context() as patch:
            patch.setattr(fsspec_connections, "_LONGEST_SILENCE_S", 5.0)  # of a connection from its beginning on
            storage.size("run/x")
            relay.may_pass.clear()
            with pytest.raises(StorageError) as caught:
                call(storage)
        assert classify(caught.value) == "transient"
        relay.may_pass.set()
        assert storage.get_bytes("run/x") == b"1"


@pytest.mark.parametrize("password_server", ["ftp"], indirect=True)
def test_what_another_client_has_replaced_or_removed_is_seen(password_server):
    place, password = password_server
    one, other = (FsspecStorage(f"ftp://me@{place}", {"password": password}) for _ in range(2))
    one.put_bytes("run/x", b"12345")
    assert other.size("run/x") == 5
    one.put_bytes("run/x", b"123456789")
    assert other.size("run/x") == other.digest("run/x").bytes == 9
    one.delete(["run/x"])
    with pytest.raises(FileNotFoundError):
        other.size("run/x")


@pytest.mark.parametrize("password_server", ["ftp"], indirect=True)
def test_a_prune_by_ftp_removes_what_exists_of_a_checkpoint(password_server):
    place, password = password_server
    storage = FsspecStorage(f"ftp://me@{place}", {"password": password})
    for key in ("run/metadata/y", "run/x/a", "run/x/b"):
        storage.put_bytes(key, b"1")
    storage.delete(["run/metadata/x", "nothing/x", "run/x/a", "run/x/b"])
    assert [info.key for info in storage.list("")] == ["run/metadata/y"]


@pytest.mark.parametrize("password_server", ["ftp"], indirect=True)
def test_an_interrupted_put_by_ftp_is_removed_once_it_is_old(password_server, tmp_path):
    place, password = password_server
    run = tmp_path / "served/data/run"
    run.mkdir(parents=True)
    old, new, whole = (run / name for name in (temporary_name(), temporary_name(), "x"))
    for path, age_s in ((old, 7200), (new, 0), (whole, 7200)):
        path.write_bytes(b"1")
        os.utime(path, (0, time.time() - age_s))
    storage = FsspecStorage(f"ftp://me@{place}", {"password": password})
    assert [info.modified_s for info in storage.list("run/")] == [int(whole.stat().st_mtime)]
    storage.remove_interrupted("run/", 3600)
    assert {path.name for path in run.iterdir()} == {new.name, "x"}


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"modify": "20261130163207"}, 1796056327),
        ({"modify": "20261130163207.123"}, 1796056327),
        ({"modify": "Nov 30 16:32"}, 0),
        ({"modificationTime": 1796056327500}, 1796056327.5),
    ],
    ids=["ftp", "ftp with fractions", "ftp without MLSD", "webhdfs"],
)
def test_each_filesystem_has_its_own_word_for_the_time_of_a_file(info, expected):
    assert fsspec_backend._modified_s(info) == expected


def shown(error):
    """Return an error as a log shows it, and as it is pickled."""
    return "".join(traceback.format_exception(error)) + repr(pickle.dumps(error))


def test_the_token_in_a_filesystems_requests_is_in_no_error(refusing, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    secrets = {"token": "SECRET"}
    with pytest.raises(StorageError, match=r"run/x: ConnectionError: .*/webhdfs/v1/x/run/x \(Caused by") as caught:
        FsspecStorage(f"webhdfs://{refusing}/x", secrets).get_bytes("run/x")
    assert "SECRET" not in shown(caught.value)
    for status, expected in ((403, PermissionError), (503, StorageError)):
        with ScriptedServer.answering(status, "no JSON") as server:
            place = server.endpoint.removeprefix("http://")
            with pytest.raises(expected, match=f"HTTPError: {status} ") as caught:
                FsspecStorage(f"webhdfs://{place}/x", secrets).get_bytes("run/x")
        assert any("delegation=SECRET" in request for request in server.requests)
        assert "SECRET" not in shown(caught.value)


@pytest.mark.parametrize("password_server", ["ftp"], indirect=True)
def test_a_part_of_a_file_is_read_from_a_server_with_one_response_to_it(password_server, tmp_path):
    place, password = password_server
    storage = FsspecStorage(f"ftp://me@{place}", {"password": password, "timeout": 3})
    content = os.urandom(4 * 2**20)
    (tmp_path / "served/data/run").mkdir(parents=True)
    (tmp_path / "served/data/run/x").write_bytes(content)
    for start in range(0, 2**20, 2**17):
        into = bytearray(2**17)
        assert storage.get_range("run/x", start, memoryview(into)) == 2**17
        assert into == content[start : start + 2**17]
    assert storage.get_file("run/x", tmp_path / "out") == storage.digest("run/x")
    assert (tmp_path / "out").read_bytes() == content


def test_a_connection_of_ftp_whose_transfer_ends_without_a_response_is_not_lent_again(monkeypatch):
    monkeypatch.setattr(fsspec_reads, "_LONGEST_END_S", 0.01)
    here, there = socket.socketpair()
    connection = SimpleNamespace(ftp=ftplib.FTP())
    connection.ftp.sock, connection.ftp.file = here, here.makefile()
    connections = fsspec_connections.Connections(lambda: connection)
    with there, connections.lent():
        fsspec_reads._hear_end(connection.ftp)
    assert connection.ftp.sock is None
    assert connections._idle == []
