"""GcsBucket and AzureBlobStorageContainer blocks: their fields as a storage's specification, and real requests with it."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.blocks import CheckpointStorage
from prefect_torch.ckpt.storage.opening import open_storage, parse_storage
from prefect_torch.tasks import RunConfig


def gcs_bucket(**fields):
    """Return a block of Google's; its module is imported here, for half a second, which every worker would take above."""
    gcp = pytest.importorskip("prefect_gcp")
    return gcp.GcsBucket(bucket="bucket", bucket_folder="models", gcp_credentials=gcp.GcpCredentials(**fields))


def azure_container(name="c", folder="", **fields):
    """Return a block of Azure's, imported here, too."""
    credentials = pytest.importorskip("prefect_azure.credentials").AzureBlobStorageCredentials(**fields)
    container = pytest.importorskip("prefect_azure.blob_storage").AzureBlobStorageContainer
    return container(container_name=name, credentials=credentials, base_folder=folder)


@contextmanager
def keeping_objects():
    """Keep what is put, as Google's XML API does: no server that pip or npm has speaks more of it than single objects."""
    objects = {}

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            objects.update({self.path: body} if self.command == "PUT" else {})
            answer = b"" if self.command == "PUT" else objects.get(self.path)
            self.send_response(404 if answer is None else 200)
            answer = b"<Error><Code>NoSuchKey</Code></Error>" if answer is None else answer
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
        yield f"http://127.0.0.1:{http.server_port}", objects
        http.shutdown()


@pytest.fixture(scope="module")
def private_key():
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


@pytest.fixture
def key_of(private_key):
    def key_of(endpoint):
        """Return a service account's key that leads to `endpoint` and asks no other server for a token."""
        names = {"type": "service_account", "project_id": "project", "private_key_id": "1", "client_email": "me@example.com"}
        urls = {"token_uri": f"{endpoint}/token", "gcs_base_url": endpoint}
        return {**names, **urls, "private_key": private_key, "disable_oauth": True}

    return key_of


@pytest.mark.parametrize("kind", ["info", "file"])
def test_a_gcs_bucket_is_opened_with_the_key_of_its_service_account(kind, key_of, tmp_path):
    with keeping_objects() as (endpoint, objects):
        (tmp_path / "key.json").write_text(json.dumps(key_of(endpoint)))
        fields = (
            {"service_account_info": key_of(endpoint)} if kind == "info" else {"service_account_file": tmp_path / "key.json"}
        )
        storage = open_storage(RunConfig(storage=gcs_bucket(**fields)).storage)
        assert storage.url == "gs://bucket/models"
        storage.put_bytes("run/x", b"123")
        assert storage.get_bytes("run/x") == b"123"
        assert list(objects.values()) == [b"123"]
        with pytest.raises(FileNotFoundError):
            storage.get_bytes("run/y")


def azure_block(server, key=None, folder="models/x/"):
    return azure_container(server.new_container(), folder, connection_string=server.connection_string(key))


def test_an_azure_container_holds_the_checkpoints_of_runs(azurite):
    block = azure_block(azurite)
    storage = open_storage(RunConfig(storage=block).storage)
    assert storage.url == f"az://{block.container_name}/models/x"
    storage.put_bytes("run/x", b"123")
    assert storage.get_bytes("run/x") == b"123"
    assert [info.key for info in storage.list("run/")] == ["run/x"]
    store = CheckpointStore.open(block, "run")
    assert store.list() == []
    storage.delete(["run/x"])
    assert list(storage.list("")) == []


def test_a_container_with_a_wrong_key_is_a_permission_error_that_shows_no_key(azurite):
    wrong = "d3Jvbmcta2V5"
    with pytest.raises(PermissionError) as caught:
        open_storage(azure_block(azurite, wrong)).put_bytes("run/x", b"1")
    assert wrong not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (
            {"connection_string": "AccountName=acc;AccountKey=a2V5;EndpointSuffix=core.example.net"},
            {
                "azure_storage_account_name": "acc",
                "azure_storage_account_key": "a2V5",
                "azure_storage_endpoint": "https://acc.blob.core.example.net",
            },
        ),
        (
            {"connection_string": "BlobEndpoint=https://acc.blob.core.windows.net/;SharedAccessSignature=?sv=1&sig=x%3D"},
            {
                "azure_storage_account_name": "acc",
                "azure_storage_sas_key": "sv=1&sig=x%3D",
                "azure_storage_endpoint": "https://acc.blob.core.windows.net",
            },
        ),
        (
            {"account_url": "https://acc.blob.core.windows.net/", "client_id": "c", "tenant_id": "t", "client_secret": "s"},
            {
                "azure_storage_account_name": "acc",
                "azure_storage_endpoint": "https://acc.blob.core.windows.net",
                "azure_storage_client_id": "c",
                "azure_storage_tenant_id": "t",
                "azure_storage_client_secret": "s",
            },
        ),
        (
            {"account_url": "http://127.0.0.1:10000/acc"},
            {"azure_storage_account_name": "acc", "azure_storage_endpoint": "http://127.0.0.1:10000/acc"},
        ),
    ],
)
def test_every_login_of_an_azure_block_reaches_the_client(fields, expected):
    spec = parse_storage(azure_container(**fields))
    assert (spec.url, spec.options) == ("az://c", expected)
    assert open_storage(spec).url == "az://c"  # the client knows each of these options by this name


def test_a_connection_string_without_an_account_is_refused():
    block = azure_container(connection_string="AccountKey=a2V5")
    with pytest.raises(ValueError, match="give AccountName") as caught:
        parse_storage(block)
    assert "a2V5" not in str(caught.value)


def test_a_block_opens_the_store_of_a_run(tmp_path):
    store = CheckpointStorage(location=str(tmp_path)).get_store("run")
    assert store.list() == []
    store.storage.put_bytes("run/x", b"1")
    assert (tmp_path / "run/x").read_bytes() == b"1"
