"""The indexer's choice equals a plain sort by (score, position), however the tokens are cut."""

from __future__ import annotations

import math
import random

import pytest
import torch

from longstraw.attention import indexer, sparse_reference
from longstraw.pages import PageStore
from longstraw.pages.prefix import Prefix

TOKENS, HEADS, SIZE = 203, 4, 16
CUTS = [11, 48, 64, 100, 1000]


def prefix_of(pages: list[torch.Tensor], store: PageStore | None = None) -> Prefix:
    """Pages [R, S, D], one behind the other from position 0."""
    store = store or PageStore("cpu")
    held, start = [], 0
    for tensor in pages:
        held.append(store.put("index", start, [tensor]))
        start += tensor.shape[1]
    return Prefix(store, held)


def draw(kind: str, heads: int = HEADS, tokens: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries [1, S, H, D], weights [1, S, H] and keys [1, S, D]."""
    torch.manual_seed(5)
    q, w = torch.randn(1, tokens, heads, SIZE), torch.randn(1, tokens, heads)
    if kind == "random":
        return q, w, torch.randn(1, tokens, SIZE)
    if kind == "repeated":  # few distinct tokens, each many times: their scores are equal to the bit
        return q, w, torch.randn(5, SIZE)[torch.randint(0, 5, (tokens,))][None]
    if kind == "zeros":  # the relu cuts most products; zeros carry both signs
        return q.abs(), w, torch.randn(1, tokens, SIZE).abs() * torch.where(torch.rand(1, tokens, 1) < 0.9, -1.0, 1.0)
    assert kind == "all equal"
    return q, w, torch.zeros(1, tokens, SIZE)


def chosen_in_pieces(q: torch.Tensor, w: torch.Tensor, k: torch.Tensor, num: int, size: int) -> list[list[int]]:
    chosen = []
    for start in range(0, q.shape[1], size):
        piece = slice(start, start + size)
        pages = [k[:, i : i + size] for i in range(0, start, size)]
        found = indexer.choose(q[:, piece], w[:, piece], k[:, piece], prefix_of(pages), num)
        assert found.dtype == torch.int32
        for row in found[0].tolist():
            real = [s for s in row if s >= 0]
            assert row == real + [-1] * (len(row) - len(real)), "absent choices stand at the end"
            chosen.append(real)
    return chosen


@pytest.mark.parametrize("kind", ["random", "repeated", "zeros", "all equal"])
@pytest.mark.parametrize("size", CUTS)
@pytest.mark.parametrize("num", [1, 24])
def test_equals_a_plain_sort(kind: str, size: int, num: int) -> None:
    q, w, k = draw(kind)
    expected = sparse_reference.choose(sparse_reference.scores(q[0], w[0], k[0]), num)
    assert chosen_in_pieces(q, w, k, num, size) == expected


@pytest.mark.parametrize("size", [1, 2, 3])
def test_tiny_pieces(size: int) -> None:
    q, w, k = draw("repeated", tokens=37)
    expected = sparse_reference.choose(sparse_reference.scores(q[0], w[0], k[0]), 6)
    assert chosen_in_pieces(q, w, k, 6, size) == expected


def test_kinds_are_what_they_say() -> None:
    """Ties reach across the choice's edge, or the comparisons above would not see them."""
    for kind, tied in (("random", False), ("repeated", True), ("zeros", True), ("all equal", True)):
        scores = sparse_reference.scores(*(x[0] for x in draw(kind)))[-1].sort(descending=True).values
        assert bool(scores[23] == scores[24]) == tied, kind


@pytest.mark.parametrize("kind", ["random", "repeated"])
def test_one_head_and_many(kind: str) -> None:
    for heads in (1, 2, 64):
        q, w, k = draw(kind, heads=heads, tokens=70)
        expected = sparse_reference.choose(sparse_reference.scores(q[0], w[0], k[0]), 9)
        assert chosen_in_pieces(q, w, k, 9, 13) == expected


@pytest.mark.parametrize("tile", [(1, 512), (9, 512), (512, 512)])
def test_tile_size(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles cut a page many times, and the running best takes both its ways: few candidates, and many."""
    q, w, k = draw("repeated", tokens=1300)
    expected = sparse_reference.choose(sparse_reference.scores(q[0], w[0], k[0]), 24)
    monkeypatch.setattr(indexer, "_CPU_TILE", tile)
    assert chosen_in_pieces(q, w, k, 24, 700) == expected


def test_rising_scores_displace_every_choice() -> None:
    """Every new token beats all before: the last `num` are chosen."""
    q, w = torch.ones(1, 300, 1, 1), torch.ones(1, 300, 1)
    k = torch.arange(1.0, 301.0)[None, :, None]
    assert chosen_in_pieces(q, w, k, 5, 100)[-1] == [295, 296, 297, 298, 299]
    assert chosen_in_pieces(q, w, k.flip(1), 5, 100)[-1] == [0, 1, 2, 3, 4]


def test_ten_runs_alike() -> None:
    q, w, k = draw("zeros")
    first = chosen_in_pieces(q, w, k, 24, 48)
    assert all(chosen_in_pieces(q, w, k, 24, 48) == first for _ in range(10))


def test_a_later_token_changes_no_earlier_choice() -> None:
    q, w, k = draw("random")
    before = chosen_in_pieces(q, w, k, 24, 48)
    changed = k.clone()
    changed[:, 120] = 100 * q[:, 150, 0]
    after = chosen_in_pieces(q, w, changed, 24, 48)
    assert after[:120] == before[:120]
    assert after[120:] != before[120:]


def test_rows_share_pages_and_own_others() -> None:
    """Three rows over two shared pages and one of their own, against each row alone."""
    torch.manual_seed(1)
    q, w = torch.randn(3, 7, HEADS, SIZE), torch.randn(3, 7, HEADS)
    shared, own, live = torch.randn(1, 50, SIZE), torch.randn(3, 6, SIZE), torch.randn(3, 7, SIZE)
    prefix = prefix_of([shared[:, :30], shared[:, 30:], own])
    found = indexer.choose(q, w, live, prefix, 12)
    for row in range(3):
        k = torch.cat([shared[0], own[row], live[row]])
        assert found[row].tolist() == sparse_reference.choose(sparse_reference.scores(q[row], w[row], k), 12)


def test_one_query_behind_a_tail() -> None:
    """As in decoding: the query is the last of several live tokens."""
    q, w, k = draw("repeated")
    found = indexer.choose(q[:, -1:], w[:, -1:], k[:, 150:], prefix_of([k[:, :90], k[:, 90:150]]), 24)
    assert found[0].tolist() == sparse_reference.choose(sparse_reference.scores(q[0], w[0], k[0]), 24)[-1:]


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_tier(tier: str, tmp_path: object) -> None:
    q, w, k = draw("repeated")
    pages = [k[:, :90], k[:, 90:150]]
    here = indexer.choose(q[:, 150:], w[:, 150:], k[:, 150:], prefix_of(pages), 24)
    there = indexer.choose(
        q[:, 150:], w[:, 150:], k[:, 150:], prefix_of(pages, PageStore("cpu", tier, str(tmp_path))), 24
    )
    assert torch.equal(here, there)


@pytest.mark.parametrize("heads,size", [(32, 128), (64, 128), (4, 16), (1, 8)])
def test_a_pair_scores_the_same_bits_in_every_shape(heads: int, size: int) -> None:
    torch.manual_seed(0)
    q, w, k = torch.randn(40, heads, size), torch.randn(40, heads), torch.randn(1100, size)
    whole = indexer.scores(q, w, k)
    for queries in (slice(0, 1), slice(3, 5), slice(7, 40), slice(39, 40)):
        for tokens in (slice(0, 1), slice(64, 69), slice(100, 800), slice(1099, 1100)):
            part = indexer.scores(q[queries], w[queries], k[tokens].contiguous())
            assert torch.equal(part, whole[queries, tokens])


def test_ranks_order_as_score_then_lower_position() -> None:
    values = [0.0, -0.0, 1.0, -1.0, 1e-42, -1e-42, 3.4e38, -3.4e38, 0.1, 0.1, math.inf, 2.0**-126, 1.0]
    positions = list(range(len(values)))
    random.Random(0).shuffle(positions)
    found = indexer.ranks(torch.tensor(values), torch.tensor(positions))
    by_rank = sorted(range(len(values)), key=lambda i: -int(found[i]))
    assert by_rank == sorted(range(len(values)), key=lambda i: (-values[i], positions[i]))
    assert len(set(found.tolist())) == len(values)
