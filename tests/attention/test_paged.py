"""Attention over pages against the plain reference, outputs and gradients, on every cut, tier and head layout."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from longstraw.attention import kernels, paged, reference
from longstraw.attention.scores import Scores
from longstraw.pages import PageStore
from longstraw.pages.prefix import Prefix

DIM = 8


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture
def store() -> Any:
    store = PageStore("cpu")
    yield store
    store.close()


def run(
    store: PageStore, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cuts: list[int], grad: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Output of the last tokens over pages cut at `cuts`, the rest live, and the gradients of q, k and v."""
    bounds = [0, *cuts]
    pages = [store.put("kv", a, (k[:, :, a:b].to(k.dtype), v[:, :, a:b].to(v.dtype))) for a, b in pairwise(bounds)]
    live = [x.clone().requires_grad_() for x in (q, k[:, :, bounds[-1] :], v[:, :, bounds[-1] :])]
    out = paged.attend(*live, Prefix(store, pages), Scores(DIM**-0.5))
    out.backward(grad)
    parts: list[list[torch.Tensor]] = [[], []]
    for page in pages:
        found = store.take_cotangent(page)
        assert found is not None
        for side, gradient in zip(parts, found):
            side.append(gradient)
    grads = [live[0].grad] + [torch.cat([*side, x.grad], 2) for side, x in zip(parts, live[1:])]
    return out, grads


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = reference.attend(*leaves, Scores(DIM**-0.5))
    out.backward(grad)
    return out, [x.grad for x in leaves]


def assert_close(found: Any, expected: Any, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    for name, a, b in zip("qkv", found[1], expected[1]):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"d{n}: {m}")


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("cuts", [[], [1], [5], [1, 2, 3], [7, 8, 30], [40]])
def test_any_cut_and_head_layout(store: PageStore, cuts: list[int], heads: tuple[int, int]) -> None:
    total, (num_q, num_kv) = 43, heads
    live = total - (cuts[-1] if cuts else 0)
    q, grad = draw(1, num_q, live, DIM), draw(1, num_q, live, DIM, seed=1)
    k, v = draw(1, num_kv, total, DIM, seed=2), draw(1, num_kv, total, DIM, seed=3)
    assert_close(run(store, q, k, v, cuts, grad), plain(q, k, v, grad))


@pytest.mark.parametrize("rows", [2, 5])
@pytest.mark.parametrize("live", [1, 6])
def test_rows_share_the_prompts_pages_and_own_their_branchs(store: PageStore, rows: int, live: int) -> None:
    """A page of one row serves all rows, and its gradient is the sum over them; a branch's page has a row for each."""
    shared, own = 9, 4
    k1, v1 = draw(1, 2, shared, DIM), draw(1, 2, shared, DIM, seed=1)
    k2, v2 = draw(rows, 2, own + live, DIM, seed=2), draw(rows, 2, own + live, DIM, seed=3)
    q, grad = draw(rows, 4, live, DIM, seed=4), draw(rows, 4, live, DIM, seed=5)
    pages = [store.put("kv", 0, (k1, v1)), store.put("kv", shared, (k2[:, :, :own], v2[:, :, :own]))]
    inputs = [x.clone().requires_grad_() for x in (q, k2[:, :, own:], v2[:, :, own:])]
    out = paged.attend(*inputs, Prefix(store, pages), Scores(DIM**-0.5))
    out.backward(grad)

    leaves = [x.clone().requires_grad_() for x in (q, k1, v1, k2, v2)]
    k = torch.cat([leaves[1].expand(rows, -1, -1, -1), leaves[3]], 2)
    v = torch.cat([leaves[2].expand(rows, -1, -1, -1), leaves[4]], 2)
    expected = reference.attend(leaves[0], k, v, Scores(DIM**-0.5))
    expected.backward(grad)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(inputs[0].grad, leaves[0].grad, rtol=1e-12, atol=1e-12)
    first, second = store.take_cotangent(pages[0]), store.take_cotangent(pages[1])
    assert first is not None and second is not None
    assert first[0].shape == k1.shape
    for shared_grad, own_grad, live_leaf, whole, branch in zip(first, second, inputs[1:], leaves[1:3], leaves[3:]):
        torch.testing.assert_close(shared_grad, whole.grad, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat([own_grad, live_leaf.grad], 2), branch.grad, rtol=1e-12, atol=1e-12)


def test_constant_pages_collect_nothing(store: PageStore) -> None:
    k, v = draw(1, 2, 12, DIM), draw(1, 2, 12, DIM, seed=1)
    pages = [store.put("kv", i, (k[:, :, i : i + 3], v[:, :, i : i + 3])) for i in range(0, 9, 3)]
    q = draw(1, 2, 3, DIM, seed=2).requires_grad_()
    prefix = Prefix(store, pages, num_constant=2)
    paged.attend(q, k[:, :, 9:], v[:, :, 9:], prefix, Scores(0.3)).sum().backward()
    assert [store.take_cotangent(page) is None for page in pages] == [True, True, False]
    whole = q.detach().clone().requires_grad_()
    reference.attend(whole, k, v, Scores(0.3)).sum().backward()
    torch.testing.assert_close(q.grad, whole.grad, rtol=1e-12, atol=1e-12)


def test_every_query_adds_to_a_pages_cotangent(store: PageStore) -> None:
    k, v = draw(1, 2, 8, DIM), draw(1, 2, 8, DIM, seed=1)
    page = store.put("kv", 0, (k[:, :, :4], v[:, :, :4]))
    q = draw(1, 2, 4, DIM, seed=2).requires_grad_()
    for _ in range(3):
        paged.attend(q, k[:, :, 4:], v[:, :, 4:], Prefix(store, [page]), Scores(0.3)).sum().backward()
    three = store.take_cotangent(page)
    paged.attend(q, k[:, :, 4:], v[:, :, 4:], Prefix(store, [page]), Scores(0.3)).sum().backward()
    one = store.take_cotangent(page)
    assert three is not None and one is not None
    torch.testing.assert_close(three[0], 3 * one[0], rtol=1e-12, atol=1e-12)


def test_the_graph_holds_no_pages(store: PageStore) -> None:
    """Autograd saves the live piece and handles: freeing the pages' tensors from the store is all that is needed."""
    k, v = draw(1, 2, 40, DIM), draw(1, 2, 40, DIM, seed=1)
    pages = [store.put("kv", i, (k[:, :, i : i + 10], v[:, :, i : i + 10])) for i in range(0, 40, 10)]
    live = [draw(1, 2, 2, DIM, seed=i).requires_grad_() for i in range(3)]
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        paged.attend(*live, Prefix(store, pages), Scores(0.3))
    assert saved and max(saved) == live[0].numel()


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_scores_are_never_made_nor_more_than_two_pages_at_a_time(tier: str, tmp_path: Path) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        nbytes = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for value in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(value, torch.Tensor):
                    self.nbytes = max(self.nbytes, value.numel() * value.element_size())
            return result

    store = PageStore("cpu", tier, tmp_path)
    size, live = 100, 60
    pages = [store.put("kv", i, (draw(1, 1, size, DIM), draw(1, 1, size, DIM))) for i in range(8)]
    q, k, v = (draw(1, 1, live, DIM, seed=i).requires_grad_() for i in range(3))
    with Largest() as largest:
        paged.attend(q, k, v, Prefix(store, pages), Scores(0.3)).sum().backward()
    assert largest.nbytes <= 8 * size * DIM < 8 * live * size
    store.close()


@pytest.mark.parametrize("dtypes", [("float32", "bfloat16"), ("bfloat16", "float32"), ("float64", "float32")])
@pytest.mark.parametrize("mixed", [False, True])
def test_keys_and_values_of_another_dtype_than_queries(store: PageStore, dtypes: Any, mixed: bool) -> None:
    """They are computed with in the queries' dtype; gradients come back in their own."""
    query_dtype, other = (getattr(torch, name) for name in dtypes)
    key_dtype = query_dtype if mixed else other  # under autocast the values alone differ
    q, grad = draw(1, 4, 6, DIM, dtype=query_dtype), draw(1, 4, 6, DIM, dtype=query_dtype, seed=1)
    k, v = draw(1, 2, 16, DIM, dtype=key_dtype, seed=2), draw(1, 2, 16, DIM, dtype=other, seed=3)
    out, grads = run(store, q, k, v, [4, 10], grad)
    assert out.dtype == query_dtype
    page = store.put("kv", 0, (k[:, :, :10], v[:, :, :10]))
    leaves = [x.clone().requires_grad_() for x in (q, k[:, :, 10:], v[:, :, 10:])]
    paged.attend(*leaves, Prefix(store, [page]), Scores(DIM**-0.5)).backward(grad)
    assert [x.grad.dtype for x in leaves] == [query_dtype, key_dtype, other]
    wide = [x.double() for x in (q, k, v)]
    tolerance = 0.05 if torch.bfloat16 in (query_dtype, other) else 1e-5
    expected = plain(*wide, grad.double())
    assert_close((out.double(), [g.double() for g in grads]), expected, tolerance)


def test_scores_far_apart_merge_exactly(store: PageStore) -> None:
    """A page whose scores tower over the others' by more than float64 can hold leaves them without weight, not NaN."""
    q, k, v = draw(1, 1, 2, DIM), draw(1, 1, 9, DIM, seed=1), draw(1, 1, 9, DIM, seed=2)
    k[:, :, 3] = 2000 * q[:, :, 0]
    grad = draw(1, 1, 2, DIM, seed=3)
    found = run(store, q, k, v, [3, 7], grad)
    assert all(torch.isfinite(x).all() for x in [found[0], *found[1]])
    assert_close(found, plain(q, k, v, grad), 1e-9)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_kernels_are_the_reference(causal: bool, dtype: torch.dtype, tolerance: float) -> None:
    """Output, log-sum-exp and the three gradients of one part, with the output and log-sum-exp of a whole."""
    num_keys = 7 if causal else 12
    q, grad = draw(2, 4, 7, DIM, dtype=dtype), draw(2, 4, 7, DIM, dtype=dtype, seed=1)
    k, v = draw(2, 2, num_keys, DIM, dtype=dtype, seed=2), draw(2, 2, num_keys, DIM, dtype=dtype, seed=3)
    found, expected = (m.part_forward(q, k, v, Scores(0.4), causal) for m in (kernels, reference))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
    assert found[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    whole = (expected[0] * 0.7, expected[1] + 0.4)  # as if another part had weight, too
    backward = [m.part_backward(grad, q, k, v, *whole, Scores(0.4), causal) for m in (kernels, reference)]
    for name, a, b in zip("qkv", *backward):
        torch.testing.assert_close(a.to(b.dtype), b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"d{n}: {m}")


@pytest.fixture(params=[2, 3])
def threads(request: pytest.FixtureRequest) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("heads", [(1, 1), (4, 1)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-5)])
def test_more_threads_than_heads_share_the_queries(
    threads: int, causal: bool, heads: tuple[int, int], dtype: torch.dtype, tolerance: float, monkeypatch: Any
) -> None:
    num_queries = 256 * threads
    num_keys = num_queries if causal else 700
    q, grad = (draw(1, num_queries, heads[0], DIM, seed=seed).transpose(1, 2) for seed in (0, 3))
    k, v = (draw(1, heads[1], num_keys, DIM, seed=seed) for seed in (1, 2))
    out, lse = kernels.part_forward(q, k, v, Scores(DIM**-0.5), causal)
    expected = reference.part_backward(grad, q, k, v, out, lse, Scores(DIM**-0.5), causal)
    rows = []
    kernel = kernels._cpu_backward
    monkeypatch.setattr(kernels, "_cpu_backward", lambda grad, *a, **k: rows.append(len(grad)) or kernel(grad, *a, **k))
    narrow = [x.to(dtype) for x in (grad, q, k, v, out, lse)]
    found = kernels.part_backward(*narrow, Scores(DIM**-0.5), causal)
    assert rows[0] == threads
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "num_queries, heads, shares", [(8192, 1, 8), (8192, 3, 2), (8190, 1, 7), (600, 1, 2), (500, 1, 1)]
)
def test_shares_of_eight_threads(num_queries: int, heads: int, shares: int, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    q, k = torch.empty(1, heads * 2, num_queries, DIM), torch.empty(1, heads, num_queries, DIM)
    assert kernels._shares(q, k) == shares
    assert kernels._shares(q.expand(2, -1, -1, -1), k) == 1


def test_the_reference_is_autograds() -> None:
    """The plain backward formula against autograd through the plain forward."""
    q, k, v, grad = (
        draw(1, 4, 5, DIM),
        draw(1, 2, 5, DIM, seed=1),
        draw(1, 2, 5, DIM, seed=2),
        draw(1, 4, 5, DIM, seed=3),
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = reference.attend(*leaves, Scores(0.4))
    out.backward(grad)
    part, lse = reference.part_forward(q, k, v, Scores(0.4), True)
    torch.testing.assert_close(part, out.detach(), rtol=1e-13, atol=1e-13)
    for a, b in zip(reference.part_backward(grad, q, k, v, part, lse, Scores(0.4), True), leaves):
        torch.testing.assert_close(a, b.grad, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "shapes, causal, words",
    [
        (((1, 2, 0, 4), (1, 2, 3, 4), (1, 2, 3, 4)), False, "at least one query and one key, got 0 and 3"),
        (((1, 2, 3, 4), (1, 2, 0, 4), (1, 2, 0, 4)), False, "got 3 and 0"),
        (((2, 2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), False, "2, 1 and 1 rows"),
        (((1, 3, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), False, "head or key counts"),
        (((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 5, 4)), False, "head or key counts"),
        (((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)), True, "square, got 3 queries and 5 keys"),
    ],
)
def test_shapes_that_the_kernels_would_read_out_of_bounds(shapes: Any, causal: bool, words: str) -> None:
    q, k, v = (torch.zeros(shape) for shape in shapes)
    lse = torch.zeros(q.shape[:3])
    with pytest.raises(ValueError, match=words):
        kernels.part_forward(q, k, v, Scores(1.0), causal)
    with pytest.raises(ValueError, match=words):
        kernels.part_backward(q, q, k, v, q, lse, Scores(1.0), causal)


def test_the_attention_function_outside_the_engine() -> None:
    from longstraw.attention import interface

    x = torch.zeros(1, 2, 3, 4)
    module = torch.nn.Module()
    with pytest.raises(RuntimeError, match=r"only inside longstraw\.Engine"):
        interface.forward(module, x, x, x, None, scaling=1.0)
    piece = {interface.PIECE: object()}
    with pytest.raises(ValueError, match=r"dropout=0\.1"):
        interface.forward(module, x, x, x, None, scaling=1.0, dropout=0.1, **piece)
    with pytest.raises(ValueError, match="mask"):
        interface.forward(module, x, x, x, torch.zeros(1, 1, 3, 3), scaling=1.0, **piece)
    with pytest.raises(ValueError, match="position_bias"):
        interface.forward(module, x, x, x, None, scaling=1.0, position_bias=x, **piece)
