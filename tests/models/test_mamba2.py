"""Mamba-2: the chunk scan against the recurrence token by token, and the families against stock autograd."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import reference
import torch
from families import build
from group import engine_step, group

import longstraw
from longstraw.engine.host import ModelHost
from longstraw.models import mamba2
from longstraw.pages import PageStore
from longstraw.state.layer import PieceComplete
from longstraw.state.recurrent import RecurrentPiece

EXACT = 1e-11
FAMILIES = ["bamba", "granitemoehybrid", "nemotron_h", "falcon_h1"]
ROWS, HEADS, HEAD, GROUPS, STATE = 2, 6, 3, 2, 5


def _inputs(num: int, strong: bool = False) -> list[torch.Tensor]:
    """x, dt, a, b, c and a starting state; `strong` decays forget all within a token, and some steps are tiny."""
    generator = torch.Generator().manual_seed(num)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    dt = torch.nn.functional.softplus(draw(ROWS, num, HEADS) * (6 if strong else 1))
    a = -(draw(HEADS) * (3 if strong else 0.5)).exp()
    x, b, c = draw(ROWS, num, HEADS, HEAD), draw(ROWS, num, GROUPS, STATE), draw(ROWS, num, GROUPS, STATE)
    return [t.requires_grad_() for t in (x, dt, a, b, c, draw(ROWS, HEADS, HEAD, STATE))]


def _token_by_token(x, dt, a, b, c, state):  # type: ignore[no-untyped-def]
    """(outputs, end): S_t = exp(a dt_t) S_{t-1} + dt_t x_t b_t^T, y_t = S_t c_t."""
    b, c = (t.repeat_interleave(HEADS // GROUPS, 2) for t in (b, c))
    outputs = []
    for token in range(x.shape[1]):
        step = dt[:, token, :, None, None]
        state = (a[:, None, None] * step).exp() * state + step * x[:, token, ..., None] * b[:, token, :, None]
        outputs.append((state * c[:, token, :, None]).sum(-1))
    return torch.stack(outputs, 1), state


def _in_pieces(cuts, x, dt, a, b, c, state):  # type: ignore[no-untyped-def]
    outputs = []
    for x_, dt_, b_, c_ in zip(*(t.split(cuts, 1) for t in (x, dt, b, c))):
        left: list[torch.Tensor] = []
        outputs.append(mamba2.scan(x_, dt_, a, b_, c_, state, left.append))
        (state,) = left
    return torch.cat(outputs, 1), state


@pytest.mark.parametrize(
    "cuts",
    [[1], [2], [64], [65], [150], [1] * 7, [2, 1, 2, 2], [63, 1, 66], [128, 2]],
    ids=lambda cuts: "-".join(map(str, cuts)),
)
@pytest.mark.parametrize("strong", [False, True])
@pytest.mark.parametrize("from_zero", [False, True])
def test_chunks_are_the_recurrence(cuts: list[int], strong: bool, from_zero: bool) -> None:
    inputs = _inputs(sum(cuts), strong)
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


def test_small_steps_behind_a_large_one() -> None:
    """In float32, a difference of running sums would lose them."""
    x, dt, a, b, c, state = (t.detach() for t in _inputs(40))
    dt[:, 3], a = 3e3, a * 3
    dt[:, 4:] *= 1e-4
    expected = _token_by_token(x, dt, a, b, c, state)
    found = _in_pieces([40], *(t.float() for t in (x, dt, a, b, c, state)))
    for have, want in zip(found, expected):
        assert (have - want).norm() <= 1e-6 * want.norm()


def test_a_last_layer_stops_at_its_state() -> None:
    x, dt, a, b, c, state = _inputs(5)
    live = RecurrentPiece(None, rows=ROWS)
    live.update_conv_state(torch.zeros(ROWS, 1, 5))
    live.last = True
    with pytest.raises(PieceComplete):
        mamba2.scan(x, dt, a, b, c, state, live.update_recurrent_state)
    torch.testing.assert_close(live.written()[1], _token_by_token(x, dt, a, b, c, state)[1])


@pytest.mark.parametrize("mode", ["full", "none", 40])
@pytest.mark.parametrize("family", FAMILIES)
def test_in_pieces_as_in_one_pass(family: str, mode: str | int, float64_inside: None) -> None:
    model, what = build(family), group()
    loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective, mode)
    outcome, found = engine_step(model, what, prompt_grad=mode, segment_tokens=20, block_tokens=4)
    assert abs(outcome.loss - loss) <= EXACT
    reference.assert_same_gradients(found, expected, EXACT)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_shorter_than_the_convolution(family: str, size: int, float64_inside: None) -> None:
    model, what = build(family), group(num_prompt=14, lengths=(7, 1))
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    reference.assert_same_gradients(
        engine_step(model, what, segment_tokens=size, block_tokens=size)[1], expected, EXACT
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_as_shipped_in_float32(family: str) -> None:
    """Nothing patched: float32, experts by the stock grouped kernel, layers checkpointed in the piece."""
    model, what = build(family, dtype=torch.float32, initializer_range=0.05), group(num_prompt=90, lengths=(20, 9, 1))
    loss, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    outcome, found = engine_step(model, what, segment_tokens=33, block_tokens=16)
    torch.testing.assert_close(outcome.loss, loss, rtol=2e-5, atol=2e-5, check_dtype=False)
    reference.assert_same_gradients(found, expected, 2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampling_scores_as_one_pass_does(family: str, float64_inside: None) -> None:
    """A decoder carries the state from token to token."""
    model, what = build(family), group(num_prompt=21)
    engine = longstraw.Engine(model, segment_tokens=8)
    with engine.capture(what.prompt) as state:
        for draft in engine.sample(state, num=3, max_new_tokens=6, seed=0):
            with torch.no_grad():
                expected = reference.response_logps(model, what.prompt, draft.ids)
            torch.testing.assert_close(draft.logps, expected, rtol=EXACT, atol=EXACT)


def test_the_stock_forward_is_back_afterwards() -> None:
    model = build("nemotron_h", dtype=torch.float32)
    host = ModelHost(model)
    with host.running():
        assert "forward" in model.model.layers[0].mixer.__dict__
        assert "forward" not in model.model.layers[1].mixer.__dict__
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_layers_of_nemotron() -> None:
    names = [type(layer).__name__ for layer in ModelHost(build("nemotron_h")).new_chain(PageStore("cpu"), 0).layers]
    assert names == [
        "RecurrentChain",
        "StatelessChain",
        "KVChain",
        "StatelessChain",
        "RecurrentChain",
        "StatelessChain",
    ]


@pytest.mark.parametrize("norm", [False, True])
def test_falcon_with_and_without_a_norm(norm: bool, float64_inside: None) -> None:
    model, what = build("falcon_h1", mamba_rms_norm=norm, mamba_norm_before_gate=norm), group()
    _, _, expected = reference.step(model, what.prompt, what.responses, what.objective)
    reference.assert_same_gradients(engine_step(model, what, segment_tokens=20, block_tokens=4)[1], expected, EXACT)


def test_a_prompt_stops_at_the_last_state() -> None:
    """Layers without state behind it are not run where nothing reads them."""
    model, what = build("nemotron_h", dtype=torch.float32), group()
    ran: list[int] = []
    model.model.layers[-1].register_forward_hook(lambda module, inputs, output: ran.append(output.shape[1]))
    engine = longstraw.Engine(model, segment_tokens=20)
    ran.clear()  # the engine has compared itself with the stock model
    engine.capture(what.prompt).release()
    assert not ran


@pytest.mark.parametrize("family", ["nemotron_h", "falcon_h1"])
def test_kept_at_few_boundaries(family: str, float64_inside: None) -> None:
    """States that were not kept are restored, and a piece's layers are computed once more for their gradients."""
    model, what = build(family), group()
    expected = engine_step(model, what, segment_tokens=10, block_tokens=4)[1]
    options = dict(segment_tokens=10, block_tokens=4, recompute_layers=True)
    with pytest.warns(UserWarning, match="boundary_bytes"):  # too few for any stride: the one that needs the least
        found = engine_step(model, what, **options, boundary_bytes=1)[1]
    reference.assert_same_gradients(found, expected, EXACT)


def test_an_unknown_kind_names_itself() -> None:
    config = SimpleNamespace(layers_block_type=["linear_attention", "sliding_attention"])
    with pytest.raises(ValueError, match="sliding_attention"):
        mamba2.layers(config)
