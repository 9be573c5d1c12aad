"""Which state each layer of a dense decoder keeps, and windows across pieces of odd sizes."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import transformers
from families import build
from group import engine_step, group

from longstraw.models import family_of, supported_model_types
from longstraw.pages import PageStore
from longstraw.state.kv import KVChain
from longstraw.state.window import WindowChain


def kinds(config: Any) -> list[tuple[type, int | None]]:
    store = PageStore("cpu")
    chains = [layer.chain(store, 0) for layer in family_of(config.model_type).layers(config)]
    return [(type(chain), getattr(chain, "size", None)) for chain in chains]


def test_full_attention_keeps_every_token() -> None:
    for config in (
        transformers.LlamaConfig(num_hidden_layers=2),
        transformers.Qwen2Config(num_hidden_layers=2),
        transformers.Qwen3Config(num_hidden_layers=2),
        transformers.MistralConfig(num_hidden_layers=2, sliding_window=None),
    ):
        assert kinds(config) == [(KVChain, None)] * 2, config.model_type


def test_windows() -> None:
    assert kinds(transformers.MistralConfig(num_hidden_layers=2, sliding_window=7)) == [(WindowChain, 7)] * 2
    mixed = dict(num_hidden_layers=4, use_sliding_window=True, sliding_window=9, max_window_layers=2)
    for config in (transformers.Qwen2Config(**mixed), transformers.Qwen3Config(**mixed)):
        assert kinds(config) == [(KVChain, None)] * 2 + [(WindowChain, 9)] * 2
    unused = dict(mixed, use_sliding_window=False)
    assert kinds(transformers.Qwen2Config(**unused)) == [(KVChain, None)] * 4


def test_an_unknown_kind_names_itself() -> None:
    config = transformers.Qwen3Config(num_hidden_layers=2)
    config.layer_types = ["full_attention", "chunked_attention"]
    with pytest.raises(ValueError, match="'chunked_attention'"):
        family_of("qwen3").layers(config)


def test_the_registry() -> None:
    served = supported_model_types()
    assert served == sorted(served) and {"llama", "qwen2", "qwen3", "mistral", "qwen3_5_text", "qwen3_next"} <= {
        *served
    }
    with pytest.raises(ValueError, match=r"'bert'; served are .*llama.*one file in longstraw/models"):
        family_of("bert")


@pytest.mark.parametrize("window", [1, 2, 4, 16, 100])
@pytest.mark.parametrize("segment_tokens", [1, 3, 5, 17, 64])
def test_a_prompt_longer_than_the_window_in_odd_pieces(window: int, segment_tokens: int, float64_inside: None) -> None:
    """Pieces shorter than, as long as and longer than the window; gradients reach back through every tail."""
    model = build("mistral", sliding_window=window, num_hidden_layers=2)
    what = group(num_prompt=40, lengths=(7, 2))
    loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    outcome, found = engine_step(model, what, segment_tokens=segment_tokens, block_tokens=3)
    assert abs(outcome.loss - loss) <= 1e-11
    reference.assert_same_gradients(found, expected, 1e-11)


@pytest.mark.parametrize("mode", ["none", 9, 30])
def test_a_window_over_constant_tokens(mode: Any, float64_inside: None) -> None:
    """The boundary of the gradient lies inside a window, and windows of the branch reach beyond it."""
    model, what = build("qwen3_mixed"), group(num_prompt=40, lengths=(20, 3))
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective, mode)
    _, found = engine_step(model, what, prompt_grad=mode, segment_tokens=6, block_tokens=5)
    reference.assert_same_gradients(found, expected, 1e-11)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_whatever_attention_the_user_chose(attention: str, float64_inside: None) -> None:
    model, what = build("qwen3_mixed"), group(num_prompt=40, lengths=(7, 2))
    model.set_attn_implementation(attention)
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    reference.assert_same_gradients(engine_step(model, what, segment_tokens=9)[1], expected, 1e-11)
    assert model.config._attn_implementation == attention
