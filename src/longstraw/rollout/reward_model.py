"""A sequence-classification model as a reward function, as in TRL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from longstraw.config.locate import missing_folder_hint, resolve_path
from longstraw.data.text import is_conversation


@dataclass(eq=False)
class RewardModel:
    """Reward = the model's first logit for prompt and completion. Called like any reward function."""

    name: str
    model: Any
    tokenizer: Any
    chat_template_kwargs: dict[str, Any]

    @classmethod
    def from_pretrained(
        cls,
        reference: str,
        device: str = "cpu",
        trust_remote_code: bool = False,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> RewardModel:
        """Load by path or hub name; one label.

        Raises:
            ValueError: there is no such model, or it has no tokenizer.
        """
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        path = resolve_path(reference, "reward_funcs")
        try:
            model = AutoModelForSequenceClassification.from_pretrained(
                path, num_labels=1, trust_remote_code=trust_remote_code, use_safetensors=True
            )
            tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
        except (OSError, ValueError) as error:
            raise ValueError(
                f"'reward_funcs': '{reference}' is neither 'module:function' nor a sequence-classification model that "
                f"can be loaded: {error}{missing_folder_hint(reference)}"
            ) from error
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id
        name = reference.rstrip("/").rsplit("/", 1)[-1]
        return cls(name, model.to(device).eval(), tokenizer, chat_template_kwargs or {})

    @torch.inference_mode()
    def __call__(self, prompts: list[Any], completions: list[Any], **_: Any) -> list[float]:
        """One score a completion. Raises TypeError where prompts are token ids: another tokenizer cannot read them."""
        texts = [self._text(prompt, completion) for prompt, completion in zip(prompts, completions, strict=True)]
        inputs = self.tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        logits = self.model(**inputs.to(self.model.device)).logits
        return logits[:, 0].float().tolist()

    def _text(self, prompt: Any, completion: Any) -> str:
        if is_conversation(prompt):
            return self.tokenizer.apply_chat_template(
                [*prompt, *completion], tokenize=False, **self.chat_template_kwargs
            )
        if isinstance(prompt, str):
            return prompt + completion
        raise TypeError(
            "a reward model reads text, but the prompts are token ids; give prompts as text or chat messages"
        )
