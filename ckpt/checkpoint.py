"""A handle to a checkpoint: a directory of files, local or in a storage."""

import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from html import escape
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from prefect_torch.ckpt.context import rank_and_world_size, uncompiled
from prefect_torch.ckpt.errors import CheckpointError, CheckpointNotFoundError
from prefect_torch.ckpt.files.download import download, readable_files
from prefect_torch.ckpt.files.folder import existing_directory, read_metadata, remove_metadata, write_metadata
from prefect_torch.ckpt.files.node_copy import NodeCopy
from prefect_torch.ckpt.files.selection import Include, choose_files, choose_in_folder
from prefect_torch.ckpt.files.target_directory import copy_folder, lies_in, made_directory
from prefect_torch.ckpt.runs.layout import is_checkpoint_folder
from prefect_torch.ckpt.runs.manifest import FileEntry, Manifest
from prefect_torch.ckpt.runs.metrics import Metrics, flatten_metrics
from prefect_torch.ckpt.runs.run import Run
from prefect_torch.ckpt.runs.verification import VerifyLevel, verify
from prefect_torch.ckpt.storage.records import check_depth
from prefect_torch.ckpt.storage.specs.location import absolute
from prefect_torch.ckpt.text import show_bytes, show_count

if TYPE_CHECKING:
    from prefect_torch.ckpt.state.loading.load import Source  # it imports torch
    from typing_extensions import Never


class Checkpoint:
    """A checkpoint to report, or one to read.

    Args:
        path: A local directory of files, or the path or URL of a committed checkpoint (`<storage>/<run>/checkpoints/<id>`).
            Costs no request; a checkpoint that does not exist raises when it is read.

    Attributes:
        path: The absolute path of a local directory, or the path or URL of a committed checkpoint.
        id: The id of a committed checkpoint; None for a plain directory.
        store: The run of a committed checkpoint; None for a plain directory.
        node_copy: Keeps the downloads of a loaded state, and what is known of files in place, for the other ranks of this node;
            None if there are no others.
        verify_level: How `as_directory` verifies files in place.

    Raises:
        ValueError: If `path` is empty, or a URL of anything but a committed checkpoint.

    """

    path: str
    id: str | None
    store: Run | None
    node_copy: NodeCopy | None = None
    verify_level: VerifyLevel = "digest"
    open_run: ClassVar[Callable[[str, str], Run]] = Run.open

    def __init__(self, path: str | PathLike[str]) -> None:
        self.path = _named(path)
        self.store = None
        self._manifest: Manifest | None = None
        self.id = None
        if (place := split_path(self.path)) is not None:
            base, run_name, self.id = place
            self.store = type(self).open_run(base, run_name)
            self.path = self.store.path_of(self.id)
        elif "://" in self.path:
            raise ValueError(f"{self.path} is not a committed checkpoint; give <storage>/<run>/checkpoints/<id>")

    @classmethod
    def from_directory(cls, path: str | PathLike[str]) -> "Checkpoint":
        """Return the local directory `path` as a checkpoint to report; nothing is read before the report.

        Raises:
            ValueError: If `path` is empty.

        """
        checkpoint = cls.__new__(cls)
        checkpoint.path = _named(path)
        checkpoint.store = checkpoint._manifest = checkpoint.id = None
        return checkpoint

    @classmethod
    def committed(cls, run: Run, manifest: Manifest) -> "Checkpoint":
        """Return a handle to a committed checkpoint, sharing the run's connection."""
        checkpoint = cls.__new__(cls)
        checkpoint.store, checkpoint._manifest, checkpoint.id = run, manifest, manifest.id
        checkpoint.path = run.path_of(manifest.id)
        return checkpoint

    @property
    def filesystem(self) -> "Never":
        """Raise AttributeError: the attribute is Ray's, and the message names the replacement."""
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute 'filesystem', which is Ray's, and pyarrow's: write "
            "checkpoint.store.storage, or read the files in checkpoint.as_directory()"
        )

    @property
    def step(self) -> int:
        """The step of a committed checkpoint; -1 for a plain directory, which comes before every step."""
        return -1 if self.id is None else self.manifest.step

    @property
    def metrics(self) -> Metrics:
        """The metrics of a committed checkpoint: those of rank 0's report and of its evaluations; empty for a plain directory.

        The checkpoint of `get_checkpoint()` has the reported metrics alone, so that they are the same on all ranks.
        """
        return {} if self.id is None else dict(self.manifest.metrics)

    @property
    def manifest(self) -> Manifest:
        """The manifest of a committed checkpoint, read once.

        Raises:
            CheckpointNotFoundError: If there is none: the checkpoint was pruned, never committed, or is a plain directory.
            CheckpointCorruptError: If it is damaged.
            UnsupportedFormatError: If a newer version committed it.

        """
        if self._manifest is None:
            if self.store is None or self.id is None:
                raise CheckpointNotFoundError(f"{self.path} is a plain directory: it has no manifest")
            self._manifest = self.store.get(self.id)
        return self._manifest

    @property
    def directory(self) -> Path | None:
        """The directory of a checkpoint that is not committed, None for a committed one.

        Raises:
            CheckpointNotFoundError: If the directory does not exist.

        """
        if self.store is not None:
            return None
        return existing_directory(self.path)

    def verify(self, level: VerifyLevel = "digest") -> None:
        """Raise unless a committed checkpoint's stored files are those that were committed; do nothing for a plain directory.

        Args:
            level: "size" compares sizes by one listing, "digest" also reads every byte, "none" does nothing.

        Raises:
            CheckpointCorruptError: Naming the first file that is missing, short, long or changed.
            CheckpointNotFoundError: If the checkpoint was pruned or never existed.
            ValueError: If there is no such level.

        """
        if self.store is not None:
            verify(self.store, self.manifest, level)

    @contextmanager
    def as_directory(self, *, include: Include = None, own_files: bool = False) -> Iterator[str]:
        """Yield the path of a local directory with the files, whole and verified; read it, do not change it.

        Where this machine sees the files, they are yielded in place, after one read of each to verify it. Of the processes and
        threads of a machine that have the checkpoint at a time, one reads a file; the others compare its state with that in
        which it was verified: no program has changed it since. In a training, they have the checkpoint that it resumes from
        until their first report, the flow's process included, and `RunConfig.verify` holds for it: "size" compares sizes alone.

        Otherwise each file is downloaded once per node, for all processes and threads that request it, below the directory for
        temporary files (`TMPDIR`). The downloads are deleted after the last reader.

        With `include` or `own_files`, only the chosen files are verified or downloaded; the directory may hold others.

        Args:
            include: Patterns of the paths to have: "*.pt", "optimizer/*", or a directory's name for all files in it; "*"
                also matches "/". None means every file, or with `own_files` only those.
            own_files: Have the files that this rank itself stored. A file that several ranks reported with equal content was
                stored by the lowest of them. Outside of a training, this is rank 0 of 1.

        Raises:
            CheckpointNotFoundError: If it was pruned or never existed.
            CheckpointCorruptError: If a file differs from the committed one.
            ValueError: If a pattern matches no file, naming some of the files.
            RankLocalStateError: If `own_files`, and another number of ranks stored it.
            OSError: If there is no space for the downloads, or their directory is not this user's alone, naming the directory.

        """
        if self.store is None:
            assert self.directory is not None
            choose_in_folder(self.directory, include, own_files=own_files)
            yield str(self.directory)
            return
        manifest, files = self._choose(self.store, include, own_files=own_files)
        if self.node_copy is not None and self.verify_level == "digest":
            self.node_copy.hold(self.store, manifest)
        with readable_files(self.store, manifest, files, self.verify_level) as folder:
            yield str(folder)

    def to_directory(
        self,
        path: str | PathLike[str] | None = None,
        *,
        include: Include = None,
        own_files: bool = False,
    ) -> str:
        """Copy the files, verified, and the metadata into a directory of the caller's and return its path.

        Other files in the directory stay. After an error, such as a prune of the checkpoint meanwhile, no file of a committed
        checkpoint is in the directory, unless it occurs while they are moved there at the end.

        Args:
            path: The directory, created if missing; None creates a new temporary one.
            include: Patterns of the paths to copy; see `as_directory`.
            own_files: Copy the files that this rank itself stored; see `as_directory`.

        Raises:
            CheckpointNotFoundError: If it was pruned or never existed.
            CheckpointCorruptError: If a file differs from the committed one.
            FileExistsError: If `path` is a file, or holds a directory in the place of a file, or a file in that of a directory.
                If its filesystem takes two names for one, as many do that ignore case.
            ValueError: If a pattern matches no file, naming some of the files, or if `path` lies in the checkpoint itself.
            RankLocalStateError: If `own_files`, and another number of ranks stored it.

        """
        if path is not None and lies_in(self.path, path):
            raise ValueError(f"{fspath(path)} lies in the checkpoint {self.path} itself: give another directory")
        if self.store is None:
            assert self.directory is not None
            chosen = choose_in_folder(self.directory, include, own_files=own_files)
            metadata = read_metadata(Path(self.path))
            with made_directory(path) as target:
                copy_folder(self.directory, target, chosen)
                if metadata:
                    write_metadata(target, metadata)
        else:
            manifest, files = self._choose(self.store, include, own_files=own_files)
            metadata = self.store.metadata(manifest)  # before the files: once those are read, a prune no longer matters
            with made_directory(path) as target:
                download(self.store, manifest, files, metadata, target)
        if not metadata:
            remove_metadata(target)
        return str(target)

    @uncompiled
    def load_state(
        self,
        state: MutableMapping[str, Any],
        *,
        rank_local: "Callable[[str, list[Any], int, int], Any] | None" = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        """Restore `state`, as it was given to `report(..., state=...)`, in place; every byte is verified before it is used.

        The ranks read in parallel, each only the data it needs: for a DTensor its own part, whatever the number of ranks that
        stored it. Data that all ranks of a node need from a bucket are downloaded once, below `TMPDIR`, if there is enough
        space. Names that `state` leaves out are not read; a dict below a name gets back every item it held. All names, shapes
        and dtypes are compared before anything changes; after an error while reading, parts of `state` are restored and others
        not. A tensor outside of modules that shares the memory of a module in `state`, or of another tensor there, is replaced
        by a new one if its stored values differ from those loaded into that memory. Into a parameter with several names, equal
        values must be stored under all of them.

        The tensors of an object with `load_state_dict`, other than modules and torch's optimizers, are read into those of its
        `state_dict()`, as by torch.distributed.checkpoint; then `load_state_dict` is called. If it returns tensors of another
        object, such as a model's parameters before the first update of their average, load both in one call. Of an object that
        can be iterated over, but has no items by index or key, such as a data loader, `state_dict()` is not called, since it
        may begin an iteration; of an optimizer it always is.

        An optimizer keeps its own `foreach`, `fused` and `capturable`, which say how a step is computed: another sharding or
        device may need others.

        On GPUs it waits for the work that this thread has queued on the current streams; these must wait for work on other
        streams before the call. Afterwards every stream sees the values. A tensor below a name for which `state` holds none,
        such as an item of an empty dict, is built on the CPU.

        Args:
            state: Modules, optimizers and other objects with `load_state_dict`, tensors, arrays, plain values and containers of
                them, under the names of the report. An optimizer may be fresh. Random generators are set last.
            rank_local: Called as `rank_local(name, values, rank, world_size)`, with the values of the former ranks that had
                one, in the order of the ranks, for each value that differed between ranks, if the number of ranks has changed;
                returns this rank's value. None raises instead.
            rank: This rank; None means that of the training, or 0 outside of one.
            world_size: The number of ranks; None means that of the training, or 1 outside of one.

        Raises:
            ValueError: If `state` is no dict, or there is no such rank.
            StateMismatchError: If `state` has a name that the checkpoint lacks, or holds in another shape or dtype, or two
                names of one parameter whose stored values differ.
            RankLocalStateError: If the number of ranks has changed, and values differed between ranks while `rank_local` is
                None, or each rank stepped other parameters of an optimizer; one rank alone loads the states of all.
            CheckpointCorruptError: If the stored data differ from the committed ones.
            CheckpointNotFoundError: If the checkpoint holds no state, was pruned or never existed.

        """
        from prefect_torch.ckpt.state.loading.load import load_state  # noqa: PLC0415 - torch, for states only

        own_rank, own_world_size = rank_and_world_size()
        loading = (own_rank if rank is None else rank, own_world_size if world_size is None else world_size)
        if not 0 <= loading[0] < loading[1]:
            raise ValueError(
                f"rank {loading[0]} is none of {loading[1]} ranks, which are numbered from 0: give rank and world_size"
            )
        load_state(self._source(), state, loading, rank_local, self.node_copy)

    def to_safetensors(self, path: str | PathLike[str], *, key: str = "model") -> str:
        """Write the whole tensors of a reported state to one safetensors file, verified, and return its path.

        The tensors are assembled from the parts that all ranks stored, however the model was sharded, in the memory of a few
        blocks of 4 MiB; the file appears whole or not at all. Their names are those of the module's `state_dict()`; a tensor
        with several names is written under each. Values that are no tensors are left out, with a warning.

        Args:
            path: The file; an existing one is replaced, a missing directory is created.
            key: The part to write: a name in the reported state, or a path of names in it, joined with dots.

        Raises:
            IsADirectoryError: If `path` is a directory.
            ValueError: If there is no tensor below `key`, each rank stored its own, or safetensors does not support its dtype.
            CheckpointCorruptError: If the stored data differ from the committed ones.
            CheckpointNotFoundError: If the checkpoint holds no state, was pruned or never existed.

        """
        from prefect_torch.ckpt.state.loading.export import export_tensors  # noqa: PLC0415 - torch, for states only
        from prefect_torch.ckpt.state.loading.load import opened  # noqa: PLC0415 - torch, for states only

        target = Path(path).expanduser()
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a directory: give the path of a file in it")
        target.parent.mkdir(parents=True, exist_ok=True)
        with opened(self._source()) as reader:
            export_tensors(reader, key, target)
        return str(target)

    def get_metadata(self) -> dict[str, Any]:
        """Return the user's metadata; empty where none was set.

        Raises:
            ValueError: If a plain directory's metadata file holds anything else.
            CheckpointNotFoundError: If a committed checkpoint was pruned or never existed.

        """
        if self.store is not None:
            return self.store.metadata(self.manifest)
        return read_metadata(Path(self.path))

    def set_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Replace the user's metadata: before a report it is committed with the files, afterwards stored beside them.

        A digest reveals a later change of the stored bytes: the committed metadata is then returned instead, with a warning.

        Raises:
            ValueError: If JSON cannot represent it, or it has the key "prefect-torch.digest".
            CheckpointNotFoundError: If the checkpoint was pruned.

        """
        try:
            plain = json.loads(json.dumps(dict(metadata), allow_nan=False))
            check_depth(plain, "it")
        except (TypeError, ValueError, RecursionError) as exc:
            raise ValueError(f"metadata must be what JSON can hold: {exc}") from exc
        if self.store is not None:
            self.store.put_metadata(self.manifest.id, plain)
        else:
            write_metadata(Path(self.path), plain)

    def update_metadata(self, metadata: Mapping[str, Any]) -> None:
        """Add to the user's metadata, replacing equal keys; not atomic, so one of two concurrent updates may be lost.

        Raises:
            ValueError: If JSON cannot represent it, or a plain directory's metadata file holds anything else.
            CheckpointNotFoundError: If the checkpoint was pruned.

        """
        self.set_metadata({**self.get_metadata(), **metadata})

    def __setstate__(self, fields: dict[str, Any]) -> None:
        """Restore a pickled handle; version 0.1 had other names for two fields."""
        renamed = {"_store": "store", "_id": "id"}
        self.__dict__.update({renamed.get(name, name): value for name, value in fields.items()})

    def __repr__(self) -> str:
        return f"Checkpoint({self.path!r})"

    def _repr_html_(self) -> str:
        """Return a table for notebooks: the path, and the facts of the manifest or the reason why it cannot be read."""
        rows = {"path": self.path, **self._facts()}
        left = ' style="text-align:left"'  # a notebook's own style centres heads, and moves cells to the right
        cells = {escape(name): escape(str(value)) for name, value in rows.items()}
        lines = "".join(f"<tr><th{left}>{name}</th><td{left}>{value}</td></tr>" for name, value in cells.items())
        return f"<table>{lines}</table>"

    def _facts(self) -> dict[str, object]:
        if self.store is None:
            return {}
        try:
            manifest = self.manifest
        except (CheckpointError, OSError) as exc:
            return {"not readable": exc}
        size = f"{show_bytes(manifest.total_bytes)} in {show_count(len(manifest.files), 'file')}"
        return {"step": manifest.step, "attempt": manifest.attempt, **dict(flatten_metrics(manifest.metrics)), "size": size}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Checkpoint) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def _choose(self, run: Run, include: Include, *, own_files: bool) -> tuple[Manifest, tuple[FileEntry, ...]]:
        manifest = self._committed(run)
        return manifest, choose_files(manifest, include, rank_and_world_size() if own_files else None, self.path)

    def _source(self) -> "Source":
        if self.store is not None:
            return self.store, self._committed(self.store)
        assert self.directory is not None
        return self.directory

    def _committed(self, run: Run) -> Manifest:
        """Return the manifest that this handle holds, which never changes, or else read the stored one."""
        assert self.id is not None
        return run.committed(self.id) if self._manifest is None else self._manifest


def _named(path: str | PathLike[str]) -> str:
    named = fspath(path)
    if not named:
        raise ValueError("the path of a checkpoint is empty; '.' is the working directory")
    named = named.rstrip("/") or "/"
    return named if "://" in named else absolute(named)


def split_path(path: str) -> tuple[str, str, str] | None:
    """Return the storage, run and id that the path or URL of a committed checkpoint names; None if it is no such path."""
    base, run, folder, name = ["", "", "", "", *_named(path).rsplit("/", 3)][-4:]
    if not is_checkpoint_folder(folder, name):
        return None
    return (f"{base}/" if not base or base.endswith("/") else base), run, name  # "/" and "memory://" are roots
