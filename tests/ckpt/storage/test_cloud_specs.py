"""GcsBucket and AzureBlobStorageContainer blocks: their fields as a storage's specification, and real requests with it."""

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from google_server import keeping_objects, service_account_key
from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.blocks import CheckpointStorage
from prefect_torch.ckpt.storage.opening import open_storage, parse_storage
from prefect_torch.ckpt.storage.protocol import RetryPolicy
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


@pytest.mark.parametrize("kind", ["info", "file"])
def test_a_gcs_bucket_is_opened_with_the_key_of_its_service_account(kind, tmp_path):
    with keeping_objects() as (endpoint, objects):
        key = service_account_key(endpoint)
        (tmp_path / "key.json").write_text(json.dumps(key))
        fields = {"service_account_info": key} if kind == "info" else {"service_account_file": tmp_path / "key.json"}
        storage = open_storage(RunConfig(storage=gcs_bucket(**fields)).storage)
        assert storage.url == "gs://bucket/models"
        storage.put_bytes("run/x", b"123")
        assert storage.get_bytes("run/x") == b"123"
        assert objects == {"models/run/x": b"123"}
        with pytest.raises(FileNotFoundError):
            storage.get_bytes("run/y")


def test_the_address_of_a_gcs_server_may_be_given_by_its_variable(monkeypatch):
    with keeping_objects() as (endpoint, objects):
        key = service_account_key(endpoint)
        monkeypatch.setenv("GOOGLE_BASE_URL", str(key.pop("gcs_base_url")))
        monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
        open_storage(replace(parse_storage("gs://bucket/runs"), retry=RetryPolicy(0.0))).put_bytes("run/x", b"1")
        assert objects == {"runs/run/x": b"1"}


@pytest.mark.parametrize("kind", ["external_account", "impersonated_service_account"])
def test_a_login_of_google_that_the_client_does_not_know_is_refused_with_those_that_it_does(monkeypatch, tmp_path, kind):
    (tmp_path / "login.json").write_text(json.dumps({"type": kind, "client_secret": "s3cr3t"}))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "login.json"))
    with pytest.raises(
        ValueError, match="neither workload identity federation nor impersonation: give a service account"
    ) as caught:
        open_storage("gs://bucket")
    assert "s3cr3t" not in str(caught.value)


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


@pytest.mark.parametrize("login", ["AccountKey", "SharedAccessSignature"])
@pytest.mark.parametrize(
    "variables",
    [
        {"AZURE_STORAGE_ACCOUNT_KEY": "b3RoZXI="},
        {"AZURE_STORAGE_TOKEN": "other"},
        {"AZURE_CLIENT_ID": "pod", "AZURE_TENANT_ID": "t", "AZURE_CLIENT_SECRET": "s"},
        {"AZURE_CLIENT_ID": "pod", "AZURE_TENANT_ID": "t", "AZURE_FEDERATED_TOKEN_FILE": "/dev/null"},
    ],
    ids="-".join,
)
def test_the_login_of_a_container_comes_before_that_of_the_machine(monkeypatch, azurite, login, variables):
    blob = pytest.importorskip("azure.storage.blob")
    container, until = azurite.new_container(), datetime.now(timezone.utc) + timedelta(hours=1)
    account, rights = (azurite.account, container), blob.ContainerSasPermissions(read=True, write=True, create=True, list=True)
    sas = blob.generate_container_sas(*account, account_key=azurite.key, permission=rights, expiry=until)
    text = azurite.connection_string().replace(
        f"AccountKey={azurite.key}", f"{login}={azurite.key if login == 'AccountKey' else sas}"
    )
    for name, value in {"AZURE_AUTHORITY_HOST": "http://127.0.0.1:1", **variables}.items():
        monkeypatch.setenv(name, value)
    storage = open_storage(replace(parse_storage(azure_container(container, connection_string=text)), retry=RetryPolicy(0.0)))
    storage.put_bytes("run/x", b"123")
    assert storage.get_bytes("run/x") == b"123"


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


@pytest.mark.parametrize("variable", ["AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"])
def test_a_url_is_opened_by_the_variables_of_an_emulator(monkeypatch, azurite, variable):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", azurite.account)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", azurite.key)
    monkeypatch.setenv(variable, f"{azurite.endpoint}/{azurite.account}")
    storage = open_storage(replace(parse_storage(f"az://{azurite.new_container()}/runs"), retry=RetryPolicy(0.0)))
    storage.put_bytes("run/x", b"1")
    assert storage.get_bytes("run/x") == b"1"
