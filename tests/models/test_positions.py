"""How far a config's positions reach, in every way that configs write it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from families import build

import longstraw
from longstraw.models.positions import position_limit, refuse_length_dependent


def config(length: Any, rope: Any = None) -> Any:
    return SimpleNamespace(max_position_embeddings=length, rope_parameters=rope)


def yarn(factor: Any, original: Any) -> dict[str, Any]:
    return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}


@pytest.mark.parametrize(
    "length, rope, limit",
    [
        (4096, None, 4096),
        (4096, {}, 4096),
        (4096, {"rope_type": "default", "rope_theta": 1e4}, 4096),
        (None, None, None),
        (32768, yarn(4.0, 32768), 131072),  # the length is the original one
        (131072, yarn(4.0, 32768), 131072),  # the length is the stretched one
        (40960, yarn(4.0, 32768), 131072),  # Qwen3: neither
        (163840, yarn(None, 4096), 163840),
        (131072, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131072),
        (16384, {"rope_type": "linear", "factor": 4.0}, 16384),  # DeepSeek-Coder writes the stretched length
        (4096, {"rope_type": "linear", "factor": 4.0, "original_max_position_embeddings": 4096}, 16384),
        (65536, {"full_attention": yarn(8.0, 8192), "sliding_attention": {"rope_type": "default"}}, 65536),  # OLMo 3
        (8192, {"full_attention": yarn(8.0, 8192), "sliding_attention": {"rope_type": "default"}}, 65536),
        (8192, {"full_attention": None, "sliding_attention": {"rope_type": "default"}}, 8192),
        (
            131072,
            {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {}},
            131072,
        ),  # Gemma 3
        (4096, {"main": {"rope_type": "default"}, "compress": yarn(16.0, 4096)}, 4096),  # the shortest that sees far
        (4096, {"rope_type": "default", "main": yarn(4.0, 4096)}, 4096),
    ],
)
def test_the_limit(length: Any, rope: Any, limit: Any) -> None:
    assert position_limit(config(length, rope)) == limit


def test_stock_configs() -> None:
    rope = dict(rope_type="yarn", factor=4.0, rope_theta=1e6)
    assert position_limit(transformers.Qwen3Config(max_position_embeddings=32768, rope_parameters=dict(rope))) == 131072
    assert position_limit(transformers.GptOssConfig()) == 131072
    assert position_limit(transformers.Ministral3Config()) == 262144
    assert position_limit(transformers.Gemma3TextConfig()) == 131072
    olmo = transformers.Olmo3Config(max_position_embeddings=8192, rope_scaling=dict(rope, attention_factor=1.2))
    assert position_limit(olmo) == 32768


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize("layer_type", ["", "full_attention", "sliding_attention"])
def test_length_dependent_rope_at_any_layer_type(kind: str, layer_type: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "factor": 2.0}
    if layer_type:
        rope = {"full_attention": {"rope_type": "default"}, "sliding_attention": None} | {layer_type: rope}
    words = rf"rope_type '{kind}'.*{layer_type}.*changes with the length.*'yarn' or 'linear'.*rope_parameters"
    with pytest.raises(ValueError, match=words):
        refuse_length_dependent(config(4096, rope))


@pytest.mark.parametrize("rope", [None, {}, {"rope_type": "default"}, yarn(4.0, 512), {"full_attention": None}])
def test_fixed_rope_is_not_refused(rope: Any) -> None:
    refuse_length_dependent(config(4096, rope))


def test_phi3_with_longrope_is_refused_by_the_engine() -> None:
    factors = dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[2.0] * 4)
    rope = factors | dict(rope_theta=1e4, original_max_position_embeddings=64)
    with pytest.raises(ValueError, match="'longrope' changes with the length"):
        longstraw.Engine(build("llama", dtype=torch.float32, rope_parameters=rope))


def test_the_engine_takes_what_yarn_stretches_to() -> None:
    model = build("llama", dtype=torch.float32, max_position_embeddings=16, rope_parameters=yarn(4.0, 16))
    engine = longstraw.Engine(model)
    engine.capture(torch.arange(64)).release()
    with pytest.raises(ValueError, match="beyond max_position_embeddings=64"):
        engine.capture(torch.arange(65))
