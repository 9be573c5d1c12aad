"""The short convolution over a tail: against a sum written out, over any cut, with and without bias and activation."""

from __future__ import annotations

import pytest
import torch

from longstraw.models.short_convolution import Kernels, convolve
from longstraw.state.recurrent import RecurrentPiece

SHAPES = [(2, 3), (1, 5)]
NUM = 9


def _inputs(kernel: int, bias: bool) -> tuple[list[torch.Tensor], torch.nn.Conv1d]:
    torch.manual_seed(0)
    channels = sum(heads * size for heads, size in SHAPES)
    module = torch.nn.Conv1d(channels, channels, kernel, groups=channels, bias=bias, dtype=torch.float64)
    return [torch.randn(2, NUM, *shape, dtype=torch.float64, requires_grad=True) for shape in SHAPES], module


def _plain(parts: list[torch.Tensor], module: torch.nn.Conv1d) -> torch.Tensor:
    """Channels [B, T, C] token by token: sum over the last K tokens, with zeros before the first."""
    mixed = torch.cat([part.flatten(2) for part in parts], -1)
    kernel = module.weight.shape[-1]
    outputs = []
    for token in range(NUM):
        out = torch.zeros_like(mixed[:, 0]) if module.bias is None else module.bias.expand_as(mixed[:, 0])
        for back in range(min(kernel, token + 1)):
            out = out + module.weight[:, 0, kernel - 1 - back] * mixed[:, token - back]
        outputs.append(out)
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("cuts", [[9], [1] * 9, [2, 2, 1, 4], [3, 6], [8, 1]])
@pytest.mark.parametrize("kernel", [1, 2, 4, 12])
@pytest.mark.parametrize("bias", [False, True])
def test_any_cut_gives_the_sum_written_out(cuts: list[int], kernel: int, bias: bool) -> None:
    parts, module = _inputs(kernel, bias)
    expected = torch.nn.functional.silu(_plain(parts, module))
    weight = torch.randn_like(expected)
    leaves = [*parts, *module.parameters()]
    gradients = torch.autograd.grad((expected * weight).sum(), leaves)

    kernels = Kernels.of(module, SHAPES, "silu")
    state, pieces, tails = None, [], set()
    for piece in zip(*(part.split(cuts, 1) for part in parts)):
        live = RecurrentPiece(state, rows=2)
        pieces.append(torch.cat([out.flatten(2) for out in convolve(live, piece, kernels)], -1))
        live.update_recurrent_state(torch.zeros(2, 1))
        state = live.written()
        tails.add(state[0].shape)
    found = torch.cat(pieces, 1)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.autograd.grad((found * weight).sum(), leaves), gradients)
    assert len(tails) == 1  # the tail has its shape from the first piece on


def test_the_kernels_dtype_is_the_convolutions() -> None:
    """Activations in another dtype come back in theirs."""
    parts, module = _inputs(4, True)
    narrow = [part.detach().to(torch.bfloat16) for part in parts]
    outputs = convolve(RecurrentPiece(None, rows=2), narrow, Kernels.of(module, SHAPES, None))
    assert {out.dtype for out in outputs} == {torch.bfloat16}
    expected = _plain([part.double() for part in narrow], module)
    torch.testing.assert_close(
        torch.cat([out.flatten(2) for out in outputs], -1).double(), expected, atol=0.02, rtol=0.02
    )
