"""A root directory that no name leads out of: each name below it is opened relative to its parent, and links are checked.

A path may lead elsewhere between its check and its use. A descriptor stays on its directory
(https://man7.org/linux/man-pages/man2/open.2.html, "Rationale for openat() and other directory file descriptor APIs").
"""

import errno
import io
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NoReturn, TypeVar, final

T = TypeVar("T")

# A directory on the way is not read: with O_PATH, opening one requests nothing but the name from a file server.
_PLACE = os.O_DIRECTORY | getattr(os, "O_PATH", 0)
_LISTED = os.O_RDONLY | os.O_DIRECTORY
_MANY_DELETES = 100  # more deletes do not hit one put; where nothing can be created, as in /proc, the loop must end
_NOT_OFFERED = {errno.ENOSYS, errno.ENOTSUP}  # as Mountpoint for S3 answers
_NO_FILE = {errno.ENXIO, errno.ENODEV, errno.ELOOP}  # a socket, a device without a driver, a link
_STAYS = {errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EBUSY}  # the last: a mount point


@final
class Way:
    """The open directories from a root down to one of them; closed by `with`.

    Args:
        root: The directory to begin with; may be a link itself.
        device: The filesystem that it was on when something was in it; on another one, nothing new is made in the root itself.

    """

    def __init__(self, root: Path, device: int | None = None) -> None:
        self._root = root
        self._device = device
        self._names: list[str] = []
        self._descriptors = [os.open(root, _PLACE)]

    def __enter__(self) -> "Way":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    @property
    def folder(self) -> int:
        """The descriptor of the last directory."""
        return self._descriptors[-1]

    @property
    def root_device(self) -> int:
        """The filesystem of the root."""
        return os.fstat(self._descriptors[0]).st_dev

    def path(self, name: str) -> Path:
        """Return the full path of `name` in the last directory, for messages."""
        return self._root.joinpath(*self._names, name)

    def enter(self, name: str, *, make: bool) -> None:
        """Enter the directory `name`; a new one is synced into its parent, since a lost one loses everything below it.

        Raises:
            FileNotFoundError: If it does not exist, and is not to be made, or the root is an empty mount point by now.
            OSError: NotADirectoryError or ELOOP, depending on the system, if `name` is a link.

        """
        try:
            descriptor = os.open(name, _PLACE | os.O_NOFOLLOW, dir_fd=self.folder)
        except FileNotFoundError:
            if not make:
                raise
            if not self._names and self._device not in (None, self.root_device):
                raise root_gone(self._root) from None
            try:
                os.mkdir(name, dir_fd=self.folder)
            except FileExistsError:  # another process was faster
                pass
            except OSError as exc:
                self._explain_inodes(exc)
                raise
            self.sync()
            descriptor = os.open(name, _PLACE | os.O_NOFOLLOW, dir_fd=self.folder)
        self._descriptors.append(descriptor)
        self._names.append(name)

    def is_link(self, name: str) -> bool:
        """Return whether `name` is a link in the last directory."""
        try:
            return stat.S_ISLNK(self.status(name).st_mode)
        except FileNotFoundError:
            return False

    def status(self, name: str) -> os.stat_result:
        """Return the status of `name` itself."""
        try:
            return os.stat(name, dir_fd=self.folder, follow_symlinks=False)
        except OSError as exc:
            exc.filename = str(self.path(name))  # the call knew the last name only
            raise

    def open(self, name: str, mode: Literal["rb", "xb"]) -> io.FileIO:
        """Open the file `name`; "xb" creates it.

        Raises:
            FileNotFoundError: If it is no regular file: a pipe, a socket, a device, a directory or a link.

        """
        if mode == "xb":
            return io.FileIO(self.create(name), "w")
        try:
            descriptor = self._open(name, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not block this process
        except OSError as exc:
            if exc.errno in _NO_FILE:
                raise self._no_file(name) from exc
            raise
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise self._no_file(name)
        return io.FileIO(descriptor, "r")

    def _no_file(self, name: str) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, "There is no regular file", str(self.path(name)))

    def create(self, name: str) -> int:
        """Create the file `name`, and return a descriptor for writing it, which the caller closes."""
        return self._open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)

    def _open(self, name: str, flags: int) -> int:
        try:
            return os.open(name, flags | os.O_NOFOLLOW, 0o666, dir_fd=self.folder)
        except OSError as exc:
            exc.filename = str(self.path(name))  # the call knew the last name only
            self._explain_inodes(exc)
            raise

    def _explain_inodes(self, error: OSError) -> None:
        """Add to the error of a full filesystem that its inodes are used up, if they are: its free bytes do not show this."""
        if error.errno == errno.ENOSPC:
            filesystem = os.statvfs(self.folder)
            if filesystem.f_files and not filesystem.f_favail:  # some filesystems have no number of inodes
                error.strerror = f"{error.strerror} (all inodes are used, which `df -i` shows)"

    def replace(self, source: str, target: str) -> None:
        """Rename a file of the last directory."""
        try:
            os.replace(source, target, src_dir_fd=self.folder, dst_dir_fd=self.folder)
        except OSError as exc:
            exc.filename, exc.filename2 = str(self.path(source)), str(self.path(target))  # the call knew the last names only
            if exc.errno in _NOT_OFFERED:
                exc.strerror = f"{exc.strerror} (this filesystem cannot rename files)"
            raise

    def unlink(self, name: str) -> None:
        """Remove a file or a link."""
        try:
            os.unlink(name, dir_fd=self.folder)
        except OSError as exc:
            exc.filename = str(self.path(name))  # the call knew the last name only
            raise

    def listed(self) -> int:
        """Return a descriptor of the last directory for listing or syncing, which the caller closes."""
        try:
            return os.open(".", _LISTED, dir_fd=self.folder)
        except OSError as exc:
            exc.filename = str(self._root.joinpath(*self._names))  # the call knew no name
            raise

    def sync(self) -> None:
        """Make the names in the last directory durable."""
        sync_folder(self.listed())

    def remove_if_empty(self) -> None:
        """Remove the last directory if it is empty, then its parent; never the root."""
        for name, parent in zip(reversed(self._names), reversed(self._descriptors[:-1]), strict=True):
            try:
                os.rmdir(name, dir_fd=parent)
            except OSError as exc:
                if exc.errno in _STAYS:
                    return
                raise


class RootFolder:
    """A directory of the local filesystem; links below it are followed as long as they stay below it.

    Once something was in it, it is not made again: if it is missing, or is on another filesystem and empty, somebody has
    unmounted it. What is then written would fill the disk of the mount point, and be hidden after the next mount.

    Args:
        path: Its path; need not exist, and may be a link itself.

    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._device: int | None = None  # of its filesystem, since something was in it

    def open(self, names: Sequence[str], *, make: bool = False) -> Way:
        """Open the directory below the root that `names` lead to.

        Args:
            names: The directories on the way; none for the root.
            make: Whether to create missing directories, including the root and its parents.

        Raises:
            FileNotFoundError: If it does not exist, and is not made.
            NotADirectoryError: If it is no directory.
            PermissionError: If a link leads out, with its target.

        """
        if make and self._device is None:
            _make_root(self.path)
        try:
            way = Way(self.path, self._device)
        except FileNotFoundError:
            if make:
                raise root_gone(self.path) from None
            raise
        for number, name in enumerate(names):
            link = self._enter(way, name, make=make)
            if link is not None:
                return self.open([*self._inside(link), *names[number + 1 :]], make=make)
        return way

    def open_own(self, names: Sequence[str], *, make: bool = False) -> Way:
        """Open the directory that `names` lead to, for a change: of the names, only the first one, a run's, may be a link.

        A link below it, as an unpacked archive may hold, can lead to another run.

        Args:
            names: As in `open`.
            make: As in `open`.

        Raises:
            FileNotFoundError: If it does not exist, and is not made.
            NotADirectoryError: If it is no directory.
            PermissionError: If a link leads to it from below the first name, or leads out, with its target.

        """
        way = self.open(names[:1], make=make)
        for name in names[1:]:
            link = self._enter(way, name, make=make)
            if link is not None:
                self._refuse(link, make=make)
        return way

    def _refuse(self, link: Path, *, make: bool) -> NoReturn:
        inside = self._inside(link)
        if not make:
            with self.open(inside):  # else nothing is there to delete
                pass
        raise PermissionError(
            f"{link} is a link to {os.path.realpath(link)}, and nothing is written or deleted through a link below a run's "
            "directory: remove it"
        )

    def _enter(self, way: Way, name: str, *, make: bool) -> Path | None:
        """Enter a directory; for a link in its place, close `way` and return the link's path."""
        try:
            way.enter(name, make=make)
        except OSError as exc:
            with way:
                path = way.path(name)
                if way.is_link(name):
                    return path
                if exc.filename == name:  # the call knew the last name only
                    exc.filename = str(path)
                raise
        if self._device is None:
            self._device = way.root_device
        return None

    def make(self, folder: str) -> Way:
        """Open the directory at a "/"-joined path below the root, as `open_own` does, and create it if it is missing.

        Raises:
            NotADirectoryError: If it is no directory.
            PermissionError: If a link leads to it from below the first name, or leads out, with its target.

        """
        return despite_deletes(lambda: self.open_own(folder.split("/") if folder else [], make=True))

    def reach(self, key: str) -> tuple[Way, str]:
        """Return the open directory of the file at `key`, and its name there, which is no link.

        Raises:
            FileNotFoundError: If there is no such directory.
            NotADirectoryError: If it is no directory.
            PermissionError: If a link leads out, with its target.

        """
        *folders, name = key.split("/")
        way = self.open(folders)
        try:
            is_link = way.is_link(name)
        except BaseException:
            way.__exit__(None, None, None)
            raise
        if not is_link:
            return way, name
        with way:
            return self.reach("/".join(self._inside(way.path(name))))

    def _inside(self, link: Path) -> tuple[str, ...]:
        """Return the names that lead to the target of `link`."""
        target = Path(os.path.realpath(link))
        root = Path(os.path.realpath(self.path))
        if not target.is_relative_to(root):
            raise PermissionError(f"{link} leads out of the storage {self.path} to {target}: give that as the storage")
        if _leads_to_itself(link):
            raise FileNotFoundError(errno.ENOENT, "A link that leads to itself leads nowhere", str(link))
        return target.relative_to(root).parts


def root_gone(root: Path) -> FileNotFoundError:
    """Return the error of a storage's directory that has vanished while it was in use."""
    return FileNotFoundError(errno.ENOENT, "The storage's directory was deleted, moved or unmounted", str(root))


def despite_deletes(make: Callable[[], T]) -> T:
    """Return what `make` returns, called again when a concurrent delete has removed an empty directory that it made."""
    for tries_left in reversed(range(_MANY_DELETES)):
        try:
            return make()
        except (FileNotFoundError, FileExistsError):  # mkdir raises the latter for a directory that was just removed
            if not tries_left:
                raise
    raise AssertionError


def _leads_to_itself(link: Path) -> bool:
    try:
        link.stat()
    except OSError as exc:
        return exc.errno == errno.ELOOP
    return False


def sync_folder(descriptor: int) -> None:
    """Make the names in a directory durable, and close the descriptor."""
    try:
        os.fsync(descriptor)
    except OSError as exc:
        if exc.errno != errno.EINVAL:  # some network filesystems cannot sync a directory and need not
            raise
    finally:
        os.close(descriptor)


def _make_root(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_root(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:  # another writer's, unless it is no directory
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    sync_folder(os.open(folder.parent, _LISTED))
