"""Objects under keys, on a disk, in a bucket or on a server; this package does not know about checkpoints."""

from prefect_torch.lazy_names import lazy_names

# Pickles of version 0.1 have these names here, when this package was a module.
__getattr__, _ = lazy_names(__name__, dict.fromkeys(("ObjectInfo", "RetryPolicy", "StorageSpec", "Transfer"), ".protocol"))
