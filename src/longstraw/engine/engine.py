"""The engine: capture a prompt once, branch from it any number of times, take the exact gradient in a bounded graph."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from longstraw.engine import branches, checks
from longstraw.engine.drift import probe
from longstraw.engine.gradients import GradientTransaction
from longstraw.engine.graphs import SegmentGraphs, saved_bytes
from longstraw.engine.host import ModelHost
from longstraw.engine.kept import KeptBundles
from longstraw.engine.meter import Meter, Phase
from longstraw.engine.pullback import build, pull_back
from longstraw.engine.sample import Draft, Sampling, sample
from longstraw.objective.logprobs import tokens_a_chunk
from longstraw.pages import PageStore, Tier
from longstraw.parallel.reduce import DataMesh
from longstraw.precision import wide_dtype
from longstraw.state.chain import Chain
from longstraw.state.resident import ResidentState

Objective = Callable[[list[torch.Tensor]], torch.Tensor]
Progress = Callable[[str, int, int], None]


@dataclass
class Outcome:
    """What `Engine.backward` found.

    Attributes:
        loss: the objective's value, a detached scalar.
        logps: the policy's log-probabilities, one [R_i] tensor a response, detached.
        cotangents: the gradient of the loss with respect to each of them.
        entropies: of the distribution that each token is from, in nats, one [R_i] tensor a response.
        phases: seconds and peak memory of "score", "replay" and "sweep".
        response_side: the part of the added gradient that does not pass through the prompt's state, one entry a
            trainable parameter, in float32 at least; None for a parameter without one. None unless it was asked for.
    """

    loss: torch.Tensor
    logps: list[torch.Tensor]
    cotangents: list[torch.Tensor]
    entropies: list[torch.Tensor]
    phases: dict[str, Phase] = field(default_factory=dict)
    response_side: list[torch.Tensor | None] | None = None


class Engine:
    """GRPO-style steps on one long prompt at a time.

    Args:
        model: a transformers causal LM, PEFT-wrapped or not, on its device.
        prompt_grad: "full": the exact gradient; "none": the prompt's state is a constant; an int N: only what the last
            N prompt tokens computed is in the graph.
        segment_tokens: prompt tokens a piece.
        block_tokens: response tokens a piece; shorter responses share one.
        tier: where pages rest: "device", "host" or "disk".
        mesh: a DeviceMesh with an axis "data"; `reduce_gradients` sums over it.
        page_dir: parent of the disk tier's private directory; None is the system's temporary directory.
        tier_bytes: bounds by tier, as {"device": 8 << 30}: pages beyond one rest on the next tier down.
        head_bytes: bound on the logits that exist at a time, in float32; what is computed from them takes up to twice
            as much again.
        checkpoint_layers: a piece's graph holds one layer's activations at a time and recomputes each layer once more.
        retain_graph_bytes: so much memory for graphs of the prompt's last segments, and for scored responses (the pages
            of their blocks on any tier, the graph of the last one), which need no recomputation then. Results are the
            same with any value.
        checkpoint_bytes: bound on recurrent and window states at segment boundaries, which `prompt_grad="full"` needs;
            where it does not hold them all, some are recomputed (`ResidentState.checkpoint_stride` says how many are
            kept), and where it is below the least that this takes, a warning says so. None is no bound.
        progress: called as (phase, tokens done, tokens in all) after every piece.

    Raises:
        ValueError: an argument is out of range, or no adapter serves the model.
    """

    def __init__(
        self,
        model: Any,
        prompt_grad: str | int = "full",
        segment_tokens: int = 4096,
        block_tokens: int = 1024,
        tier: str = "device",
        mesh: Any = None,
        *,
        page_dir: str | os.PathLike[str] | None = None,
        tier_bytes: Mapping[str, int] | None = None,
        head_bytes: int = 64 << 20,
        checkpoint_layers: bool = False,
        retain_graph_bytes: int = 0,
        checkpoint_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.host = ModelHost(model, checkpoint_layers)
        self.prompt_grad = checks.prompt_grad(prompt_grad)
        self.segment_tokens = checks.positive("segment_tokens", segment_tokens)
        self.block_tokens = checks.positive("block_tokens", block_tokens)
        if tier not in list(Tier):
            raise ValueError(f'tier={tier!r}: choose "device", "host" or "disk"')
        self.tier = Tier(tier)
        self.mesh = DataMesh(mesh)
        self.page_dir = page_dir
        self.tier_bytes = checks.tier_bytes(tier_bytes)
        self.chunk = tokens_a_chunk(self.host.vocab_size, checks.positive("head_bytes", head_bytes, "bytes"))
        self.retain_graph_bytes = checks.not_negative("retain_graph_bytes", retain_graph_bytes)
        self.checkpoint_bytes = checkpoint_bytes
        if checkpoint_bytes is not None:
            checks.not_negative("checkpoint_bytes", checkpoint_bytes)
        self.meter = Meter(self.host.device)
        self._progress = progress or (lambda phase, done, total: None)

    @torch.no_grad()
    def capture(self, prompt_ids: Any) -> ResidentState:
        """Runs the prompt once without a graph and keeps what its responses need.

        Args:
            prompt_ids: [P] token ids, P at least 1. The last one belongs to the branches.

        Raises:
            ValueError: empty, outside the vocabulary, longer than the model's range, or dropout is active.
        """
        ids = checks.token_ids("prompt_ids", prompt_ids, self.host.vocab_size)
        if not ids.numel():
            raise ValueError("prompt_ids is empty: a prompt needs at least one token, such as the tokenizer's bos")
        checks.length(self.host, ids.numel(), 0, "response")
        captured = ids.numel() - 1
        segments, first_live = self._segments(captured)
        store = PageStore(self.host.device, self.tier, self.page_dir, self.tier_bytes)
        chain = self.host.new_chain(store, first_live)
        state = ResidentState(ids, chain, store, first_live, self.host.parameter_version())
        state.backbone = weakref.ref(self.host.backbone)
        state.graphs = graphs = SegmentGraphs(self.retain_graph_bytes, first_live, len(segments))
        try:
            with self.meter.phase("capture"), self.host.running():
                for index, segment in enumerate(segments):
                    piece_ids = self._piece_ids(state, segment)
                    if graphs.builds(index):
                        with saved_bytes(list(self.host.model.parameters())) as saved:
                            graph = build(self.host, chain, index, piece_ids, output_read=False)
                        graphs.built(index, graph, saved.nbytes)
                        cache = graph.cache
                    else:
                        cache = chain.enter(index, output_read=False)
                        self.host.forward(piece_ids, segment.start, cache)
                    chain.commit(cache, segment.stop - segment.start)
                    if index == 0 and chain.carried and first_live < len(segments):
                        state.checkpoint_stride = self._thin_out(chain, len(segments) - first_live)
                    self._progress("capture", segment.stop, captured)
        except BaseException:
            state.release()
            raise
        return state

    def score(self, state: ResidentState, responses: Sequence[Any], temperature: float = 1.0) -> list[torch.Tensor]:
        """Log-probabilities of the responses' tokens, one [R_i] tensor each, float32 at least, without a graph."""
        return self.score_with_entropies(state, responses, temperature)[0]

    def score_with_entropies(
        self, state: ResidentState, responses: Sequence[Any], temperature: float = 1.0
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """As `score`, and the entropy of the distribution that each token is from, in nats, [R_i] each."""
        temperature = checks.temperature(temperature)
        bundles, ids = self._bundles(state, responses)
        with self.meter.phase("score"), self.host.running():
            return self._score(state, bundles, ids, temperature, KeptBundles())

    def sample(
        self,
        state: ResidentState,
        num: int = 8,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        *,
        min_p: float = 0.0,
        repetition_penalty: float = 1.0,
        stop_ids: Collection[int] | int | None = None,
    ) -> list[Draft]:
        """Decodes `num` responses side by side over the captured pages.

        Args:
            temperature: 0 takes the likeliest token.
            top_k: 0 is off.
            seed: same seed, same state, same parameters: same drafts.
            stop_ids: tokens that end a response; None takes the model's end-of-sequence ids.

        Raises:
            ValueError: an argument is out of range, or the prompt and `max_new_tokens` exceed the model's range.
        """
        self._refuse_foreign(state)
        how = Sampling(
            num, max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, self._stops(stop_ids)
        )
        checks.length(self.host, len(state), max_new_tokens, "max_new_tokens")
        with self.meter.phase("sample"), self.host.running():
            return sample(self.host, state, how, lambda done, total: self._progress("sample", done, total))

    def backward(
        self,
        state: ResidentState,
        responses: Sequence[Any],
        objective: Objective,
        temperature: float = 1.0,
        *,
        keep_response_side: bool = False,
    ) -> Outcome:
        """Adds the objective's gradient to `.grad` of every trainable parameter.

        Args:
            objective: any differentiable function of the responses' log-probability vectors, one [R_i] tensor each;
                returns a scalar.
            temperature: divides the logits, as at sampling.
            keep_response_side: copy the gradient as `prompt_grad="none"` has it, before the sweep adds the prompt's
                side: `Outcome.response_side`. `.grad` is the same, bit for bit.

        Raises:
            ValueError: bad ids, no trainable parameter, or an objective without a scalar or a gradient.
            FloatingPointError: the loss or its gradient is not finite. `.grad` is as before, as after any exception.
        """
        temperature = checks.temperature(temperature)
        parameters = [p for _, p in self.host.trainable()]
        if not parameters:
            raise ValueError("the model has no trainable parameter: unfreeze some, or attach an adapter with PEFT")
        bundles, ids = self._bundles(state, responses)
        self.meter.phases.clear()
        chain = state.chain
        kept = KeptBundles()
        try:
            with self.host.running(), GradientTransaction(parameters) as gradients:
                if self.is_stale(state):
                    state.graphs = SegmentGraphs(0, 0, 0)  # built with parameters that are no more
                with self.meter.phase("score"):
                    kept = KeptBundles(state.graphs.left)
                    logps, entropies = self._score(state, bundles, ids, temperature, kept)
                loss, cotangents = self._evaluate(state, objective, logps)
                with self.meter.phase("replay"):
                    self._replay(state, bundles, cotangents, temperature, kept)
                response_side = gradients.copies() if keep_response_side else None
                with self.meter.phase("sweep"):
                    if any(bool(c.any()) for c in cotangents):
                        self._sweep(state)
        except BaseException:
            kept.release()
            chain.drop_cotangents()
            for index in range(chain.num_pieces):
                chain.forget_start(index)
            raise
        return Outcome(loss, logps, cotangents, entropies, dict(self.meter.phases), response_side)

    def is_stale(self, state: ResidentState) -> bool:
        """Whether a parameter has changed since the state was captured."""
        return state.parameter_version != self.host.parameter_version()

    def drift(self, state: ResidentState, num_segments: int = 2, seed: int = 0) -> float:
        """How far the state is from what the present parameters would leave: see `drift.probe`.

        Args:
            num_segments: random segments to recompute; each costs its share of a capture.
        """
        self._refuse_foreign(state)
        checks.positive("num_segments", num_segments, "segments")
        with self.meter.phase("probe"), self.host.running():
            return probe(self.host, state, num_segments, seed)

    def reduce_gradients(self) -> None:
        """Completes `.grad` over the mesh: once a step, after the last `backward`. Without a mesh: nothing to do."""
        self.mesh.sum_gradients([p for _, p in self.host.trainable()])

    def reduce(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Sums over the mesh, in place, what belongs to gradients, such as `Outcome.response_side`.

        Every rank has to call it. Returns the sums; without a mesh they are what was given, and zeros for None.

        Args:
            tensors: one entry a trainable parameter, of its shape; None counts as zero.

        Raises:
            ValueError: not as many entries as trainable parameters.
        """
        parameters = [p for _, p in self.host.trainable()]
        if len(tensors) != len(parameters):
            raise ValueError(
                f"{len(tensors)} tensors for {len(parameters)} trainable parameters: give one for each, in the order "
                "of engine.host.trainable(), or None"
            )
        sums = [
            torch.zeros_like(parameter, dtype=wide_dtype(parameter.dtype)) if tensor is None else tensor
            for parameter, tensor in zip(parameters, tensors)
        ]
        for tensor in sums:
            self.mesh.sum(tensor)
        return sums

    def _segments(self, captured: int) -> tuple[list[slice], int]:
        """Segments of the captured tokens, cut where gradients begin, and the first that they flow into."""
        if self.prompt_grad == "full":
            constant = 0
        elif self.prompt_grad == "none":
            constant = captured
        else:
            constant = max(0, captured + 1 - int(self.prompt_grad))
        segments = []
        for first, last in ((0, constant), (constant, captured)):
            segments += [
                slice(start, min(start + self.segment_tokens, last))
                for start in range(first, last, self.segment_tokens)
            ]
        return segments, sum(segment.stop <= constant for segment in segments)

    def _bundles(
        self, state: ResidentState, responses: Sequence[Any]
    ) -> tuple[list[branches.Bundle], list[torch.Tensor]]:
        self._refuse_foreign(state)
        ids = checks.responses(responses, self.host.vocab_size)
        checks.length(self.host, len(state), max(r.numel() for r in ids), "response")
        return branches.pack(int(state.prompt_ids[-1]), ids, self.block_tokens, self.host.device), ids

    def _score(
        self,
        state: ResidentState,
        bundles: list[branches.Bundle],
        ids: list[torch.Tensor],
        temperature: float,
        kept: KeptBundles,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        wide = wide_dtype(next(self.host.head.parameters()).dtype)
        logps = [torch.zeros(r.numel(), dtype=wide, device=self.host.device) for r in ids]
        entropies = [torch.zeros_like(logp) for logp in logps]
        for place, bundle in enumerate(bundles):
            scored = kept.score(self.host, state, place, bundle, temperature, self.chunk)
            for row, (member, num_tokens) in enumerate(zip(bundle.members, bundle.lengths)):
                for found, scored_BT in zip((logps, entropies), scored):
                    found[member] = scored_BT[row, :num_tokens].to(wide)
        return logps, entropies

    def _evaluate(
        self, state: ResidentState, objective: Objective, logps: list[torch.Tensor]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        leaves = [logp.clone().requires_grad_() for logp in logps]
        with torch.enable_grad():
            loss = objective(leaves)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"objective has to return a scalar tensor, got {found}: sum or average its terms")
        if loss.grad_fn is None and not any(loss is leaf for leaf in leaves):
            raise ValueError(
                "objective returned a value without a gradient: compute it from the log-probabilities it is given, "
                "without .detach(), .item() or torch.no_grad()"
            )
        with torch.enable_grad():  # the caller may be under torch.no_grad
            found = torch.autograd.grad(loss.reshape(()), leaves, allow_unused=True)
        if all(g is None for g in found):
            raise ValueError("objective returned a value that depends on none of the log-probabilities it was given")
        cotangents = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found)]
        loss = loss.detach().reshape(())
        if not torch.isfinite(loss) or not all(torch.isfinite(c).all() for c in cotangents):
            start = state.prompt_ids[:8].tolist()
            raise FloatingPointError(
                f"the loss ({float(loss)}) or its gradient is not finite for the prompt of {len(state)} tokens that "
                f"starts with ids {start}; nothing was added to .grad. Look at its responses' log-probabilities and "
                "advantages, or lower the learning rate"
            )
        return loss, cotangents

    def _replay(
        self,
        state: ResidentState,
        bundles: list[branches.Bundle],
        cotangents: list[torch.Tensor],
        temperature: float,
        kept: KeptBundles,
    ) -> None:
        total = sum(sum(bundle.lengths) for bundle in bundles)
        done = 0
        for place, bundle in enumerate(bundles):
            padded_BT = torch.zeros(bundle.targets_BT.shape, dtype=cotangents[0].dtype, device=self.host.device)
            for row, (member, num_tokens) in enumerate(zip(bundle.members, bundle.lengths)):
                padded_BT[row, :num_tokens] = cotangents[member]
            has_gradient = bool(padded_BT.any())
            branch = kept.take(place)
            if has_gradient:
                branches.replay(self.host, state, bundle, padded_BT, temperature, self.chunk, branch)
            elif branch is not None:
                branch.release()
            done += sum(bundle.lengths)
            self._progress("replay", done, total)

    def _sweep(self, state: ResidentState) -> None:
        chain: Chain = state.chain
        for index in reversed(range(state.first_live, chain.num_pieces)):
            segment = slice(chain.starts[index], chain.starts[index + 1])
            graph = state.graphs.take(index)
            if graph is None:
                self._restore_start(state, index)
            pull_back(self.host, chain, index, self._piece_ids(state, segment), kept=graph)
            chain.forget_start(index)
            self._progress("sweep", chain.stop - segment.start, chain.stop - chain.starts[state.first_live])

    @torch.no_grad()
    def _restore_start(self, state: ResidentState, index: int) -> None:
        """Has the state before segment `index` at hand, recomputed from the nearest that was kept."""
        chain = state.chain
        for before in range(chain.nearest_start(index), index):
            cache = chain.enter(before, output_read=False)
            segment = slice(chain.starts[before], chain.starts[before + 1])
            self.host.forward(self._piece_ids(state, segment), segment.start, cache)
            chain.restore(before, cache)

    def _thin_out(self, chain: Chain, num_pieces: int) -> int:
        if self.checkpoint_bytes is None:
            return 1
        stride, needed = chain.thin_out(self.checkpoint_bytes, num_pieces)
        if needed > self.checkpoint_bytes:
            warnings.warn(
                f"checkpoint_bytes={self.checkpoint_bytes:,} holds too few states at segment boundaries for a prompt "
                f"of {num_pieces} segments: the sweep needs {needed:,} bytes at the least and takes them. Raise "
                "checkpoint_bytes, or segment_tokens, so that there are fewer boundaries",
                stacklevel=4,
            )
        return stride

    def _piece_ids(self, state: ResidentState, segment: slice) -> torch.Tensor:
        return state.prompt_ids[None, segment].to(self.host.device)

    def _stops(self, stop_ids: Collection[int] | int | None) -> tuple[int, ...]:
        if stop_ids is None:
            generation = getattr(self.host.model, "generation_config", None)
            stop_ids = getattr(generation, "eos_token_id", None)
            stop_ids = getattr(self.host.config, "eos_token_id", None) if stop_ids is None else stop_ids
        if stop_ids is None:
            return ()
        return (stop_ids,) if isinstance(stop_ids, int) else tuple(stop_ids)

    def _refuse_foreign(self, state: ResidentState) -> None:
        if state.released:
            raise ValueError("this state was released: capture the prompt again")
        if state.backbone() is not self.host.backbone:
            raise ValueError(
                "this state was captured with another model, whose keys and values it holds: capture the prompt with "
                "this engine, as every model (policy, reference) needs a state of its own"
            )
