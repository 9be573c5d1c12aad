"""Sliding-window attention in tiles of queries against the plain reference, outputs and gradients."""

from __future__ import annotations

import pytest
import torch

from longstraw.attention import reference, window
from longstraw.attention.scores import Scores


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("size", [1, 2, 5, 12, 40])
@pytest.mark.parametrize("live, carried", [(1, 0), (1, 4), (7, 0), (7, 3), (7, 11), (30, 4)])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1)])
def test_any_window_piece_and_tail(
    size: int, live: int, carried: int, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tiles of 4 queries, so that pieces are cut inside; `carried` tokens came before."""
    monkeypatch.setattr(window, "_TILE", 4)
    q, grad = draw(2, heads[0], live, 6), draw(2, heads[0], live, 6, seed=1)
    k, v = draw(2, heads[1], carried + live, 6, seed=2), draw(2, heads[1], carried + live, 6, seed=3)
    results = []
    for attend in (
        lambda q, k, v: window.attend(q, k, v, Scores(0.4, window=size)),
        lambda q, k, v: reference.attend(q, k, v, Scores(0.4, window=size)),
    ):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(*leaves)
        out.backward(grad)
        results.append([out, *(x.grad for x in leaves)])
    for name, a, b in zip(("out", "dq", "dk", "dv"), *results):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_the_graph_holds_queries_keys_and_values_alone() -> None:
    q, k, v = (draw(1, 2, 30, 6, seed=seed).requires_grad_() for seed in range(3))
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        window.attend(q, k, v, Scores(0.4, window=5))
    assert {x.data_ptr() for x in saved} == {x.data_ptr() for x in (q, k, v)}


def test_the_reference_window() -> None:
    """By hand: with equal scores, query i averages the values of the tokens i - size + 1 to i."""
    v = draw(1, 1, 9, 3)
    found = reference.attend(torch.zeros(1, 1, 4, 3), torch.zeros(1, 1, 9, 3), v.float(), Scores(1.0, window=3))
    expected = torch.stack([v[0, 0, i - 2 : i + 1].mean(0) for i in range(5, 9)]).float()
    torch.testing.assert_close(found[0, 0], expected)


def test_a_window_wider_than_the_text_is_full_attention() -> None:
    q, k, v = draw(1, 2, 5, 4), draw(1, 2, 9, 4, seed=1), draw(1, 2, 9, 4, seed=2)
    torch.testing.assert_close(
        window.attend(q, k, v, Scores(0.4, window=100)), reference.attend(q, k, v, Scores(0.4)), rtol=1e-12, atol=1e-12
    )


def test_values_of_another_dtype() -> None:
    q, k, v = draw(1, 2, 5, 4).float(), draw(1, 2, 9, 4, seed=1).float(), draw(1, 2, 9, 4, seed=2).bfloat16()
    leaf = v.clone().requires_grad_()
    out = window.attend(q, k, leaf, Scores(0.4, window=4))
    assert out.dtype == torch.float32
    out.sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16
    torch.testing.assert_close(out, reference.attend(q, k, v.float(), Scores(0.4, window=4)), rtol=1e-5, atol=1e-5)


def test_memory_follows_the_window_and_not_the_text() -> None:
    from typing import Any

    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
                    self.numel = max(self.numel, value.numel())
            return result

    q, k, v = (torch.zeros(1, 1, 3000, 2) for _ in range(3))
    with Largest() as masks:
        window.attend(q, k, v, Scores(1.0, window=64))
    assert 0 < masks.numel <= 512 * (512 + 64)
