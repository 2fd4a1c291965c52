"""Objects under keys, on a disk, in a bucket or on a server; it knows no checkpoint."""


def __getattr__(name: str) -> object:
    """Return what version 0.1 pickled under this name, when a module was here."""
    if name in ("ObjectInfo", "RetryPolicy", "StorageSpec", "Transfer"):
        from . import protocol  # noqa: PLC0415 - only for what was pickled then

        return getattr(protocol, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
