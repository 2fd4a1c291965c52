"""What the ranks of a training do together to make a checkpoint."""


def __getattr__(name: str) -> object:
    """Return what version 0.1 pickled under this name, when a module was here."""
    if name in ("get_checkpoint", "get_context", "log_metrics", "report"):
        from . import api  # noqa: PLC0415 - only for what was pickled then

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
