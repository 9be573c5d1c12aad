"""An adapter of the text model of a checkpoint that takes images loads into the published class, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tiny_runs import metrics, run
from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

from longstraw.config.load import load_config
from longstraw.trainer.loading import load_policy

IDS = torch.randint(4, tiny.VOCAB_SIZE, (1, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = dict(
        vocab_size=tiny.VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, linear_key_head_dim=8, linear_value_head_dim=8, linear_num_key_heads=2,
        linear_num_value_heads=2, layer_types=["linear_attention", "full_attention"], max_position_embeddings=256,
    )  # fmt: skip
    vision = dict(
        depth=1, hidden_size=32, intermediate_size=48, num_heads=2, out_hidden_size=32, patch_size=4,
        spatial_merge_size=2, temporal_patch_size=2, num_position_embeddings=16,
    )  # fmt: skip
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("published") / "model"
    config = Qwen3_5Config(text_config=text, vision_config=vision)
    Qwen3_5ForConditionalGeneration(config).eval().save_pretrained(folder)
    return folder


def whole_logits(checkpoint: Path, adapter: Path | None) -> torch.Tensor:
    model: Any = Qwen3_5ForConditionalGeneration.from_pretrained(checkpoint).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, str(adapter)).eval()
        inside = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
        assert inside and all("language_model" in name for name in inside)
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize(
    "targets",
    [{}, {"target_modules": ["q_proj", "linear_fc1"]}, {"target_modules": r"model\.layers\.1\..*_proj"}],
    ids=["linear", "names that others have too", "a pattern"],
)
@pytest.mark.filterwarnings("error:.*[Mm]issing adapter keys")
def test_it_loads_into_the_published_class_and_back(targets: dict[str, Any], checkpoint: Path, tmp_path: Path) -> None:
    options = dict(model={"path": str(checkpoint)}, max_steps=2, learning_rate=0.05, eval_on_start=False)
    run(tmp_path / "first", lora={"r": 2, **targets}, **options)
    final = tmp_path / "first" / "final"
    assert all("model.model.language_model.layers" in name for name in load_file(final / "adapter_model.safetensors"))
    changed = whole_logits(checkpoint, final)
    assert float((changed - whole_logits(checkpoint, None)).abs().max()) > 1e-4

    again = {"path": str(checkpoint), "adapter": str(final)}
    policy = load_policy(load_config(None, (), tiny.options(**options | {"model": again, "beta": 0.1})))
    assert set(policy.model.peft_config) == {"default", "reference"}
    with torch.no_grad():
        torch.testing.assert_close(policy.model(input_ids=IDS).logits, changed, rtol=1e-5, atol=1e-5)
    run(tmp_path / "second", **options | {"model": again})
    assert len(metrics(tmp_path / "second")) == 2
