"""The model and the data that every method is given: one GRPO gradient step on a group of responses to one prompt."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

FAMILIES = ("llama", "qwen3_5")
CLIP = 0.2


@dataclass(frozen=True)
class Workload:
    """A tiny random model (4 layers, hidden size 256, vocabulary 4096, float32) and one group of random tokens.

    Attributes:
        family: "llama" (4 query and 2 K/V heads of 64), or "qwen3_5" (three GatedDeltaNet layers, one of attention).
        prompt: tokens of the prompt.
        group: responses to it.
        response: tokens of each.
        seed: of the weights and of the data.
    """

    family: str = "llama"
    prompt: int = 8192
    group: int = 8
    response: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family={self.family!r}: choose one of {', '.join(FAMILIES)}")
        for name in ("prompt", "group", "response"):
            if getattr(self, name) < (1 if name != "group" else 2):
                raise ValueError(f"{name}={getattr(self, name)} is too small: a group has two responses or more")

    def model(self) -> Any:
        """A transformers causal LM in evaluation mode, on the CPU."""
        torch.manual_seed(self.seed)
        shape = {
            "vocab_size": 4096,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 1 << 21,
        }
        if self.family == "llama":
            from transformers import LlamaConfig, LlamaForCausalLM

            return LlamaForCausalLM(LlamaConfig(**shape)).eval()
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        heads = {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
        counts = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**shape, **heads, **counts)).eval()

    def data(self) -> Group:
        """The same tokens and numbers whatever the method."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        vocab = 4096
        prompt = torch.randint(0, vocab, (self.prompt,), generator=generator)
        responses = [torch.randint(0, vocab, (self.response,), generator=generator) for _ in range(self.group)]
        # A random model is close to uniform. Noise makes the old policy stale enough for the clip to hold some tokens.
        uniform = -torch.log(torch.tensor(float(vocab)))
        old = [uniform + 0.1 * torch.randn(self.response, generator=generator) for _ in responses]
        rewards = torch.rand(self.group, generator=generator)
        return Group(prompt, responses, old, (rewards - rewards.mean()) / (rewards.std() + 1e-4))

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Group:
    """One prompt's responses, as an update finds them.

    Attributes:
        prompt: [P] ids.
        responses: [R] ids each.
        old_logps: [R] log-probabilities each, under the policy that sampled; the update has moved on since.
        advantages: [G].
    """

    prompt: torch.Tensor
    responses: list[torch.Tensor]
    old_logps: list[torch.Tensor]
    advantages: torch.Tensor

    @property
    def num_tokens(self) -> int:
        return sum(response.numel() for response in self.responses)

    def loss(self, index: int, logps: torch.Tensor) -> torch.Tensor:
        """Response `index`'s share of the loss: PPO's clip (arXiv 1707.06347), a mean over the group's tokens."""
        ratio = (logps - self.old_logps[index]).exp()
        advantage = self.advantages[index]
        clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
        return -torch.minimum(ratio * advantage, clipped * advantage).sum() / self.num_tokens

    def head(self, num_prompt: int, num_responses: int, num_tokens: int) -> Group:
        """A small part of the data, to warm up on."""
        return Group(
            self.prompt[:num_prompt],
            [r[:num_tokens] for r in self.responses[:num_responses]],
            [o[:num_tokens] for o in self.old_logps[:num_responses]],
            self.advantages[:num_responses],
        )
