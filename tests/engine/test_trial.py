"""On construction the engine holds its forward against the stock one: what it would drop is seen there."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, build

import longstraw
from longstraw.attention import window
from longstraw.engine import trial
from longstraw.engine.host import ModelHost
from longstraw.models import family
from longstraw.state.kv import KVChain
from longstraw.state.window import WindowChain, WindowPiece


class Scaled(transformers.LlamaForCausalLM):
    """Logits that a multiplier and a cap change after the head, as Granite and Gemma 2 have them."""

    divisor, cap = 1.0, None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / self.divisor
        if self.cap is not None:
            output.logits = torch.tanh(output.logits / self.cap) * self.cap
        return output


def scaled(divisor: float, cap: float | None, dtype: torch.dtype) -> Any:
    model = Scaled(build("llama").config).eval().to(dtype)
    model.divisor, model.cap = divisor, cap
    return model


class Forgetful(KVChain):
    """Serves every piece as if it were the first."""

    def enter(self, index: int, rows: int, context: Any, graph: bool) -> Any:
        return KVChain(self.store).enter(0, rows, context, graph)


def served_by(monkeypatch: pytest.MonkeyPatch, model: Any, kinds: list[Any]) -> None:
    name = model.config.model_type
    changed = replace(family.family_of(name), layers=lambda config: [family.Layer(kind) for kind in kinds])
    monkeypatch.setitem(family._FAMILIES, name, changed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_passes_far_within_the_tolerance(name: str, dtype: torch.dtype) -> None:
    found = trial.compare_with_stock(ModelHost(build(name, dtype=dtype)))
    assert found.num_tokens >= 12 and found.head_distance <= (1e-7 if dtype == torch.float32 else 1e-2)
    assert 0 < found.pieces_distance <= (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_logits(dtype: torch.dtype) -> None:
    words = r"Scaled \(model_type 'llama'\).*they are 8 times as large: .*models/heads\.py"
    if dtype == torch.bfloat16:
        words = words.replace("8 times", r"\S+ times")
    with pytest.raises(ValueError, match=words):
        longstraw.Engine(scaled(8.0, None, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cap_far_above_this_models_logits(dtype: torch.dtype) -> None:
    """30, as in Gemma, over logits of a random model, which are about 1: seen at loud ones."""
    model = scaled(1.0, 30.0, dtype)
    assert model(torch.arange(9)[None]).logits.abs().max() < 5
    with pytest.raises(ValueError, match=r"scales or caps"):
        longstraw.Engine(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_layer_served_by_the_wrong_chain(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", dtype=dtype)
    served_by(monkeypatch, model, [KVChain, Forgetful, KVChain])
    with pytest.raises(
        ValueError, match=r"model_type 'llama' .*LlamaForCausalLM.* 5 \+ 1 \+ 6 .*first after layer 1\b"
    ):
        longstraw.Engine(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [12, 14])
def test_a_window_off_by_one(dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        WindowPiece, "attend", lambda self, q, k, v, scores: window.attend(q, k, v, replace(scores, window=self.size))
    )
    model = build("mistral", dtype=dtype)
    served_by(monkeypatch, model, [lambda store, live: WindowChain(store, size, live)] * 3)
    with pytest.raises(ValueError, match=r"model_type 'mistral'.*first after layer 0"):
        longstraw.Engine(model)


def test_another_scale_of_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = KVChain.enter

    def enter(self: KVChain, index: int, rows: int, context: Any, graph: bool) -> Any:
        live = attend(self, index, rows, context, graph)
        own = live.attend
        live.attend = lambda q, k, v, scores: own(q, k, v, replace(scores, scale=0.9 * scores.scale))
        return live

    monkeypatch.setattr(KVChain, "enter", enter)
    with pytest.raises(ValueError, match="computes something else here"):
        longstraw.Engine(build("qwen3", dtype=torch.float32))


def test_an_attention_keyword_shows_on_construction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by name, not by a distance: the first forward is run there."""
    model = build("llama", dtype=torch.float32)
    for layer in model.model.layers:
        layer.self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"LlamaAttention.*is_causal=False"):
        longstraw.Engine(model)


def test_a_small_window_is_reached_and_a_large_one_named(caplog: pytest.LogCaptureFixture) -> None:
    near = trial.compare_with_stock(ModelHost(build("mistral", dtype=torch.float32, sliding_window=40)))
    assert near.num_tokens == 46 and near.not_covered == []
    with caplog.at_level(logging.INFO, "longstraw"):
        far = trial.compare_with_stock(ModelHost(build("mistral", dtype=torch.float32, sliding_window=4096)))
    assert far.num_tokens == 12 and far.not_covered == ["sliding_window=4096"]
    assert "does not cover sliding_window=4096" in caplog.text


def test_nothing_of_the_users_changes() -> None:
    model = build("qwen3_5_moe", dtype=torch.float32, attention_dropout=0.3).train()
    model.model.layers[1].eval()
    training = [module.training for module in model.modules()]
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(7)
    before = torch.get_rng_state()
    longstraw.Engine(model)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == training
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert "forward" not in model.model.__dict__ and not model.model._forward_hooks
    assert not any(layer._forward_hooks for layer in model.model.layers)


def test_a_second_engine_tries_again_only_what_has_changed() -> None:
    model = build("llama", dtype=torch.float32)
    count: list[Any] = []
    hook = model.model.register_forward_hook(lambda *call: count.append(None))
    first = longstraw.Engine(model)
    tried = len(count)
    assert tried == 5 and longstraw.Engine(model, prompt_grad="none").trial is first.trial and len(count) == tried
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    longstraw.Engine(model)
    assert len(count) == 2 * tried
    model.config.rope_parameters["factor"] = 3.0  # a config that changes may be another function
    longstraw.Engine(model)
    assert len(count) == 3 * tried
    hook.remove()


def test_a_failure_is_not_remembered_as_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", dtype=torch.float32)
    with monkeypatch.context() as patch:
        served_by(patch, model, [Forgetful] * 3)
        for _ in range(2):
            with pytest.raises(ValueError, match="something else"):
                longstraw.Engine(model)
    longstraw.Engine(model)


def test_a_model_that_cannot_run_is_said_to_be_uncompared() -> None:
    config = build("llama").config
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    with pytest.warns(UserWarning, match="not compared with the stock one: .*meta device"):
        assert longstraw.Engine(model).trial.num_tokens == 0

    class Broken(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError("needs a card")

    with pytest.warns(UserWarning, match="not compared.*Broken raises NotImplementedError: needs a card"):
        longstraw.Engine(Broken(config))
    model = build("llama", dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.warns(UserWarning, match="not compared.*logits that are not finite"):
        longstraw.Engine(model)


def test_noise_that_the_stock_model_has_itself_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of dynamic quantisation, whose scales depend on which tokens run together."""
    model = build("llama", dtype=torch.float32)

    def rounded(module: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = inputs[0].abs().max() / 7  # four bits, one scale for all tokens
        return ((inputs[0] / scale).round() * scale,)

    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(rounded)
    found = longstraw.Engine(model).trial
    assert 1e-3 < found.pieces_distance < 0.4
    served_by(monkeypatch, model, [Forgetful] * 3)
    with pytest.raises(ValueError, match="something else"):
        longstraw.Engine(model)


def test_autocast_rounds_as_its_dtype_does() -> None:
    model = build("llama", dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = longstraw.Engine(model).trial
    assert 1e-4 < rounded.pieces_distance < 2e-2
    assert longstraw.Engine(model).trial.pieces_distance < 1e-5, "compared again without it"


def test_ids_with_a_meaning_are_not_drawn() -> None:
    model = build("llama", dtype=torch.float32)
    model.config.pad_token_id, model.config.eos_token_id = 3, list(range(10, 60))
    ids = trial._draw(ModelHost(model), 64)
    assert ids.shape == (1, 64) and not {3, *range(10, 60)} & set(ids.flatten().tolist())
    assert torch.equal(ids, trial._draw(ModelHost(model), 64))


@pytest.mark.parametrize("num_tokens", [12, 13, 19, 64])
def test_pieces_cover_all_tokens(num_tokens: int) -> None:
    lengths = trial._cut(num_tokens)
    assert sum(lengths) == num_tokens and lengths[:2] == [5, 1] and min(lengths) > 0


def test_the_engine_can_bring_its_own_run() -> None:
    calls: list[Any] = []

    def run(host: ModelHost, ids: torch.Tensor, lengths: Any) -> torch.Tensor:
        calls.append((tuple(ids.shape), list(lengths), torch.is_grad_enabled()))
        return trial.run_in_pieces(host, ids, lengths)

    trial.compare_with_stock(ModelHost(build("llama", dtype=torch.float32)), run)
    assert calls == [((1, 12), [5, 1, 6], False)]
