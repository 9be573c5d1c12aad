"""Shared-prefix training as others do it: one sequence, the prompt once and all responses behind it, in one graph.

`prefix_grouper` runs the PrefixGrouper package (arXiv 2506.05433), which repeats the prompt's keys and values for
every response. `packed` is written for this benchmark and repeats nothing. Both hold the whole graph; neither
recomputes.

Shapes: P prompt tokens, G responses, S = R - 1 input tokens of each, N = P + G S; H query heads, K key/value heads of
size D.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks.memory import Watcher
from benchmarks.workload import Group, token_logps
from longstraw.attention import kernels
from longstraw.attention.parts import Merge
from longstraw.attention.scores import Scores

PACKED, GROUPED = "benchmark_packed", "benchmark_prefix_grouper"


@dataclass(frozen=True)
class Layout:
    """Where the prompt ends, and how many responses of how many input tokens follow."""

    num_prompt: int
    group: int
    num_inputs: int

    def prompt(self, x_1HND: torch.Tensor) -> torch.Tensor:
        return x_1HND[:, :, : self.num_prompt]

    def flat(self, x_1HND: torch.Tensor) -> torch.Tensor:
        """[1, H, G S, D]: all responses query one prompt."""
        return x_1HND[:, :, self.num_prompt :]

    def rows(self, x_1HND: torch.Tensor) -> torch.Tensor:
        """[G, H, S, D]: every response by itself."""
        return self.flat(x_1HND)[0].unflatten(1, (self.group, self.num_inputs)).transpose(0, 1)

    def join(self, prompt: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([prompt, unrow(rows)], 2)


def unrow(x_GHSD: torch.Tensor) -> torch.Tensor:
    return x_GHSD.transpose(0, 1).flatten(1, 2)[None]


class _PackedAttention(torch.autograd.Function):
    """Causal within the prompt; every response over the prompt and causally over itself, merged by log-sum-exp."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout, scale: float) -> Any:
        scores = Scores(scale)
        prompt_k, prompt_v = layout.prompt(k), layout.prompt(v)
        out, lse = kernels.part_forward(layout.prompt(q), prompt_k, prompt_v, scores, causal=True)
        own, own_lse = kernels.part_forward(layout.rows(q), layout.rows(k), layout.rows(v), scores, causal=True)
        merged = Merge(own.shape[0] * own.shape[2])
        merged.add(unrow(own), unrow(own_lse[..., None])[..., 0])
        merged.add(*kernels.part_forward(layout.flat(q), prompt_k, prompt_v, scores, causal=False))
        out, lse = torch.cat([out, merged.out], 2), torch.cat([lse, merged.lse], 2)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        layout, scale = ctx.layout, ctx.scale
        q, k, v, out, lse = ctx.saved_tensors
        lse = lse[..., None]
        grad = grads[0].contiguous()

        def part(queries: Any, keys: Any, causal: bool) -> tuple[torch.Tensor, ...]:
            whole = queries(out), queries(lse)[..., 0]
            return kernels.part_backward(queries(grad), queries(q), keys(k), keys(v), *whole, Scores(scale), causal)

        dq, dk, dv = part(layout.prompt, layout.prompt, True)
        flat_dq, prompt_dk, prompt_dv = part(layout.flat, layout.prompt, False)
        own_dq, own_dk, own_dv = part(layout.rows, layout.rows, True)
        grad_q = torch.cat([dq, flat_dq + unrow(own_dq)], 2)
        return grad_q, layout.join(dk + prompt_dk, own_dk), layout.join(dv + prompt_dv, own_dv), None, None


def _packed_attention(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    if mask is not None:
        raise RuntimeError("the packed benchmark needs no mask, but the model made one")
    return _PackedAttention.apply(query, key, value, kwargs["layout"], scaling).transpose(1, 2), None


def packed(model: Any) -> Any:
    """One graph over prompt and responses, flash kernels, nothing repeated or recomputed."""
    ALL_ATTENTION_FUNCTIONS.register(PACKED, _packed_attention)
    model.set_attn_implementation(PACKED)

    def step(group: Group, watcher: Watcher) -> None:
        watcher.enter("step")
        layout = _layout(group)
        inputs = torch.cat([group.prompt, *(r[:-1] for r in group.responses)])[None]
        hidden = model.model(
            input_ids=inputs, position_ids=_positions(layout), use_cache=False, layout=layout
        ).last_hidden_state[0]
        last = hidden[layout.num_prompt - 1].expand(layout.group, 1, -1)
        behind = hidden[layout.num_prompt :].unflatten(0, (layout.group, layout.num_inputs))
        _total_loss(group, model.lm_head(torch.cat([last, behind], 1))).backward()

    return step


def prefix_grouper(model: Any) -> Any:
    """The PrefixGrouper package with PyTorch's attention as its attention function.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    from prefix_grouper import PrefixGrouper

    ALL_ATTENTION_FUNCTIONS.register(GROUPED, _grouped_attention)
    model.set_attn_implementation(GROUPED)

    def step(group: Group, watcher: Watcher) -> None:
        watcher.enter("step")
        layout = _layout(group)
        prompt, responses = group.prompt[None], torch.stack([r[:-1] for r in group.responses])
        masks = torch.ones_like(prompt), torch.ones_like(responses)
        grouper = PrefixGrouper.from_ungrouped_masks(*masks, layout.group)
        inputs = grouper.concat_input(prompt, masks[0], responses, masks[1])
        hidden = model.model(
            input_ids=inputs, position_ids=_positions(layout), use_cache=False, prefix_grouper=grouper
        ).last_hidden_state
        _, _, suffix, _ = grouper.split_output(hidden, include_prefix_last=1)
        _total_loss(group, model.lm_head(suffix)).backward()

    return step


def _grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Any,
    scaling: float,
    prefix_grouper: Any = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Its masks say where padding is, of which there is none here; causality is the attention function's own."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padding_mask: torch.Tensor) -> torch.Tensor:
        num_queries, num_keys = q.shape[2], k.shape[2]
        if num_queries == num_keys:
            out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        else:
            visible = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
            out = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2)

    return prefix_grouper.forward(attend, query, key, value), None


def _layout(group: Group) -> Layout:
    return Layout(group.prompt.numel(), len(group.responses), group.responses[0].numel() - 1)


def _positions(layout: Layout) -> torch.Tensor:
    behind = torch.arange(layout.num_prompt, layout.num_prompt + layout.num_inputs).repeat(layout.group)
    return torch.cat([torch.arange(layout.num_prompt), behind])[None]


def _total_loss(group: Group, logits_GRV: torch.Tensor) -> torch.Tensor:
    shares = [
        group.loss(index, token_logps(logits, response))
        for index, (logits, response) in enumerate(zip(logits_GRV, group.responses))
    ]
    return torch.stack(shares).sum()
