"""The page table's accounting, without a tensor."""

from __future__ import annotations

import subprocess
import sys

import pytest

from longstraw.pages import Page, PageTable, Tier


def page(kind: str = "kv", start: int = 0, nbytes: int = 10, tier: Tier = Tier.DEVICE) -> Page:
    return Page(kind, start, num_tokens=4, rows=1, nbytes=nbytes, tier=tier)


def test_pages_are_numbered_in_order_of_creation() -> None:
    table = PageTable()
    pages = [table.add(page(start=4 * i)) for i in range(3)]
    assert [p.number for p in table] == [0, 1, 2] and list(table) == pages and len(table) == 3
    table.remove(pages[1])
    assert table.add(page()).number == 3, "a number is never used twice"
    assert pages[1] not in table and pages[2] in table
    assert pages[2].stop == 12


def test_bytes_by_kind_and_tier() -> None:
    table = PageTable()
    kept = [
        table.add(page(nbytes=8)),
        table.add(page(nbytes=5, tier=Tier.HOST)),
        table.add(page("recurrent", nbytes=3)),
    ]
    gone = table.add(page(nbytes=100))
    table.remove(gone)
    assert table.nbytes() == {"kv": {"device": 8, "host": 5}, "recurrent": {"device": 3}}
    for p in kept:
        table.remove(p)
    assert table.nbytes() == {} and len(table) == 0


def test_freed_twice_or_in_use_is_an_error() -> None:
    table = PageTable()
    first = table.add(page(start=8))
    table.remove(first)
    with pytest.raises(RuntimeError, match=r"tokens 8-12\) was already freed"):
        table.remove(first)
    pinned = table.add(page())
    pinned.pins += 1
    with pytest.raises(RuntimeError, match="is in use"):
        table.remove(pinned)
    pinned.pins -= 1
    table.remove(pinned)


def test_pages_are_compared_by_identity() -> None:
    assert page() != page()


def test_the_table_needs_no_torch() -> None:
    code = "import importlib.util as u, sys; sys.modules['torch'] = None; " + (
        "s = u.spec_from_file_location('table', sys.argv[1]); m = u.module_from_spec(s); sys.modules['table'] = m; "
        "s.loader.exec_module(m); m.PageTable()"
    )
    source = sys.modules[PageTable.__module__].__file__
    subprocess.run([sys.executable, "-c", code, source], check=True, timeout=60)
