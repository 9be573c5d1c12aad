"""No keyword of an attention call is dropped unread."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.utils.generic import TransformersKwargs

from longstraw.attention import keywords
from longstraw.attention.scores import Scores

PLAIN = Scores(0.25)  # of heads of 16


def served(module: torch.nn.Module, call: dict[str, Any], **options: Any) -> Scores:
    return keywords.served(module, call, 16, **options)


class TinyAttention(torch.nn.Module):
    is_causal = True


class BothWays(torch.nn.Module):
    is_causal = False


def test_what_has_an_effect_comes_through() -> None:
    sinks = torch.ones(4)
    call = dict(scaling=0.2, s_aux=sinks, softcap=30.0, sliding_window=7, dropout=0.0, position_ids=torch.arange(3))
    found = served(TinyAttention(), call)
    assert found == Scores(0.2, sinks, 30.0, 7) and found.sinks is sinks
    assert served(TinyAttention(), {}) == PLAIN


def test_none_is_absent() -> None:
    names = [*keywords.REFUSED, *keywords.SERVED, *keywords.WITHOUT_EFFECT, "is_causal", "something_new"]
    assert served(TinyAttention(), dict.fromkeys(names)) == PLAIN


@pytest.mark.parametrize(
    "call",
    [
        dict(use_cache=True, output_hidden_states=True, return_dict=True, output_router_logits=True),
        dict(cache_position=torch.arange(4), cache=object(), past_key_values=object(), num_items_in_batch=3),
        dict(is_causal=True, dropout=0.0, output_attentions=False, deterministic=True),
    ],
)
def test_without_effect(call: dict[str, Any]) -> None:
    assert served(TinyAttention(), call) == PLAIN


@pytest.mark.parametrize("name", keywords.REFUSED)
def test_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"TinyAttention passes the attention keyword {name}, .*does not serve: "):
        served(TinyAttention(), {name: torch.zeros(2)})


def test_packed_sequences_name_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"max_length_k.*packed sequences; capture each prompt by itself"):
        served(TinyAttention(), {"max_length_k": 12})


def test_an_unknown_one_says_where_it_would_be_served() -> None:
    with pytest.raises(ValueError, match=r"keyword logit_bias, .*keywords\.py.*longstraw/models"):
        served(TinyAttention(), {"logit_bias": 0.0})


@pytest.mark.parametrize("call", [dict(is_causal=False), dict(dropout=0.1), dict(output_attentions=True)])
def test_values_with_an_effect(call: dict[str, Any]) -> None:
    (name,) = call
    with pytest.raises(ValueError, match=f"TinyAttention.*{name}={call[name]}"):
        served(TinyAttention(), call)


def test_a_module_that_looks_ahead() -> None:
    with pytest.raises(ValueError, match=r"BothWays.*is_causal=False.*later tokens"):
        served(BothWays(), {})
    assert served(BothWays(), {"is_causal": True}) == PLAIN  # the call overrules the module, as in stock kernels


def test_a_mask() -> None:
    with pytest.raises(ValueError, match=r"TinyAttention passes an attention_mask, .*unpadded"):
        served(TinyAttention(), {}, attention_mask=torch.zeros(1, 1, 3, 3))


def test_every_keyword_that_transformers_documents_has_an_entry() -> None:
    known = {*keywords.WITHOUT_EFFECT, *keywords.REFUSED, *keywords.SERVED, "is_causal", "output_attentions"}
    assert set(TransformersKwargs.__annotations__) <= known


def test_no_keyword_is_in_two_tables() -> None:
    tables = [keywords.WITHOUT_EFFECT, keywords.REFUSED, keywords.SERVED, keywords._CONDITIONS]
    names = [name for table in tables for name in table]
    assert len(names) == len(set(names))
