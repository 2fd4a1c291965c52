"""The blocks of prefect-gcp and prefect-azure as storage, by their fields: neither package is a dependency of this one."""

import json
from pathlib import Path
from typing import Any

from prefect_torch.ckpt.storage.protocol import StorageSpec

_GCS, _AZURE = "gcs-bucket", "azure-blob-storage-container"


def is_cloud_block(block: Any) -> bool:
    """Return whether `block` is prefect-gcp's GcsBucket or prefect-azure's AzureBlobStorageContainer."""
    slug = getattr(block, "get_block_type_slug", None)
    return slug is not None and slug() in (_GCS, _AZURE)


def cloud_spec(block: Any) -> StorageSpec:
    """Return the specification with which every process opens the bucket or container of `block`.

    Without a key in the block, each process uses the login of its own machine, as object_store finds it
    (https://docs.rs/object_store): Google's application default credentials; on Azure the `AZURE_…` variables, or the
    identity of the workload or machine.

    Raises:
        ValueError: If its connection string or account URL names no account.

    """
    return _gcs_spec(block) if block.get_block_type_slug() == _GCS else _azure_spec(block)


def _gcs_spec(block: Any) -> StorageSpec:
    key = block.gcp_credentials.service_account_info
    file = block.gcp_credentials.service_account_file
    options = {}
    if key is not None:
        options["google_service_account_key"] = json.dumps(key.get_secret_value())
    elif file is not None:  # its content: a rank on another machine has no such file
        options["google_service_account_key"] = Path(file).expanduser().read_text()
    # object_store takes the endpoint of another server from the key.
    if str(json.loads(options.get("google_service_account_key", "{}")).get("gcs_base_url", "")).startswith("http://"):
        options["allow_http"] = "true"
    return StorageSpec(_joined(f"gs://{block.bucket}", block.bucket_folder), options)


def _azure_spec(block: Any) -> StorageSpec:
    credentials = block.credentials
    options = _of_connection_string(credentials) if credentials.connection_string is not None else _of_account_url(credentials)
    return StorageSpec(
        _joined(f"az://{block.container_name}", block.base_folder or ""), {name: it for name, it in options.items() if it}
    )


def _of_connection_string(credentials: Any) -> dict[str, str | None]:
    """Return the options of the block's connection string.

    Its format: https://learn.microsoft.com/azure/storage/common/storage-configure-connection-string
    """
    text = credentials.connection_string.get_secret_value()
    fields = {name.lower(): value for name, _, value in (part.partition("=") for part in text.split(";")) if value}
    endpoint = fields.get("blobendpoint")
    account = fields.get("accountname") or (_account_of(endpoint) if endpoint else None)
    if account is None:
        raise ValueError("the connection string names no account: give AccountName or BlobEndpoint in it")
    suffix = fields.get("endpointsuffix", "core.windows.net")
    scheme = fields.get("defaultendpointsprotocol", "https")
    return {
        "azure_storage_account_name": account,
        "azure_storage_account_key": fields.get("accountkey"),
        "azure_storage_sas_key": fields.get("sharedaccesssignature", "").lstrip("?") or None,
        "azure_storage_endpoint": (endpoint or f"{scheme}://{account}.blob.{suffix}").rstrip("/"),
    }


def _of_account_url(credentials: Any) -> dict[str, str | None]:
    secret = credentials.client_secret
    return {
        "azure_storage_account_name": _account_of(credentials.account_url),
        "azure_storage_endpoint": credentials.account_url.rstrip("/"),
        "azure_storage_client_id": credentials.client_id,
        "azure_storage_tenant_id": credentials.tenant_id,
        "azure_storage_client_secret": None if secret is None else secret.get_secret_value(),
    }


def _account_of(url: str) -> str:
    """Return the account of a service's URL: its host's first name, or, on an emulator's address, the first folder."""
    host, _, path = url.partition("://")[2].partition("/")
    account = path.partition("/")[0] if host.replace(".", "").replace(":", "").isdigit() else host.partition(".")[0]
    if not account:
        raise ValueError(f"{url!r} names no storage account: give it as https://ACCOUNT.blob.core.windows.net")
    return account


def _joined(url: str, folder: str) -> str:
    below = folder.strip("/")
    return f"{url}/{below}" if below else url
