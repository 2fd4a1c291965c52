"""Reports: the ranks of a training make a checkpoint together."""


def __getattr__(name: str) -> object:
    """Return the function that version 0.1 pickled under this name, when this was a module."""
    if name in ("get_checkpoint", "get_context", "log_metrics", "report"):
        from . import api  # noqa: PLC0415 - only for pickles of that version

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
