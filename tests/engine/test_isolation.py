"""A step leaves nothing behind but `.grad`: not in the captured state, not in the model, also when it raises."""

from __future__ import annotations

import errno
import hashlib
import os
from typing import Any

import pytest
import reference
import torch
from families import build
from group import Group, group
from peft import LoraConfig, get_peft_model

import longstraw
from longstraw.pages import PageStore

KINDS = ["llama", "mistral", "qwen3_5"]
PIECES = dict(segment_tokens=7, block_tokens=4)


class Interrupt(Exception):
    """Not an error that anything below could expect."""


def small_group() -> Group:
    return group(num_prompt=24, lengths=(5, 9, 1))


def fingerprint(state: Any) -> list[tuple[Any, ...]]:
    """Every page of the state with the hash of its bytes."""
    pages = []
    for page in sorted(state.store.table, key=lambda page: page.number):
        digests = [hashlib.sha256(t.contiguous().view(-1).view(torch.uint8).numpy()) for t in state.store.fetch(page)]
        pages.append((page.number, page.kind, page.start, page.num_tokens, [d.hexdigest() for d in digests]))
    return pages


def description(model: Any) -> dict[str, Any]:
    """All of a model that is not its parameters' values."""
    modules = dict(model.named_modules())
    configs = {id(m.config): m.config for m in modules.values() if hasattr(m, "config")}
    return {
        "training": {name: module.training for name, module in modules.items()},
        "configs": [config.to_dict() for config in configs.values()],
        "attention": [config._attn_implementation for config in configs.values()],
        "hooks": {
            name: [len(h) for key, h in sorted(vars(module).items()) if key.endswith("_hooks") and h is not None]
            for name, module in modules.items()
        },
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "parameter hooks": {
            name: [len(getattr(p, key) or ()) for key in ("_backward_hooks", "_post_accumulate_grad_hooks")]
            for name, p in model.named_parameters()
        },
        "checkpointing": getattr(model, "is_gradient_checkpointing", None),
    }


def fail_in(phase: str, at: int = 1) -> Any:
    """A progress callback that raises at the `at`-th piece of a phase."""
    seen = [0]

    def progress(name: str, done: int, total: int) -> None:
        seen[0] += name == phase
        if name == phase and seen[0] == at:
            raise Interrupt(phase)

    return progress


@pytest.mark.parametrize("tier", ["device", "disk"])
@pytest.mark.parametrize("family", KINDS)
def test_many_branches_leave_the_state_as_captured(family: str, tier: str, tmp_path: Any) -> None:
    what, model = small_group(), build(family, dtype=torch.float32)
    engine = longstraw.Engine(model, tier=tier, page_dir=tmp_path, **PIECES)
    with engine.capture(what.prompt) as state:
        captured = fingerprint(state)
        assert captured
        scored = engine.score(state, what.responses)
        for _ in range(2):
            engine.score(state, what.responses, temperature=0.7)
            engine.sample(state, num=3, max_new_tokens=6)
            engine.backward(state, what.responses, what.objective)
            assert fingerprint(state) == captured
        again = engine.score(state, what.responses)
        assert all(torch.equal(a, b) for a, b in zip(scored, again))


@pytest.mark.parametrize("mode", ["none", 1, 12])
@pytest.mark.parametrize("family", KINDS)
def test_constant_tokens_never_collect_a_cotangent(family: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would consume it: it would be computed, stored and left behind."""
    what, model = small_group(), build(family, dtype=torch.float32)
    engine = longstraw.Engine(model, prompt_grad=mode, **PIECES)
    boundary = len(what.prompt) - (1 if mode == "none" else mode)
    starts: list[int] = []
    accumulate = PageStore.accumulate

    def recorded(self: PageStore, page: Any, gradients: Any) -> None:
        starts.append(page.start)
        accumulate(self, page, gradients)

    monkeypatch.setattr(PageStore, "accumulate", recorded)
    with engine.capture(what.prompt) as state:
        captured = fingerprint(state)
        engine.backward(state, what.responses, what.objective)
        assert fingerprint(state) == captured and "cotangent" not in state.nbytes
        for layer in state.chain.carried:
            assert not layer._cotangents
    assert all(start >= boundary for start in starts)
    assert bool(starts) == (family != "mistral"), "the blocks of a branch collect theirs, in pages of K/V"


@pytest.mark.parametrize("phase", ["replay", "sweep"])
@pytest.mark.parametrize("family", KINDS)
def test_a_step_that_raises_leaves_state_and_gradients(family: str, phase: str) -> None:
    """Interrupted at every piece of the phase in turn; the step after it is the step without it, to the bit."""
    what, model = small_group(), build(family, dtype=torch.float32)
    engine = longstraw.Engine(model, **PIECES)
    with engine.capture(what.prompt) as state:
        captured = fingerprint(state)
        engine.backward(state, what.responses, what.objective)
        expected = reference.gradients(model)
        model.zero_grad(set_to_none=True)
        for at in (1, 2):
            broken = longstraw.Engine(model, progress=fail_in(phase, at), **PIECES)
            before = {name: torch.full_like(p, 3.0) for name, p in model.named_parameters()}
            for name, parameter in model.named_parameters():
                parameter.grad = before[name]
            with pytest.raises(Interrupt):
                broken.backward(state, what.responses, what.objective)
            for name, parameter in model.named_parameters():
                assert parameter.grad is before[name] and (parameter.grad == 3).all(), name
            assert fingerprint(state) == captured
            model.zero_grad(set_to_none=True)
        engine.backward(state, what.responses, what.objective)
        found = reference.gradients(model)
        assert all(torch.equal(gradient, found[name]) for name, gradient in expected.items())


@pytest.mark.parametrize("tier", ["device", "disk"])
@pytest.mark.parametrize("phase", ["score", "replay", "sweep"])
def test_a_page_that_cannot_be_read(phase: str, tier: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the page comes out, not one of cleaning up after it; gradients and state are as before."""
    what, model = small_group(), build("llama", dtype=torch.float32)
    last = {"score": None, "replay": None, "sweep": ("replay", 15)}[phase]
    armed = [phase == "score"]

    def progress(name: str, done: int, total: int) -> None:
        armed[0] = armed[0] or (name, done) == last

    def objective(logps: list[torch.Tensor]) -> torch.Tensor:
        armed[0] = armed[0] or phase == "replay"
        return what.objective(logps)

    def failing(self: PageStore, page: Any) -> Any:
        if armed[0]:
            raise OSError(errno.EIO, "Input/output error")
        return fetch(self, page)

    def failing_preadv(*args: Any) -> int:
        if armed[0]:
            raise OSError(errno.EIO, "Input/output error")
        return preadv(*args)

    fetch, preadv = PageStore.fetch, os.preadv
    engine = longstraw.Engine(model, tier=tier, page_dir=tmp_path, progress=progress, **PIECES)
    with engine.capture(what.prompt) as state:
        captured = fingerprint(state)
        with monkeypatch.context() as patch:
            if tier == "disk":
                patch.setattr(os, "preadv", failing_preadv)
            else:
                patch.setattr(PageStore, "fetch", failing)
            with pytest.raises(OSError, match="Input/output error") as caught:
                engine.backward(state, what.responses, objective)
        armed[0] = False
        assert tier != "disk" or str(tmp_path) in str(caught.value)
        assert all(p.grad is None for p in model.parameters())
        assert fingerprint(state) == captured
        assert "cotangent" not in state.nbytes
        engine.backward(state, what.responses, what.objective)  # the disk is back
        found = reference.gradients(model)
    assert not list(tmp_path.iterdir())
    model.zero_grad(set_to_none=True)
    with longstraw.Engine(model, **PIECES).capture(what.prompt) as state:
        longstraw.Engine(model, **PIECES).backward(state, what.responses, what.objective)
    assert all(torch.equal(gradient, found[name]) for name, gradient in reference.gradients(model).items())


def test_an_objective_that_raises_is_not_swallowed() -> None:
    what, model = small_group(), build("llama", dtype=torch.float32)
    engine = longstraw.Engine(model, **PIECES)

    def objective(logps: list[torch.Tensor]) -> torch.Tensor:
        raise Interrupt

    with engine.capture(what.prompt) as state:
        captured = fingerprint(state)
        first = next(model.parameters())
        first.grad = torch.ones_like(first)
        with pytest.raises(Interrupt):
            engine.backward(state, what.responses, objective)
        assert (first.grad == 1).all() and sum(p.grad is not None for p in model.parameters()) == 1
        assert fingerprint(state) == captured


def models() -> dict[str, Any]:
    def adapted() -> Any:
        return get_peft_model(build("llama", dtype=torch.float32), LoraConfig(r=2, target_modules="all-linear"))

    def checkpointed() -> Any:
        model = build("llama", dtype=torch.float32).train()
        model.gradient_checkpointing_enable()
        return model

    def partly_training() -> Any:
        model = build("qwen3_5", dtype=torch.float32)
        model.model.layers[1].train()
        model.requires_grad_(False).lm_head.requires_grad_(True)
        return model

    def eager() -> Any:
        model = build("mistral", dtype=torch.float32)
        model.set_attn_implementation("eager")
        return model

    def image() -> Any:
        return build("qwen3_5_image", dtype=torch.float32).train()

    return {f.__name__: f for f in (adapted, checkpointed, partly_training, eager, image)}


@pytest.mark.parametrize("kind", models())
def test_the_model_is_as_found(kind: str) -> None:
    what, model = small_group(), models()[kind]()
    before = description(model)
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}

    def unchanged() -> bool:
        assert description(model) == before
        assert all(torch.equal(p, parameters[name]) for name, p in model.named_parameters())
        return True

    engine = longstraw.Engine(model, **PIECES)
    assert unchanged()
    with engine.capture(what.prompt) as state:
        assert unchanged()
        engine.score(state, what.responses)
        assert unchanged()
        engine.sample(state, num=2, max_new_tokens=3)
        assert unchanged()
        engine.backward(state, what.responses, what.objective)
        assert unchanged()
        for phase in ("replay", "sweep"):
            with pytest.raises(Interrupt):
                longstraw.Engine(model, progress=fail_in(phase), **PIECES).backward(
                    state, what.responses, what.objective
                )
            assert unchanged()
        with pytest.raises(Interrupt):
            longstraw.Engine(model, progress=fail_in("sample"), **PIECES).sample(state, num=2, max_new_tokens=3)
        assert unchanged()
    with pytest.raises(Interrupt):
        longstraw.Engine(model, progress=fail_in("capture"), **PIECES).capture(what.prompt)
    assert unchanged()


def test_stock_training_works_after_the_engine() -> None:
    """The same model goes on with its own attention: a conventional step before and after agree to the bit."""
    what, model = small_group(), build("qwen3_5", dtype=torch.float32)
    _, _, before = reference.step(model, what.prompt, what.responses, what.objective)
    engine = longstraw.Engine(model, **PIECES)
    with engine.capture(what.prompt) as state:
        engine.backward(state, what.responses, what.objective)
    _, _, after = reference.step(model, what.prompt, what.responses, what.objective)
    assert all(torch.equal(gradient, after[name]) for name, gradient in before.items())


def test_a_capture_that_raises_leaves_no_files(tmp_path: Any) -> None:
    what, model = small_group(), build("qwen3_5", dtype=torch.float32)
    engine = longstraw.Engine(model, tier="disk", page_dir=tmp_path, progress=fail_in("capture", 3), **PIECES)
    with pytest.raises(Interrupt):
        engine.capture(what.prompt)
    assert not list(tmp_path.iterdir())


def test_the_callers_random_numbers_and_grad_mode_stay() -> None:
    what, model = small_group(), build("llama", dtype=torch.float32)
    engine = longstraw.Engine(model, **PIECES)
    generator = torch.get_rng_state()
    with engine.capture(what.prompt) as state:
        engine.sample(state, num=2, max_new_tokens=3, seed=5)
        with torch.no_grad():
            engine.backward(state, what.responses, what.objective)
            assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled() and torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is not None for p in model.parameters())


def test_several_states_live_side_by_side() -> None:
    """Steps on one prompt change nothing for another."""
    model = build("qwen3_5", dtype=torch.float32)
    one, two = small_group(), group(num_prompt=18, lengths=(3, 4), seed=5)
    engine = longstraw.Engine(model, **PIECES)
    with engine.capture(two.prompt) as alone:
        engine.backward(alone, two.responses, two.objective)
    expected = reference.gradients(model)
    with engine.capture(one.prompt) as first, engine.capture(two.prompt) as second:
        engine.backward(first, one.responses, one.objective)
        model.zero_grad(set_to_none=True)
        engine.backward(second, two.responses, two.objective)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in reference.gradients(model).items())
