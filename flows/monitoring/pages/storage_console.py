"""Where a person can look at a storage: its cloud's console, or its folder."""

import re
from typing import Any
from urllib.parse import quote, urlsplit

from prefect_torch.ckpt import StorageSpec

_URL = re.compile(r"(?P<scheme>[a-z0-9+.-]+)://(?P<place>[^/]*)/?(?P<path>.*)")


class StorageConsole:
    """Knows the pages of one storage's folders; asks the storage nothing.

    S3 on AWS and Google Cloud Storage have a page for every folder. Azure's portal finds a container only by the ids of its
    subscription and resource group, which no storage is told: its list of storage accounts is the nearest page. A local
    storage gives a file:// URL, which no web page may link to, but people can paste. Servers that speak S3 at an endpoint of
    their own have none.

    Args:
        spec: The storage.

    """

    def __init__(self, spec: StorageSpec) -> None:
        self._url = spec.url
        match = _URL.fullmatch(spec.url)
        self._scheme, self._place, self._path = (
            ("file", "", "") if match is None else (match["scheme"], match["place"], match["path"])
        )
        if self._scheme in ("s3", "s3a") and not _is_on_aws(spec):
            self._scheme = "elsewhere"

    def url_of(self, key: str) -> str | None:
        """Return where the folder `key` can be looked at; None where there is no such place."""
        folder = quote("/".join(part for part in (self._path.strip("/"), key) if part))
        if self._scheme == "file":
            return f"file://{quote(f'{self._url}/{key}')}"
        if self._scheme in ("s3", "s3a"):
            return f"https://console.aws.amazon.com/s3/buckets/{self._place}?prefix={folder}/"
        if self._scheme in ("gs", "gcs"):
            return f"https://console.cloud.google.com/storage/browser/{self._place}/{folder}"
        if self._scheme in ("az", "azure", "abfs", "abfss", "adl"):
            return "https://portal.azure.com/#browse/Microsoft.Storage%2FStorageAccounts"
        return None


def _is_on_aws(spec: StorageSpec) -> bool:
    """Say whether the storage's own client would ask AWS: an endpoint may come from options, variables or a profile."""
    from prefect_torch.ckpt.object_store_opening import open_object_store  # noqa: PLC0415 - obstore, for buckets only

    opened: Any = open_object_store(spec.url, spec.options)  # an S3Store; not all of its kind tell their configuration
    endpoint = opened.config.get("endpoint")
    return endpoint is None or (urlsplit(endpoint).hostname or "").endswith(".amazonaws.com")
