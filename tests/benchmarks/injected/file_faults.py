"""Counts what a real process does to the files below a folder, and kills it with SIGKILL at one of these events.

An event is a call that names a path below the folder: open or create a file, mkdir, rename, unlink, rmdir, link, truncate,
scandir, and fsync of a file or a folder. The functions of `os` and `open` are wrapped, so that the process can die before an
event and right after it; an audit hook, which nothing in Python passes by, tells of every event that no wrapper saw. Stdlib
only.

How a process dies (`Fault.how`):
    before  the call did not happen
    after   the call took effect, its caller never learned of it
    half    before the call, and of every file that this process wrote and has not synced, half of the bytes are on the disk,
            whatever its name is by then
    cut     before the call, and every name that was made, replaced or removed since its folder's last fsync is as it was
            before: a power cut on a filesystem that promises no more than POSIX does
"""

import builtins
import io
import json
import os
import re
import shutil
import signal
import sys
import threading
from collections import Counter
from dataclasses import asdict, dataclass

VARIABLE = "FILE_FAULTS"
_CREATES = os.O_CREAT | os.O_TRUNC
_BY_PATH = {  # functions whose first argument is what they act on
    "unlink": "unlink",
    "remove": "unlink",
    "mkdir": "mkdir",
    "rmdir": "rmdir",
    "truncate": "truncate",
    "fsync": "fsync",
    "fdatasync": "fsync",
    "scandir": "scandir",
    "listdir": "scandir",
}
_AUDITED = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "os.scandir", "os.listdir"}
_REAL = {name: getattr(os, name) for name in ("open", "fsync", "replace", "unlink", "mkdir", "rmdir", "link", "scandir")}
_RANDOM = re.compile(r"[0-9a-f]{8,}(?=$|[/.])")
_real_open = builtins.open


@dataclass(frozen=True)
class Fault:
    """Which process dies where: at the `number`th (from 1) of its events that are named `event`, as `name_of` names them.

    By name, since threads of a process race for making a folder: who counts all its events would die somewhere else each time.
    """

    role: str
    event: str
    number: int
    how: str


def name_of(kind, path):
    """Return what an event is called in every run alike: its path has "*" in place of what is drawn at random."""
    return f"{kind} {_RANDOM.sub('*', path)}"


@dataclass(frozen=True)
class Plan:
    """What a process is told: what to watch, where to record events, what to die of.

    Attributes:
        folder: The folder that is watched.
        record: The file that takes a line per event; None records nothing.
        fault: How to die, or None.
        fired: The file that is made when the fault fires; while it exists nobody dies, so that restarts live.
        acknowledged: The file in which the training notes the steps whose report has returned.
        whole_group: Whether the whole process group dies at that moment, as with the machine, or this process alone.

    """

    folder: str
    record: str | None = None
    fault: Fault | None = None
    fired: str | None = None
    acknowledged: str | None = None
    whole_group: bool = False

    def encode(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> "Plan":
        fields = json.loads(text)
        return cls(**{**fields, "fault": fields["fault"] and Fault(**fields["fault"])})


class Watch:
    """The events of this process."""

    def __init__(self, plan: Plan, role: str) -> None:
        self.plan = plan
        self.role = role
        self.count = 0
        self.seen = Counter()
        self.unsynced_names: list = []  # (folder, how to undo it), in order
        self.unsynced_files: set = set()
        self.lock = threading.RLock()
        mine = plan.fault is not None and plan.fault.role == role
        self.fault = plan.fault if mine and not os.path.exists(plan.fired) else None

    def relative(self, path):
        """Return `path` below the folder, "." for the folder itself, or None where it is elsewhere."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}")
        path = os.path.abspath(os.fsdecode(path))
        if path == self.plan.folder:
            return "."
        return path.removeprefix(self.plan.folder + "/") if path.startswith(self.plan.folder + "/") else None

    def before(self, kind, path, source) -> bool:
        """Count an event and die of it, if so planned; say whether to die once it took effect."""
        with self.lock:
            self.count += 1
            if kind == "fsync" and os.path.isdir(f"{self.plan.folder}/{path}"):
                kind = "fsync folder"
            self._note(kind, path)
            name = name_of(kind, path)
            self.seen[name] += 1
            fires = self.fault is not None and (name, self.seen[name]) == (self.fault.event, self.fault.number)
            if fires and self.fault.how != "after":
                self._lose_what_is_unsynced()
                self.die(kind, path)
            self._follow(kind, path, source)
            if self.fault is not None and self.fault.how == "cut":
                self._remember(kind, os.path.normpath(f"{self.plan.folder}/{path}"))
            return fires

    def die(self, kind, path):
        told = {"kind": kind, "path": path, "committed": _committed(self.plan.folder), "acknowledged": []}
        if self.plan.acknowledged is not None and os.path.exists(self.plan.acknowledged):
            with _real_open(self.plan.acknowledged) as file:
                told["acknowledged"] = [int(line) for line in file]
        with _real_open(self.plan.fired, "x") as file:
            json.dump(told, file)
        os.kill(0 if self.plan.whole_group else os.getpid(), signal.SIGKILL)

    def unseen(self, event, path):
        if self.plan.record is not None:
            self._write({"role": self.role, "kind": f"unseen {event}", "path": path})

    def _note(self, kind, path):
        if self.plan.record is not None:
            line = {"role": self.role, "kind": kind, "path": path, "step": _step(), "unsynced": bool(self.unsynced_files)}
            self._write(line)

    def _write(self, line):
        descriptor = _REAL["open"](self.plan.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, json.dumps(line).encode() + b"\n")
        os.close(descriptor)

    def _follow(self, kind, path, source):
        """Keep the names of files whose bytes no fsync has made durable."""
        if kind == "rename" and source in self.unsynced_files:
            self.unsynced_files.add(path)
        if kind == "create":
            self.unsynced_files.add(path)
        if kind in {"fsync", "unlink"}:
            self.unsynced_files.discard(path)
        self.unsynced_files.discard(source)

    def _remember(self, kind, path):
        """Keep how to take a change of a name back until its folder is synced; only a `cut` pays for it."""
        folder = os.path.dirname(path)
        if kind == "fsync folder":
            self.unsynced_names = [known for known in self.unsynced_names if known[0] != path and not _is_gone(known[0], path)]
        elif kind == "mkdir" and not os.path.exists(path):
            self.unsynced_names.append((folder, lambda: shutil.rmtree(path, ignore_errors=True)))
        elif kind == "rmdir" and os.path.exists(path) and not any(_REAL["scandir"](path)):
            self.unsynced_names.append((folder, lambda: os.path.isdir(path) or _REAL["mkdir"](path)))
        elif kind in {"create", "rename", "unlink"}:
            saved = None
            if os.path.exists(path):
                saved = f"{self.plan.fired}-{self.count}"
                _REAL["link"](path, saved)
            self.unsynced_names.append((folder, lambda: _bring_back(path, saved)))

    def _lose_what_is_unsynced(self):
        if self.fault.how == "half":
            for path in (f"{self.plan.folder}/{name}" for name in self.unsynced_files):
                os.truncate(path, os.path.getsize(path) // 2)
        if self.fault.how == "cut":
            for _, undo in reversed(self.unsynced_names):
                undo()


def _is_gone(folder, synced):
    """Return whether `folder` is, or was in, one that was removed from the folder `synced`."""
    below = folder.removeprefix(f"{synced}/")
    return below != folder and not os.path.exists(os.path.join(synced, below.split("/")[0]))


def _bring_back(path, saved):
    if saved is not None:
        _REAL["replace"](saved, path)
    elif os.path.exists(path):
        _REAL["unlink"](path)


def _committed(folder):
    """Return the ids whose manifest exists, of every run."""
    runs = [entry.path for entry in _REAL["scandir"](folder)]
    folders = [f"{run}/manifests" for run in runs if os.path.isdir(f"{run}/manifests")]
    names = [entry.name for place in folders for entry in _REAL["scandir"](place)]
    return sorted(name.removesuffix(".json") for name in names if not name.startswith("."))


def _step():
    """Name what the package is doing, by the code on this thread's stack."""
    seen, frame = set(), sys._getframe(1)
    while frame is not None:
        seen |= {os.path.basename(frame.f_code.co_filename), frame.f_code.co_name}
        frame = frame.f_back
    if seen & {"pruning.py", "garbage.py"}:
        return "prune"
    return "save" if seen & {"commit.py", "history.py", "rank_part.py", "hint_latest", "write_outcome"} else "resume"


_watch: Watch | None = None
_inside = threading.local()


def arm(plan: Plan, role: str) -> None:
    """Watch this process from now on, as `role`; again in every forked child."""
    global _watch  # noqa: PLW0603 - one per process
    _install()
    _watch = Watch(plan, role)


def arm_from_environment() -> None:
    """Watch a process that somebody else started: as the rank that its environment says, else as the leader."""
    if VARIABLE in os.environ:
        rank = os.environ.get("RANK")
        arm(Plan.decode(os.environ[VARIABLE]), "leader" if rank is None else f"rank {rank}")


def _install():
    if getattr(builtins.open, "watched", False):
        return
    os.open = _wrapped(os.open, _of_os_open)
    builtins.open = io.open = _wrapped(_real_open, _of_open)
    os.rename = _wrapped(os.rename, lambda source, target, **__: ("rename", target, source))
    os.replace = _wrapped(os.replace, lambda source, target, **__: ("rename", target, source))
    os.link = _wrapped(os.link, lambda _, target, **__: ("link", target))
    for name, kind in _BY_PATH.items():
        setattr(os, name, _wrapped(getattr(os, name), lambda path=".", *_, _kind=kind, **__: (_kind, path)))
    sys.addaudithook(_audit)


def _in(place, kwargs, *names):
    """Return the path of what a call means that names it in an open folder."""
    folder = next((kwargs[name] for name in names if kwargs.get(name) is not None), None)
    return place if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fsdecode(place))


def _of_os_open(path, flags, *_, **__):
    """Leave out folders: opening one on the way to a file changes nothing, and happens several times for each."""
    return ("create" if flags & _CREATES else "open", None if flags & os.O_DIRECTORY else path)


def _of_open(file, mode="r", *_, **__):
    return ("create" if set(mode) & set("wxa+") else "open", None if isinstance(file, int) else file)


def _wrapped(real, describe):
    def wrapper(*args, **kwargs):
        watch = _watch
        if watch is None or getattr(_inside, "depth", 0):
            return real(*args, **kwargs)
        kind, place, *source = describe(*args, **kwargs)
        path = None if place is None else watch.relative(_in(place, kwargs, "dir_fd", "dst_dir_fd"))
        _inside.depth = 1
        if path is None:
            try:
                return real(*args, **kwargs)
            finally:
                _inside.depth = 0
        dies = False
        try:
            dies = watch.before(kind, path, watch.relative(_in(source[0], kwargs, "src_dir_fd")) if source else None)
            return real(*args, **kwargs)
        finally:
            if dies:
                watch.die(kind, path)
            _inside.depth = 0

    wrapper.watched = True
    return wrapper


def _audit(event, args):
    if event in _AUDITED and _watch is not None and not getattr(_inside, "depth", 0):
        place = args[1] if event in {"os.rename", "os.link"} else args[0]
        if isinstance(place, (str, bytes, os.PathLike)):
            path = _watch.relative(place)
            if path is not None:
                _watch.unseen(event, path)
