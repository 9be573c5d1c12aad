"""Recall among decoys: a second embedded task, in which what the prompt's own tokens store has to change.

As in `longstraw.tasks.recall`, pairs of key and value stand among filler and one key is asked for. But each key has two
pairs with two values, and a mark before each pair says which one counts. A model that was warm-started on plain recall
knows no marks: it stores both pairs alike and, asked for the key, wavers between the two values. Sharper attention at
the query does not help as long as both pairs store the same kind of key: what is kept at a pair has to depend on its
mark.

Vocabulary, weights and reward are those of plain recall; the marks are two tokens that are filler there.
"""

from typing import Any

import numpy as np

from longstraw.tasks.recall import (
    FIRST_FILLER,
    FIRST_KEY,
    FIRST_VALUE,
    NUM_FILLERS,
    NUM_KEYS,
    NUM_QUERY_TOKENS,
    NUM_VALUES,
    QUERY_TOKEN,
    reward,
)

__all__ = ["prompts", "reward"]

VALID_MARK = FIRST_FILLER + NUM_FILLERS - 1
VOID_MARK = VALID_MARK - 1
DEFAULT_NUM_KEYS = 4
TOKENS_A_PAIR = 3


def prompts(num_rows: int, prompt_tokens: int, num_keys: int = DEFAULT_NUM_KEYS, seed: int = 0) -> list[dict[str, Any]]:
    """Prompts of an exact length, each with `num_keys` valid pairs and as many decoys.

    Row i depends on (seed, prompt_tokens, num_keys, i) only.

    Args:
        num_rows: rows to make, at least 0.
        prompt_tokens: length of every prompt in tokens, query included; at least `6 * num_keys + 2`.
        num_keys: keys in a prompt, 1 to 8; each has a valid pair and a void one, all values distinct.
        seed: a non-negative integer.

    Returns:
        Rows `{"prompt": list[int], "answer": int, "decoy": int}`: the value of the queried key's valid pair, and that
        of its void pair.

    Raises:
        ValueError: an argument out of range.
    """
    if num_rows < 0 or seed < 0:
        raise ValueError(f"num_rows={num_rows} and seed={seed} must be 0 or more.")
    most = min(NUM_KEYS, NUM_VALUES // 2)
    if not 1 <= num_keys <= most:
        raise ValueError(f"num_keys={num_keys} is not in 1..{most}: each key takes two values, all distinct.")
    least = 2 * TOKENS_A_PAIR * num_keys + NUM_QUERY_TOKENS
    if prompt_tokens < least:
        raise ValueError(
            f"prompt_tokens={prompt_tokens} cannot hold {2 * num_keys} marked pairs and the query; raise it to at "
            f"least {least} or lower num_keys."
        )
    return [
        _row(np.random.default_rng([seed, prompt_tokens, num_keys, i]), prompt_tokens, num_keys)
        for i in range(num_rows)
    ]


def _row(generator: np.random.Generator, prompt_tokens: int, num_keys: int) -> dict[str, Any]:
    num_pairs, num_tokens = 2 * num_keys, prompt_tokens - NUM_QUERY_TOKENS
    keys = FIRST_KEY + generator.permutation(NUM_KEYS)[:num_keys]
    values = FIRST_VALUE + generator.permutation(NUM_VALUES)[:num_pairs]
    body = FIRST_FILLER + generator.integers(NUM_FILLERS - 2, size=num_tokens)
    # With every marked pair seen as one slot, adding back the width of the earlier ones keeps them apart.
    widening = TOKENS_A_PAIR - 1
    slots = np.sort(generator.choice(num_tokens - widening * num_pairs, size=num_pairs, replace=False))
    starts = (slots + widening * np.arange(num_pairs))[generator.permutation(num_pairs)]
    body[starts] = np.repeat([VALID_MARK, VOID_MARK], num_keys)
    body[starts + 1] = np.tile(keys, 2)
    body[starts + 2] = values
    asked = int(generator.integers(num_keys))
    return {
        "prompt": [*body.tolist(), QUERY_TOKEN, int(keys[asked])],
        "answer": int(values[asked]),
        "decoy": int(values[asked + num_keys]),
    }
