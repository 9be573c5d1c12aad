"""The models and the data that methods are given: one GRPO gradient step on a group of responses to one prompt."""

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
        return _group(prompt, responses, vocab, self.seed)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "random", **asdict(self)}


@dataclass(frozen=True)
class TextWorkload:
    """Real text, byte by byte, and a hybrid so small that a million tokens of it can be trained on here.

    The text is Python's own language reference (`pydoc_data.topics`, some 470,000 bytes of UTF-8), topics in
    alphabetical order, from the start again where it ends. Vocabulary: the 256 bytes. The responses are other passages.

    Attributes:
        prompt: tokens of the prompt.
        group: responses to it.
        response: tokens of each.
        seed: of the weights and of the numbers.
    """

    prompt: int = 1 << 20
    group: int = 4
    response: int = 256
    seed: int = 0

    def model(self) -> Any:
        """Two GatedDeltaNet layers and one of full attention (one head of 16), hidden size 64, float32."""
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        torch.manual_seed(self.seed)
        config = Qwen3_5TextConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=3,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=16,
            linear_num_key_heads=1,
            linear_num_value_heads=2,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            max_position_embeddings=1 << 21,
        )
        return Qwen3_5ForCausalLM(config).eval()

    def data(self) -> Group:
        text = topics()
        prompt = text.repeat(-(-self.prompt // text.numel()))[: self.prompt]
        starts = [(index + 1) * text.numel() // (self.group + 1) for index in range(self.group)]
        return _group(prompt, [text[start : start + self.response] for start in starts], 256, self.seed)

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "text", **asdict(self)}


def from_dict(fields: dict[str, Any]) -> Workload | TextWorkload:
    """The inverse of `as_dict`."""
    kinds: dict[str, Any] = {"random": Workload, "text": TextWorkload}
    return kinds[fields["kind"]](**{name: value for name, value in fields.items() if name != "kind"})


def topics() -> torch.Tensor:
    """Every topic of `pydoc_data.topics` as bytes, [N] int64."""
    from pydoc_data.topics import topics as pages

    text = "\n\n".join(f"{name}\n\n{pages[name]}" for name in sorted(pages))
    return torch.tensor(list(text.encode()))


def _group(prompt: torch.Tensor, responses: list[torch.Tensor], vocab: int, seed: int) -> Group:
    """Adds what an update finds beside the tokens: old log-probabilities and advantages."""
    generator = torch.Generator().manual_seed(seed + 2)
    # A random model is close to uniform. Noise makes the old policy stale enough for the clip to hold some tokens.
    uniform = -torch.log(torch.tensor(float(vocab)))
    old = [uniform + 0.1 * torch.randn(response.numel(), generator=generator) for response in responses]
    rewards = torch.rand(len(responses), generator=generator)
    return Group(prompt, responses, old, (rewards - rewards.mean()) / (rewards.std() + 1e-4))


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


def token_logps(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """log softmax(logits)[target], [R], of logits [R, V]."""
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
