"""Files and folders that are written completely or not at all.

Data is written beside the target under a temporary name, synced to the disk, and replaces the target at the end. A
process that is killed leaves the target as it was; the next that writes there removes what it left behind.

filelock keeps a second writer out. The rest is done here, since tempfile and os.replace alone neither replace a folder
at once nor remove what a killed process left.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ..errors import ConflictError, DiskSpaceError, SettingsError
from .signals import undisturbed

if TYPE_CHECKING:
    from filelock import FileLock

_FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
_LONG = 200  # bytes of a name, of the 255 that file systems allow
_EXCHANGE = 2  # RENAME_EXCHANGE of Linux' renameat2
_HERE = -100  # AT_FDCWD
_WAIT = 0.1  # seconds for the lock of a writer that is done but has not let go
_HALF_WRITTEN: set[tuple[Path, Path]] = set()  # by this process: what is beside a target, and its lock


@contextmanager
def whole_file(target: Path, nbytes: int = 0, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `target` at the end of the block, unless that raises an exception.

    Where `target` is a link, the file that it names is replaced; an existing file's mode is kept.

    Args:
        nbytes: that will be written; whether there is room is checked first.
        mode: permissions of a file that was not there, before the umask.

    Raises:
        DiskSpaceError: there is no room. ConflictError: another process is writing there. SettingsError: nothing can be
            written there, or there is something else than a file.
    """
    with _errors(target, nbytes):
        place = place_of(target)
        if place.is_dir():
            raise SettingsError(f"Cannot write {target}", "it is a folder", "Choose another path")
        with _one_writer(place) as beside:
            require_space(place, nbytes)
            with open(beside, "xb", opener=_private) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.chmod(beside, place.stat().st_mode & 0o7777 if place.exists() else mode & ~_umask())
            os.replace(beside, place)
            _sync(place.parent)


@contextmanager
def whole_folder(target: Path, nbytes: int = 0) -> Iterator[Path]:
    """Yield a new folder that replaces `target`, as `whole_file`. An old one is removed after the new one exists."""
    with _errors(target, nbytes):
        place = place_of(target)
        with _one_writer(place) as beside:
            require_space(place, nbytes)
            beside.mkdir()
            yield beside
            for path in beside.rglob("*"):
                _sync(path)
            _sync(beside)
            _exchange(beside, place)
            _sync(place.parent)


@contextmanager
def part_file(path: Path, nbytes: int = 0) -> Iterator[BinaryIO]:
    """Yield a new file inside a folder of `whole_folder`, synced to the disk at the end of the block.

    For processes that did not make the folder themselves: if it is gone, it is not made again.

    Raises:
        As `whole_file`.
    """
    with _errors(path, nbytes):
        require_space(path, nbytes)
        with open(path, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())


def abandon() -> None:
    """Remove all that this process is writing. For its end, where other threads do not get to remove it."""
    for beside, lock_file in list(_HALF_WRITTEN):
        with contextlib.suppress(OSError):
            _remove_shared(beside)
            lock_file.unlink(missing_ok=True)


def _private(path: str, flags: int) -> int:
    """Open for the owner alone: a file that is being written does not have its permissions yet."""
    return os.open(path, flags, 0o600)


def place_of(target: Path) -> Path:
    """Return the real path of a target, with links resolved.

    Raises:
        SettingsError: something that is neither a file nor a folder is there, or the path is not possible.
    """
    with _errors(target, 0):
        place = Path(os.path.realpath(target))
        place.exists()  # which says so if its name is too long
    if place.is_symlink() or (place.exists() and not place.is_file() and not place.is_dir()):
        what = "it is a circular link" if place.is_symlink() else "it is a device or a pipe"
        raise SettingsError(f"Cannot write {target}", what, "Choose another path")
    return place


def require_space(target: Path, nbytes: int) -> None:
    """Raise DiskSpaceError if fewer than `nbytes` bytes are free where `target` is to be written."""
    with _errors(target, nbytes):
        free = _free(target)
    if nbytes > free:
        raise _no_space(target, nbytes, free)


def _no_space(target: Path, nbytes: int, free: int) -> DiskSpaceError:
    needed = (
        f"it takes {nbytes} bytes, but only {free} are free there" if nbytes else f"only {free} bytes are free there"
    )
    return DiskSpaceError(f"Cannot write {target}", needed, "Make room, or choose another path")


def _free(target: Path) -> int:
    """Return the bytes that are free where `target` is to be written."""
    return shutil.disk_usage(next(home for home in Path(os.path.realpath(target)).parents if home.exists())).free


@contextmanager
def _errors(target: Path, nbytes: int) -> Iterator[None]:
    """Turn the system's errors about a path, also while it is written to, into errors that name the target."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _no_space(target, nbytes, _free(target)) from error
        place = f": {error.filename}" if error.filename else ""
        raise _unwritable(target, f"{error.strerror or error}{place}") from error
    except ValueError as error:
        if "\0" not in str(target):
            raise
        raise _unwritable(target, str(error)) from error


def _unwritable(target: Path, why: str) -> SettingsError:
    return SettingsError(f"Cannot write {target}", why, "Check the path and its permissions, or choose another")


@contextmanager
def _one_writer(place: Path) -> Iterator[Path]:
    """Yield a free name beside `place` that no other process writes to; remove what an earlier writer left there.

    The parent folder is made if it is missing, and removed again if nothing is written into it.
    """
    name = place.name if len(os.fsencode(place.name)) < _LONG else sha256(os.fsencode(place.name)).hexdigest()
    beside, lock_file = (place.with_name(f".sdquant-{name}.{end}") for end in ("tmp", "lock"))
    new_folders = _make_folder(place.parent)
    lock = None
    try:
        with undisturbed():  # Ctrl-C comes when it is known that the lock is ours
            lock = _locked(place, lock_file)
        if not place.exists() and beside.with_suffix(".old").exists():
            beside.with_suffix(".old").rename(place)  # killed between two renames
        _remove_shared(beside)
        _HALF_WRITTEN.add((beside, lock_file))
        yield beside
    finally:
        with undisturbed():
            _HALF_WRITTEN.discard((beside, lock_file))
            if lock is not None:
                _remove_shared(beside)
                with contextlib.suppress(OSError):  # Windows, where filelock removes it
                    lock_file.unlink()  # while it is held: who waits for it sees that it is gone
                lock.release()
            _unmake(new_folders)


def _make_folder(folder: Path) -> list[Path]:
    """Make a folder and its parents; return those that were missing, the innermost first."""
    new = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    return new


def _unmake(folders: list[Path]) -> None:
    """Remove the folders that are empty."""
    with contextlib.suppress(OSError):  # not empty
        for folder in folders:
            folder.rmdir()


def _locked(place: Path, lock_file: Path) -> FileLock | None:
    """Return the acquired lock of a target. File systems without locks (network) are ignored.

    None without filelock: a Python without sdquant's packages writes no model, but `install-extension` its folder.
    """
    try:
        from filelock import FileLock, Timeout
    except ModuleNotFoundError:
        return None

    lock = FileLock(lock_file, timeout=_WAIT, mode=0o600, thread_local=False, poll_interval=_WAIT / 5)
    try:
        lock.acquire()
    except Timeout:
        why, fix = "another process is writing to it", "Wait until it is done"
        raise ConflictError(f"Cannot write {place}", why, fix) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP):
            raise
    return lock


def _exchange(new: Path, target: Path) -> None:
    """Rename `new` to `target` and remove what was there; atomically if the system can."""
    if target.exists() and not _swap(new, target):
        old = new.with_suffix(".old")
        remove(old)
        target.rename(old)
        new.rename(target)
        remove(old)
    elif new.exists() and not target.exists():
        new.rename(target)


def _swap(one: Path, other: Path) -> bool:
    """Exchange two names atomically; return False if the system cannot."""
    if not sys.platform.startswith("linux"):
        return False
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return rename is not None and rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0


def remove(path: Path) -> None:
    """Remove a file or folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _remove_shared(path: Path) -> None:
    """Remove a path that other processes may be writing into: rename it first, so that they cannot find it."""
    gone = path.with_suffix(".gone")
    remove(gone)
    if path.is_dir() and not path.is_symlink():
        path.rename(gone)
        remove(gone)
    else:
        remove(path)


def _sync(path: Path) -> None:
    """Sync a file or a folder's entries to the disk."""
    if path.is_dir() and sys.platform == "win32":
        return  # folders cannot be opened there
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EACCES, errno.EBADF):  # a file system without it
            raise
    finally:
        os.close(file)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
