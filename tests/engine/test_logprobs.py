"""Log-probabilities in chunks: the values and gradients of a plain log-softmax, without ever making [tokens, vocab]."""

from __future__ import annotations

import math
from typing import Any

import pytest
import reference
import torch
from families import build
from group import group
from torch.utils._python_dispatch import TorchDispatchMode

import longstraw
from longstraw.objective import logprobs

VOCAB = 4000


class Sizes(TorchDispatchMode):
    """The largest tensor that any operation made, with the operation's name."""

    def __init__(self) -> None:
        super().__init__()
        self.numel, self.name = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and value.numel() > self.numel:
                self.numel, self.name = value.numel(), str(func)
        return result


@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5])
def test_values_and_gradients_of_a_plain_log_softmax(temperature: float) -> None:
    torch.manual_seed(0)
    logits = (5 * torch.randn(7, 31, dtype=torch.float64)).requires_grad_()
    targets, weights = torch.randint(0, 31, (7,)), torch.randn(7, dtype=torch.float64)
    expected = (logits / temperature).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    found = logprobs.token_logps(logits, targets, temperature)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    grads = [torch.autograd.grad((x * weights).sum(), logits)[0] for x in (found, expected)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)
    assert torch.autograd.gradcheck(lambda x: logprobs.token_logps(x, targets, temperature), (logits,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_are_computed_in_float32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits, targets = (9 * torch.randn(6, 50)).to(dtype).requires_grad_(), torch.randint(0, 50, (6,))
    found = logprobs.token_logps(logits, targets, 0.7)
    assert found.dtype == torch.float32
    wide = logits.detach().double().requires_grad_()
    expected = (wide / 0.7).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    expected.sum().backward()
    assert logits.grad is not None and logits.grad.dtype == dtype
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=1e-2, atol=1e-3)


def test_extreme_logits() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [3e38, 0.0, -3e38]], requires_grad=True)
    found = logprobs.token_logps(logits, torch.tensor([0, 1]))
    assert torch.equal(found, torch.tensor([0.0, -3e38]))
    found.sum().backward()
    assert logits.grad is not None and torch.isfinite(logits.grad).all()


def test_entropies() -> None:
    logits = torch.tensor([[0.0, 0.0, -torch.inf], [3e38, -3e38, 0.0], [1.0, 2.0, 4.0]])
    found = logprobs.entropies(logits, 2.0)
    p = (logits[2].double() / 2).softmax(-1)
    expected = torch.tensor([math.log(2), 0.0, float(-(p * p.log()).sum())])
    torch.testing.assert_close(found, expected)
    assert logprobs.entropies(logits.bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("retained", [0, 1 << 26])
def test_a_step_knows_the_entropies_of_its_tokens(retained: int, float64_inside: None) -> None:
    model, what = build("llama"), group(lengths=(1, 0, 9, 30))
    engine = longstraw.Engine(model, segment_tokens=20, block_tokens=16, retain_graph_bytes=retained)
    with engine.capture(what.prompt) as state:
        outcome = engine.backward(state, what.responses, what.objective, temperature=0.6)
        logps, entropies = engine.score_with_entropies(state, what.responses, temperature=0.6)
    for response, logp, scored, *both in zip(what.responses, outcome.logps, logps, outcome.entropies, entropies):
        ids = torch.cat([what.prompt, response])[None]
        logits = model(input_ids=ids).logits[0, what.prompt.numel() - 1 : -1] / 0.6
        expected = torch.distributions.Categorical(logits=logits).entropy()
        for found in both:
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
            assert not found.requires_grad
        torch.testing.assert_close(scored, logp)


@pytest.mark.parametrize("chunk", [1, 2, 5, 1000])
def test_chunks_do_not_change_the_result(chunk: int) -> None:
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 31, dtype=torch.float64)
    hidden, targets = torch.randn(13, 8, dtype=torch.float64), torch.randint(0, 31, (13,))
    cotangents = torch.randn(13, dtype=torch.float64)
    leaf = hidden.clone().requires_grad_()
    expected = (head(leaf) / 0.8).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    (expected * cotangents).sum().backward()
    wanted = [p.grad.clone() for p in head.parameters() if p.grad is not None]
    head.zero_grad()
    logps, entropies = logprobs.score(head, hidden, targets, 0.8, chunk)
    torch.testing.assert_close(logps, expected.detach())
    torch.testing.assert_close(entropies, torch.distributions.Categorical(logits=head(hidden) / 0.8).entropy().detach())
    gradient = logprobs.hidden_gradient(head, hidden, targets, cotangents, 0.8, chunk)
    torch.testing.assert_close(gradient, leaf.grad)
    for parameter, want in zip(head.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, want)


def test_tokens_without_a_cotangent_cost_nothing_and_get_nothing() -> None:
    calls = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden))
        return hidden @ torch.ones(4, 9)

    cotangents = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    gradient = logprobs.hidden_gradient(head, torch.randn(6, 4), torch.zeros(6, dtype=torch.long), cotangents, 1.0, 2)
    assert calls == [2] and (gradient[:2] == 0).all() and (gradient[4:] == 0).all()


def test_tokens_a_chunk() -> None:
    assert logprobs.tokens_a_chunk(1000, 4000 * 7) == 7
    assert logprobs.tokens_a_chunk(1000, 4000 * 7 - 1) == 6
    assert logprobs.tokens_a_chunk(1000, 1) == 1


def test_head_bytes_bounds_the_logits_of_a_step() -> None:
    """60 response tokens, at most 5 of them with logits at a time, in scoring, sampling and backward."""
    model = build("llama", dtype=torch.float32, vocab_size=VOCAB, hidden_size=8, head_dim=4, num_hidden_layers=1)
    what = group(num_prompt=9, lengths=(40, 20))
    engine = longstraw.Engine(model, head_bytes=5 * 4 * VOCAB)
    with engine.capture(what.prompt) as state, Sizes() as sizes:
        outcome = engine.backward(state, what.responses, what.objective)
        engine.score(state, what.responses)
    parameters = max(p.numel() for p in model.parameters())
    assert sizes.numel <= max(5 * VOCAB, parameters) < 60 * VOCAB / 4, f"{sizes.numel} numbers by {sizes.name}"
    found = reference.gradients(model)
    loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    torch.testing.assert_close(outcome.loss, loss, check_dtype=False)
    reference.assert_same_gradients(found, expected, 2e-5)


@pytest.mark.parametrize("head_bytes", [1, 4 * 67 * 3, 1 << 30])
def test_head_bytes_does_not_change_the_gradient(head_bytes: int, float64_inside: None) -> None:
    model, what = build("qwen3"), group()
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective, temperature=0.6)
    engine = longstraw.Engine(model, segment_tokens=20, head_bytes=head_bytes)
    with engine.capture(what.prompt) as state:
        engine.backward(state, what.responses, what.objective, temperature=0.6)
    reference.assert_same_gradients(reference.gradients(model), expected, 1e-11)
