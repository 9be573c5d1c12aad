"""Pages in files: a private directory a store, removed on release, on exit and after a crash."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch

_PREFIX = "longstraw-pages-"
_HIDDEN = "." + _PREFIX
_MAKING_SECONDS = 60  # a directory takes milliseconds to make
_LOCK = "lock"


class DiskFolder:
    """A directory of mode 0700 that one process owns and holds a lock on until it ends.

    Args:
        parent: where to make it; None takes the system's temporary directory. Directories that a dead process left
            behind there are removed first; one whose lock is held belongs to a running process and stays.
        nbytes: of the page that is waiting for it, which an error names.

    Raises:
        OSError: it could not be made; nothing of it is left.
    """

    def __init__(self, parent: str | os.PathLike[str] | None = None, nbytes: int = 0) -> None:
        root = Path(parent) if parent is not None else Path(tempfile.gettempdir())
        hidden = None
        try:
            root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(root)
            hidden = Path(tempfile.mkdtemp(prefix=_HIDDEN, dir=root))  # until it is locked nobody may find it
            lock = open(hidden / _LOCK, "w")  # noqa: SIM115  (held open on purpose: the lock is the life sign)
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.path = hidden.rename(root / hidden.name.removeprefix("."))
        except OSError as error:
            if hidden is not None:
                shutil.rmtree(hidden, ignore_errors=True)
            raise OSError(
                error.errno,
                f"cannot keep pages ({nbytes:,} bytes to begin with) in {root}: {error.strerror}; choose another "
                "directory with page_dir",
            ) from error
        self._next = 0
        self._remove = weakref.finalize(self, _remove, self.path, lock, os.getpid())

    def new_file(self, tensors: tuple[torch.Tensor, ...]) -> DiskFile:
        """A file that holds these tensors; none is left if that fails."""
        self._next += 1
        file = DiskFile(self.path / f"{self._next}.page", sum(t.numel() * t.element_size() for t in tensors))
        try:
            file.write(tensors)
        except BaseException:
            file.close()
            raise
        return file

    def close(self) -> None:
        """Removes the directory and everything in it; safe to call again. Forgetting the folder does the same."""
        self._remove()


class DiskFile:
    """Tensors of one page in one file, written and read with explicit I/O so that a failure is an exception.

    The file is open only while it is read or written: pages are more than a process may have open.

    Raises:
        OSError: no room, or a failed read or write; the message names the directory and the bytes wanted.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self._layout: list[tuple[torch.dtype, torch.Size, int]] = []
        try:
            with self._opened(os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
                if nbytes:
                    os.posix_fallocate(descriptor, 0, nbytes)
        except OSError as error:
            self.close()
            raise self._explained(error, nbytes, "reserve") from error

    def write(self, tensors: tuple[torch.Tensor, ...]) -> None:
        layout: list[tuple[torch.dtype, torch.Size, int]] = []
        nbytes = sum(t.numel() * t.element_size() for t in tensors)
        offset = 0
        try:
            with self._opened(os.O_WRONLY) as descriptor:
                for tensor in tensors:
                    flat = tensor.detach().to("cpu").contiguous()
                    layout.append((flat.dtype, flat.shape, offset))
                    data = memoryview(flat.view(-1).view(torch.uint8).numpy())
                    done = 0
                    while done < len(data):
                        done += os.pwrite(descriptor, data[done:], offset + done)
                    offset += len(data)
        except OSError as error:
            raise self._explained(error, nbytes, "write") from error
        self._layout = layout

    def read(self, *, pin: bool = False) -> tuple[torch.Tensor, ...]:
        tensors = [torch.empty(shape, dtype=dtype, pin_memory=pin) for dtype, shape, _ in self._layout]
        nbytes = sum(t.numel() * t.element_size() for t in tensors)
        try:
            with self._opened(os.O_RDONLY) as descriptor:
                for tensor, (_, _, offset) in zip(tensors, self._layout):
                    data = memoryview(tensor.view(-1).view(torch.uint8).numpy())
                    done = 0
                    while done < len(data):
                        count = os.preadv(descriptor, [data[done:]], offset + done)
                        if count == 0:
                            raise OSError(errno.EIO, "the file ends early")
                        done += count
        except OSError as error:
            raise self._explained(error, nbytes, "read") from error
        return tuple(tensors)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    @contextlib.contextmanager
    def _opened(self, flags: int) -> Iterator[int]:
        descriptor = os.open(self.path, flags, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _explained(self, error: OSError, nbytes: int, verb: str) -> OSError:
        return OSError(
            error.errno,
            f"cannot {verb} {nbytes:,} bytes of pages in {self.path.parent}: {error.strerror}; "
            "free space there or choose another directory with page_dir",
        )


def remove_leftovers(root: Path) -> list[Path]:
    """Removes page directories under `root` whose owner is gone; returns what it removed."""
    removed = []
    broken_off = [folder for folder in root.glob(_HIDDEN + "*") if _age_seconds(folder) > _MAKING_SECONDS]
    for folder in [*root.glob(_PREFIX + "*"), *broken_off]:
        try:
            with open(folder / _LOCK, "a" if folder in broken_off else "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                removed.append(folder)
        except OSError:  # its owner still runs, it is another user's, or it is being made this instant
            continue
    return removed


def _age_seconds(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:  # its owner has just removed it
        return 0.0


def _remove(path: Path, lock: IO[str], owner: int) -> None:
    if os.getpid() == owner:  # not in a fork of it, which ends while the owner still reads
        shutil.rmtree(path, ignore_errors=True)
        lock.close()
