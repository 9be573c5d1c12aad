"""The embedded recall task: what its prompts promise, its reward, and the weights that ship with it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3_5ForCausalLM

from longstraw.tasks import recall

ASSETS = Path(recall.__file__).parent / "assets" / "recall"


@pytest.mark.parametrize("prompt_tokens", [18, 19, 64, 300, 3072])
def test_answer_follows_from_prompt(prompt_tokens: int) -> None:
    rows = recall.prompts(20, prompt_tokens, seed=3)
    assert len(rows) == 20
    for row in rows:
        prompt = row["prompt"]
        assert len(prompt) == prompt_tokens
        assert all(type(token) is int and 0 <= token < recall.VOCAB_SIZE for token in prompt)
        body, (marker, asked) = prompt[:-2], prompt[-2:]
        assert marker == recall.QUERY_TOKEN and marker not in body
        key_places = [i for i, token in enumerate(body) if recall.FIRST_KEY <= token < recall.FIRST_VALUE]
        value_places = [i for i, token in enumerate(body) if recall.FIRST_VALUE <= token < recall.FIRST_FILLER]
        assert len(key_places) == recall.DEFAULT_NUM_PAIRS
        assert value_places == [place + 1 for place in key_places]
        pairs = {body[place]: body[place + 1] for place in key_places}
        assert len(pairs) == len(set(pairs.values())) == recall.DEFAULT_NUM_PAIRS
        assert pairs[asked] == row["answer"]


def test_rows_depend_on_seed_and_index_alone() -> None:
    rows = recall.prompts(6, 100, seed=5)
    assert recall.prompts(3, 100, seed=5) == rows[:3]
    assert recall.prompts(6, 100, seed=6) != rows
    assert len({tuple(row["prompt"]) for row in rows}) == 6


def test_pairs_stand_anywhere() -> None:
    starts = np.zeros(7)
    generator = np.random.default_rng(0)
    for _ in range(7000):
        body, keys, _ = recall.recall_body(generator, 8, num_pairs=1)
        starts[int(np.flatnonzero(body == keys[0])[0])] += 1
    # Each of 7 places is drawn 1,000 times with a standard deviation below 30.
    assert np.abs(starts - 1000).max() < 150


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rows": -1, "prompt_tokens": 64}, "num_rows=-1"),
        ({"num_rows": 1, "prompt_tokens": 17}, "raise prompt_tokens to at least 18"),
        ({"num_rows": 1, "prompt_tokens": 64, "num_pairs": 17}, "num_pairs=17"),
        ({"num_rows": 1, "prompt_tokens": 64, "num_pairs": 0}, "num_pairs=0"),
        ({"num_rows": 1, "prompt_tokens": 64, "seed": -1}, "seed=-1"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recall.prompts(**arguments)


def test_reward_compares_the_first_token_with_the_answer() -> None:
    completions = [[20], [21], [], [20, 3], torch.tensor([20])]
    rewards = recall.reward(
        prompts=[None] * 5, completions=[None] * 5, completion_ids=completions, answer=[20] * 5, trainer_state=None
    )
    assert rewards == [1.0, 0.0, 0.0, 1.0, 1.0]
    with pytest.raises(ValueError):
        recall.reward(completion_ids=[[20]], answer=[20, 20])


@pytest.fixture(scope="module")
def packaged_model() -> Qwen3_5ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(ASSETS, use_safetensors=True, dtype=torch.float32)


def test_packaged_weights_are_small_and_fit_the_task(packaged_model: Qwen3_5ForCausalLM) -> None:
    assert sum(file.stat().st_size for file in ASSETS.iterdir()) < 3_000_000
    assert packaged_model.config.vocab_size == recall.VOCAB_SIZE
    assert packaged_model.config.layer_types == ["linear_attention", "full_attention"]
    assert packaged_model.config.max_position_embeddings >= 1 << 20


@torch.no_grad()
def test_packaged_weights_solve_short_prompts_only(packaged_model: Qwen3_5ForCausalLM) -> None:
    def accuracy(prompt_tokens: int, num_rows: int) -> float:
        rows = recall.prompts(num_rows, prompt_tokens, seed=11)
        ids = torch.tensor([row["prompt"] for row in rows])
        logits = packaged_model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        picks = logits.argmax(-1, keepdim=True).tolist()
        return sum(recall.reward(completion_ids=picks, answer=[row["answer"] for row in rows])) / num_rows

    assert accuracy(128, 64) >= 0.97
    # Held-out accuracy at 4,096 is 0.44: far from solved, which is what training is for.
    assert accuracy(4096, 6) < 0.9
