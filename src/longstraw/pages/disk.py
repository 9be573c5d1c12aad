"""Pages in files: a private directory a store, removed on release, on exit and after a crash."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

import torch

_PREFIX = "longstraw-pages-"
_LOCK = "lock"
_LIVE: weakref.WeakSet[DiskFolder] = weakref.WeakSet()


class DiskFolder:
    """A directory of mode 0700 that one process owns and holds a lock on while it lives.

    Args:
        parent: where to make it; None takes the system's temporary directory. Directories that a dead process left
            behind there are removed first; one whose lock is held belongs to a live process and stays.
    """

    def __init__(self, parent: str | os.PathLike[str] | None = None) -> None:
        root = Path(parent) if parent is not None else Path(tempfile.gettempdir())
        try:
            root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(root)
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
            self._lock = open(self.path / _LOCK, "w")  # noqa: SIM115  (held open on purpose: the lock is the life sign)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise OSError(
                error.errno, f"cannot keep pages in {root}: {error.strerror}; choose another directory with page_dir"
            ) from error
        self._next = 0
        _LIVE.add(self)

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
        """Removes the directory and everything in it; safe to call again."""
        if not self._lock.closed:
            shutil.rmtree(self.path, ignore_errors=True)
            self._lock.close()


class DiskFile:
    """Tensors of one page in one file, written and read with explicit I/O so that a failure is an exception.

    Raises:
        OSError: no room, or a failed read or write; the message names the directory and the bytes wanted.
    """

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self._layout: list[tuple[torch.dtype, torch.Size, int]] = []
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise self._explained(error, nbytes, "create") from error
        try:
            if nbytes:
                os.posix_fallocate(self._descriptor, 0, nbytes)
        except OSError as error:
            self.close()
            raise self._explained(error, nbytes, "reserve") from error

    def write(self, tensors: tuple[torch.Tensor, ...]) -> None:
        self._layout = []
        offset = 0
        for tensor in tensors:
            flat = tensor.detach().to("cpu").contiguous()
            self._layout.append((flat.dtype, flat.shape, offset))
            data = memoryview(flat.view(-1).view(torch.uint8).numpy())
            try:
                done = 0
                while done < len(data):
                    done += os.pwrite(self._descriptor, data[done:], offset + done)
            except OSError as error:
                raise self._explained(error, len(data), "write") from error
            offset += len(data)

    def read(self, *, pin: bool = False) -> tuple[torch.Tensor, ...]:
        tensors = []
        for dtype, shape, offset in self._layout:
            tensor = torch.empty(shape, dtype=dtype, pin_memory=pin)
            data = memoryview(tensor.view(-1).view(torch.uint8).numpy())
            done = 0
            try:
                while done < len(data):
                    count = os.preadv(self._descriptor, [data[done:]], offset + done)
                    if count == 0:
                        raise OSError(5, "the file ends early")
                    done += count
            except OSError as error:
                raise self._explained(error, len(data), "read") from error
            tensors.append(tensor)
        return tuple(tensors)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
        with contextlib.suppress(OSError):
            os.unlink(self.path)

    def _explained(self, error: OSError, nbytes: int, verb: str) -> OSError:
        return OSError(
            error.errno,
            f"cannot {verb} {nbytes:,} bytes of pages in {self.path.parent}: {error.strerror}; "
            "free space there or choose another directory with page_dir",
        )


def remove_leftovers(root: Path) -> list[Path]:
    """Removes page directories under `root` whose owner is gone; returns what it removed."""
    removed = []
    for folder in root.glob(_PREFIX + "*"):
        try:
            with open(folder / _LOCK, "r+") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
                removed.append(folder)
        except OSError:  # its owner lives, it is another user's, or it is being made this instant
            continue
    return removed


@atexit.register
def _close_all() -> None:
    for folder in list(_LIVE):
        folder.close()
