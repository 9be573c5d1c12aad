"""The page store on every tier: contents to the bit, cotangents in a fixed order, accounting, errors."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw.pages import PageStore

TIERS = ["device", "host", "disk"]


@pytest.fixture(params=TIERS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    store = PageStore("cpu", request.param, tmp_path)
    yield store
    store.close()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(_bytes(a), _bytes(b)))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_what_goes_in_comes_out(store: PageStore, dtype: torch.dtype) -> None:
    key = torch.randn(1, 2, 5, 3).mul(100).to(dtype)
    value = torch.randn(1, 5, 2, 3).mul(100).to(dtype).transpose(1, 2)  # as attention makes it: not contiguous
    page = store.put("kv", 7, (key, value))
    assert (page.start, page.num_tokens, page.rows, page.stop) == (7, 5, 1, 12)
    assert page.nbytes == 2 * 30 * key.element_size()
    assert all(same_bits(a, b) for a, b in zip(store.fetch(page), (key, value)))


def test_values_that_are_no_numbers_survive(store: PageStore) -> None:
    odd = torch.tensor([[float("nan"), float("inf"), -0.0, 1e-45]])
    assert same_bits(store.fetch(store.put("recurrent", 0, (odd,), token_dim=None))[0], odd)


def test_tensors_of_several_dtypes_and_empty_ones(store: PageStore) -> None:
    tensors = (torch.randn(2, 3, 4), torch.randn(2, 1, 2, dtype=torch.float64), torch.randn(2, 2, 0, 4))
    page = store.put("window", 0, tensors, token_dim=None)
    assert page.num_tokens == 0 and page.rows == 2
    assert all(same_bits(a, b) for a, b in zip(store.fetch(page), tensors))


def test_a_page_is_a_copy(store: PageStore) -> None:
    source = torch.zeros(1, 1, 2, 2)
    whole = torch.zeros(4, 1, 2, 2)
    pages = [store.put("kv", 0, (source,)), store.put("kv", 0, (whole[1:2],))]
    whole.fill_(1)
    if store.tier != "device":
        source.fill_(1)
    assert all((store.fetch(page)[0] == 0).all() for page in pages)


def test_freed_memory_goes_to_the_next_page_and_to_no_other(store: PageStore) -> None:
    """Pages of one size come and go; each holds what it was given."""
    held: dict[int, tuple[Any, torch.Tensor]] = {}
    for step in range(60):
        if step % 3 == 2:
            page, _ = held.pop(min(held, key=lambda number: (number * 7919) % 31))
            store.free(page)
        tensor = torch.full((1, 1, 3 + step % 2, 5), float(step))
        page = store.put("kv", step, (tensor,))
        held[page.number] = (page, tensor)
        for kept, expected in held.values():
            assert same_bits(store.fetch(kept)[0], expected)


def test_streaming_keeps_the_order(store: PageStore) -> None:
    pages = [store.put("kv", i, (torch.full((1, 1, 1, 4), float(i)),)) for i in range(9)]
    seen = [(page, float(tensor.mean())) for page, (tensor,) in store.stream(pages)]
    assert seen == [(page, float(page.start)) for page in pages]
    assert list(store.stream([])) == []


def test_the_next_page_is_read_while_this_one_is_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PageStore("cpu", "disk", tmp_path)
    pages = [store.put("kv", i, (torch.full((1, 1, 1, 4), float(i)),)) for i in range(4)]
    preadv, reads = os.preadv, threading.Semaphore(0)
    readers: list[int] = []

    def watched(*args: Any) -> int:
        readers.append(threading.get_ident())
        reads.release()
        return preadv(*args)

    monkeypatch.setattr(os, "preadv", watched)
    seen = []
    for place, (_, (tensor,)) in enumerate(store.stream(pages)):
        ahead = min(place + 2, len(pages))  # pages whose reading has begun, though nobody has asked for the next
        while len(seen) < ahead:
            assert reads.acquire(timeout=30), f"page {len(seen)} is not read ahead"
            seen.append(readers[len(seen)])
        assert float(tensor.mean()) == place
    here = threading.get_ident()
    assert len(readers) == len(pages) and [reader == here for reader in readers] == [True, False, False, False]
    store.close()


def test_a_stream_may_be_left_early(store: PageStore) -> None:
    pages = [store.put("kv", i, (torch.ones(1, 1, 1, 4),)) for i in range(5)]
    for page, _ in store.stream(pages):
        if page is pages[1]:
            break
    for page in pages:
        store.free(page)
    assert store.nbytes() == {}


def test_cotangents_are_summed_in_order_and_in_float32_at_least(store: PageStore) -> None:
    for dtype, wide in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        page = store.put("kv", 0, (torch.zeros(1, 1, 2, 3, dtype=dtype),) * 2)
        parts = [tuple((torch.randn(1, 1, 2, 3) * 10.0**i).to(dtype) for _ in range(2)) for i in (-3, 0, 3, -2)]
        for part in parts:
            store.accumulate(page, part)
        expected = tuple(torch.zeros(1, 1, 2, 3, dtype=wide) for _ in range(2))
        for part in parts:
            expected = tuple(total + gradient.to(wide) for total, gradient in zip(expected, part))
        found = store.take_cotangent(page)
        assert found is not None
        assert all(same_bits(a, b) for a, b in zip(found, expected))
        assert store.take_cotangent(page) is None, "taken once"


def test_a_cotangent_is_a_copy_of_what_was_given(store: PageStore) -> None:
    page = store.put("kv", 0, (torch.zeros(1, 1, 2, 2),))
    gradient = torch.ones(1, 1, 2, 2)
    store.accumulate(page, (gradient,))
    store.accumulate(page, (gradient,))
    assert (gradient == 1).all()
    gradient.fill_(100)
    found = store.take_cotangent(page)
    assert found is not None and (found[0] == 2).all()
    store.put("kv", 0, (torch.full((1, 1, 2, 2), 9.0),))
    assert (found[0] == 2).all(), "what was handed over is the caller's"


def test_cotangents_live_from_first_touch_to_taking(store: PageStore) -> None:
    pages = [store.put("kv", i, (torch.zeros(1, 1, 2, 4),)) for i in range(3)]
    tier = store.tier.value
    assert store.nbytes() == {"kv": {tier: 96}}
    store.accumulate(pages[0], (torch.ones(1, 1, 2, 4),))
    store.accumulate(pages[1], (torch.ones(1, 1, 2, 4),))
    assert store.nbytes() == {"kv": {tier: 96}, "cotangent": {tier: 64}}
    store.take_cotangent(pages[0])
    assert store.nbytes()["cotangent"] == {tier: 32}
    store.free(pages[1])
    assert store.nbytes() == {"kv": {tier: 64}}, "a freed page takes its cotangent along"


def test_cotangents_rest_no_higher_than_their_page(tmp_path: Path) -> None:
    """On its page's tier, or on the next one down that has room."""
    store = PageStore("cpu", "device", tmp_path, {"device": 192, "host": 192})
    pages = [store.put("kv", i, (torch.zeros(1, 1, 4, 4),)) for i in range(5)]
    assert [page.tier for page in pages] == ["device"] * 3 + ["host"] * 2
    store.free(pages.pop(0))
    for page in reversed(pages):
        store.accumulate(page, (torch.ones(1, 1, 4, 4),))
    placed = [page.tier for page in store.table if page.kind == "cotangent"]
    assert placed == ["host", "disk", "device", "disk"], "the device has room for the first, but its page rests below"
    store.accumulate(pages[0], (torch.ones(1, 1, 4, 4),))
    found = [store.take_cotangent(page) for page in pages]
    assert [float(part[0].mean()) for part in found if part is not None] == [2.0, 1.0, 1.0, 1.0]
    store.close()


def test_freed_twice_is_an_error(store: PageStore) -> None:
    page = store.put("kv", 0, (torch.zeros(1, 1, 2, 2),))
    store.free(page)
    with pytest.raises(RuntimeError, match="already freed"):
        store.free(page)


def test_closing_forgets_everything(store: PageStore, tmp_path: Path) -> None:
    page = store.put("kv", 0, (torch.zeros(1, 1, 2, 2),))
    store.accumulate(page, (torch.zeros(1, 1, 2, 2),))
    store.close()
    store.close()
    assert store.nbytes() == {} and not list(tmp_path.iterdir())


def test_nothing_is_kept_of_a_page_that_found_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room runs out at reserving, at writing, and while a cotangent is added: an error, and the accounting is right."""
    store = PageStore("cpu", "disk", tmp_path)
    kept = store.put("kv", 0, (torch.ones(1, 1, 4, 4),))
    store.accumulate(kept, (torch.ones(1, 1, 4, 4),))
    before = store.nbytes()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for call in ("posix_fallocate", "pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, full)
            with pytest.raises(OSError) as caught:
                store.put("kv", 4, (torch.ones(1, 1, 4, 4),))
        assert caught.value.errno == errno.ENOSPC
        message = str(caught.value)
        assert str(tmp_path) in message and "64 bytes" in message and "page_dir" in message
        assert store.nbytes() == before
    files = [path for folder in tmp_path.iterdir() for path in folder.glob("*.page")]
    assert len(files) == 2, "the page and its cotangent"
    assert (store.fetch(kept)[0] == 1).all()
    store.close()


def test_a_read_that_fails_names_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = PageStore("cpu", "disk", tmp_path)
    page = store.put("kv", 0, (torch.ones(1, 1, 4, 4),))
    store.accumulate(page, (torch.ones(1, 1, 4, 4),))

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        for use in (store.fetch, store.take_cotangent):
            with pytest.raises(OSError) as caught:
                use(page)
            message = str(caught.value)
            assert str(tmp_path) in message and "64 bytes" in message
    assert store.nbytes() == {"kv": {"disk": 64}}, "a cotangent that could not be read is gone"
    assert (store.fetch(page)[0] == 1).all()
    store.close()


def test_a_file_that_was_cut_short(tmp_path: Path) -> None:
    store = PageStore("cpu", "disk", tmp_path)
    page = store.put("kv", 0, (torch.ones(1, 1, 4, 4),))
    [file] = [path for folder in tmp_path.iterdir() for path in folder.glob("*.page")]
    os.truncate(file, 10)
    with pytest.raises(OSError, match="ends early"):
        store.fetch(page)
    store.close()
