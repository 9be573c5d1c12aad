"""The disk tier's directory: private, and gone after release, exit, exception, crash and garbage collection."""

from __future__ import annotations

import errno
import gc
import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw.pages import PageStore
from longstraw.pages.disk import DiskFolder, remove_leftovers


def folders(root: Path) -> list[Path]:
    return sorted(root.iterdir())


def process(root: Path, ending: str) -> subprocess.Popen[str]:
    """Another process that keeps a page under `root`, says so, and ends in the given way once it reads a line."""
    code = (
        "import os, sys, torch; from longstraw.pages import PageStore\n"
        f"store = PageStore('cpu', 'disk', {str(root)!r})\n"
        "page = store.put('kv', 0, (torch.ones(1, 1, 4, 4),))\n"
        "print('kept', flush=True); sys.stdin.readline()\n"
        f"{ending}\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert child.stdout is not None and child.stdout.readline() == "kept\n", child.communicate()[1]
    return child


def test_only_its_owner_may_look(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = PageStore("cpu", "disk", tmp_path)
        store.put("kv", 0, (torch.ones(1, 1, 4, 4),))
    finally:
        os.umask(before)
    [folder] = folders(tmp_path)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.page")} == {0o600}
    store.close()
    assert not folders(tmp_path)


def test_the_directory_is_made_where_it_was_missing(tmp_path: Path) -> None:
    store = PageStore("cpu", "disk", tmp_path / "a" / "b")
    store.put("kv", 0, (torch.ones(1, 1, 4, 4),))
    assert folders(tmp_path / "a" / "b")
    store.close()
    assert not folders(tmp_path / "a" / "b")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    store = PageStore("cpu", "disk", tmp_path / "file")
    with pytest.raises(OSError, match="page_dir"):
        store.put("kv", 0, (torch.ones(1, 1, 4, 4),))
    assert store.nbytes() == {}


def test_a_freed_page_gives_its_file_back(tmp_path: Path) -> None:
    store = PageStore("cpu", "disk", tmp_path)
    page = store.put("kv", 0, (torch.ones(1, 1, 4, 4),))
    store.accumulate(page, (torch.ones(1, 1, 4, 4),))
    [folder] = folders(tmp_path)
    assert len(list(folder.glob("*.page"))) == 2
    store.free(page)
    assert not list(folder.glob("*.page"))
    store.close()


def test_a_forgotten_store_leaves_no_files(tmp_path: Path) -> None:
    store = PageStore("cpu", "disk", tmp_path)
    store.put("kv", 0, (torch.ones(1, 1, 4, 4),))
    del store
    gc.collect()
    assert not folders(tmp_path)


def test_more_pages_than_files_may_be_open(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    store = PageStore("cpu", "disk", tmp_path)
    in_use = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 20, hard))
    try:
        pages = [store.put("kv", i, (torch.full((1, 1, 1, 4), float(i)),)) for i in range(60)]
        for page in pages:
            store.accumulate(page, (torch.ones(1, 1, 1, 4),))
        assert [float(tensor[0, 0, 0, 0]) for _, (tensor,) in store.stream(pages)] == [float(i) for i in range(60)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    store.close()


ENDINGS = {
    "end of the program": "",
    "exit": "sys.exit(3)",
    "exception": "raise RuntimeError('stop')",
    "close": "store.close(); os._exit(0)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_files_after_the_process(ending: str, tmp_path: Path) -> None:
    child = process(tmp_path, ENDINGS[ending])
    assert folders(tmp_path)
    child.communicate("\n", timeout=60)
    assert not folders(tmp_path)


def test_a_dead_process_is_cleaned_up_after_and_a_live_one_is_not(tmp_path: Path) -> None:
    live, dead = process(tmp_path, "print(float(store.fetch(page)[0].sum()))"), process(tmp_path, "")
    assert len(folders(tmp_path)) == 2
    dead.send_signal(signal.SIGKILL)
    dead.communicate(timeout=60)
    assert len(folders(tmp_path)) == 2, "killed, it could not clean up"
    (tmp_path / "longstraw-pages-of-nobody").mkdir()
    (tmp_path / "else").mkdir()
    store = PageStore("cpu", "disk", tmp_path)
    store.put("kv", 0, (torch.ones(1, 1, 4, 4),))
    assert len(folders(tmp_path)) == 4, "the dead one's is gone; the live one's, this one's and strangers' stay"
    output, _ = live.communicate("\n", timeout=60)
    assert output == "16.0\n", "the live process still reads its pages"
    store.close()
    assert sorted(path.name for path in folders(tmp_path)) == ["else", "longstraw-pages-of-nobody"]


def test_a_fork_that_ends_leaves_its_parents_pages(tmp_path: Path) -> None:
    fork = (
        "child = os.fork()\nif child == 0: sys.exit(0)\nos.waitpid(child, 0); print(float(store.fetch(page)[0].sum()))"
    )
    output, errors = process(tmp_path, fork).communicate("\n", timeout=60)
    assert output == "16.0\n", errors
    assert not folders(tmp_path)


def test_a_directory_that_cannot_be_made_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def failing(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", failing)
        store = PageStore("cpu", "disk", tmp_path)
        with pytest.raises(OSError, match=r"64 bytes.*page_dir") as caught:
            store.put("kv", 0, (torch.ones(1, 1, 4, 4),))
    assert caught.value.errno == errno.ENOLCK and str(tmp_path) in str(caught.value)
    assert not folders(tmp_path) and store.nbytes() == {}


def test_what_broke_off_in_the_making_is_removed_later(tmp_path: Path) -> None:
    """Once it is older than any directory in the making, unless its owner holds the lock."""
    import fcntl

    young, old, locked = (tmp_path / f".longstraw-pages-{name}" for name in ("young", "old", "locked"))
    for folder in (young, old, locked):
        folder.mkdir()
    with open(locked / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for folder in (old, locked):
            os.utime(folder, (0, 0))
        assert remove_leftovers(tmp_path) == [old]
    assert folders(tmp_path) == [locked, young]


def test_a_directory_in_the_making_is_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process that starts at any instant of the making takes nothing away."""
    import fcntl

    flock = fcntl.flock

    def interrupted(lock: Any, flags: int) -> None:
        if flags == fcntl.LOCK_EX:
            remove_leftovers(tmp_path)
        flock(lock, flags)
        if flags == fcntl.LOCK_EX:
            remove_leftovers(tmp_path)

    monkeypatch.setattr(fcntl, "flock", interrupted)
    folder = DiskFolder(tmp_path)
    monkeypatch.undo()
    assert remove_leftovers(tmp_path) == []
    assert folder.path.is_dir() and folders(tmp_path) == [folder.path]
    folder.close()
