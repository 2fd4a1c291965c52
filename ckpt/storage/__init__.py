"""Objects under keys, on a disk, in a bucket or on a server; this package does not know about checkpoints."""


def __getattr__(name: str) -> object:
    """Return the class that version 0.1 pickled under this name, when this package was a module."""
    if name in ("ObjectInfo", "RetryPolicy", "StorageSpec", "Transfer"):
        from . import protocol  # noqa: PLC0415 - only for pickles of version 0.1

        return getattr(protocol, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
