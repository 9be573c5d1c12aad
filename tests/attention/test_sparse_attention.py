"""Attention over latents, to chosen ones and to all, equals its plain reference: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from longstraw.attention import latent, sparse, sparse_reference
from longstraw.attention.scores import Scores
from longstraw.pages import PageStore
from longstraw.pages.prefix import Prefix

HEADS, HEAD, ROPE, VALUE, RANK = 3, 6, 4, 5, 8
SCALE = 0.3
NAMES = ("q", "q_rope", "w_k", "w_v", "live")


@dataclass
class Case:
    """Rows over pages that they share, a page of their own, and live tokens.

    Attributes:
        leaves: q, q_rope, w_k, w_v and the live latents.
        pages: latents [R, S, E] of each page.
        chosen: [B, T, K].
    """

    leaves: list[torch.Tensor]
    pages: list[torch.Tensor]
    chosen: torch.Tensor
    weight: torch.Tensor

    @property
    def rows(self) -> int:
        return self.chosen.shape[0]

    def tokens(self, pages: list[torch.Tensor], live: torch.Tensor) -> torch.Tensor:
        return torch.cat([*(page.expand(self.rows, -1, -1) for page in pages), live], 1)


def case(
    rows: int = 1, shared: tuple[int, ...] = (9, 4), own: tuple[int, ...] = (), live: int = 7, queries: int = 7
) -> Case:
    torch.manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    width = RANK + ROPE
    leaves = [
        draw(rows, queries, HEADS, HEAD),
        draw(rows, queries, HEADS, ROPE),
        draw(HEADS, HEAD, RANK),
        draw(HEADS, VALUE, RANK),
        draw(rows, live, width),
    ]
    pages = [draw(1, n, width) for n in shared] + [draw(rows, n, width) for n in own]
    num_tokens = sum(shared) + sum(own) + live
    chosen = torch.full((rows, queries, 6), -1, dtype=torch.int32)
    for row in range(rows):
        for query in range(queries):
            visible = num_tokens - queries + query + 1
            some = torch.randperm(visible)[:6].sort().values
            chosen[row, query, : len(some)] = some
    return Case(leaves, pages, chosen, draw(rows, queries, HEADS, VALUE))


CASES = {
    "one row": dict(),
    "no page": dict(shared=()),
    "one token": dict(shared=(9,), live=1, queries=1),
    "one token alone": dict(shared=(), live=1, queries=1),
    "rows share": dict(rows=3),
    "rows own pages": dict(rows=3, own=(5, 2)),
    "one row, many pages": dict(shared=(2, 1, 3, 1, 4, 1)),
}


def ours(
    what: Case, function: Callable[..., torch.Tensor], num_constant: int = 0, store: PageStore | None = None
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor | None]]:
    """(output, gradients of the leaves, gradients of the pages)."""
    store = store or PageStore("cpu")
    held, start = [], 0
    for tensor in what.pages:
        held.append(store.put("latent", start, [tensor]))
        start += tensor.shape[1]
    leaves = [x.clone().requires_grad_() for x in what.leaves]
    out = function(*leaves, Prefix(store, held, num_constant))
    (out * what.weight).sum().backward()
    cotangents = [store.take_cotangent(page) for page in held]
    return out.detach(), [x.grad for x in leaves], [None if c is None else c[0] for c in cotangents]


def expected(what: Case, chosen: torch.Tensor | None) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    leaves = [x.clone().requires_grad_() for x in what.leaves]
    pages = [x.clone().requires_grad_() for x in what.pages]
    out = sparse_reference.attend(*leaves[:4], what.tokens(pages, leaves[4]), SCALE, chosen)
    (out * what.weight).sum().backward()
    return out.detach(), [x.grad for x in leaves], [x.grad for x in pages]


def assert_equal(found: tuple, wanted: tuple, num_constant: int = 0) -> None:
    close = dict(rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found[0], wanted[0], **close, msg=lambda m: f"output: {m}")
    for name, have, want in zip(NAMES, found[1], wanted[1]):
        torch.testing.assert_close(have, want, **close, msg=lambda m, name=name: f"gradient of {name}: {m}")
    for index, (have, want) in enumerate(zip(found[2], wanted[2])):
        if index < num_constant:
            assert have is None, f"page {index} is a constant"
            continue
        have = torch.zeros_like(want) if have is None else have  # nothing in it was chosen
        torch.testing.assert_close(have, want, **close, msg=lambda m, index=index: f"gradient of page {index}: {m}")


def run_sparse(what: Case) -> Callable[..., torch.Tensor]:
    return lambda *inputs: sparse.attend(*inputs[:5], what.chosen, inputs[5], Scores(SCALE))


def run_latent(*inputs: torch.Tensor) -> torch.Tensor:
    return latent.attend(*inputs, Scores(SCALE))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bounds", [None, (1, 1), (800, 1), (1 << 20, 900)])
def test_chosen(name: str, bounds: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`bounds`: bytes of a group and of a tile; 1 puts every query into its own."""
    if bounds is not None:
        monkeypatch.setattr(sparse, "_CPU_BYTES", bounds)
    what = case(**CASES[name])
    assert_equal(ours(what, run_sparse(what)), expected(what, what.chosen))


def test_chosen_behind_a_tail() -> None:
    """More live tokens than queries, as in decoding."""
    what = case(rows=2, live=5, queries=1)
    assert_equal(ours(what, run_sparse(what)), expected(what, what.chosen))


def test_nothing_chosen_from_a_page_costs_it_nothing() -> None:
    what = case(shared=(9, 4))
    what.chosen = torch.arange(9, 13, dtype=torch.int32).expand(1, 7, 4)
    found = ours(what, run_sparse(what))
    assert found[2][0] is None and found[2][1] is not None
    assert_equal(found, expected(what, what.chosen))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tile_bytes", [64 << 20, 500, 1])
def test_all(name: str, tile_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The smallest tile holds one token."""
    monkeypatch.setattr(latent, "_TILE_BYTES", tile_bytes)
    what = case(**CASES[name])
    assert_equal(ours(what, run_latent), expected(what, None))


@pytest.mark.parametrize("value", [3, 16])
def test_values_narrower_and_wider_than_keys(value: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("test_sparse_attention.VALUE", value)
    what = case(rows=2, own=(3,))
    assert_equal(ours(what, run_latent), expected(what, None))
    assert_equal(ours(what, run_sparse(what)), expected(what, what.chosen))


@pytest.mark.parametrize("kind", ["chosen", "all"])
def test_constant_pages_collect_nothing(kind: str) -> None:
    what = case(rows=2, own=(3,))
    function = run_sparse(what) if kind == "chosen" else run_latent
    wanted = expected(what, what.chosen if kind == "chosen" else None)
    assert_equal(ours(what, function, num_constant=1), wanted, num_constant=1)


@pytest.mark.parametrize("kind", ["chosen", "all"])
def test_runs_and_tiers_agree_to_the_bit(kind: str, tmp_path: object) -> None:
    what = case(rows=2, own=(3,))
    function = run_sparse(what) if kind == "chosen" else run_latent
    first = ours(what, function)
    for tier in ("device", "host", "disk"):
        again = ours(what, function, store=PageStore("cpu", tier, str(tmp_path)))
        for have, want in zip([again[0], *again[1], *again[2]], [first[0], *first[1], *first[2]]):
            assert torch.equal(have, want)


def test_page_gradients_are_float32_for_bfloat16() -> None:
    what = case()
    what.leaves = [x.bfloat16() for x in what.leaves]
    what.pages = [x.bfloat16() for x in what.pages]
    for function in (run_sparse(what), run_latent):
        found = ours(what, function)
        assert found[0].dtype == torch.bfloat16
        assert all(g.dtype == torch.bfloat16 for g in found[1])
        assert all(g.dtype == torch.float32 for g in found[2])


@pytest.mark.parametrize("rows,own", [(1, ()), (3, ()), (3, (5,))])
def test_decoding_equals_the_last_query_of_a_piece(rows: int, own: tuple[int, ...]) -> None:
    what = case(rows=rows, own=own)
    store = PageStore("cpu")
    held, start = [], 0
    for tensor in what.pages:
        held.append(store.put("latent", start, [tensor]))
        start += tensor.shape[1]
    q, q_rope, *rest = what.leaves
    whole = latent.attend(q, q_rope, *rest, Prefix(store, held), Scores(SCALE))
    last = latent.decode(q[:, -1:], q_rope[:, -1:], *rest, Prefix(store, held), Scores(SCALE))
    torch.testing.assert_close(last, whole[:, -1:], rtol=1e-12, atol=1e-13)


def test_a_query_without_a_choice_is_not_a_number() -> None:
    """Scores that are not numbers choose nothing; the step must then fail loudly, not crash or pass."""
    what = case()
    what.chosen[0, 3] = -1
    out = ours(what, run_sparse(what))[0]
    assert out[0, 3].isnan().all() and out[0, :3].isfinite().all()
