"""What cannot be done is refused before it is half done; the message names the option and the way out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from families import VOCAB, build
from group import group
from peft import LoraConfig, PromptTuningConfig, get_peft_model

import longstraw

WHAT = group(num_prompt=12, lengths=(3, 5))
TINY = dict(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    bos_token_id=None,
    eos_token_id=None,
)


@pytest.fixture
def model() -> Any:
    return build("llama", dtype=torch.float32)


@pytest.fixture
def engine(model: Any) -> longstraw.Engine:
    return longstraw.Engine(model, segment_tokens=5)


def no_gradient(model: Any) -> bool:
    return all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "ids, words",
    [
        ([], "empty"),
        (torch.zeros(0, dtype=torch.long), "empty"),
        (torch.zeros(1, 5, dtype=torch.long), r"shape \(1, 5\)"),
        (5, r"shape \(\)"),
        ([0.5, 1.0], "dtype torch.float32"),
        ([True, False], "dtype torch.bool"),
        ([3, VOCAB, 2], f"id {VOCAB} at place 1, outside the vocabulary of {VOCAB}"),
        ([3, 2, -100], "id -100 at place 2"),
        ("a prompt", "str that makes no tensor"),
        ([[1], [2, 3]], "list that makes no tensor"),
        (transformers.BatchEncoding({"input_ids": [1, 2]}), "BatchEncoding that makes no tensor"),
    ],
)
def test_prompt_ids(engine: longstraw.Engine, ids: Any, words: str) -> None:
    with pytest.raises(ValueError, match="prompt_ids.*" + words):
        engine.capture(ids)


@pytest.mark.parametrize(
    "responses, words",
    [
        ([], "responses is empty"),
        (torch.tensor([1, 2, 3]), "responses is one tensor"),
        ([[1, 2], [3, VOCAB]], rf"responses\[1\] holds id {VOCAB}"),
        ([[1, 2], [[3]]], r"responses\[1\] has shape"),
        ([[1.5]], r"responses\[0\] has dtype"),
    ],
)
def test_responses(engine: longstraw.Engine, model: Any, responses: Any, words: str) -> None:
    with engine.capture(WHAT.prompt) as state:
        for call in (lambda: engine.score(state, responses), lambda: engine.backward(state, responses, WHAT.objective)):
            with pytest.raises(ValueError, match=words):
                call()
    assert no_gradient(model)


@pytest.mark.parametrize("ids", [[4, 5, 6], (4, 5, 6), torch.tensor([4, 5, 6], dtype=torch.int32)])
def test_ids_in_any_form(engine: longstraw.Engine, ids: Any) -> None:
    with engine.capture(ids) as state, engine.capture(torch.tensor([4, 5, 6])) as plain:
        assert torch.equal(engine.score(state, [ids])[0], engine.score(plain, [torch.tensor([4, 5, 6])])[0])


def test_positions_beyond_the_models_range() -> None:
    """Exactly to the limit is fine; one beyond is an error that names the lengths, the limit and the override."""
    limit = 40
    model = build("llama", dtype=torch.float32, max_position_embeddings=limit)
    engine = longstraw.Engine(model)
    with pytest.raises(ValueError, match=f"max_position_embeddings={limit}.*RoPE override"):
        engine.capture([1] * 41)
    with engine.capture([1] * 30) as state:
        engine.backward(state, [[2] * 10, [3]], lambda logps: logps[0].sum())
        model.zero_grad(set_to_none=True)
        for call in (
            lambda: engine.score(state, [[2], [2] * 11]),
            lambda: engine.backward(state, [[2] * 11], lambda logps: logps[0].sum()),
        ):
            with pytest.raises(ValueError, match="prompt of 30 and response of 11 tokens need 41 positions"):
                call()
        with pytest.raises(ValueError, match="max_new_tokens of 11"):
            engine.sample(state, num=1, max_new_tokens=11)
        assert len(engine.sample(state, num=1, max_new_tokens=10, stop_ids=())[0].ids) == 10
    assert no_gradient(model)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rope_that_changes_with_the_length(rope_type: str) -> None:
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    with pytest.raises(ValueError, match=f"'{rope_type}'.*'yarn' or 'linear'"):
        longstraw.Engine(build("llama", dtype=torch.float32, rope_parameters=rope))


@pytest.mark.parametrize("kind", ["attention", "adapter"])
def test_dropout(kind: str, tmp_path: Any) -> None:
    if kind == "attention":
        model = build("llama", dtype=torch.float32, attention_dropout=0.1)
        option = "attention_dropout"
    else:
        config = LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
        model, option = get_peft_model(build("llama", dtype=torch.float32), config), "lora_dropout"
    engine = longstraw.Engine(model.train(), tier="disk", page_dir=tmp_path)
    with pytest.raises(ValueError, match=f"dropout is active.*rate 0.1.*{option}.*eval()"):
        engine.capture(WHAT.prompt)
    assert not list(tmp_path.iterdir()) and model.training
    model.eval()
    with engine.capture(WHAT.prompt) as state:
        engine.backward(state, WHAT.responses, WHAT.objective)
        model.zero_grad(set_to_none=True)
        model.train()
        for call in (
            lambda: engine.score(state, WHAT.responses),
            lambda: engine.sample(state, num=1, max_new_tokens=2),
            lambda: engine.backward(state, WHAT.responses, WHAT.objective),
        ):
            with pytest.raises(ValueError, match="dropout is active"):
                call()
        assert no_gradient(model) and "cotangent" not in state.nbytes


def test_training_mode_without_dropout_is_welcome(engine: longstraw.Engine, model: Any) -> None:
    model.train()
    with engine.capture(WHAT.prompt) as state:
        engine.backward(state, WHAT.responses, WHAT.objective)
    assert model.training and not no_gradient(model)


def test_a_family_that_no_adapter_serves() -> None:
    gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCAB, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(ValueError, match=r"model_type 'gpt2'; served are .*llama"):
        longstraw.Engine(gpt2)


def test_a_layer_kind_that_no_adapter_serves() -> None:
    for family, kind in (("qwen3", "chunked_attention"), ("qwen3_5", "sliding_attention")):
        model = build(family, dtype=torch.float32)
        model.config.layer_types[1] = kind
        with pytest.raises(ValueError, match=f"kind.*{kind}"):
            longstraw.Engine(model)


def test_a_text_model_inside_a_wrapper_that_no_adapter_knows() -> None:
    """Its own attention would run there, and forget every page."""
    vision = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, image_size=8)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**TINY),
        vision_config=transformers.CLIPVisionConfig(**vision, patch_size=4, projection_dim=8),
        image_token_index=1,
    )
    with pytest.raises(ValueError, match="llama text model inside LlavaForConditionalGeneration"):
        longstraw.Engine(transformers.LlavaForConditionalGeneration(config))


@pytest.mark.parametrize("kind", ["LlamaModel", "LlamaForSequenceClassification"])
def test_a_model_without_a_head(kind: str) -> None:
    with pytest.raises(ValueError, match=f"causal LM is needed, got {kind}"):
        longstraw.Engine(getattr(transformers, kind)(transformers.LlamaConfig(**TINY)))


def test_something_that_is_no_transformers_model() -> None:
    with pytest.raises(ValueError, match="causal LM is needed, got Linear"):
        longstraw.Engine(torch.nn.Linear(2, 2))


def test_adapters_that_put_tokens_before_the_prompt(model: Any) -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match=r"PROMPT_TUNING.*use LoRA"):
        longstraw.Engine(get_peft_model(model, config))


def test_no_trainable_parameter(engine: longstraw.Engine, model: Any) -> None:
    model.requires_grad_(False)
    with engine.capture(WHAT.prompt) as state:
        assert len(engine.score(state, WHAT.responses)) == 2
        with pytest.raises(ValueError, match=r"no trainable parameter.*PEFT"):
            engine.backward(state, WHAT.responses, WHAT.objective)


@pytest.mark.parametrize(
    "objective, words",
    [
        (lambda logps: torch.cat(logps), r"scalar tensor, got shape \(8,\)"),
        (lambda logps: 1.5, "scalar tensor, got float"),
        (lambda logps: None, "scalar tensor, got NoneType"),
        (lambda logps: torch.cat(logps).sum().detach(), "without a gradient"),
        (lambda logps: torch.tensor(float(logps[0].sum())), "without a gradient"),
        (lambda logps: 2 * torch.ones((), requires_grad=True), "depends on none"),
    ],
)
def test_objective(engine: longstraw.Engine, model: Any, objective: Any, words: str) -> None:
    with engine.capture(WHAT.prompt) as state:
        with pytest.raises(ValueError, match="objective.*" + words):
            engine.backward(state, WHAT.responses, objective)
        assert "cotangent" not in state.nbytes
    assert no_gradient(model)


@pytest.mark.parametrize(
    "objective",
    [
        lambda logps: logps[0].sum() * float("inf"),
        lambda logps: logps[0].sum() + float("nan"),
        lambda logps: (logps[0] - logps[0].detach()).abs().sqrt().sum(),  # the loss is 0, its gradient is not a number
    ],
)
def test_a_loss_that_is_not_finite(engine: longstraw.Engine, model: Any, objective: Any) -> None:
    """The step is refused, the prompt is named, `.grad` is as before."""
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    start = ", ".join(str(int(token)) for token in WHAT.prompt[:4])
    with engine.capture(WHAT.prompt) as state:
        with pytest.raises(FloatingPointError, match=rf"not finite for the prompt of 12 tokens.*\[{start}"):
            engine.backward(state, WHAT.responses, objective)
        assert "cotangent" not in state.nbytes
    assert (first.grad == 1).all()
    first.grad = None
    assert no_gradient(model)


@pytest.mark.parametrize(
    "options, words",
    [
        (dict(prompt_grad="some"), "prompt_grad='some'.*full.*none"),
        (dict(prompt_grad=0), "prompt_grad=0"),
        (dict(prompt_grad=-3), "prompt_grad=-3"),
        (dict(prompt_grad=True), "prompt_grad=True"),
        (dict(prompt_grad=1.5), "prompt_grad=1.5"),
        (dict(prompt_grad=None), "prompt_grad=None"),
        (dict(segment_tokens=0), "segment_tokens=0"),
        (dict(segment_tokens=2.0), "segment_tokens=2.0"),
        (dict(block_tokens=-1), "block_tokens=-1"),
        (dict(block_tokens=True), "block_tokens=True"),
        (dict(head_bytes=0), "head_bytes=0.*bytes"),
        (dict(tier="cloud"), "tier='cloud'.*device.*host.*disk"),
        (dict(mesh=SimpleNamespace(mesh_dim_names=("pipeline",))), "mesh.*pipeline"),
        (dict(mesh=SimpleNamespace(mesh_dim_names=None)), "mesh"),
    ],
)
def test_options(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        longstraw.Engine(model, **options)


@pytest.mark.parametrize("temperature", [0, -1.0, float("nan")])
def test_temperature(engine: longstraw.Engine, temperature: float) -> None:
    with engine.capture(WHAT.prompt) as state:
        for call in (
            lambda: engine.score(state, WHAT.responses, temperature),
            lambda: engine.backward(state, WHAT.responses, WHAT.objective, temperature),
        ):
            with pytest.raises(ValueError, match=r"temperature=.*positive"):
                call()


@pytest.mark.parametrize(
    "how",
    [
        dict(num=0),
        dict(num=2.5),
        dict(max_new_tokens=0),
        dict(max_new_tokens=1.5),
        dict(temperature=-0.1),
        dict(temperature=float("nan")),
        dict(top_p=0.0),
        dict(top_p=1.1),
        dict(top_k=-1),
        dict(top_k=0.5),
        dict(min_p=-0.1),
        dict(min_p=1.5),
        dict(repetition_penalty=0.0),
    ],
)
def test_sampling(engine: longstraw.Engine, how: dict[str, Any]) -> None:
    [(name, value)] = how.items()
    with engine.capture(WHAT.prompt) as state, pytest.raises(ValueError, match=f"{name}={value!r} has to be"):
        engine.sample(state, **how)


@pytest.mark.parametrize("tier", ["device", "disk"])
def test_a_released_state(model: Any, tier: str, tmp_path: Any) -> None:
    engine = longstraw.Engine(model, tier=tier, page_dir=tmp_path)
    state = engine.capture(WHAT.prompt)
    assert not state.released and len(state) == 12 and state.nbytes
    state.release()
    state.release()
    assert state.released and state.nbytes == {} and not list(tmp_path.iterdir())
    for call in (
        lambda: engine.score(state, WHAT.responses),
        lambda: engine.sample(state, num=1, max_new_tokens=1),
        lambda: engine.backward(state, WHAT.responses, WHAT.objective),
    ):
        with pytest.raises(ValueError, match="released: capture the prompt again"):
            call()
    assert no_gradient(model)


def test_a_full_disk_at_capture(model: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno
    import os

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    engine = longstraw.Engine(model, tier="disk", page_dir=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=f"bytes of pages in {tmp_path}.*No space left.*page_dir"):
            engine.capture(WHAT.prompt)
    assert not list(tmp_path.iterdir())


def test_a_state_of_another_model(engine: longstraw.Engine) -> None:
    """Of the same shape even, it would give numbers that mean nothing; another engine on the same model may use it."""
    other = build("llama", seed=1, dtype=torch.float32)
    with longstraw.Engine(other).capture(WHAT.prompt) as state:
        for call in (
            lambda: engine.score(state, WHAT.responses),
            lambda: engine.sample(state, num=1, max_new_tokens=1),
            lambda: engine.backward(state, WHAT.responses, WHAT.objective),
        ):
            with pytest.raises(ValueError, match="captured with another model"):
                call()
        longstraw.Engine(other, block_tokens=3).score(state, WHAT.responses)
        longstraw.Engine(get_peft_model(other, LoraConfig(target_modules=["q_proj"]))).score(state, WHAT.responses)


def test_ids_are_copied(engine: longstraw.Engine) -> None:
    ids = WHAT.prompt.clone()
    with engine.capture(ids) as state:
        ids.fill_(0)
        assert torch.equal(state.prompt_ids, WHAT.prompt)


def test_configs_that_ask_for_other_outputs(model: Any) -> None:
    engine = longstraw.Engine(model)
    with engine.capture(WHAT.prompt) as state:
        expected = engine.score(state, WHAT.responses)
    model.config.return_dict = False
    model.config.output_hidden_states = True
    with engine.capture(WHAT.prompt) as state:
        assert all(torch.equal(a, b) for a, b in zip(engine.score(state, WHAT.responses), expected))
