"""Reports: the ranks of a training make a checkpoint together."""

from prefect_torch.lazy_names import lazy_names

# Pickles of version 0.1 have these names here, when this package was a module.
__getattr__, _ = lazy_names(__name__, dict.fromkeys(("get_checkpoint", "get_context", "log_metrics", "report"), ".api"))
