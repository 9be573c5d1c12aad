"""A tiny random Llama, a tokenizer made on the spot, prompts and rewards: what tests of training run on."""

from __future__ import annotations

import random
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 61
_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    eos_token_id=None,
    bos_token_id=None,
)
WORDS = ["<pad>", "<eos>", "user", "assistant", *(f"w{number}" for number in range(VOCAB_SIZE - 4))]


def llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Two layers of 32; positions to 256; no eos unless asked for."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**_SHAPE | changes)).eval()


def mistral() -> MistralForCausalLM:
    """As `llama`, with a window of 8 tokens."""
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**_SHAPE, sliding_window=8)).eval()


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word, with a chat template."""
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>")
    fast.chat_template = (
        "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    return fast


def rows(num_rows: int = 6, num_tokens: int = 20, seed: int = 0) -> list[dict[str, Any]]:
    """Random prompts of token ids with a column `target`, a token."""
    chooser = random.Random(seed)
    return [
        {
            "prompt": [chooser.randrange(4, VOCAB_SIZE) for _ in range(num_tokens + number)],
            "target": chooser.randrange(4, VOCAB_SIZE),
        }
        for number in range(num_rows)
    ]


def closeness(completion_ids: list[list[int]], target: list[int], **_: Any) -> list[float]:
    """Higher the nearer the tokens are to the target: differs within nearly every group."""
    return [
        -sum(abs(token - goal) for token in ids) / (VOCAB_SIZE * max(len(ids), 1))
        for ids, goal in zip(completion_ids, target, strict=True)
    ]


def options(**changes: Any) -> dict[str, Any]:
    """A configuration over the above; `changes` win."""
    return {
        "model": {"path": "tiny:llama"},
        "dataset": "tiny:rows",
        "reward_funcs": "tiny:closeness",
        "num_generations": 3,
        "max_completion_length": 4,
        "max_steps": 3,
        "learning_rate": 1e-2,
        "segment_tokens": 16,
        "block_tokens": 8,
    } | changes
