"""Recall among decoys: the answer follows from the marks, lengths are exact, seeds reproduce."""

import pytest

from longstraw.tasks import marked, recall


@pytest.mark.parametrize("prompt_tokens", [26, 27, 64, 2048])
def test_answer_follows_from_the_marks(prompt_tokens: int) -> None:
    for row in marked.prompts(20, prompt_tokens, seed=4):
        prompt = row["prompt"]
        assert len(prompt) == prompt_tokens and all(0 <= token < recall.VOCAB_SIZE for token in prompt)
        body, (marker, asked) = prompt[:-2], prompt[-2:]
        assert marker == recall.QUERY_TOKEN
        pairs = {
            mark: {body[i + 1]: body[i + 2] for i, token in enumerate(body) if token == mark}
            for mark in (marked.VALID_MARK, marked.VOID_MARK)
        }
        valid, void = pairs[marked.VALID_MARK], pairs[marked.VOID_MARK]
        assert valid.keys() == void.keys() and len(valid) == marked.DEFAULT_NUM_KEYS
        assert len({*valid.values(), *void.values()}) == 2 * marked.DEFAULT_NUM_KEYS
        assert (valid[asked], void[asked]) == (row["answer"], row["decoy"])
        num_keys = sum(recall.FIRST_KEY <= token < recall.FIRST_VALUE for token in body)
        assert num_keys == 2 * marked.DEFAULT_NUM_KEYS


def test_valid_pair_comes_first_half_of_the_time() -> None:
    rows = marked.prompts(400, 100, seed=0)
    num_first = sum(row["prompt"].index(row["answer"]) < row["prompt"].index(row["decoy"]) for row in rows)
    # The standard deviation is 10.
    assert 150 < num_first < 250


def test_rows_depend_on_seed_and_index_alone() -> None:
    rows = marked.prompts(5, 100, seed=5)
    assert marked.prompts(2, 100, seed=5) == rows[:2]
    assert marked.prompts(5, 100, seed=6) != rows


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_rows": -1}, "num_rows=-1"),
        ({"prompt_tokens": 25}, "raise it to at least 26"),
        ({"num_keys": 9}, "num_keys=9"),
    ],
)
def test_bad_arguments_are_named(arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        marked.prompts(**({"num_rows": 1, "prompt_tokens": 64} | arguments))
