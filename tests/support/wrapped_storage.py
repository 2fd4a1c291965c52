"""A storage that passes everything on; what watches a storage, or breaks it, is a subclass."""

from typing import Any

READS_OF_DATA = ("get_file", "digest", "get_range", "get_bytes")
READS = (*READS_OF_DATA, "list", "folders", "size")  # they change nothing
VERBS = (*READS, "put_file", "put_files", "put_buffers", "put_bytes", "delete", "remove_interrupted")


class WrappedStorage:
    """Passes every operation on to `inner`, through `_do`."""

    def __init__(self, inner: Any):
        self.inner = inner

    @property
    def url(self) -> str:
        return self.inner.url

    def local_path(self, key: str) -> Any:
        return self.inner.local_path(key)

    def reopened(self) -> Any:
        return self

    def _do(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.inner, verb)(*args, **kwargs)


for _verb in VERBS:
    setattr(WrappedStorage, _verb, lambda self, *args, _verb=_verb, **kwargs: self._do(_verb, *args, **kwargs))
