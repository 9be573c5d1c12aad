"""Ways to take the same gradient step. Each is prepared on a model, and then adds the group's gradient to `.grad`."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from benchmarks.memory import Watcher
from benchmarks.shared_prefix import packed, prefix_grouper
from benchmarks.trl_step import trl
from benchmarks.workload import CLIP, Group, token_logps

Facts = dict[str, Any]
Step = Callable[[Group, Watcher], Facts | None]
"""Adds the group's gradient to `.grad`, tells the watcher its phases, and returns what else a row should say."""


def conventional(model: Any) -> Step:
    """Stock transformers with gradient checkpointing, one response at a time, only the response's logits."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()  # checkpointing is off in evaluation mode; these models have no dropout

    def step(group: Group, watcher: Watcher) -> None:
        watcher.enter("step")
        for index, response in enumerate(group.responses):
            ids = torch.cat([group.prompt, response])[None, :-1]
            logits = model(input_ids=ids, use_cache=False, logits_to_keep=response.numel()).logits[0]
            group.loss(index, token_logps(logits, response)).backward()

    return step


def constant_prompt(model: Any) -> Step:
    """What `prompt_grad="none"` has to agree with: stock transformers, the prompt's cached state being a constant."""

    def step(group: Group, watcher: Watcher) -> None:
        watcher.enter("step")
        captured = group.prompt.numel() - 1
        trunk = _new_cache(model.config)
        with torch.no_grad():
            if captured:
                model(input_ids=group.prompt[None, :captured], cache=trunk, use_cache=True, logits_to_keep=1)
        for index, response in enumerate(group.responses):
            ids = torch.cat([group.prompt[-1:], response[:-1]])[None]
            positions = torch.arange(captured, captured + ids.shape[1])[None]
            logits = model(input_ids=ids, position_ids=positions, cache=_branch(trunk), use_cache=True).logits[0]
            group.loss(index, token_logps(logits, response)).backward()

    return step


def longstraw(model: Any, report_progress: bool = False, **options: Any) -> Step:
    """The engine with these options: capture, score, replay and, unless `prompt_grad="none"`, sweep.

    Args:
        report_progress: tell phase and tokens on standard error, for runs of minutes.
    """
    from longstraw import Engine
    from longstraw.objective import Normalizer, PolicyLoss

    policy_loss = PolicyLoss(loss_type="dapo", epsilon=CLIP)

    def step(group: Group, watcher: Watcher) -> Facts:
        most: Facts = {}

        def objective(logps: list[torch.Tensor]) -> torch.Tensor:
            normalizer = Normalizer(len(logps), group.num_tokens)
            loss, _ = policy_loss(logps, group.advantages, normalizer, old_logps=group.old_logps)
            watcher.enter("replay")
            return loss

        def progress(phase: str, done: int, total: int) -> None:
            if report_progress:
                print(f"\r{phase}: {done:,} of {total:,} tokens ", end="", file=sys.stderr, flush=True)
            if phase == "replay" and done == total:
                _note_bytes(most, state.nbytes)
                if engine.prompt_grad != "none":
                    watcher.enter("sweep")

        engine = Engine(model, progress=progress, **options)
        watcher.enter("capture")
        with engine.capture(group.prompt) as state:
            _note_bytes(most, state.nbytes)
            watcher.enter("score")
            outcome = engine.backward(state, group.responses, objective)
        return {"state_bytes": most, "loss": float(outcome.loss)}

    return step


def _note_bytes(most: Facts, nbytes: dict[str, dict[str, int]]) -> None:
    """The most bytes seen at a time, by kind of state and tier."""
    for kind, tiers in nbytes.items():
        for tier, count in tiers.items():
            seen = most.setdefault(kind, {})
            seen[tier] = max(count, seen.get(tier, 0))


METHODS: dict[str, Callable[..., Step]] = {
    make.__name__: make for make in (conventional, constant_prompt, longstraw, packed, prefix_grouper, trl)
}


def retains_graphs() -> bool:
    """Whether this version of the engine can keep graphs from capture to sweep."""
    from longstraw import Engine

    return "retain_graph_bytes" in inspect.signature(Engine).parameters


class _Recurrent(LinearAttentionLayer):
    """Assigns its states, where the stock layer writes into them: the trunk's stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.record_past = True

    def update_recurrent_state(self, recurrent_states: torch.Tensor, state_idx: int = 0, **_: Any) -> torch.Tensor:
        self.recurrent_states[state_idx] = recurrent_states
        return recurrent_states


def _new_cache(config: Any) -> Cache:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return Cache(layers=[_Recurrent() if kind == "linear_attention" else DynamicLayer() for kind in kinds])


def _branch(trunk: Cache) -> Cache:
    layers = [copy.copy(layer) for layer in trunk.layers]
    for layer in layers:
        if isinstance(layer, _Recurrent):
            for name in ("conv_states", "recurrent_states", "has_previous_state"):
                setattr(layer, name, dict(getattr(layer, name)))
            if layer.conv_kernel_size[0] is not None:
                layer.crop(0)
    return Cache(layers=layers)
