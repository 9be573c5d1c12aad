"""What the tests of latent attention share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from longstraw.models import mla

MODELS = ["glm_moe_dsa", "deepseek_v32", "deepseek_v3"]
SPARSE = MODELS[:2]


class Choices:
    """What every call of the indexer was given and chose, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        choose = mla.indexer.choose

        def spy(q: Any, w: Any, k: Any, prefix: Any, num: int) -> Any:
            found = choose(q, w, k, prefix, num)
            start = prefix.pages[-1].stop if prefix.pages else 0
            self.calls.append((start, q, w, k, found))
            return found

        monkeypatch.setattr(mla.indexer, "choose", spy)

    def of_prompt(self) -> list[list[list[int]]]:
        """[layer][query] -> positions, for the two indexers that choose at capture: the last layer only keeps state."""
        layers: list[list[list[int]]] = [[], []]
        for call, (*_, found) in enumerate(self.calls):
            layers[call % 2] += [[s for s in row if s >= 0] for row in found[0].tolist()]
        return layers


def with_lora(model: Any, targets: Any, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, target_modules=targets, **options)).to(dtype)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model.eval()
