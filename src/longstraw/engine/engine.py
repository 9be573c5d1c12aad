"""The engine: capture a prompt once, branch from it any number of times, take the exact gradient in a bounded graph."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from longstraw.engine import branches, checks, run, step
from longstraw.engine.ambient import Autocast, engine_call
from longstraw.engine.capture import capture, restore_start, segment
from longstraw.engine.drift import probe
from longstraw.engine.gradients import GradientTransaction
from longstraw.engine.host import ModelHost
from longstraw.engine.kept import KeptGraphs
from longstraw.engine.meter import Meter
from longstraw.engine.piece import Bundle, cut_prompt, pack
from longstraw.engine.run import HeadOptions
from longstraw.engine.sample import Draft, Sampling, default_stops, sample
from longstraw.engine.step import Objective, Outcome, Scored
from longstraw.objective.logprobs import tokens_a_chunk
from longstraw.pages import PageStore, Tier
from longstraw.parallel.context import ALONE
from longstraw.parallel.reduce import DataMesh
from longstraw.precision import wide_dtype
from longstraw.state.resident import ResidentState

Progress = Callable[[str, int, int], None]


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
        recompute_layers: a piece's graph holds one layer's activations at a time and recomputes each layer once more.
        retain_graph_bytes: so much memory for graphs of the prompt's last segments, and for scored responses (the pages
            of their blocks on any tier, the graph of the last one), which need no recomputation then. Results are the
            same with any value.
        boundary_bytes: bound on recurrent and window states at segment boundaries, which `prompt_grad="full"` needs;
            where it does not hold them all, some are recomputed (`ResidentState.boundary_stride` says how many are
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
        recompute_layers: bool = False,
        retain_graph_bytes: int = 0,
        boundary_bytes: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.host = ModelHost(model, recompute_layers)
        self.prompt_grad = checks.prompt_grad(prompt_grad)
        self.segment_tokens = checks.positive("segment_tokens", segment_tokens)
        self.block_tokens = checks.positive("block_tokens", block_tokens)
        if tier not in list(Tier):
            raise ValueError(f'tier={tier!r}: choose "device", "host" or "disk"')
        self.tier = Tier(tier)
        self.mesh = DataMesh(mesh)
        self.context = ALONE
        self.page_dir = page_dir
        self.tier_bytes = checks.tier_bytes(tier_bytes)
        self.chunk = tokens_a_chunk(self.host.vocab_size, checks.positive("head_bytes", head_bytes, "bytes"))
        self.retain_graph_bytes = checks.not_negative("retain_graph_bytes", retain_graph_bytes)
        self.boundary_bytes = boundary_bytes
        if boundary_bytes is not None:
            checks.not_negative("boundary_bytes", boundary_bytes)
        self.meter = Meter(self.host.device)
        self._progress = progress or (lambda phase, done, total: None)

    @engine_call
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
        constant = {"full": 0, "none": captured}.get(str(self.prompt_grad))
        if constant is None:
            constant = max(0, captured + 1 - int(self.prompt_grad))
        segments = cut_prompt(captured, self.segment_tokens, constant)
        grad_from = sum(tokens.stop <= constant for tokens in segments)
        store = PageStore(self.host.device, self.tier, self.page_dir, self.tier_bytes, self.context)
        chain = self.host.new_chain(store, grad_from)
        state = ResidentState(ids, chain, store, grad_from, self.host.parameter_version())
        state.backbone = weakref.ref(self.host.backbone)
        state.autocast = Autocast.now(self.host.device)
        state.kept = KeptGraphs(self.retain_graph_bytes, self.context)
        try:
            with self.meter.phase("capture"), self.host.running():
                on_tokens = lambda done: self._progress("capture", done, captured)  # noqa: E731
                capture(self.host, state, segments, self.boundary_bytes, on_tokens)
        except BaseException:
            state.release()
            raise
        return state

    def score(self, state: ResidentState, responses: Sequence[Any], temperature: float = 1.0) -> list[torch.Tensor]:
        """Log-probabilities of the responses' tokens, one [R_i] tensor each, float32 at least, without a graph."""
        return self.score_with_entropies(state, responses, temperature)[0]

    @engine_call
    def score_with_entropies(
        self, state: ResidentState, responses: Sequence[Any], temperature: float = 1.0
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """As `score`, and the entropy of the distribution that each token is from, in nats, [R_i] each."""
        ids, bundles, options = self._branches(state, responses, temperature)
        with self.meter.phase("score"), self.host.running():
            return step.score(self.host, state, ids, bundles, options, None)

    @engine_call
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
        checks.state(self.host, state)
        state.autocast.require(self.host.device)
        if stop_ids is None:
            stop_ids = default_stops(self.host)
        stops = (stop_ids,) if isinstance(stop_ids, int) else tuple(stop_ids)
        how = Sampling(num, max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed, stops)
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
        scored = self.score_for(state, responses, temperature)
        try:
            loss, cotangents = step.evaluate(objective, scored.logps)
            checks.finite(state, cotangents, loss)
            response_side = self.pull_back(scored, cotangents, keep_response_side=keep_response_side)
        finally:
            scored.release()
        logps = [leaf.detach() for leaf in scored.logps]
        return Outcome(loss, logps, cotangents, scored.entropies, dict(self.meter.phases), response_side)

    @engine_call
    def score_for(self, state: ResidentState, responses: Sequence[Any], temperature: float = 1.0) -> Scored:
        """Scores the responses for a gradient: their log-probabilities are leaves of any loss in between.

        `backward` is this, an objective, and `pull_back`. Only one pullback may follow, under the same parameters.

        Raises:
            ValueError: bad ids, or no trainable parameter.
        """
        ids, bundles, options = self._branches(state, responses, temperature)
        self._parameters()
        self.meter.phases.clear()
        if self.context.agree(self.is_stale(state)):
            state.kept.release()  # built with parameters that are no more
        kept = KeptGraphs(state.kept.left, self.context)
        try:
            with self.meter.phase("score"), self.host.running():
                logps, entropies = step.score(self.host, state, ids, bundles, options, kept)
        except BaseException:
            kept.release()
            raise
        leaves = [logp.requires_grad_() for logp in logps]
        return Scored(state, leaves, entropies, bundles, options, kept, self.host.parameter_version())

    @engine_call
    def pull_back(
        self,
        scored: Scored,
        cotangents: Sequence[torch.Tensor | None] | None = None,
        *,
        keep_response_side: bool = False,
    ) -> list[torch.Tensor | None] | None:
        """Adds to `.grad` of every trainable parameter what a loss of the scored log-probabilities has there.

        Args:
            scored: used up, whatever happens.
            cotangents: the loss's gradient with respect to each response's log-probabilities, [R_i] each, None for
                zero; by default what a backward pass has left in `scored.logps[i].grad`.
            keep_response_side: return a copy of the gradient before the sweep adds the prompt's side: see `Outcome`.

        Raises:
            ValueError: it was used before, parameters have changed since, or cotangents do not fit.
            FloatingPointError: a cotangent is not finite. `.grad` is as before, as after any exception.
        """
        state, parameters = scored.state, self._parameters()
        checks.state(self.host, state)
        checks.scored(scored, self.host.parameter_version())
        given = [leaf.grad for leaf in scored.logps] if cotangents is None else cotangents
        wanted = checks.cotangents(scored.logps, given)
        checks.finite(state, wanted)
        try:
            with state.autocast.again(), GradientTransaction(parameters) as gradients, self.host.running():
                with self.meter.phase("replay"):
                    reached = self._replay(scored, wanted)
                response_side = gradients.copies() if keep_response_side else None
                with self.meter.phase("sweep"):
                    if reached:
                        self._sweep(state, scored.options)
        except BaseException:
            state.chain.drop_cotangents()
            for index in range(state.chain.num_pieces):
                state.chain.forget_start(index)
            raise
        finally:
            scored.release()
        return response_side

    def is_stale(self, state: ResidentState) -> bool:
        """Whether a parameter has changed since the state was captured."""
        return state.parameter_version != self.host.parameter_version()

    def parameters_changed(self) -> None:
        """Tells the engine of a write to parameters that PyTorch does not count, such as one to a few elements through
        `.data`: states are stale from here on. Writes of an optimizer, and of adapters, it sees for itself."""
        self.host.told += 1

    @engine_call
    def drift(self, state: ResidentState, num_segments: int = 2, seed: int = 0) -> float:
        """How far the state is from what the present parameters would leave: see `drift.probe`.

        Args:
            num_segments: random segments to recompute; each costs its share of a capture.
        """
        checks.state(self.host, state)
        state.autocast.require(self.host.device)
        checks.positive("num_segments", num_segments, "segments")
        with self.meter.phase("probe"), self.host.running():
            return probe(self.host, state, num_segments, seed)

    def reduce_gradients(self) -> None:
        """Completes `.grad` over the mesh: once a step, after the last `backward`. Without a mesh: nothing to do."""
        self.mesh.sum_gradients(self.host.parameters())

    def reduce(self, tensors: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
        """Sums over the mesh, in place, what belongs to gradients, such as `Outcome.response_side`.

        Every rank has to call it. Returns the sums; without a mesh they are what was given, and zeros for None.

        Args:
            tensors: one entry a trainable parameter, of its shape; None counts as zero.

        Raises:
            ValueError: not as many entries as trainable parameters.
        """
        parameters = self.host.parameters()
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

    def _parameters(self) -> list[torch.nn.Parameter]:
        parameters = self.host.parameters()
        if not parameters:
            raise ValueError("the model has no trainable parameter: unfreeze some, or attach an adapter with PEFT")
        return parameters

    def _branches(
        self, state: ResidentState, responses: Sequence[Any], temperature: float
    ) -> tuple[list[torch.Tensor], list[Bundle], HeadOptions]:
        checks.state(self.host, state)
        state.autocast.require(self.host.device)
        options = HeadOptions(checks.temperature(temperature), self.chunk)
        ids = checks.responses(responses, self.host.vocab_size)
        checks.length(self.host, len(state), max(r.numel() for r in ids), "response")
        return ids, pack(state.prompt_ids, ids, self.block_tokens, self.host.device), options

    def _replay(self, scored: Scored, cotangents: list[torch.Tensor]) -> bool:
        """Returns whether any response had a gradient to pull back."""
        total = sum(sum(bundle.lengths) for bundle in scored.bundles)
        done, reached = 0, False
        for place, bundle in enumerate(scored.bundles):
            kept = scored.kept.take(place)
            padded_BT = bundle.padded(cotangents)
            if self.context.agree(bool(padded_BT.any())):
                branches.replay(self.host, scored.state, bundle, padded_BT, scored.options, kept)
                reached = True
            elif kept is not None:
                kept.release()
            done += sum(bundle.lengths)
            self._progress("replay", done, total)
        return reached

    def _sweep(self, state: ResidentState, options: HeadOptions) -> None:
        chain = state.chain
        first = chain.starts[state.grad_from]
        for index in reversed(range(state.grad_from, chain.num_pieces)):
            kept = state.kept.take(index)
            if kept is None:
                restore_start(self.host, state, index)
            graph = kept.hand_over() if kept else None
            run.backward(self.host, chain, index, segment(self.host, state, index), options, kept=graph)
            del graph
            chain.forget_start(index)
            self._progress("sweep", chain.stop - chain.starts[index], chain.stop - first)
