"""A directory of this machine as a storage: a command copies each put to a place that other machines reach."""

import os
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash
from prefect_torch.ckpt.storage.keys import check_key
from prefect_torch.ckpt.storage.local_files.storage import LocalStorage
from prefect_torch.ckpt.storage.protocol import ObjectInfo, Splits, Transfer

from .held_folders import HeldFolder
from .late_uploads import LateUploads
from .transport import Transport

FOLDER = ".sync"  # below the root, so that a link to a file costs nothing; no run has such a name
_MARKER = "synced.json"
_late: dict[tuple[str, Transport], LateUploads] = {}  # of this process, whoever opens the storage
_late_lock = threading.Lock()


class SyncedStorage(LocalStorage):
    """A local directory whose objects are copied elsewhere before a put returns; all is read from the directory.

    A put uploads a directory that holds the new objects alone, as links, under their keys: the tool merges it into the target.
    A small object appears in the directory only after its upload, so that readers on this machine see a manifest only
    once it is at the target. Deleted objects stay at the target.

    Args:
        root: The directory.
        transport: How it is copied.

    """

    def __init__(self, root: Path, transport: Transport) -> None:
        super().__init__(root)
        self._transport = transport
        with _late_lock:
            known = _late.get((self.url, transport))
            waiting = root / FOLDER / "late" / xxhash.xxh32_hexdigest(transport.target.encode())
            self._late = known or LateUploads(waiting, float(transport.period_s), self.upload_waiting)
            _late[self.url, transport] = self._late

    def put_file(self, key: str, path: Path) -> Transfer:
        """Copy the file at `path`, and upload it."""
        done = super().put_file(key, path)
        self._upload([key])
        return done

    def put_files(self, files: Mapping[str, str | Path], *, owned: bool = False) -> dict[str, Transfer]:
        """Copy or move files, and upload them together."""
        done = super().put_files(files, owned=owned)
        self._upload(files)
        return done

    def put_buffers(self, key: str, parts: Sequence[memoryview]) -> Transfer:
        """Write `parts`, and upload them."""
        done = super().put_buffers(key, parts)
        self._upload([key])
        return done

    def put_bytes(self, key: str, data: bytes) -> None:
        """Upload a small object, then write it; one that may be uploaded late is written, and waits for others."""
        if self._transport.is_late(key):
            super().put_bytes(key, data)
            self._late.add([key])
            return
        self._upload((), {key: data})
        super().put_bytes(key, data)

    def upload_waiting(self) -> None:
        """Upload the small objects that wait for others."""
        self._upload(())

    def folders(self, prefix: str) -> Iterator[str]:
        """Yield the names of the directories directly below `prefix`, without the directory of uploads."""
        yield from (name for name in super().folders(prefix) if prefix or name != FOLDER)

    def list(self, prefix: str, *, after: str | None = None, splits: Splits | None = None) -> Iterator[ObjectInfo]:
        """Yield the files below `prefix`, without those of uploads that are under way."""
        found = super().list(prefix, after=after, splits=splits)
        yield from (info for info in found if not info.key.startswith(f"{FOLDER}/"))

    def reopened(self) -> "SyncedStorage":
        """Return this directory, read from the disk."""
        other = SyncedStorage(Path(self.url), self._transport)
        other._rereads = True
        return other

    def remove_interrupted(self, prefix: str, older_than_s: float) -> None:
        """Remove the leftovers of killed writers and uploaders."""
        super().remove_interrupted(prefix, older_than_s)
        for staged in (Path(self.url) / FOLDER).glob("*-*"):
            with suppress(FileNotFoundError):  # removed meanwhile
                is_old = staged.stat().st_mtime <= time.time() - older_than_s
                if is_old and (left := HeldFolder.take(staged)) is not None:
                    left.remove()

    def download(self, run: str, folder: str = "") -> None:
        """Copy a run here from where it was uploaded; objects that are only here stay.

        A marker is uploaded first, so that the run's directory exists at the target, and the download of a new run succeeds.

        Args:
            run: Its name.
            folder: The prefix of the keys to copy, a directory that exists at the target; empty for all of the run.

        Raises:
            StorageError: If the upload or the download failed.

        """
        if not folder:
            self._upload((), {f"{run}/{_MARKER}": b"{}"})
        place = check_key(folder.rstrip("/") or run)
        here = Path(self.url) / place
        here.mkdir(parents=True, exist_ok=True)
        self._transport.run_download(place, f"{here}/")

    def _upload(self, keys: Iterable[str], small: Mapping[str, bytes] | None = None) -> None:
        """Upload objects of this directory, the waiting ones, and small objects that are not in it yet."""
        late = self._late.take()
        try:
            self._upload_now({*keys, *late}, small or {})
            self._late.uploaded(late)
        except BaseException:
            self._late.put_back(late)
            raise

    def _upload_now(self, keys: Collection[str], small: Mapping[str, bytes]) -> None:
        if not keys and not small:
            return
        staged = HeldFolder.make(Path(self.url) / FOLDER)
        try:
            for key in keys:
                with suppress(FileNotFoundError):  # deleted meanwhile
                    _link(self._path(key), staged.path / key)
            for key, data in small.items():
                (staged.path / check_key(key)).parent.mkdir(parents=True, exist_ok=True)
                (staged.path / key).write_bytes(data)
            self._transport.run_upload(f"{staged.path}/")
        finally:
            staged.remove()


def _link(path: Path, link: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, link)
    except FileNotFoundError:
        raise
    except OSError:  # a filesystem without hard links
        shutil.copyfile(path, link)
