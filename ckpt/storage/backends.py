"""Opening of a storage from its specification; each backend is imported only when it is used."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from prefect_torch.ckpt.storage.specs.location import OBJECT_STORES, URL

from .protocol import Storage, StorageSpec

_KEY = re.compile(r"access_key|account_key|master_key|sas|secret|password|session_token|bearer_token|^token$")
_VARIABLES = {  # Google's names a file, which is read again
    ("s3://", "s3a://"): ("AWS_ACCESS_KEY_ID",),
    ("az", "abfs", "adl://"): ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN"),
}
Renew = Callable[[bytes], Mapping[str, str]]


def open_spec(spec: StorageSpec, renew: Renew | None = None) -> Storage:
    """Open the storage that `spec` specifies; sends no request yet.

    Args:
        spec: The storage's location and login.
        renew: Returns fresh options from `spec.credential_source`, when those of `spec` have expired; None disables this.

    Raises:
        ValueError: If it cannot be opened.

    """
    match = URL.match(spec.url)
    from .retry import RetryingStorage  # noqa: PLC0415 - each backend loads only what it needs

    if match is None and "upload" in spec.options:
        return _open_synced(spec)
    if match is None:
        from .local_files.storage import LocalStorage  # noqa: PLC0415 - each backend loads only what it needs

        # pyright takes `ckpt` and `prefect_torch.ckpt` for two packages, and these backends name their protocol by the latter.
        return RetryingStorage(lambda: LocalStorage(Path(spec.url)), spec.retry)  # pyright: ignore[reportArgumentType]
    if match["scheme"] in OBJECT_STORES:
        from .object_store.backend import ObstoreStorage  # noqa: PLC0415 - each backend loads only what it needs

        return _open_renewable(lambda options: ObstoreStorage(spec.url, options, spec.retry.deadline_s), spec, renew)  # pyright: ignore[reportArgumentType]
    from .fsspec_files.backend import FsspecStorage  # noqa: PLC0415 - each backend loads only what it needs

    return _open_renewable(lambda options: FsspecStorage(spec.url, options), spec, renew)  # pyright: ignore[reportArgumentType]


def _open_synced(spec: StorageSpec) -> Storage:
    from .retry import RetryingStorage  # noqa: PLC0415 - each backend loads only what it needs
    from .synced.storage import SyncedStorage  # noqa: PLC0415
    from .synced.transport import Transport  # noqa: PLC0415

    transport = Transport.of(spec.options)
    assert transport is not None
    return RetryingStorage(lambda: SyncedStorage(Path(spec.url), transport), spec.retry)  # pyright: ignore[reportArgumentType]


def _open_renewable(open_with: Callable[[Mapping[str, str]], Storage], spec: StorageSpec, renew: Renew | None) -> Storage:
    """Open a storage with the options of `spec`, and with fresh ones each time they have expired."""
    from .retry import RetryingStorage  # noqa: PLC0415 - each backend loads only what it needs

    def reopen() -> Storage:
        if renew is None or spec.credential_source is None:
            return open_with(spec.options)  # the client itself searches anew for credentials that are not in the options
        return open_with(renew(spec.credential_source))

    is_from_source = renew is not None and spec.credential_source is not None
    return RetryingStorage(reopen, spec.retry, open_with(spec.options), renews=is_from_source or not _has_own_keys(spec))


def _has_own_keys(spec: StorageSpec) -> bool:
    """Return whether the login is in the options, or in this process's environment, where nobody renews it."""
    given = {name.lower() for name, value in spec.options.items() if value}
    variables = next((names for schemes, names in _VARIABLES.items() if spec.url.startswith(schemes)), ())
    return any(_KEY.search(name) for name in given) or any(os.environ.get(name) for name in variables)
