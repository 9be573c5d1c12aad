"""What the engine's design bounds, counted: the live graph, reads of a page, and the memory that a phase reports."""

from __future__ import annotations

import os
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families import build
from group import group

import longstraw
from longstraw.engine.meter import Meter
from longstraw.pages import PageStore


class _Saved:
    """Bytes that graphs hold, and the most of them at a time, apart from parameters."""

    def __init__(self, model: Any) -> None:
        self.now = self.peak = 0
        self._parameters = {p.data_ptr() for p in model.parameters()}
        self._holders: Counter[tuple[int, int]] = Counter()  # by address and bytes

    @contextmanager
    def watched(self) -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held[0]):
            yield

    def _pack(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        storage = tensor.untyped_storage()
        place = storage.data_ptr(), storage.nbytes()
        held = _Held([tensor.detach()])  # the tensor itself may own the graph that is to hold it
        if place[0] not in self._parameters:
            if not self._holders[place]:
                self.now += place[1]
                self.peak = max(self.peak, self.now)
            self._holders[place] += 1
            weakref.finalize(held, self._drop, place)
        return held

    def _drop(self, place: tuple[int, int]) -> None:
        self._holders[place] -= 1
        if not self._holders[place]:
            self.now -= place[1]


class _Held(list[torch.Tensor]):
    """A list that can be referred to weakly."""


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3_5", "glm_moe_dsa"])
def test_a_long_response_costs_no_more_graph_than_a_block(family: str) -> None:
    model = build(family, dtype=torch.float32)
    engine = longstraw.Engine(model, segment_tokens=8, block_tokens=16)
    peaks = []
    for num_tokens in (16, 8 * 16):
        what = group(num_prompt=17, lengths=(num_tokens,))
        saved = _Saved(model)
        with engine.capture(what.prompt) as state, saved.watched():
            engine.backward(state, what.responses, what.objective)
        assert saved.now == 0
        peaks.append(saved.peak)
    assert peaks[1] <= 1.05 * peaks[0]


@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa"])
def test_responses_that_share_a_block_read_each_page_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(family, dtype=torch.float32)
    engine = longstraw.Engine(model, segment_tokens=16, block_tokens=64, prompt_grad="none")
    fetch = PageStore.fetch
    reads: list[Counter[int]] = []

    def counted(store: PageStore, page: Any) -> Any:
        reads[-1][page.number] += 1
        return fetch(store, page)

    for lengths in ((6,), (6, 5, 6, 3, 6, 6)):
        what = group(num_prompt=65, lengths=lengths)
        with engine.capture(what.prompt) as state, monkeypatch.context() as patch:
            patch.setattr(PageStore, "fetch", counted)
            reads.append(Counter())
            engine.score(state, what.responses)
            reads.append(Counter())
            engine.backward(state, what.responses, lambda logps: sum(logp.sum() for logp in logps))
    alone, together = reads[:2], reads[2:]
    assert all(alone) and alone == together
    if family == "llama":
        assert set(alone[0].values()) == {1}


def test_a_phase_reports_the_memory_that_it_held() -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the system does not forget its peak")
    meter = Meter(torch.device("cpu"))
    with meter.phase("small"):
        pass
    with meter.phase("large"):
        held = torch.ones(100 << 20, dtype=torch.uint8)
        del held
    with meter.phase("after"):
        pass
    small, large, after = (meter.phases[name].peak_bytes for name in ("small", "large", "after"))
    assert small is not None and large is not None and after is not None
    assert 95 << 20 < large - small < 150 << 20
    assert after < large - (50 << 20)
