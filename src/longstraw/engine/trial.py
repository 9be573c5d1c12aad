"""Is the function that the engine runs the model's own? Compared on a few tokens before any work.

Shapes: T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from longstraw.engine.evaluation import evaluating
from longstraw.engine.host import ModelHost
from longstraw.engine.piece import Piece
from longstraw.engine.run import extend
from longstraw.pages import PageStore

NUM_TOKENS, MOST_TOKENS, SEED = 12, 64, 20260
LOUD = 50.0  # root mean square of the logits at which scales and caps after the head show

RunInPieces = Callable[[ModelHost, torch.Tensor, Sequence[int]], torch.Tensor]
"""(host, ids [1, T], pieces' lengths) -> hidden states [1, T, E] by the engine's own chain, without a graph."""

_log = logging.getLogger(__name__)
_passed: weakref.WeakKeyDictionary[torch.nn.Module, tuple[int, Trial]] = weakref.WeakKeyDictionary()


@dataclass
class Trial:
    """What was compared.

    Attributes:
        num_tokens: 0 where nothing could be.
        head_distance: of head(backbone(x)) from the stock logits; see `distance`.
        pieces_distance: of the engine's forward in pieces from the stock one.
        not_covered: what so few tokens do not reach.
    """

    num_tokens: int = 0
    head_distance: float = 0.0
    pieces_distance: float = 0.0
    not_covered: list[str] = field(default_factory=list)


def run_in_pieces(host: ModelHost, ids_1T: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """See `RunInPieces`."""
    chain = host.new_chain(PageStore(host.device), len(lengths))
    hidden = []
    try:
        with host.running():
            for ids in ids_1T.split(list(lengths), 1):
                hidden.append(extend(host, chain, Piece(ids, chain.stop, targets=ids)).hidden_BTE)
    finally:
        chain.truncate(0)
    return torch.cat([piece for piece in hidden if piece is not None], 1)


def compare_with_stock(host: ModelHost, run: RunInPieces = run_in_pieces) -> Trial:
    """Holds `head(backbone(x))` and the engine's forward in pieces against `model(x).logits`.

    Leaves the global random state, training modes and gradients as they are. A backbone that has passed is not tried
    again until its parameters or its config change. Where the stock model cannot run, a warning says so.

    Raises:
        RuntimeError: the model drew random numbers.
        ValueError: another function; the message names the model type, the difference and what would serve the model.
    """
    narrow = _narrowest(host)
    fingerprint = hash((host.parameter_version(), repr(host.backbone.config), id(host.family), narrow))
    before = _passed.get(host.backbone)
    if before is not None and before[0] == fingerprint:
        return before[1]
    cuda = [host.device] if host.device.type == "cuda" else []
    with torch.no_grad(), evaluating(host.model), torch.random.fork_rng(cuda):
        trial = _compare(host, run, narrow)
    _passed[host.backbone] = (fingerprint, trial)
    return trial


def _compare(host: ModelHost, run: RunInPieces, narrow: torch.dtype) -> Trial:
    num_tokens, not_covered = _reach(host.config)
    ids_1T = _draw(host, num_tokens).to(host.device)
    stock, why_not = _stock(host, ids_1T)
    if stock is None:
        warnings.warn(
            f"the engine's forward is not compared with the stock one: {why_not}. Whether every layer is served by its "
            "own chain shows only in results",
            stacklevel=4,
        )
        return Trial(not_covered=["everything"])
    trial = Trial(num_tokens, not_covered=not_covered)
    trial.head_distance = _compare_head(host, ids_1T, stock, narrow)

    lengths = _cut(num_tokens)
    logits_TV = _plain(host.head(run(host, ids_1T, lengths)))[0]
    trial.pieces_distance = distance(logits_TV, stock.logits_TV)
    allowed = _allowed(narrow)
    if not trial.pieces_distance <= allowed:
        allowed = max(allowed, min(0.4, 4 * _own_distance(stock)))
    if not trial.pieces_distance <= allowed:
        raise ValueError(
            f"model_type {host.config.model_type!r} computes something else here than in {_name(host)}.forward: over "
            f"pieces of {' + '.join(map(str, lengths))} tokens the logits differ by {trial.pieces_distance:.1e} "
            f"(relative L2, the median token), where {allowed:.1e} is allowed in {_word(narrow)}"
            f"{_first_layer(host, run, ids_1T, lengths, allowed)}. Its family's file in longstraw/models names a "
            "state that is not the layer's own, or the attention drops something that the stock one applies: a file "
            "for this model_type has to say what each layer keeps, and bring the layer's forward where it differs"
        )
    for what in not_covered:
        _log.info("%s: the comparison on %d tokens does not cover %s", host.config.model_type, num_tokens, what)
    return trial


def distance(found_TV: torch.Tensor, expected_TV: torch.Tensor) -> float:
    """Relative L2 of logits, each token's less their mean, which no probability sees: the greater of the medians over
    the first and over the last six tokens.

    Medians: where rounding flips a close choice of an expert or of a token to attend to, single tokens move far in the
    stock model as well; a layer served wrongly moves all that see it. The last six: they alone see beyond a window.
    """
    found, expected = (t.double() - t.double().mean(-1, keepdim=True) for t in (found_TV, expected_TV))
    distances_T = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    return float(torch.stack([distances_T[:6].median(), distances_T[-6:].median()]).max())


@dataclass
class _Stock:
    logits_TV: torch.Tensor
    output: Any  # of the backbone, the head's hidden states in it; None if the model did not call it
    again: Callable[..., torch.Tensor]


def _stock(host: ModelHost, ids_1T: torch.Tensor) -> tuple[_Stock | None, str]:
    """The stock model's logits and its backbone's output, or why there are none."""
    if any(tensor.is_meta for tensor in (*host.model.parameters(), *host.model.buffers())):
        return None, "the model has tensors on the meta device"
    outputs: list[Any] = []
    hook = host.backbone.register_forward_hook(lambda module, inputs, output: outputs.append(output))

    def forward(num_tokens: int | None = None) -> torch.Tensor:
        """Of the first so many tokens."""
        return _plain(host.model(input_ids=ids_1T[:, :num_tokens], use_cache=False, return_dict=True).logits)[0]

    try:
        logits_TV = forward()
    except Exception as error:
        return None, f"{_name(host)} raises {type(error).__name__}: {error}"
    finally:
        hook.remove()
    if not torch.isfinite(logits_TV).all():
        return None, f"{_name(host)} returns logits that are not finite"
    return _Stock(logits_TV, outputs[-1] if outputs else None, forward), ""


def _own_distance(stock: _Stock) -> float:
    """How far the stock model is from itself where later tokens are left out: what the shape of a matrix does."""
    return max(distance(stock.again(num_tokens), stock.logits_TV[:num_tokens]) for num_tokens in (1, 5, 6))


def _compare_head(host: ModelHost, ids_1T: torch.Tensor, stock: _Stock, narrow: torch.dtype) -> float:
    """The distance that was found, at the model's own logits and at loud ones."""
    output = stock.output if stock.output is not None else host.backbone(input_ids=ids_1T, use_cache=False)
    hidden_1TE = output.last_hidden_state
    pairs = [(_plain(host.head(hidden_1TE))[0], stock.logits_TV)]
    loudness = pairs[0][0].double().square().mean().sqrt()
    loud_1TE = (hidden_1TE * (LOUD / loudness).to(hidden_1TE.dtype)) if loudness > 0 else hidden_1TE
    output.last_hidden_state = loud_1TE
    with _returning(host.backbone, output) as called:
        logits_TV = stock.again()
    if called:  # else the model runs its backbone otherwise than by calling it
        pairs.append((_plain(host.head(loud_1TE))[0], logits_TV))
    found = max(distance(ours, theirs) for ours, theirs in pairs)
    allowed = 2 * torch.finfo(narrow).eps if narrow.itemsize <= 2 else 1e-5
    if not found <= allowed:
        ours, theirs = (t.double() - t.double().mean(-1, keepdim=True) for t in pairs[0])
        factor = float((ours * theirs).sum() / theirs.square().sum())
        scaled = f": they are {factor:.4g} times as large" if distance(ours, factor * theirs) <= 1e-2 else ""
        raise ValueError(
            f"{_name(host)} (model_type {host.config.model_type!r}) computes its logits otherwise than by its head on "
            f"its backbone's output{scaled}: they differ by {found:.1e} (relative L2, the median token), where "
            f"{allowed:.0e} is allowed in {_word(narrow)}. It scales or caps them on the way: its family's file in "
            "longstraw/models has to name the divisor and the cap, as longstraw/models/heads.py takes them"
        )
    return found


@contextmanager
def _returning(backbone: torch.nn.Module, output: Any) -> Iterator[list[None]]:
    """The backbone hands out `output` while the context lasts; the list says how often it was asked."""
    module: Any = backbone
    own = module.__dict__.get("forward")
    called: list[None] = []

    def forward(*args: Any, **kwargs: Any) -> Any:
        called.append(None)
        return output

    module.forward = forward
    try:
        yield called
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _first_layer(
    host: ModelHost, run: RunInPieces, ids_1T: torch.Tensor, lengths: Sequence[int], allowed: float
) -> str:
    """Which layer is the first to differ, in words; nothing where the backbone does not list its layers."""
    layers = getattr(host.backbone, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        return ""

    def outputs(forward: Callable[[], Any]) -> list[torch.Tensor]:
        found: list[list[torch.Tensor]] = [[] for _ in layers]

        def keep(index: int) -> Callable[..., None]:
            def hook(module: Any, inputs: Any, output: Any) -> None:
                hidden = output[0] if isinstance(output, tuple) else output
                found[index].append(_plain(hidden))

            return hook

        hooks = [layer.register_forward_hook(keep(index)) for index, layer in enumerate(layers)]
        try:
            forward()
        finally:
            for hook in hooks:
                hook.remove()
        return [torch.cat(parts, 1)[0] for parts in found if parts]

    pairs = zip(
        outputs(lambda: run(host, ids_1T, lengths)),
        outputs(lambda: host.model(input_ids=ids_1T, use_cache=False, return_dict=True)),
    )
    kinds = getattr(host.config, "layer_types", None)
    for index, (ours_TE, theirs_TE) in enumerate(pairs):
        if ours_TE.shape != theirs_TE.shape:
            return ""
        if not distance(ours_TE, theirs_TE) <= allowed / 3:
            return f", first after layer {index}" + (f" ({kinds[index]})" if kinds else "")
    return ""


def _reach(config: Any) -> tuple[int, list[str]]:
    """How many tokens to compare, and what of the model they do not reach."""
    names = ("sliding_window", "attention_chunk_size", "index_topk")
    reaches = {name: getattr(config, name, None) for name in names}
    sizes = {name: size for name, size in reaches.items() if isinstance(size, int)}
    within = [size + 6 for size in sizes.values() if size + 6 <= MOST_TOKENS]
    num_tokens = max([NUM_TOKENS, *within])
    return num_tokens, [f"{name}={size}" for name, size in sizes.items() if size >= num_tokens]


def _cut(num_tokens: int) -> list[int]:
    """Pieces of 5 and 1 tokens, then the rest in two where it is long."""
    rest = num_tokens - 6
    return [5, 1, rest] if rest <= 6 else [5, 1, rest // 2, rest - rest // 2]


def _draw(host: ModelHost, num_tokens: int) -> torch.Tensor:
    """Ids [1, T] without those that the config gives a meaning, such as padding and images."""
    configs = (host.config, getattr(host.model, "config", None))
    special: set[int] = set()
    for config in configs:
        for name, value in (vars(config) if config is not None else {}).items():
            if name.endswith(("_token_id", "_token_index")):
                special.update(value if isinstance(value, list) else [value] if isinstance(value, int) else [])
    ids = torch.randint(0, host.vocab_size, (16 * num_tokens,), generator=torch.Generator().manual_seed(SEED))
    plain = [i for i in ids.tolist() if i not in special] or ids.tolist()
    return torch.tensor([(plain * num_tokens)[:num_tokens]])


def _narrowest(host: ModelHost) -> torch.dtype:
    """Of the dtypes that the model computes in, the one that rounds most."""
    dtypes = {p.dtype for p in host.model.parameters() if p.dtype.is_floating_point}
    dtypes |= {p.dtype for p in host.head.parameters() if p.dtype.is_floating_point}
    if host.device.type != "meta" and torch.is_autocast_enabled(host.device.type):
        dtypes.add(torch.get_autocast_dtype(host.device.type))
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _allowed(narrow: torch.dtype) -> float:
    """How far rounding in that dtype may take logits.

    Measured on random models of 3 to 80 layers: up to 3e-6 in float32 and 2e-2 in bfloat16; a window one token short
    is 8e-2 on a model that hardly attends, and a layer that forgets what came before 0.3 and more.
    """
    if narrow.itemsize <= 2 or torch.get_float32_matmul_precision() != "highest":
        return 5e-2
    return 1e-4


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A sharded tensor's whole."""
    whole = getattr(tensor, "full_tensor", None)
    return whole() if whole is not None else tensor


def _name(host: ModelHost) -> str:
    model = host.model.get_base_model() if hasattr(host.model, "get_base_model") else host.model
    return type(model).__name__


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
