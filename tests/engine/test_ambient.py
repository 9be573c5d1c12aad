"""Whatever surrounds a call: the same gradient as without it, or an error by name; never another one in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import reference
import torch
from families import build
from group import group

import longstraw

WHAT = group(num_prompt=30, lengths=(5, 3))
PLAIN: Callable[[], AbstractContextManager[Any]] = nullcontext
CALLS = ("capture", "score_for", "pull_back", "sample")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    before = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=before)


class Observer(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "bfloat16 by default": lambda: default_dtype(torch.bfloat16),
    "float64 by default": lambda: default_dtype(torch.float64),
    "another device by default": default_device,
    "inside a device": lambda: torch.device("meta"),
    "deterministic algorithms": deterministic,
    "anomaly detection": lambda: torch.autograd.detect_anomaly(check_nan=False),
    "an observer": Observer,
    "forward-mode derivatives": torch.autograd.forward_ad.dual_level,
    "tensors saved on the CPU": torch.autograd.graph.save_on_cpu,
}


def step(model: Any, retained: int = 0, **around: Callable[[], AbstractContextManager[Any]]) -> tuple[Any, Any]:
    """Gradients and a draft's log-probabilities, each call inside its own context."""
    model.zero_grad(set_to_none=True)
    engine = longstraw.Engine(model, segment_tokens=9, block_tokens=4, retain_graph_bytes=retained)
    with around.get("capture", PLAIN)():
        state = engine.capture(WHAT.prompt)
    with around.get("score_for", PLAIN)():
        scored = engine.score_for(state, WHAT.responses)
    WHAT.objective(scored.logps).backward()
    with around.get("pull_back", PLAIN)():
        engine.pull_back(scored)
    with around.get("sample", PLAIN)():
        drafts = engine.sample(state, num=2, max_new_tokens=3)
        scores = engine.score(state, [draft.ids for draft in drafts])
    state.release()
    found = reference.gradients(model)
    model.zero_grad(set_to_none=True)
    return found, [*(draft.logps for draft in drafts), *scores]


def same(found: tuple[Any, Any], expected: tuple[Any, Any]) -> bool:
    assert found[0].keys() == expected[0].keys() and len(expected[0]) > 10
    pairs = [(found[0][name], expected[0][name]) for name in expected[0]] + list(zip(found[1], expected[1]))
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe"])
def test_the_same_bits_in_every_mode(family: str, mode: str) -> None:
    model = build(family, dtype=torch.float32)
    for retained in (0, 1 << 26):
        plain = step(model, retained)
        for call in CALLS:
            assert same(step(model, retained, **{call: MODES[mode]}), plain), (call, retained)
        assert same(step(model, retained, **dict.fromkeys(CALLS, MODES[mode])), plain), ("all", retained)


@pytest.mark.parametrize("mode", ["inference mode", "no grad", "bfloat16 by default", "inside a device"])
def test_backward_in_every_mode(mode: str) -> None:
    """The objective runs inside as well: in the caller's mode, but with a graph."""
    model = build("llama", dtype=torch.float32)
    expected = step(model)[0]
    engine = longstraw.Engine(model, segment_tokens=9, block_tokens=4)
    with MODES[mode]():
        state = engine.capture(WHAT.prompt.tolist())
        outcome = engine.backward(state, [ids.tolist() for ids in WHAT.responses], lambda logps: WHAT.objective(logps))
    found = reference.gradients(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not outcome.loss.is_inference() and not any(logp.is_inference() for logp in outcome.logps)


def test_tensors_made_in_inference_mode_are_taken() -> None:
    model = build("llama", dtype=torch.float32)
    expected = step(model)[0]
    engine = longstraw.Engine(model, segment_tokens=9, block_tokens=4)
    with torch.inference_mode():
        prompt, responses = WHAT.prompt.clone(), [ids.clone() for ids in WHAT.responses]
    with engine.capture(prompt) as state:
        scored = engine.score_for(state, responses)
        gradients = torch.autograd.grad(WHAT.objective(scored.logps), scored.logps)
        with torch.inference_mode():
            gradients = [gradient.clone() for gradient in gradients]
        engine.pull_back(scored, gradients)
    found = reference.gradients(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = build("llama", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"embed_tokens.weight or its gradient was made under torch.inference_mode"):
        longstraw.Engine(model)


def test_a_gradient_made_in_inference_mode_is_refused() -> None:
    model = build("llama", dtype=torch.float32)
    engine = longstraw.Engine(model)
    with torch.inference_mode():
        model.model.norm.weight.grad = torch.zeros(32)
    with pytest.raises(ValueError, match=r"model.norm.weight or its gradient was made under torch.inference_mode"):
        engine.capture(WHAT.prompt)


BFLOAT16 = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731


@pytest.mark.parametrize("retained", [0, 1 << 26])
def test_autocast_holds_from_capture_to_pullback(retained: int) -> None:
    model = build("llama", dtype=torch.float32)
    whole = step(model, retained, **dict.fromkeys(CALLS, BFLOAT16))
    assert not same(whole, step(model, retained))
    outside = {call: BFLOAT16 for call in CALLS if call != "pull_back"}  # a backward pass is outside of autocast
    assert same(step(model, retained, **outside), whole)
    inside = {"pull_back": BFLOAT16}  # or inside, although its forward pass was not
    assert same(step(model, retained, **inside), step(model, retained))


@pytest.mark.parametrize("call", ["capture", "score_for", "sample"])
def test_another_autocast_than_at_capture_is_refused(call: str) -> None:
    model = build("llama", dtype=torch.float32)
    with pytest.raises(ValueError, match=r"captured under .* and is used under .*: put capture, score, sample"):
        step(model, **{call: BFLOAT16})


def test_autocast_sees_an_update_between_two_calls() -> None:
    """Under one autocast PyTorch keeps the cast copies of parameters, also of those that have changed."""
    model = build("llama", dtype=torch.float32)
    engine = longstraw.Engine(model, segment_tokens=9)
    scores = []
    for around in (True, False):
        with BFLOAT16() if around else nullcontext():
            for _ in range(2):
                with nullcontext() if around else BFLOAT16(), engine.capture(WHAT.prompt) as state:
                    model.lm_head(torch.zeros(1, 32).requires_grad_())  # fills the cache
                    scores.append(engine.score(state, WHAT.responses)[0])
                with torch.no_grad():
                    model.lm_head.weight.mul_(2.0 if len(scores) % 2 else 0.5)
    assert torch.equal(scores[0], scores[2]) and torch.equal(scores[1], scores[3])
    assert not torch.equal(scores[0], scores[1])


def test_transforms_and_traces_are_refused() -> None:
    model = build("llama", dtype=torch.float32)
    engine = longstraw.Engine(model, segment_tokens=9)

    def call(x: torch.Tensor) -> torch.Tensor:
        engine.capture(WHAT.prompt).release()
        return x * 2

    one = torch.tensor(1.0)
    with pytest.raises(RuntimeError, match=r"inside a transform of torch.func"):
        torch.func.grad(call)(one)
    with pytest.raises(RuntimeError, match=r"inside a transform of torch.func"):
        torch.vmap(call)(one[None])
    with pytest.raises(RuntimeError, match=r"inside torch.jit.trace"):
        torch.jit.trace(call, one)
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("no hooks"),
        pytest.raises(RuntimeError, match=r"saved-tensor hooks are disabled \('no hooks'\)"),
    ):
        call(one)


@pytest.mark.parametrize("part", ["whole", "layer", "forward"])
def test_a_compiled_model_is_refused(part: str) -> None:
    model = build("llama", dtype=torch.float32)
    engine = longstraw.Engine(model, segment_tokens=9)
    if part == "whole":
        with pytest.raises(ValueError, match=r"the model is compiled.*_orig_mod"):
            longstraw.Engine(torch.compile(model, backend="eager"))
        return
    layer = model.model.layers[1]
    if part == "layer":
        layer.compile(backend="eager")
    else:
        layer.forward = torch.compile(layer.forward, backend="eager")
    with pytest.raises(ValueError, match=r"model.layers.1 is compiled"):
        engine.capture(WHAT.prompt)


def test_a_compiled_function_calls_the_engine_as_it_is() -> None:
    model = build("llama", dtype=torch.float32)
    expected = step(model)[0]
    engine = longstraw.Engine(model, segment_tokens=9, block_tokens=4)
    frames = torch._dynamo.utils.counters["frames"]

    def call(x: torch.Tensor) -> torch.Tensor:
        state = engine.capture(WHAT.prompt)
        scored = engine.score_for(state, WHAT.responses)
        engine.pull_back(scored, cotangents)
        return x * 2

    with engine.capture(WHAT.prompt) as state:
        scored = engine.score_for(state, WHAT.responses)
        cotangents = torch.autograd.grad(WHAT.objective(scored.logps), scored.logps)
    before = frames["total"]
    torch.compile(call, backend="eager")(torch.tensor(1.0))
    assert frames["total"] - before < 20  # of the engine's hundreds
    found = reference.gradients(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe", "glm_moe_dsa"])
def test_global_generators_are_neither_read_nor_moved(family: str) -> None:
    model = build(family, dtype=torch.float32)
    found = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        found.append(step(model, 1 << 26))
        assert torch.equal(torch.get_rng_state(), before)
    assert same(*found)


@pytest.mark.parametrize("call", CALLS)
def test_a_model_that_draws_random_numbers_is_refused(call: str) -> None:
    """A hook that adds noise: what is replayed would not be what was scored."""
    model = build("llama", dtype=torch.float32)
    noisy = []
    model.model.layers[0].mlp.register_forward_hook(
        lambda module, args, output: output + 0.1 * torch.randn_like(output) if noisy else None
    )

    @contextmanager
    def noise() -> Iterator[None]:
        noisy.append(True)
        yield
        noisy.clear()

    with pytest.raises(RuntimeError, match=r"the model drew random numbers \(aten.*rand.*\).*hook of a module"):
        step(model, **{call: noise})
    if call == "pull_back":
        assert all(parameter.grad is None for parameter in model.parameters())


def test_another_threads_random_numbers_are_not_the_models() -> None:
    model = build("llama", dtype=torch.float32)
    engine = longstraw.Engine(model, segment_tokens=9, progress=lambda *_: torch.rand(1))  # stands for the thread
    engine.capture(WHAT.prompt).release()
