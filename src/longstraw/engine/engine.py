"""The engine: capture a prompt once, branch from it any number of times, take the exact gradient in a bounded graph."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from longstraw.engine import branches, checks, run, step, walk
from longstraw.engine.ambient import Autocast, engine_call, neutral
from longstraw.engine.capture import capture, extend, restore_start, segment
from longstraw.engine.drift import probe
from longstraw.engine.gradients import GradientTransaction
from longstraw.engine.host import ModelHost
from longstraw.engine.kept import KeptGraphs
from longstraw.engine.limbs import Limb, plan
from longstraw.engine.meter import Meter
from longstraw.engine.piece import Bundle, cut_prompt, pack
from longstraw.engine.run import HeadOptions
from longstraw.engine.sample import Draft, Sampling, default_stops, sample
from longstraw.engine.step import Objective, Outcome, Scored
from longstraw.engine.tree import Tree
from longstraw.engine.trial import compare_with_stock
from longstraw.engine.walk import TreeScored
from longstraw.objective.logprobs import tokens_a_chunk
from longstraw.pages import PageStore, Tier
from longstraw.parallel.reduce import GradientMesh
from longstraw.precision import wide_dtype
from longstraw.state.resident import ResidentState

Progress = Callable[[str, int, int], None]


class Engine:
    """GRPO-style steps on one long prompt at a time.

    Args:
        model: a transformers causal LM, PEFT-wrapped or not, on its device.
        prompt_grad: "full": the exact gradient; "none": the prompt's state is a constant; an int N: only what the last
            N prompt tokens computed is in the graph.
        segment_tokens: tokens of a segment, a piece of the prompt.
        block_tokens: tokens of a block, a piece of a response; shorter responses share one.
        tier: where pages rest: "device", "host" or "disk".
        mesh: a DeviceMesh with the axes "data" (each rank its own prompts) or "context" (ranks share a prompt: all of
            them make the same calls), or both; `reduce_gradients` sums over it.
        page_dir: parent of the disk tier's private directory; None is the system's temporary directory.
        tier_bytes: bounds by tier, as {"device": 8 << 30}: pages beyond one rest on the next tier down.
        head_bytes: bound on the logits that exist at a time, in float32; what is computed from them takes up to twice
            as much again.
        recompute_layers: a piece's graph holds one layer's activations at a time and recomputes each layer once more.
        retain_graph_bytes: so much memory for graphs of the prompt's last segments, and for scored responses (the pages
            of their blocks on any tier, the graph of the last one), which need no recomputation then. Results are the
            same with any value.
        boundary_bytes: bound on carried states (recurrent, convolution and window ones) at segment boundaries, which
            `prompt_grad="full"` needs; where it does not hold them all, some are recomputed
            (`ResidentState.boundary_stride` says how many are kept), and where it is below the least that this takes, a
            warning says so. None is no bound.
        progress: called as (phase, tokens done, tokens in all) after every piece.

    Raises:
        ValueError: an argument is out of range, no family serves the model, or it computes something else on a few
            tokens here than by itself: see `compare_with_stock`.
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
        self.mesh = GradientMesh(mesh)
        self.context = self.mesh.context
        self.page_dir = page_dir
        self.tier_bytes = checks.tier_bytes(tier_bytes)
        self.chunk = tokens_a_chunk(self.host.vocab_size, checks.positive("head_bytes", head_bytes, "bytes"))
        self.retain_graph_bytes = checks.not_negative("retain_graph_bytes", retain_graph_bytes)
        self.boundary_bytes = boundary_bytes
        if boundary_bytes is not None:
            checks.not_negative("boundary_bytes", boundary_bytes)
        self.meter = Meter(self.host.device)
        self._progress = progress or (lambda phase, done, total: None)
        with self.host.turn.taken(), neutral(self.host.device):
            self.trial = compare_with_stock(self.host)

    @engine_call
    def capture(self, prompt_ids: Any) -> ResidentState:
        """Runs the prompt once and keeps what its responses need.

        It runs without a graph, but for those of its last segments that `retain_graph_bytes` has room for.

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
        constant = self._num_constant(ids.numel())
        segments = cut_prompt(captured, self.segment_tokens, constant)
        grad_from = sum(tokens.stop <= constant for tokens in segments)
        store = self._new_store()
        chain = self.host.new_chain(store, grad_from)
        state = ResidentState(ids, chain, store, grad_from, self.host.parameter_version())
        state.backbone = weakref.ref(self.host.backbone)
        state.autocast = Autocast.now(self.host.device)
        state.kept = KeptGraphs(self.retain_graph_bytes, self.context)
        try:
            with self.meter.phase("capture"), self.host.running(self.context):
                on_tokens = lambda done: self._progress("capture", done, captured)  # noqa: E731
                capture(self.host, state, segments, self.boundary_bytes, on_tokens)
        except BaseException:
            state.release()
            raise
        return state

    @engine_call
    def extend(self, state: ResidentState, ids: Any) -> None:
        """Grows a fork of a state, as by a sampled turn and a tool's output, without running what came before again.

        Args:
            state: made by `ResidentState.fork`, grown in place; what it was forked from stays as it is. Released, if
                anything is raised on the way.
            ids: [N] token ids that follow `state.prompt_ids`.

        Raises:
            ValueError: bad ids, longer than the model's range, or not a fork.
        """
        checks.state(self.host, state)
        state.autocast.require(self.host.device)
        if state.parent is None:
            raise ValueError("a captured state stays as it is: grow a fork of it, state.fork()")
        new = checks.token_ids("ids", ids, self.host.vocab_size)
        checks.length(self.host, len(state), new.numel(), "what follows it")
        try:
            with self.meter.phase("capture"), self.host.running(self.context):
                on_tokens = lambda done: self._progress("capture", done, new.numel())  # noqa: E731
                extend(self.host, state, new, self.segment_tokens, on_tokens)
        except BaseException:
            state.release()
            raise

    def score(self, state: ResidentState, responses: Sequence[Any], temperature: float = 1.0) -> list[torch.Tensor]:
        """Log-probabilities of the responses' tokens, one [R_i] tensor each, float32 at least, without a graph."""
        return self.score_with_entropies(state, responses, temperature)[0]

    @engine_call
    def score_with_entropies(
        self, state: ResidentState, responses: Sequence[Any], temperature: float = 1.0
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """As `score`, and the entropy of the distribution that each token is from, in nats, [R_i] each."""
        ids, bundles, options = self._branches(state, responses, temperature)
        with self.meter.phase("score"), self.host.running(self.context):
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
        with self.meter.phase("sample"), self.host.running(self.context):
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
            checks.finite(self.context, state.prompt_ids, cotangents, loss)
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
            ValueError: bad ids, a forked state, or no trainable parameter.
        """
        checks.captured(state)
        ids, bundles, options = self._branches(state, responses, temperature)
        self._parameters()
        self.meter.phases.clear()
        if self.context.agree(self.is_stale(state)):
            state.kept.release()  # built with parameters that are no more
        kept = KeptGraphs(state.kept.left, self.context)
        try:
            with self.meter.phase("score"), self.host.running(self.context):
                logps, entropies = step.score(self.host, state, ids, bundles, options, kept)
        except BaseException:
            kept.release()
            raise
        leaves = [logp.requires_grad_() for logp in logps]
        return Scored(state, leaves, entropies, bundles, options, kept, self.host.parameter_version())

    @engine_call
    def pull_back(
        self,
        scored: Scored | TreeScored,
        cotangents: Sequence[torch.Tensor | None] | None = None,
        *,
        keep_response_side: bool = False,
    ) -> list[torch.Tensor | None] | None:
        """Adds to `.grad` of every trainable parameter what a loss of the scored log-probabilities has there.

        Args:
            scored: of `score_for` or `score_tree_for`; used up, whatever happens.
            cotangents: the loss's gradient with respect to each response's log-probabilities (of a tree, each
                sequence's), [R_i] each, None for zero; by default what a backward pass has left in
                `scored.logps[i].grad`.
            keep_response_side: return a copy of the gradient before the sweep adds the prompt's side: see `Outcome`.
                A tree's gradient is not told apart like that.

        Raises:
            ValueError: it was used before, parameters have changed since, or cotangents do not fit.
            FloatingPointError: a cotangent is not finite. `.grad` is as before, as after any exception.
        """
        parameters = self._parameters()
        if isinstance(scored, TreeScored):
            if keep_response_side:
                raise ValueError("keep_response_side=True is for responses to a prompt: pull a tree back without it")
            self._pull_back_tree(scored, self._wanted(scored, cotangents), parameters)
            return None
        state = scored.state
        checks.state(self.host, state)
        wanted = self._wanted(scored, cotangents)
        checks.finite(self.context, state.prompt_ids, wanted)
        try:
            with state.autocast.again(), GradientTransaction(parameters) as gradients, self.host.running(self.context):
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

    def backward_tree(self, tree: Tree, objective: Objective, temperature: float = 1.0) -> Outcome:
        """Adds to `.grad` the gradient of an objective of trajectories that share more than a prompt.

        It is the gradient of the sequences run one by one; every place they share runs once. Pages of one path from the
        root are alive at a time, so places before a fork are run once more, without a graph, when the walk comes back
        to them; those on the last path, which is the heaviest, are not. `prompt_grad` counts the common prompt, the
        tokens up to the first branching or the first scored token: with "none" the state before its last token is a
        constant, with N the state before its last N. `boundary_bytes` bounds the states along the tree's first edge;
        `retain_graph_bytes` is not used.

        Args:
            objective: any differentiable function of the sequences' log-probability vectors, one [R_i] tensor each, of
                its scored tokens in order; returns a scalar. A token that several share is in each one's vector.
            temperature: divides the logits, as at sampling.

        Returns:
            One entry a sequence where `backward` has one a response; phases "score" and "replay".

        Raises:
            ValueError: ids outside the vocabulary, longer than the model's range, no trainable parameter, or an
                objective without a scalar or a gradient.
            FloatingPointError: the loss or its gradient is not finite. `.grad` is as before, as after any exception.
        """
        scored = self.score_tree_for(tree, temperature)
        try:
            loss, cotangents = step.evaluate(objective, scored.logps)
            checks.finite(self.context, tree.ids_P[: tree.num_prompt], cotangents, loss)
            self.pull_back(scored, cotangents)
        finally:
            scored.release()
        logps = [leaf.detach() for leaf in scored.logps]
        return Outcome(loss, logps, cotangents, scored.entropies, dict(self.meter.phases))

    @engine_call
    def score_tree(self, tree: Tree, temperature: float = 1.0) -> list[torch.Tensor]:
        """Log-probabilities of each sequence's scored tokens, one [R_i] tensor each, as `score` has of responses."""
        scored = self._score_tree(tree, temperature)
        scored.release()
        return scored.logps

    @engine_call
    def score_tree_for(self, tree: Tree, temperature: float = 1.0) -> TreeScored:
        """Scores a tree's sequences for a gradient: their log-probabilities are leaves of any loss in between.

        `backward_tree` is this, an objective, and `pull_back`. It holds pages until it is pulled back or released.

        Raises:
            ValueError: see `backward_tree`.
        """
        self._parameters()
        self.meter.phases.clear()
        scored = self._score_tree(tree, temperature)
        for logp in scored.logps:
            logp.requires_grad_()
        return scored

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
        with self.meter.phase("probe"), self.host.running(self.context):
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

    def _num_constant(self, num_prompt: int) -> int:
        """How many of a prompt's first tokens `prompt_grad` makes constants; the last one never is."""
        if self.prompt_grad == "full":
            return 0
        return max(0, num_prompt - (1 if self.prompt_grad == "none" else int(self.prompt_grad)))

    def _new_store(self) -> PageStore:
        return PageStore(self.host.device, self.tier, self.page_dir, self.tier_bytes, self.context)

    def _wanted(
        self, scored: Scored | TreeScored, cotangents: Sequence[torch.Tensor | None] | None
    ) -> list[torch.Tensor]:
        """What is to be pulled back, if it still can be."""
        checks.scored(scored, self.host.parameter_version())
        given = [leaf.grad for leaf in scored.logps] if cotangents is None else cotangents
        return checks.cotangents(scored.logps, given)

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

    def _score_tree(self, tree: Tree, temperature: float) -> TreeScored:
        checks.tree(self.host, tree)
        options = HeadOptions(checks.temperature(temperature), self.chunk)
        constant = self._num_constant(tree.num_prompt)
        limbs = plan(tree, constant, self.segment_tokens, self.block_tokens, self.host.device)
        path = walk.Path(self.host, self._new_store(), limbs, self.boundary_bytes)
        try:
            with self.meter.phase("score"), self.host.running(self.context):
                found = walk.score(path, tree.num_tokens, options, self._counting("score", limbs))
        except BaseException:
            path.close()
            raise
        logps, entropies = (walk.of_sequences(tree, values_P) for values_P in found)
        autocast = Autocast.now(self.host.device)
        return TreeScored(tree, logps, entropies, options, path, self.host.parameter_version(), autocast)

    def _pull_back_tree(
        self, scored: TreeScored, cotangents: list[torch.Tensor], parameters: list[torch.nn.Parameter]
    ) -> None:
        tree, path = scored.tree, scored.path
        checks.finite(self.context, tree.ids_P[: tree.num_prompt], cotangents)
        try:
            running, phase = self.host.running(self.context), self.meter.phase("replay")
            with scored.autocast.again(), GradientTransaction(parameters), running, phase:
                on_tokens = self._counting("replay", path.limbs)
                walk.pull_back(path, walk.of_places(tree, cotangents), scored.options, on_tokens)
        finally:
            scored.release()

    def _counting(self, phase: str, limbs: Sequence[Limb]) -> Callable[[int], None]:
        """Reports a tree's tokens, as so many more are done."""
        total, done = sum(sum(limb.num_tokens) for limb in limbs), 0

        def more(num_tokens: int) -> None:
            nonlocal done
            done += num_tokens
            self._progress(phase, done, total)

        return more

    def _sweep(self, state: ResidentState, options: HeadOptions) -> None:
        chain = state.chain
        first = chain.starts[state.grad_from]
        for index in reversed(range(state.grad_from, chain.num_pieces)):
            kept = state.kept.take(index)
            if kept is None:
                restore_start(self.host, chain, index, lambda i: segment(self.host, state, i))
            graph = kept.hand_over() if kept else None
            run.backward(self.host, chain, index, segment(self.host, state, index), options, kept=graph)
            del graph
            chain.forget_start(index)
            self._progress("sweep", chain.stop - chain.starts[index], chain.stop - first)
