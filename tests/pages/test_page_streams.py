"""The store's path beside the compute of a GPU, with CUDA's streams replaced by ones that note what they are told.

What a GPU would order by these calls cannot be seen on a CPU; that each sum and copy is ordered can.
"""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw.pages import PageStore

LOG: list[tuple[Any, ...]] = []


class Event:
    def __init__(self, stream: str) -> None:
        self.stream = stream

    def synchronize(self) -> None:
        LOG.append(("host waits for", self.stream))


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name

    def record_event(self) -> Event:
        return Event(self.name)

    def wait_event(self, event: Event) -> None:
        LOG.append((self.name, "waits for", event.stream))

    def wait_stream(self, other: Stream) -> None:
        LOG.append((self.name, "waits for", other.name))


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A host-tier store as on a GPU, but that its "device" is the CPU and nothing is pinned."""
    compute = Stream("compute")
    empty = torch.empty

    @contextmanager
    def on(stream: Stream) -> Any:
        LOG.append(("on", stream.name))
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch, "empty", lambda *args, pin_memory=False, **more: empty(*args, **more))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: LOG.append(("kept for", stream.name)))
    store = PageStore("cpu", "host", tmp_path)
    store._on_cpu = False
    store._copies, store._sums = Stream("copies"), Stream("sums")  # type: ignore[assignment]
    LOG.clear()
    yield store
    store.close()


def test_sums_in_host_memory_have_the_bits_of_a_plain_sum(store: PageStore) -> None:
    page = store.put("kv", 0, (torch.zeros(1, 1, 2, 3, dtype=torch.bfloat16),) * 2)
    parts = [tuple((torch.randn(1, 1, 2, 3) * 10.0**i).bfloat16() for _ in range(2)) for i in (-3, 0, 3, -2)]
    expected = [torch.zeros(1, 1, 2, 3), torch.zeros(1, 1, 2, 3)]
    for part in parts:
        store.accumulate(page, part)
        expected = [total + gradient.float() for total, gradient in zip(expected, part)]
    found = store.take_cotangent(page)
    assert found is not None and all(torch.equal(a, b) for a, b in zip(found, expected))


def test_sums_wait_for_their_gradients_and_are_waited_for(store: PageStore) -> None:
    page = store.put("kv", 0, (torch.zeros(1, 1, 2, 3),))
    store.accumulate(page, (torch.ones(1, 1, 2, 3),))
    assert LOG == [], "the first touch is a plain copy"
    adding = [("sums", "waits for", "compute"), ("on", "sums"), ("kept for", "sums")]
    store.accumulate(page, (torch.ones(1, 1, 2, 3),))
    assert list(LOG) == adding
    store.accumulate(page, (torch.ones(1, 1, 2, 3),))
    assert list(LOG) == [*adding, *adding, ("host waits for", "sums")], "no more than two are under way"
    LOG.clear()
    store.take_cotangent(page)
    assert LOG == [("compute", "waits for", "sums")]


def test_pages_do_not_run_ahead_of_their_use(store: PageStore) -> None:
    pages = [store.put("kv", i, (torch.full((1, 1, 1, 4), float(i)),)) for i in range(5)]
    seen = []
    for page, (tensor,) in store.stream(pages):
        assert float(tensor.mean()) == page.start
        seen.append(LOG.count(("host waits for", "compute")))
    assert seen == [0, 0, 1, 2, 3], "when a page is handed out, the last but one is done with"
    assert LOG.count(("compute", "waits for", "copies")) == 4, "each page that was brought ahead"
    for page in pages:
        store.free(page)
