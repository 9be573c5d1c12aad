"""The gated delta rule in chunks against the recurrence token by token, with a decay a head and a decay a channel."""

from __future__ import annotations

import pytest
import torch

from longstraw.models import delta_rule
from longstraw.state.layer import PieceComplete
from longstraw.state.recurrent import RecurrentPiece

ROWS, KEY_HEADS, HEADS, KEY, VALUE = 2, 2, 6, 4, 3
CUTS = [[1], [2], [3], [64], [65], [150], [1] * 7, [2, 1, 2, 2], [63, 1, 66], [128, 2]]


def _inputs(num: int, channels: bool, strong: bool = False) -> list[torch.Tensor]:
    """q, k, v, g, beta and a starting state; `strong` decays forget all within a token, now and then."""
    generator = torch.Generator().manual_seed(num)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    key_heads = HEADS if channels else KEY_HEADS
    q, k = (delta_rule.unit(draw(ROWS, num, key_heads, KEY)) for _ in range(2))
    g = -torch.nn.functional.softplus(draw(ROWS, num, HEADS, *[KEY] * channels) * (60 if strong else 1))
    beta = draw(ROWS, num, HEADS).sigmoid() * 2
    return [t.requires_grad_() for t in (q, k, draw(ROWS, num, HEADS, VALUE), g, beta, draw(ROWS, HEADS, KEY, VALUE))]


def _token_by_token(q, k, v, g, beta, state):  # type: ignore[no-untyped-def]
    """(outputs, end): S' = exp(g_t) S_{t-1}, S_t = S' + beta_t k_t (v_t - S'^T k_t)^T, o_t = S_t^T q_t."""
    q, k = (t.repeat_interleave(HEADS // t.shape[2], 2) for t in (q, k))
    g = g if g.dim() == 4 else g[..., None]
    outputs = []
    for token in range(q.shape[1]):
        state = g[:, token, ..., None].exp() * state
        correction = v[:, token] - (state * k[:, token, ..., None]).sum(-2)
        state = state + beta[:, token, :, None, None] * k[:, token, ..., None] * correction[..., None, :]
        outputs.append((state * q[:, token, ..., None]).sum(-2))
    return torch.stack(outputs, 1), state


def _in_pieces(cuts, *inputs):  # type: ignore[no-untyped-def]
    outputs, state = [], inputs[-1]
    for piece in zip(*(t.split(cuts, 1) for t in inputs[:-1])):
        left: list[torch.Tensor] = []
        outputs.append(delta_rule.scan(*piece, state, left.append))
        (state,) = left
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: "-".join(map(str, cuts)))
@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("from_zero", [False, True])
def test_chunks_are_the_recurrence(cuts: list[int], strong: bool, channels: bool, from_zero: bool) -> None:
    inputs = _inputs(sum(cuts), channels, strong)
    if from_zero:
        inputs[-1] = torch.zeros_like(inputs[-1])
    expected = _token_by_token(*inputs)
    found = _in_pieces(cuts, *inputs[:-1], None if from_zero else inputs[-1])
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)

    leaves = [t for t in inputs if t.requires_grad]
    weights = [torch.randn_like(t) for t in expected]
    gradients = [
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(side, weights)), leaves) for side in (found, expected)
    ]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_decayed_products_are_the_sums_written_out(size: int) -> None:
    """At decays whose inverse would overflow."""
    torch.manual_seed(0)
    rows, columns = torch.randn(2, 3, size, 5, dtype=torch.float64)
    grown = (-300 * torch.rand(3, size, 5, dtype=torch.float64)).cumsum(-2)
    exponent = (grown[:, :, None] - grown[:, None]).masked_fill(
        ~torch.ones(size, size, dtype=torch.bool).tril()[..., None], float("-inf")
    )
    expected = (rows[:, :, None] * columns[:, None] * exponent.exp()).sum(-1)
    found = delta_rule.DecayedKeys(columns, grown).products(rows)
    torch.testing.assert_close(found, expected)
    assert torch.isfinite(delta_rule.DecayedKeys(columns.float(), grown.float()).products(rows.float())).all()


def test_a_last_layer_stops_at_its_state() -> None:
    inputs = _inputs(5, channels=True)
    live = RecurrentPiece(None, rows=ROWS)
    live.update_conv_state(torch.zeros(ROWS, 1, 5))
    live.last = True
    with pytest.raises(PieceComplete):
        delta_rule.scan(*inputs, live.update_recurrent_state)
    torch.testing.assert_close(live.written()[1], _token_by_token(*inputs)[1])
