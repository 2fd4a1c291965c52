"""Prefect blocks as storage: by object, by slug, picked in the UI, against real S3 servers."""

import json
import pickle
import re
import ssl
import subprocess
import threading
import traceback
import uuid
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import cloudpickle
import httpx
import obstore
import pytest
from botocore import UNSIGNED
from http_proxy import Response, proxied
from prefect.exceptions import ParameterTypeError
from prefect.filesystems import LocalFileSystem, RemoteFileSystem
from prefect_aws.client_parameters import AwsClientParameters
from prefect_aws.credentials import AwsCredentials, MinIOCredentials
from prefect_aws.s3 import S3Bucket
from prefect_torch.ckpt import CheckpointStore, StorageError, StorageSpec
from prefect_torch.ckpt.blocks import CheckpointStorage
from prefect_torch.ckpt.storage.backends import open_spec
from prefect_torch.ckpt.storage.opening import open_storage, parse_storage
from prefect_torch.ckpt.storage.protocol import RetryPolicy
from prefect_torch.ckpt.storage.specs.blocks import resolve_storage
from prefect_torch.deployments import deploy, plan_deployment
from prefect_torch.flows import CheckpointConfig, Result, RunConfig, ScalingConfig, evaluate, prune, train
from prefect_torch.tasks.gang.engines.cluster_block import load_cluster
from pydantic import SecretStr
from ranks import Attempt, folder
from servers import ACCESS_KEY, SECRET_KEY


@pytest.fixture(params=["moto", "rclone"])
def server(request):
    return request.getfixturevalue(request.param)


def s3_block(server, credentials="aws", folder="models/x"):
    parameters = AwsClientParameters(endpoint_url=server.endpoint)
    if credentials == "aws":
        chosen = AwsCredentials(
            aws_access_key_id=ACCESS_KEY, aws_secret_access_key=SecretStr(SECRET_KEY), aws_client_parameters=parameters
        )
    else:
        chosen = MinIOCredentials(
            minio_root_user=ACCESS_KEY, minio_root_password=SecretStr(SECRET_KEY), aws_client_parameters=parameters
        )
    return S3Bucket(bucket_name=server.new_bucket(), bucket_folder=folder, credentials=chosen)


def save(block):
    name = f"test-{uuid.uuid4().hex[:8]}"
    block.save(name)
    return f"{block.get_block_type_slug()}/{name}"


def picked(slug):
    """Return what the UI sends for a picked block."""
    return {"$ref": {"block_document_id": str(S3Bucket.load(slug.partition("/")[2])._block_document_id)}}


@pytest.mark.parametrize("credentials", ["aws", "minio"])
def test_a_bucket_is_the_same_storage_by_object_by_slug_and_picked_in_the_ui(moto, credentials):
    block = s3_block(moto, credentials)
    slug = save(block)
    given = train.validate_parameters({"train_fn": "m:f", "run": {"name": "run", "storage": picked(slug)}})["run"].storage
    assert parse_storage(slug) == parse_storage(given) == parse_storage(block)


@pytest.mark.parametrize(  # either kind of credentials, each way and either server
    ("server", "credentials", "way"),
    [("moto", "aws", "object"), ("rclone", "minio", "slug"), ("moto", "minio", "json")],
    indirect=["server"],
)
def test_a_training_keeps_its_checkpoints_in_a_bucket(server, credentials, way):
    block = s3_block(server, credentials)
    slug = save(block) if way != "object" else ""
    storage = {"object": block, "slug": slug, "json": picked(slug) if way == "json" else None}[way]
    result = train(
        "trainings:train_epochs",
        {"epochs": 3},
        ScalingConfig(num_workers=2),
        {"name": "run", "storage": storage} if way == "json" else RunConfig(name="run", storage=storage),
        CheckpointConfig(num_to_keep=1),
    )
    assert result.path == f"s3://{block.bucket_name}/models/x/run"
    keys = [item["Key"] for item in server.client().list_objects_v2(Bucket=block.bucket_name)["Contents"]]
    assert sorted(key.rpartition("/")[2] for key in keys if "/checkpoints/" in key) == ["rank-1.json", "state.json"]
    with result.checkpoint.as_directory() as directory:
        assert directory
    again = train("trainings:train_epochs", {"epochs": 4}, run=RunConfig(name="run", storage=block))
    assert again.return_value == {"begun": 3, "attempt": 2}
    assert Result.from_storage(block, "run").attempts == 2


@contextmanager
def server_of_one_key(good):
    """Answer as S3 does that every key but one has expired; what is put stays, in memory."""
    objects = {}

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            objects.update({self.path: body} if self.command == "PUT" else {})
            status, answer = 200, objects.get(self.path, b"")
            if f"Credential={good}/" not in self.headers["Authorization"]:
                status, answer = 400, b"<Error><Code>ExpiredToken</Code><Message>The token has expired.</Message></Error>"
            self.send_response(status)
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", "Sat, 01 Aug 2026 00:00:00 GMT")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        do_PUT = do_GET = answer  # noqa: N815 - http.server's names

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


@pytest.mark.parametrize("way", ["slug", "block", "nested"])
def test_credentials_that_expire_are_read_anew_from_the_saved_block(way):
    def credentials(key, endpoint):
        return AwsCredentials(
            aws_access_key_id=key,
            aws_secret_access_key=SecretStr("x"),
            aws_client_parameters=AwsClientParameters(endpoint_url=endpoint),
        )

    with server_of_one_key("fresh") as endpoint:
        block = S3Bucket(bucket_name="bucket", credentials=credentials("stale", endpoint))
        slug = save(block)
        storage = block if way == "block" else slug
        if way == "nested":
            storage = save(CheckpointStorage(location="below", file_system=S3Bucket.load(slug.partition("/")[2])))
        spec = pickle.loads(cloudpickle.dumps(parse_storage(storage)))  # as it travels to a rank
        S3Bucket(bucket_name="bucket", credentials=credentials("fresh", endpoint)).save(slug.partition("/")[2], overwrite=True)
        opened = open_storage(spec)
        assert opened.url == ("s3://bucket/below" if way == "nested" else "s3://bucket")
        opened.put_bytes("run/x", b"1")
        assert opened.get_bytes("run/x") == b"1"


def test_credentials_that_nobody_renews_are_named():
    with server_of_one_key("fresh") as endpoint:
        spec = StorageSpec("s3://bucket", {"aws_endpoint_url": endpoint, "access_key_id": "stale", "secret_access_key": "x"})
        with pytest.raises(PermissionError, match="the credentials for s3://bucket/x have expired"):
            open_storage(spec).put_bytes("x", b"1")


@pytest.mark.parametrize(
    "away",
    [
        httpx.ConnectError("Prefect's API is away"),
        json.JSONDecodeError("Prefect's API is away", "<html>maintenance</html>", 0),  # a proxy's page, with status 200
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "Prefect's API is away"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_credentials_that_cannot_be_read_anew_now_are_read_anew_later(away):
    """As while Prefect's API restarts: neither the operation nor the process is lost."""
    tries = []

    def renew(source):
        tries.append(source)
        if len(tries) in (1, 3):
            raise away
        return {**options, "aws_access_key_id": "fresh" if len(tries) > 3 else "stale"}

    with server_of_one_key("fresh") as endpoint:
        options = {"aws_endpoint_url": endpoint, "aws_access_key_id": "stale", "aws_secret_access_key": "x"}
        storage = open_spec(StorageSpec("s3://bucket", options, RetryPolicy(0, 0, 0), b"source"), renew)
        with pytest.raises(StorageError, match=r"storing s3://bucket/x .*cannot be read anew: .*Prefect's API is away"):
            storage.put_bytes("x", b"1")
        with pytest.raises(StorageError, match="the credentials for s3://bucket/x have expired"):
            storage.put_bytes("x", b"1")
        patient = open_spec(StorageSpec("s3://bucket", options, RetryPolicy(30, 0, 0), b"source"), renew)
        patient.put_bytes("x", b"1")
    assert tries == [b"source"] * 4


def test_a_process_that_fails_when_its_keys_have_expired_is_started_again(monkeypatch, tmp_path):
    """As while the vault that it asks is away for a moment."""
    (tmp_path / "config").write_text(f"[default]\ncredential_process = sh {tmp_path}/tool\n")
    (tmp_path / "tool").write_text(
        f"cd {tmp_path}; echo >> starts\n"
        "case $(wc -l < starts) in 1) key=stale;; 2) exit 1;; *) key=fresh;; esac\n"
        """echo '{"Version": 1, "AccessKeyId": "'$key'", "SecretAccessKey": "x"}'\n"""
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with server_of_one_key("fresh") as endpoint:
        storage = open_storage(StorageSpec("s3://bucket", {"aws_endpoint_url": endpoint}, RetryPolicy(30, 0, 0)))
        storage.put_bytes("x", b"1")
    assert (tmp_path / "starts").read_text().count("\n") == 3


def test_a_block_that_is_gone_when_its_credentials_expire_is_named():
    def renew(_):
        raise ValueError("there is no block 's3-bucket/x'")

    with server_of_one_key("fresh") as endpoint:
        options = {"aws_endpoint_url": endpoint, "aws_access_key_id": "stale", "aws_secret_access_key": "x"}
        storage = open_spec(StorageSpec("s3://bucket", options, RetryPolicy(30, 0, 0), b"source"), renew)
        with pytest.raises(ValueError, match="there is no block"):
            storage.put_bytes("x", b"1")


def test_wrong_credentials_are_told_before_any_rank_starts(rclone):
    block = s3_block(rclone)
    block.credentials.aws_secret_access_key = SecretStr("wrong-secret")
    with pytest.raises(PermissionError, match="check the credentials") as caught:
        train("trainings:train_epochs", {"epochs": 1}, run=RunConfig(name="run", storage=block))
    assert "wrong-secret" not in str(caught.value)


def test_a_missing_bucket_is_told_before_any_rank_starts(moto):
    block = s3_block(moto)
    block.bucket_name = "no-such-bucket"
    with pytest.raises(OSError, match="no-such-bucket"):
        train("trainings:train_epochs", {"epochs": 1}, run=RunConfig(name="run", storage=block))


def test_secrets_reach_neither_logs_nor_storage_nor_the_ranks_arguments(moto, caplog, capfd):
    block = s3_block(moto)
    train("trainings:tell_environment", {}, ScalingConfig(num_workers=2), RunConfig(name="run", storage=block))
    assert SECRET_KEY not in caplog.text
    output = capfd.readouterr()
    assert SECRET_KEY not in output.out + output.err
    store = CheckpointStore.open(block, "run")
    for info in store.storage.list("run/"):
        assert SECRET_KEY.encode() not in store.storage.get_bytes(info.key)


def test_a_ranks_environment_holds_no_key_of_prefects_api_unless_a_storage_of_it_is_a_block(tmp_path, monkeypatch):
    """Which may have to be read again when its credentials expire."""
    variables = {
        "PREFECT_CLIENT_CUSTOM_HEADERS": '{"X-Of-A-Proxy": "secret"}',
        "PREFECT_SERVER_API_AUTH_STRING": "secret",
        "PREFECT_SERVER_DOCKET_URL": "redis://me:secret@host",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    one = ScalingConfig(num_workers=1)
    hidden = {"none_of": [*variables]}
    train("trainings:tell_environment", hidden, one, RunConfig(name="run", storage=str(tmp_path)))
    shown = {"more": [*variables]}
    train("trainings:tell_environment", shown, one, RunConfig(name="run", storage=LocalFileSystem(basepath=str(tmp_path))))
    seed = CheckpointStore.open(LocalFileSystem(basepath=str(tmp_path / "seed")), "seed")
    Attempt(seed).session().report({}, folder(tmp_path / "c", model="1"))
    resumed = RunConfig(name="resumed", storage=str(tmp_path))
    train("trainings:tell_environment", shown, one, resumed, resume_from=seed.checkpoint(seed.latest()))


def test_a_local_file_system_block_is_its_folder(tmp_path):
    assert resolve_storage(LocalFileSystem(basepath=str(tmp_path))).url == str(tmp_path)
    slug = save(LocalFileSystem(basepath=str(tmp_path)))
    assert parse_storage(slug).url == str(tmp_path)


def test_a_remote_file_system_block_is_its_url_and_s3fs_words_are_understood(moto):
    settings = {"key": ACCESS_KEY, "secret": SECRET_KEY, "client_kwargs": {"endpoint_url": moto.endpoint}}
    block = RemoteFileSystem(basepath=f"s3://{moto.new_bucket()}/x", settings=settings)
    store = CheckpointStore.open(block, "run")
    store.storage.put_bytes("run/x", b"1")
    assert CheckpointStore.open(save(block), "run").storage.get_bytes("run/x") == b"1"
    assert resolve_storage(RemoteFileSystem(basepath="memory://x")).url == "memory://x"


def test_a_checkpoint_storage_block_is_a_place_or_a_place_in_another_block(tmp_path, moto):
    assert parse_storage(CheckpointStorage(location=str(tmp_path))).url == str(tmp_path)
    nested = CheckpointStorage(location="team/", file_system=s3_block(moto))
    assert parse_storage(nested).url.endswith("/models/x/team")
    slug = save(nested)
    CheckpointStore.open(slug, "run").storage.put_bytes("run/x", b"1")
    assert parse_storage(slug).options["aws_access_key_id"] == ACCESS_KEY


@pytest.mark.parametrize("is_saved", [True, False])
@pytest.mark.parametrize(
    "block",
    [
        LocalFileSystem(basepath="/data"),
        LocalFileSystem(),
        RemoteFileSystem(basepath="memory://data"),
        RemoteFileSystem(basepath="sftp://host/data", settings={"username": "me"}),
        S3Bucket(bucket_name="bucket", credentials=AwsCredentials()),
        S3Bucket(bucket_name="bucket", credentials=MinIOCredentials(minio_root_user="me", minio_root_password="x")),
        S3Bucket(bucket_name="bucket", bucket_folder="folder", credentials=AwsCredentials(aws_access_key_id="key")),
    ],
    ids=lambda block: f"{type(block).__name__}-{len(block.model_dump_json())}",
)
def test_a_saved_checkpoint_storage_block_keeps_the_type_of_the_block_in_it(block, is_saved):
    if is_saved:
        slug = save(block)
        block = type(block).load(slug.partition("/")[2])
    saved = save(CheckpointStorage(location="below", file_system=block))
    loaded = CheckpointStorage.load(saved.partition("/")[2])
    assert type(loaded.file_system) is type(block)
    assert parse_storage(saved) == parse_storage(CheckpointStorage(location="below", file_system=block))


def test_a_session_token_signs_the_requests():
    tokens = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self):
            tokens.append(self.headers["X-Amz-Security-Token"])
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        parameters = AwsClientParameters(endpoint_url=f"http://127.0.0.1:{http.server_port}")
        credentials = AwsCredentials(
            aws_access_key_id="key",
            aws_secret_access_key=SecretStr("x"),
            aws_session_token="token-of-a-session",
            aws_client_parameters=parameters,
        )
        open_storage(S3Bucket(bucket_name="bucket", credentials=credentials)).put_bytes("run/x", b"1")
        http.shutdown()
    assert tokens == ["token-of-a-session"]


@contextmanager
def server_with_its_own_certificate(folder):
    """Answer every put over TLS, with a certificate of an authority that nobody trusts: `ca.pem`."""

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def do_GET(self):
            body = b"<ListMultipartUploadsResult><IsTruncated>false</IsTruncated></ListMultipartUploadsResult>"
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    new = ["openssl", "req", "-x509", "-nodes", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    leaf = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE"]
    for made in (
        ["-subj", "/CN=company", "-keyout", "ca-key.pem", "-out", "ca.pem"],
        ["-subj", "/CN=localhost", "-keyout", "key.pem", "-out", "cert.pem", "-CA", "ca.pem", "-CAkey", "ca-key.pem", *leaf],
    ):
        subprocess.run([*new, *made], cwd=folder, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.socket = context.wrap_socket(http.socket, server_side=True)
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()
        yield f"https://127.0.0.1:{http.server_port}"
        http.shutdown()


def test_verify_false_is_what_trusts_a_servers_own_certificate(tmp_path):
    with server_with_its_own_certificate(tmp_path) as endpoint:
        for verify in (False, True):
            credentials = AwsCredentials(
                aws_access_key_id="key",
                aws_secret_access_key=SecretStr("x"),
                aws_client_parameters=AwsClientParameters(endpoint_url=endpoint, verify=verify),
            )
            spec = replace(parse_storage(S3Bucket(bucket_name="bucket", credentials=credentials)), retry=RetryPolicy(0.0))
            if not verify:
                open_storage(spec).put_bytes("run/x", b"1")
                continue
            with pytest.raises(OSError, match=r"the certificate of the server .* is not accepted"):
                open_storage(spec).put_bytes("run/x", b"1")


@pytest.mark.parametrize("way", ["block", "remote", "variable"])
def test_a_servers_certificate_of_a_company_is_trusted_once_it_is_given(tmp_path, monkeypatch, caplog, way):
    caplog.set_level("INFO")
    with server_with_its_own_certificate(tmp_path) as endpoint:
        if way == "block":
            parameters = AwsClientParameters(endpoint_url=endpoint, verify_cert_path=tmp_path / "ca.pem")
            credentials = AwsCredentials(aws_access_key_id="key", aws_secret_access_key="x", aws_client_parameters=parameters)
            spec = parse_storage(S3Bucket(bucket_name="bucket", credentials=credentials))
        elif way == "remote":
            client = {"endpoint_url": endpoint, "verify": str(tmp_path / "ca.pem")}
            spec = parse_storage(
                RemoteFileSystem(basepath="s3://bucket", settings={"key": "key", "secret": "x", "client_kwargs": client})
            )
        else:
            monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "ca.pem"))
            spec = StorageSpec("s3://bucket", {"endpoint_url": endpoint, "access_key_id": "key", "secret_access_key": "x"})
        if way != "variable":
            (tmp_path / "ca.pem").unlink()  # as on a rank's machine
        storage = open_storage(replace(spec, retry=RetryPolicy(0.0)))
        storage.put_bytes("run/x", b"1")
        storage.remove_interrupted("run/", 3600)
    assert "cannot be aborted" not in caplog.text


def test_a_variable_that_names_no_certificates_is_named(monkeypatch):
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere/ca.pem")
    with pytest.raises(ValueError, match=r"AWS_CA_BUNDLE.*'/nowhere/ca.pem'"):
        open_storage("s3://bucket/x")


def _spec_with_config(way, endpoint, config):
    """Return the specification of a block of either type whose client has this endpoint and boto3's `config`."""
    if way == "block":
        parameters = AwsClientParameters(endpoint_url=endpoint, config=config)
        credentials = AwsCredentials(aws_access_key_id="key", aws_secret_access_key="x", aws_client_parameters=parameters)
        return parse_storage(S3Bucket(bucket_name="bucket", credentials=credentials))
    settings = {"key": "key", "secret": "x", "endpoint_url": endpoint, "config_kwargs": config}
    return parse_storage(RemoteFileSystem(basepath="s3://bucket", settings=settings))


@pytest.mark.parametrize("way", ["block", "remote"])
def test_the_proxy_of_a_block_is_used(moto, way):
    server = "http://s3.example.invalid"
    with proxied(moto.endpoint) as proxy:
        proxy.change = lambda *_: Response(200, b"<ListMultipartUploadsResult/>", {"ETag": '"1"'})
        proxies = {"proxies": {"http": proxy.endpoint, "https": "http://other.invalid"}}
        storage = open_storage(replace(_spec_with_config(way, server, proxies), retry=RetryPolicy(0.0)))
        storage.put_bytes("run/x", b"1")
        storage.remove_interrupted("run/", 3600)
        assert [it.partition("?")[0] for it in proxy.requests] == [f"PUT {server}/bucket/run/x", f"GET {server}/bucket"]


@pytest.mark.parametrize("way", ["block", "remote"])
@pytest.mark.parametrize("host", ["s3.example.invalid", "bucket.s3.example.invalid"])
def test_a_bucket_is_in_the_name_of_its_host_where_a_block_says_so(moto, way, host):
    with proxied(moto.endpoint) as proxy:
        proxy.change = lambda *_: Response(200, b"<ListMultipartUploadsResult/>", {"ETag": '"1"'})
        config = {"proxies": {"http": proxy.endpoint}, "s3": {"addressing_style": "virtual"}}
        storage = open_storage(replace(_spec_with_config(way, f"http://{host}", config), retry=RetryPolicy(0.0)))
        storage.put_bytes("run/x", b"1")
        storage.remove_interrupted("run/", 3600)
        named = "http://bucket.s3.example.invalid"
        assert [it.partition("?")[0] for it in proxy.requests] == [f"PUT {named}/run/x", f"GET {named}/"]


@pytest.mark.parametrize("host", ["s3.example.invalid", "bucket.s3.example.invalid"])
def test_a_bucket_is_in_the_name_of_a_host_that_a_variable_gives(moto, monkeypatch, host):
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}")
    with proxied(moto.endpoint) as proxy:
        proxy.change = lambda *_: Response(200, b"", {"ETag": '"1"'})
        config = {"proxies": {"https": proxy.endpoint}, "s3": {"addressing_style": "virtual"}}
        open_storage(replace(_spec_with_config("block", None, config), retry=RetryPolicy(0.0))).put_bytes("run/x", b"1")
        assert proxy.requests == ["PUT http://bucket.s3.example.invalid/run/x"]


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "http://[::1]:1"])
def test_an_address_that_a_variable_gives_has_no_names_of_buckets_below_it(monkeypatch, address):
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    spec = _spec_with_config("block", None, {"s3": {"addressing_style": "virtual"}})
    with pytest.raises(StorageError, match=re.escape(f"{address}/bucket/run/x")):
        open_storage(replace(spec, retry=RetryPolicy(0.0))).get_bytes("run/x")


@pytest.mark.parametrize("way", ["block", "remote"])
def test_the_timeouts_of_a_block_are_used(moto, way):
    config = {"read_timeout": 0.5, "connect_timeout": 300}
    options = _spec_with_config(way, moto.endpoint, config).options
    assert (options["read_timeout"], options["connect_timeout"]) == ("500ms", "300000ms")
    given_up = threading.Event()

    def answer_late(*_):
        given_up.wait(20)  # by itself, a storage waits for two minutes
        return Response(200, b"1", {"ETag": '"1"', "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"})

    with proxied(moto.endpoint) as proxy:
        proxy.change = answer_late
        storage = open_storage(replace(_spec_with_config(way, proxy.endpoint, config), retry=RetryPolicy(0.0)))
        with pytest.raises(StorageError):
            storage.get_bytes("run/x")
        given_up.set()


@pytest.mark.parametrize("way", ["block", "remote"])
@pytest.mark.parametrize(
    ("config", "host"),
    [
        ({"use_fips_endpoint": True}, "bucket.s3-fips.us-west-2.amazonaws.com"),
        ({"use_dualstack_endpoint": True}, "s3.dualstack.us-west-2.amazonaws.com"),
        ({"s3": {"use_dualstack_endpoint": True}}, "s3.dualstack.us-west-2.amazonaws.com"),
        ({"use_fips_endpoint": True, "s3": {"addressing_style": "virtual"}}, "bucket.s3-fips.us-west-2.amazonaws.com"),
        ({"use_fips_endpoint": True, "region_name": "us-east-2"}, "bucket.s3-fips.us-east-2.amazonaws.com"),
        ({"region_name": "us-east-2"}, "s3.us-east-2.amazonaws.com"),
    ],
)
def test_a_block_says_which_hosts_of_aws_are_requested(monkeypatch, way, config, host):
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    storage = open_storage(_spec_with_config(way, None, config))._storage
    assert urlsplit(obstore.sign(storage._store, "GET", "run/x", timedelta(minutes=1))).netloc == host


def test_a_block_with_a_profile_says_which_hosts_of_aws_are_requested(monkeypatch, tmp_path):
    (tmp_path / "config").write_text("[profile lab]\nregion = eu-west-3\nuse_dualstack_endpoint = true\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    parameters = AwsClientParameters(config={"use_fips_endpoint": True})
    credentials = AwsCredentials(profile_name="lab", region_name="us-west-2", aws_client_parameters=parameters)
    options = resolve_storage(S3Bucket(bucket_name="bucket", credentials=credentials)).options
    assert options["aws_endpoint_url"] == "https://s3-fips.dualstack.us-west-2.amazonaws.com"


@pytest.mark.parametrize("way", ["block", "remote"])
def test_an_endpoint_of_a_block_comes_before_the_hosts_of_aws(way):
    options = _spec_with_config(way, "http://minio:9000", {"use_fips_endpoint": True}).options
    assert options == _spec_with_config(way, "http://minio:9000", {}).options


@pytest.mark.parametrize("signature", ["unsigned", UNSIGNED])
def test_a_block_without_signatures_gives_no_keys(signature):
    parameters = AwsClientParameters(endpoint_url="http://minio:9000", config={"signature_version": signature})
    for credentials in (
        AwsCredentials(aws_access_key_id="key", aws_secret_access_key="x", aws_client_parameters=parameters),
        MinIOCredentials(minio_root_user="key", minio_root_password="x", aws_client_parameters=parameters),
    ):
        options = resolve_storage(S3Bucket(bucket_name="bucket", credentials=credentials)).options
        assert options == {"aws_endpoint_url": "http://minio:9000", "aws_skip_signature": "true"}


@pytest.mark.parametrize("way", ["block", "remote"])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"client_cert": "me.pem"}, "client_cert"),
        ({"proxies_config": {"proxy_ca_bundle": "ca.pem"}}, "proxies_config"),
        ({"ignore_configured_endpoint_urls": True}, "ignore_configured_endpoint_urls"),
        ({"signature_version": "s3"}, "signature_version"),
        ({"s3": {"use_accelerate_endpoint": True}}, r"s3\.use_accelerate_endpoint"),
    ],
)
def test_a_setting_of_boto3_that_would_have_no_effect_is_refused(way, config, name):
    with pytest.raises(ValueError, match=f"the settings {name} of its config have no effect: remove them from the block"):
        _spec_with_config(way, "http://minio:9000", config)


@pytest.mark.parametrize("way", ["block", "remote"])
def test_settings_of_boto3_that_do_not_change_what_is_stored_are_left_out(way):
    config = {"retries": {"mode": "adaptive"}, "max_pool_connections": 50, "signature_version": "s3v4", "user_agent_extra": "x"}
    checksums = {"request_checksum_calculation": "when_required", "s3": {"payload_signing_enabled": True}}
    spec = _spec_with_config(way, "http://minio:9000", {**config, **checksums})
    assert spec.options == _spec_with_config(way, "http://minio:9000", {}).options


@pytest.mark.parametrize("address", ["http://127.0.0.1:9000", "http://[::1]:9000", "https://127.0.0.1"])
def test_an_address_has_no_names_of_buckets_below_it(address):
    options = _spec_with_config("block", address, {"s3": {"addressing_style": "virtual"}}).options
    assert (options["aws_endpoint_url"], "aws_virtual_hosted_style_request" in options) == (address, False)


def test_a_block_with_a_profile_has_its_region_and_endpoint(monkeypatch, tmp_path):
    (tmp_path / "config").write_text("[profile lab]\nregion = eu-west-3\nendpoint_url = http://lab:9000\n")
    (tmp_path / "credentials").write_text("[lab]\naws_access_key_id = key\naws_secret_access_key = x\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)

    def places(**chosen):
        block = S3Bucket(bucket_name="bucket", credentials=AwsCredentials(profile_name="lab", **chosen))
        options = resolve_storage(block).options
        return options.get("aws_region"), options.get("aws_endpoint_url")

    assert places() == ("eu-west-3", "http://lab:9000")
    client = AwsClientParameters(endpoint_url="http://other:9000")
    assert places(region_name="us-west-2", aws_client_parameters=client) == ("us-west-2", "http://other:9000")
    with monkeypatch.context() as variables:
        variables.setenv("AWS_ENDPOINT_URL", "http://variable:9000")  # as boto3: before the profile's
        assert places() == ("eu-west-3", "http://variable:9000")
    section = "services = s\n[services s]\ns3 =\n  endpoint_url = http://section:9000\n"
    (tmp_path / "config").write_text(f"[profile lab]\nregion = eu-west-3\nendpoint_url = http://lab:9000\n{section}")
    assert places() == ("eu-west-3", "http://section:9000")
    assert places(region_name="us-west-2") == ("us-west-2", "http://section:9000")
    (tmp_path / "config").write_text("[profile lab]\nregion = cn-north-1\n")
    assert places() == ("cn-north-1", "https://s3.cn-north-1.amazonaws.com.cn")
    assert places(region_name="eu-west-3") == ("eu-west-3", None)


def test_a_block_whose_profile_has_no_keys_leaves_them_to_the_machine(monkeypatch, tmp_path, moto):
    (tmp_path / "config").write_text(f"[profile lab]\nregion = eu-west-3\nendpoint_url = {moto.endpoint}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    moto.client().create_bucket(Bucket="keys-in-variables")
    block = S3Bucket(bucket_name="keys-in-variables", credentials=AwsCredentials(profile_name="lab"))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    spec = resolve_storage(block)
    assert spec.options == {"aws_region": "eu-west-3", "aws_endpoint_url": moto.endpoint}
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    assert resolve_storage(block) == spec
    open_storage(spec).put_bytes("run/x", b"1")


def test_a_profile_of_a_block_that_does_not_exist_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    with pytest.raises(ValueError, match=r"nowhere.* the block's profile_name"):
        resolve_storage(S3Bucket(bucket_name="bucket", credentials=AwsCredentials(profile_name="nowhere")))


@pytest.mark.parametrize("name", ["profile", "requester_pays", "s3_additional_kwargs"])
def test_a_setting_of_s3fs_that_would_have_no_effect_is_refused(name):
    block = RemoteFileSystem(basepath="s3://bucket/x", settings={"key": "key", "secret": "x", name: {"a": "b"}})
    with pytest.raises(ValueError, match=rf"settings {name} have no effect"):
        resolve_storage(block)


def test_a_block_that_was_never_saved_is_named():
    with pytest.raises(ValueError, match="nosuchname"):
        train("trainings:train_epochs", {"epochs": 1}, run=RunConfig(name="run", storage="s3-bucket/nosuchname"))


def test_a_block_that_holds_no_files_is_refused():
    with pytest.raises(ValueError, match="cannot be stored with a AwsCredentials"):
        parse_storage(AwsCredentials())


@pytest.mark.parametrize("password_server", ["sftp", "ftp"], indirect=True)
@pytest.mark.parametrize("kind", ["field", "settings", "nested"])
def test_a_password_in_a_block_opens_its_server_and_is_shown_nowhere(password_server, kind, request):
    place, password = password_server
    url = f"{request.node.callspec.params['password_server']}://me@{place}"
    block = RemoteFileSystem(basepath=url, settings={"password": password})
    if kind == "field":
        block = CheckpointStorage(location=url, password=SecretStr(password))
    if kind == "nested":
        block = CheckpointStorage(location="", file_system=block)
    slug = save(block)
    for storage in (block, slug):
        opened = open_storage(storage)
        opened.put_bytes("run/x", b"123")
        assert opened.get_bytes("run/x") == b"123"
        assert [info.key for info in opened.list("")] == ["run/x"]
        opened.delete(["run/x"])
        shown = f"{opened.url} {parse_storage(storage)} {train.serialize_parameters({'run': RunConfig(storage=storage)})}"
        assert password not in shown
    if kind == "field":
        assert password not in repr(block)
        assert password not in CheckpointStorage.load(slug.partition("/")[2]).model_dump_json()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"location": "sftp://host/x"}, "names no user"),
        ({"location": "/data"}, "names no user"),
        ({"file_system": LocalFileSystem()}, "the file system's own fields"),
    ],
)
def test_a_password_that_belongs_to_nothing_is_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        parse_storage(CheckpointStorage(password=SecretStr("x"), **fields))


@pytest.mark.parametrize(
    "storage",
    [
        "sftp://me:s3cr3t@host/x",
        CheckpointStorage(location="sftp://me:s3cr3t@host/x"),
        {"basepath": "ftp://me:s3cr3t@host/x"},
        CheckpointStorage(file_system=RemoteFileSystem(basepath="ftp://me:s3cr3t@host/x")),
    ],
    ids=["url", "location", "basepath", "nested"],
)
def test_a_password_in_a_url_is_refused_in_a_form_and_by_the_config_without_showing_it(storage):
    with pytest.raises(ValueError, match="the password in its field") as caught:
        RunConfig(storage=storage)
    assert "s3cr3t" not in str(caught.value)


@pytest.mark.parametrize("flow", [evaluate, prune])
@pytest.mark.parametrize(
    "storage",
    [
        RemoteFileSystem(basepath="sftp://me@host/x", settings={"password": "s3cr3t"}),
        CheckpointStorage(file_system=RemoteFileSystem(basepath="sftp://me@host/x", settings={"password": "s3cr3t"})),
        CheckpointStorage(location="sftp://me:s3cr3t@host/x"),
        S3Bucket(bucket_name="x", credentials=AwsCredentials(aws_access_key_id="me", aws_session_token="s3cr3t")),
    ],
    ids=["settings", "nested", "location", "token"],
)
def test_a_secret_in_a_block_is_not_among_the_parameters_that_prefect_shows(flow, storage):
    shown = json.dumps(flow.serialize_parameters({"storage": storage}))
    assert "s3cr3t" not in shown
    assert "host/x" in shown or "bucket_name" in shown


@pytest.mark.parametrize(
    "settings",
    [
        {"auth": ("me", "s3cr3t")},
        {"connection_string": "AccountName=me;AccountKey=s3cr3t"},
        {"pwd": "s3cr3t"},
        {"sas": "s3cr3t"},
        {"hosts": [{"password": "s3cr3t"}]},
        {"proxies": {"https": "http://me:s3cr3t@proxy:3128"}},
    ],
    ids=str,
)
def test_a_secret_in_the_settings_of_a_block_is_masked_whatever_its_form(settings):
    block = RemoteFileSystem(basepath="webdav://host/x", settings={**settings, "port": 22, "use_auth": True})
    shown = RunConfig(storage=block).model_dump(mode="json")["storage"]
    assert "s3cr3t" not in json.dumps(shown)
    assert (shown["basepath"], shown["settings"]["port"], shown["settings"]["use_auth"]) == ("webdav://host/x", 22, True)
    assert "s3cr3t" in str(block.settings), "the training has it"


@pytest.mark.parametrize("login", ["me:s3cr3t", "me:s3cr3t/x", "me:s3cr3t@x", "me@mail.example:s3cr3t"])
def test_a_password_in_a_url_is_not_among_the_parameters_that_prefect_stores_before_it_is_refused(login):
    url = f"sftp://{login}@host:22/x"
    shown = "sftp://**********@host:22/x"
    assert prune.serialize_parameters({"storage": url}) == {"storage": shown}
    assert evaluate.serialize_parameters({"checkpoints": [url, "run/id"]}) == {"checkpoints": [shown, "run/id"]}
    assert train.serialize_parameters({"run": {"storage": url}, "resume_from": url}) == {
        "run": {"storage": shown},
        "resume_from": shown,
    }
    with pytest.raises(ParameterTypeError, match="holds credentials") as caught:
        prune.validate_parameters({"storage": url})
    assert "s3cr3t" not in str(caught.value)


def test_the_form_takes_no_url_with_a_password():
    schema = next(it for it in RunConfig.model_json_schema()["properties"]["storage"]["anyOf"] if it.get("type") == "string")
    assert re.search(schema["pattern"], "sftp://me@host:22/a:b@c")
    assert not re.search(schema["pattern"], "sftp://me:s3cr3t@host/x")


@pytest.mark.parametrize("slug", ["local-file-system/nope", "checkpointstorage/nope", "checkpoint-storage/nope"])
def test_a_wrong_name_of_a_block_lists_the_saved_ones(slug, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = save(LocalFileSystem(basepath=str(tmp_path)))
    with pytest.raises(ValueError, match=f"there is no block '{slug}'; saved are: .*{saved}"):
        train("trainings:train_epochs", run=RunConfig(storage=slug))
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_looked_up_outside_of_a_flow_is_refused_without_the_library_s_traceback(moto, monkeypatch):
    for name, value in moto.options().items():
        monkeypatch.setenv(name.upper(), value)
    for error, look in (
        (ValueError, lambda: CheckpointStore.open("local-file-system/nope", "x")),
        (ValueError, lambda: load_cluster("torch-cluster/nope")),
        (ValueError, lambda: plan_deployment("train/nope")),
        (ValueError, lambda: deploy("x", "trainings:train_epochs", work_pool="nope")),
        (FileNotFoundError, lambda: Result.from_storage("s3://no-such-bucket/x", "x")),
    ):
        with pytest.raises(error) as caught:
            look()
        assert "The above exception" not in "".join(traceback.format_exception(caught.value))
