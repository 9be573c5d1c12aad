"""While one layer computes, the next layer's first page is brought; nothing is left pinned, also after an exception."""

import pytest
import torch
from families import build

import longstraw
from longstraw.pages import PageStore


def _step(model, **options):
    model.zero_grad(set_to_none=True)
    engine = longstraw.Engine(model, segment_tokens=12, block_tokens=8, **options)
    with engine.capture(range(60)) as state:
        engine.backward(state, [torch.arange(20), torch.arange(3)], lambda logps: logps[0].sum() + logps[1].sum())
        pins = [page.pins for page in state.store.table]
    return [p.grad for p in model.parameters() if p.grad is not None], pins


@pytest.mark.parametrize("recompute_layers", [False, True])
@pytest.mark.parametrize("family", ["llama", "glm_moe_dsa"])
def test_pages_are_staged_and_change_nothing(family, recompute_layers, monkeypatch, tmp_path):
    model = build(family, dtype=torch.float32)
    expected, _ = _step(model)
    staged = []
    stage = PageStore.stage
    monkeypatch.setattr(PageStore, "stage", lambda store, page: (staged.append(page), stage(store, page))[1])
    found, pins = _step(model, tier="disk", page_dir=tmp_path, recompute_layers=recompute_layers)
    assert staged
    assert not any(pins)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_failing_read_ahead_leaves_nothing_pinned(monkeypatch, tmp_path):
    model = build("llama", dtype=torch.float32)
    engine = longstraw.Engine(model, segment_tokens=12, tier="disk", page_dir=tmp_path)
    with engine.capture(range(60)) as state:
        fetch, calls = PageStore.fetch, []

        def failing(store, page):
            calls.append(page)
            if len(calls) == 9:
                raise OSError(5, "a failed read")
            return fetch(store, page)

        monkeypatch.setattr(PageStore, "fetch", failing)
        with pytest.raises(OSError, match="a failed read"):
            engine.backward(state, [torch.arange(5)], lambda logps: logps[0].sum())
        monkeypatch.setattr(PageStore, "fetch", fetch)
        engine.backward(state, [torch.arange(5)], lambda logps: logps[0].sum())
        state.release()  # frees every page: none may be pinned
    assert not list(tmp_path.iterdir())
