"""DeepSeek Sparse Attention's choice of tokens: the best `k` a query, over pages, under a total order.

A query t scores a token s by sum_h w[t, h] relu(q[t, h] . k[s]) (DeepSeek-V3.2-Exp technical report, equation 1; the
scales of `transformers` belong to w). Higher scores come first, and of equal ones the lower position: equal scores are
common, as a relu's zeros are. Score and position make one integer, so no two candidates ever tie, and the choice is the
same whatever the pieces in which tokens are offered; they are offered in rising order.

One (query, token) pair has to score the same bits in every piece, or what ties in one would not in another. Matrix
products on CPU depend on a shape only where it is small, so tokens are padded to 512 and queries times heads to 64; on
other devices a kernel may be picked by the shape. Queries and keys also carry the rounding of the layers below, which
may depend on how a prompt is cut into pieces. A choice between scores that differ by rounding alone is therefore bound
to the cut; a piece that is computed again is cut as it was and chooses the same.

Shapes: B rows, T queries, N queries of all rows, S tokens, H index heads, D index head size, K chosen tokens.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from longstraw.pages.prefix import Prefix

_CPU_TILE = (512, 1024)  # queries times heads, and the tokens that they are scored against at a time
_GPU_TILE = (8192, 4096)
_TOKENS = 512  # a tile's tokens are a multiple
_ROWS = 64  # and so many queries times heads at least
_LOW = 0xFFFFFFFF  # the low word of a rank holds the position, counted downwards
_FUTURE = -1 - (0x7F800000 << 32)  # the rank of no token: a score of -inf, below every finite one


@torch.no_grad()
def choose(q_BTHD: torch.Tensor, w_BTH: torch.Tensor, k_BSD: torch.Tensor, prefix: Prefix, num: int) -> torch.Tensor:
    """Positions of the `num` best tokens of every query, among the pages' and its own row's up to itself.

    Args:
        q_BTHD: queries of the piece's tokens, which are the last T of the S held.
        w_BTH: weights of their heads, scales included.
        k_BSD: keys of the tokens after the pages.
        prefix: pages (k [R, S, D],) of the tokens before, R = 1 (shared by all rows) or R = B.

    Returns:
        [B, T, K] int32 in rising order, K = min(num, tokens in all); a query that sees fewer has -1 at the end.
    """
    context, rows = prefix.context, q_BTHD.shape[0]
    stop = context.stop(k_BSD.shape[1])
    first = context.own_start if context.dealt else stop - q_BTHD.shape[1]
    if stop <= num:  # every token is among the best
        position_T = torch.arange(first, first + q_BTHD.shape[1], device=q_BTHD.device)
        every_K = torch.arange(stop, device=q_BTHD.device)
        return every_K.where(every_K <= position_T[:, None], -1).int().expand(rows, -1, -1)
    q_BTHD, w_BTH = context.gather(q_BTHD, 1), context.gather(w_BTH, 1)
    num_queries = q_BTHD.shape[1]
    first = context.start if context.dealt else first
    position_T = torch.arange(first, first + num_queries, device=q_BTHD.device)
    best_NK = torch.full((rows * num_queries, num), _FUTURE, device=q_BTHD.device)
    q_NHD, w_NH = q_BTHD.to(torch.float32).flatten(0, 1), w_BTH.to(torch.float32).flatten(0, 1)
    everyone = slice(0, rows * num_queries)
    each = [slice(row * num_queries, (row + 1) * num_queries) for row in range(rows)]
    for page, (k_RSD,) in prefix.stream():
        for part, k_SD in zip([everyone] if page.rows == 1 else each, k_RSD):
            _offer(best_NK[part], q_NHD[part], w_NH[part], k_SD, page.start, None)
    for part, k_SD in zip(each, k_BSD if context.counts_own else ()):
        _offer(best_NK[part], q_NHD[part], w_NH[part], k_SD, context.own_start, position_T)
    best_BTK = context.offers(best_NK.unflatten(0, (rows, num_queries)))
    if best_BTK.shape[-1] > num:
        best_BTK = best_BTK.topk(num, -1, sorted=False).values
    found_BTK = torch.where(best_BTK > _FUTURE, _LOW - (best_BTK & _LOW), stop)
    found_BTK = found_BTK.sort(-1).values
    return found_BTK.where(found_BTK < stop, -1).int()


def scores(q_NHD: torch.Tensor, w_NH: torch.Tensor, k_SD: torch.Tensor) -> torch.Tensor:
    """[N, S] float32."""
    num_tokens = k_SD.shape[0]
    k_SD = _at_least(k_SD.to(torch.float32), -(-num_tokens // _TOKENS) * _TOKENS)
    products_MS = _at_least(q_NHD.flatten(0, 1), _ROWS) @ k_SD.T
    products_NHS = products_MS[: q_NHD.shape[0] * q_NHD.shape[1]].relu_().unflatten(0, q_NHD.shape[:2])
    return torch.bmm(w_NH[:, None], products_NHS)[:, 0, :num_tokens]


def _at_least(x: torch.Tensor, num: int) -> torch.Tensor:
    """Zero rows added up to `num`."""
    return pad(x, (0, 0, 0, num - x.shape[0])) if x.shape[0] < num else x


def ranks(scores: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """One int64 a candidate that orders as (score, then the lower position); scores float32, -0 equal to 0."""
    bits = (scores + 0.0).view(torch.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # floats order as their bits do, negative ones in reverse
    return (bits.long() << 32) + (_LOW - positions)


def _offer(
    best_NK: torch.Tensor,
    q_NHD: torch.Tensor,
    w_NH: torch.Tensor,
    k_SD: torch.Tensor,
    start: int,
    last_N: torch.Tensor | None,
) -> None:
    """Lets the tokens from position `start` on compete for the queries' best; `last_N`: the last that each may see."""
    tile_rows, chunk = _CPU_TILE if k_SD.device.type == "cpu" else _GPU_TILE
    chunk = -(-max(chunk, 2 * best_NK.shape[1]) // _TOKENS) * _TOKENS
    tile = max(1, tile_rows // q_NHD.shape[1])
    for first in range(0, k_SD.shape[0], chunk):
        part_SD = k_SD[first : first + chunk]
        positions_S = torch.arange(start + first, start + first + part_SD.shape[0], device=k_SD.device)
        for begin in range(0, q_NHD.shape[0], tile):
            queries = slice(begin, begin + tile)
            found_NS = scores(q_NHD[queries], w_NH[queries], part_SD)
            if last_N is not None:
                found_NS = found_NS.masked_fill(positions_S > last_N[queries, None], float("-inf"))
            _merge(best_NK[queries], found_NS, positions_S)


def _merge(best_NK: torch.Tensor, scores_NS: torch.Tensor, positions_S: torch.Tensor) -> None:
    """Keeps the best of the running best and new candidates, whose positions are above all that came before."""
    positions_NS = positions_S.expand_as(scores_NS)
    if scores_NS.device.type == "cpu":  # few candidates beat the worst of the best: rank those alone
        worst = (best_NK.amin(-1, keepdim=True) >> 32).int()
        worst = (worst ^ ((worst >> 31) & 0x7FFFFFFF)).view(torch.float32)
        better = scores_NS > worst
        counts = better.sum(-1)
        most = int(counts.max())
        if most == 0:
            return
        if 2 * most < scores_NS.shape[1]:
            row, column = better.nonzero(as_tuple=True)
            place = torch.arange(row.numel()) - (counts.cumsum(0) - counts)[row]
            few = scores_NS.new_full((scores_NS.shape[0], most), float("-inf"))
            few[row, place] = scores_NS[row, column]
            where = positions_S.new_zeros(few.shape)
            where[row, place] = positions_S[column]
            scores_NS, positions_NS = few, where
    candidates = torch.cat([best_NK, ranks(scores_NS, positions_NS)], -1)
    best_NK.copy_(candidates.topk(best_NK.shape[1], -1, sorted=False).values)
