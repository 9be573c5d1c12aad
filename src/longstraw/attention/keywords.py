"""The keywords of an attention call: served, known to be without effect here, or refused by name.

A transformers model hands its attention function keywords of two kinds: those that it writes itself, such as the scale,
and whatever came in with the forward call. Some change the function that is computed. None may be dropped unread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from longstraw.attention.scores import Scores

WITHOUT_EFFECT = {
    "position_ids": "stock kernels look for packed sequences in them; a piece's positions rise by one",
    "cache_position": "says where a stock cache writes; a chain knows its own place",
    "cache": "the layer has already written to it",
    "past_key_values": "the older name of `cache`",
    "use_cache": "the engine always passes a cache",
    "return_dict": "shapes what the model returns, not what it computes",
    "output_hidden_states": "likewise",
    "output_router_logits": "likewise: the load-balancing loss is no part of the engine's objective",
    "logits_to_keep": "cuts the head's input, which the engine chunks itself",
    "num_items_in_batch": "normalises the stock loss, which the engine does not call",
    "deterministic": "chooses among kernels of one function; the engine's are repeatable as they are",
}
"""Keyword to the reason why any value of it is the same function here."""

REFUSED = {
    "position_bias": "scores with a bias of their own; a family file would have to bring the attention for it",
    "attn_bias": "scores with a bias of their own; a family file would have to bring the attention for it",
    "alibi": "scores with a bias of their own; a family file would have to bring the attention for it",
    "head_mask": "heads that are switched off; remove the mask, or prune the heads in the weights",
    "layer_head_mask": "heads that are switched off; remove the mask, or prune the heads in the weights",
    "cu_seq_lens_q": "packed sequences; capture each prompt by itself",
    "cu_seq_lens_k": "packed sequences; capture each prompt by itself",
    "max_length_q": "packed sequences; capture each prompt by itself",
    "max_length_k": "packed sequences; capture each prompt by itself",
    "seq_idx": "packed sequences; capture each prompt by itself",
    "indices": "attention over chosen tokens; a family file would have to bring its forward, as models/mla.py does",
    "block_indices": "attention over chosen blocks; a family file would have to bring its forward",
    "sinks": "sinks under a name of the model's own; a family file has to pass them on as `s_aux`",
}
"""Keyword to what it stands for and what would serve it. One in no table is refused as well."""

SERVED = {"scaling": "scale", "s_aux": "sinks", "softcap": "softcap", "sliding_window": "window"}
"""Keyword to its name in `Scores`."""


def served(module: torch.nn.Module, keywords: Mapping[str, Any], head_size: int, attention_mask: Any = None) -> Scores:
    """What of an attention call's keywords has an effect.

    Args:
        module: the attention module that calls, for the message and for what it says of causality.
        keywords: all keywords of the call; None as a value is absent.
        head_size: of the queries; one over its square root is the scale where none is passed.
        attention_mask: what the model passed as its mask.

    Raises:
        ValueError: a keyword with an effect that is not served, or one that nothing is known of.
    """
    who = type(module).__name__
    if attention_mask is not None:
        raise ValueError(
            f"{who} passes an attention_mask, and the longstraw attention takes no mask: pieces are causal and "
            "unpadded. Pass prompts without padding; a model that makes a mask of its own needs a file in "
            "longstraw/models"
        )
    if getattr(module, "is_causal", True) is False and keywords.get("is_causal") is None:
        keywords = {**keywords, "is_causal": False}
    found: dict[str, Any] = {"scale": head_size**-0.5}
    for name, value in keywords.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in SERVED:
            found[SERVED[name]] = value
        elif name in _CONDITIONS:
            harmless, reason = _CONDITIONS[name]
            if bool(value) is not harmless:
                raise ValueError(_refusal(who, f"{name}={value}", reason))
        else:
            raise ValueError(_refusal(who, name, REFUSED.get(name, _UNKNOWN)))
    return Scores(**found)


_CONDITIONS = {  # keyword to its harmless truth value, and what the other one asks for
    "is_causal": (True, "attention to later tokens, which a prompt run in pieces has not seen yet; switch it off"),
    "dropout": (False, "attention dropout is active: a recomputed graph would be another function; call model.eval()"),
    "output_attentions": (False, "attention weights, which are never formed; set output_attentions=False"),
}

_UNKNOWN = (
    "nothing is known of its effect; read the model's file in transformers, then add it to longstraw/attention/keywords"
    ".py with the reason why it has none, or serve it in a file in longstraw/models"
)


def _refusal(who: str, what: str, reason: str) -> str:
    return f"{who} passes the attention keyword {what}, which the engine does not serve: {reason}"
