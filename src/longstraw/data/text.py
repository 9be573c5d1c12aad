"""Between text and token ids: plain text, chat messages, or ids as they are. The tokenizer is optional."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


class TextCodec:
    """Encodes prompts and decodes completions the way TRL hands them to rewards.

    Args:
        tokenizer: a transformers tokenizer, or None when every prompt is given as token ids.
        chat_template_kwargs: passed to `apply_chat_template`.
        vocab_size: ids must be below it; None leaves the check to the engine.
        skip_special_tokens: completions as text have none of the tokenizer's special tokens in them.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        chat_template_kwargs: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self._chat_template_kwargs = chat_template_kwargs or {}
        self._vocab_size = vocab_size
        self._skip_special_tokens = skip_special_tokens

    def encode(self, prompt: Any, where: str) -> np.ndarray:
        """Token ids of a prompt, int32 [num_tokens].

        Args:
            prompt: text, a list of chat messages (`role`, `content`), or a list of ids.
            where: the row, for messages.
        Raises:
            ValueError: another type, an empty prompt, ids outside the vocabulary, or text without a tokenizer.
        """
        if isinstance(prompt, str):
            ids = self._encode_text(prompt, where)
        elif is_conversation(prompt):
            ids = self._encode_chat(prompt, where)
        elif is_token_ids(prompt):
            ids = prompt
        else:
            raise ValueError(
                f"{where}: the prompt is of type {type(prompt).__name__}; it must be text, a list of chat messages "
                "with 'role' and 'content', or a list of token ids."
            )
        array = np.asarray(ids, dtype=np.int64)
        if array.size == 0:
            raise ValueError(f"{where}: the prompt is empty. Remove the row, or give it at least one token.")
        if array.min() < 0 or (self._vocab_size is not None and array.max() >= self._vocab_size):
            raise ValueError(
                f"{where}: the prompt has token id {int(array.min()) if array.min() < 0 else int(array.max())}, "
                f"outside the model's vocabulary of {self._vocab_size}. Check that tokenizer and model belong together."
            )
        return array.astype(np.int32)

    def decode_completions(self, prompt: Any, completions: Sequence[Sequence[int]]) -> list[Any]:
        """In the prompt's own form: text, `[{"role": "assistant", "content": text}]`, or ids without a tokenizer."""
        if self.tokenizer is None:
            return [list(ids) for ids in completions]
        texts = [self.tokenizer.decode(list(ids), skip_special_tokens=self._skip_special_tokens) for ids in completions]
        if not is_conversation(prompt):
            return texts
        return [[{"role": "assistant", "content": text}] for text in texts]

    def excerpt(self, ids: Sequence[int] | np.ndarray, num_tokens: int) -> str:
        """The end of a prompt in readable form, for logs."""
        tail = [int(token) for token in ids[-num_tokens:]]
        text = self.tokenizer.decode(tail) if self.tokenizer is not None else " ".join(map(str, tail))
        return ("… " if len(ids) > num_tokens else "") + text

    def _encode_text(self, text: str, where: str) -> list[int]:
        """With the BOS that the tokenizer puts first, but not a second one before text that was rendered with it."""
        tokenizer = self._need_tokenizer(where, "text")
        ids = list(tokenizer(text)["input_ids"])
        bos = getattr(tokenizer, "bos_token", None)
        return ids[1:] if bos and text.startswith(bos) and ids[:2] == [tokenizer.bos_token_id] * 2 else ids

    def _encode_chat(self, messages: list[dict[str, Any]], where: str) -> list[int]:
        tokenizer = self._need_tokenizer(where, "a chat")
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                f"{where}: the prompt is a chat, but the tokenizer has no chat template. Use a chat model's tokenizer "
                "(model.tokenizer), or give the prompt as text."
            )
        try:
            return tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=False, add_generation_prompt=True, **self._chat_template_kwargs
            )
        except Exception as error:  # whatever a template raises, or stumbles over
            raise ValueError(
                f"{where}: the chat template refuses these messages ({type(error).__name__}: {error}). Change them to "
                "the roles and the content that it knows, give another template (model.tokenizer, "
                "chat_template_kwargs), or leave such rows out with skip_bad_rows: true."
            ) from error

    def _need_tokenizer(self, where: str, kind: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(
                f"{where}: the prompt is {kind}, but there is no tokenizer. Set model.tokenizer, or give token ids."
            )
        return self.tokenizer


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of chat messages."""
    return (
        isinstance(prompt, (list, tuple))
        and len(prompt) > 0
        and all(isinstance(message, dict) and "role" in message and "content" in message for message in prompt)
    )


def is_token_ids(prompt: Any) -> bool:
    """Whether a prompt is a sequence of integers (an empty one included)."""
    if isinstance(prompt, np.ndarray):
        return prompt.ndim == 1 and np.issubdtype(prompt.dtype, np.integer)
    return isinstance(prompt, (list, tuple)) and all(
        isinstance(token, (int, np.integer)) and not isinstance(token, bool) for token in prompt
    )
