"""What a captured prompt is to its user: length, bytes by kind, release."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from group import group

import longstraw

PROMPT = group(num_prompt=41).prompt


def capture(family: str, **options: Any) -> longstraw.ResidentState:
    model = build(family, dtype=torch.float32)
    return longstraw.Engine(model, **{"segment_tokens": 10, **options}).capture(PROMPT)


def test_bytes_of_full_attention_are_those_of_every_token_but_the_last() -> None:
    with capture("llama") as state:
        assert state.nbytes == {"kv": {"device": 40 * 3 * 2 * 2 * 8 * 4}}  # layers, K and V, heads, head size, float32
        assert len(state) == 41 and torch.equal(state.prompt_ids, PROMPT)


def test_bytes_of_a_window_do_not_follow_the_prompt() -> None:
    """13 tokens seen, 12 kept, at most two boundaries where no gradient enters the prompt."""
    one_boundary = 12 * 3 * 2 * 2 * 8 * 4
    with capture("mistral", prompt_grad="none") as state:
        assert state.nbytes.keys() == {"window"} and state.nbytes["window"]["device"] <= 2 * one_boundary
    with capture("mistral", prompt_grad="full") as state:
        assert state.nbytes["window"]["device"] == 3 * one_boundary + one_boundary * 10 // 12


def test_bytes_of_a_hybrid() -> None:
    """One K/V layer; two layers of convolution tail [64 channels, 4] and recurrent matrices [4, 8, 8] in float32."""
    boundary = 2 * (64 * 4 + 4 * 8 * 8) * 4
    with capture("qwen3_5", prompt_grad="full") as state:
        assert state.nbytes == {"kv": {"device": 40 * 2 * 2 * 16 * 4}, "recurrent": {"device": 4 * boundary}}
    with capture("qwen3_5", prompt_grad="none") as state:
        assert state.nbytes["recurrent"]["device"] <= 2 * boundary


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_bytes_are_counted_where_they_rest(tier: str, tmp_path: Path) -> None:
    with capture("qwen3_5", tier=tier, page_dir=tmp_path) as state:
        assert all(list(by_tier) == [tier] for by_tier in state.nbytes.values())
        files = [path for folder in tmp_path.iterdir() for path in folder.glob("*.page")]
        assert sum(path.stat().st_size for path in files) == sum(b.get("disk", 0) for b in state.nbytes.values())
        assert bool(files) == (tier == "disk")
    assert state.released and state.nbytes == {} and not list(tmp_path.iterdir())


def test_an_exception_releases(tmp_path: Path) -> None:
    with pytest.raises(KeyError), capture("llama", tier="disk", page_dir=tmp_path) as state:
        raise KeyError
    assert state.released and not list(tmp_path.iterdir())


def test_a_forgotten_state_leaves_no_files(tmp_path: Path) -> None:
    import gc

    state = capture("qwen3_5", tier="disk", page_dir=tmp_path)
    assert list(tmp_path.iterdir())
    del state
    gc.collect()
    assert not list(tmp_path.iterdir())


def test_a_one_token_prompt_leaves_nothing() -> None:
    model = build("llama", dtype=torch.float32)
    with longstraw.Engine(model).capture([3]) as state:
        assert state.nbytes == {} and len(state) == 1
