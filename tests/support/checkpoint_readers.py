"""Readers of a checkpoint as processes of their own, on a storage that writes down what is downloaded from it."""

import tempfile
import threading
from pathlib import Path
from typing import Any

from prefect_torch.ckpt import CheckpointStore
from prefect_torch.ckpt.runs.layout import Layout


class RecordingStorage:
    """Passes everything on to `inner`; adds the key of every downloaded file as a line to `record`."""

    def __init__(self, inner: Any, record: Path) -> None:
        self._inner = inner
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get_file(self, key: str, *rest: Any) -> Any:
        with self._record.open("a") as file:
            file.write(f"{key}\n")
        return self._inner.get_file(key, *rest)


def read(place, wanted, everybody_reads):
    """Read the patterns `wanted`, each in a thread of its own; hold on until every reader of every process has read.

    Args:
        place: The storage's url, the folder for temporary files, and where to write down downloads.
        wanted: Patterns; None for all files.
        everybody_reads: A barrier.

    """
    url, node, record = place
    tempfile.tempdir = node
    store = CheckpointStore.open(url, "run")
    recording = CheckpointStore(RecordingStorage(store.storage, Path(record)), Layout("run"), store.spec)
    checkpoint = recording.checkpoint(recording.latest())
    failed = []

    def read_one(include):
        try:
            with checkpoint.as_directory(include=include) as directory:
                everybody_reads.wait(60)
                names = ("a", "b", "c", "d") if include is None else include
                assert all((Path(directory) / name).read_text() == name * 1000 for name in names)
        except BaseException as exc:
            failed.append(exc)
            raise

    threads = [threading.Thread(target=read_one, args=(include,)) for include in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raise SystemExit(len(failed))
