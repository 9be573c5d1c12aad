"""Associative recall over long prompts: an embedded task that needs no download.

A prompt is a sequence of token ids. Key-value pairs stand at random places among filler; the prompt ends with the query
marker and one of the keys; the answer is that key's value, one token. Pairs are adjacent (key, value) tokens, keys are
distinct within a prompt, and values are distinct too, so that an answer names its pair.

The vocabulary is split in contiguous ranges, so that ids read without a table:

    0           query marker
    1 .. 16     keys
    17 .. 32    values
    33 .. 63    filler
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

QUERY_TOKEN = 0
NUM_KEYS = 16
NUM_VALUES = 16
NUM_FILLERS = 31
FIRST_KEY = 1
FIRST_VALUE = FIRST_KEY + NUM_KEYS
FIRST_FILLER = FIRST_VALUE + NUM_VALUES
VOCAB_SIZE = FIRST_FILLER + NUM_FILLERS

DEFAULT_NUM_PAIRS = 8
NUM_QUERY_TOKENS = 2


def prompts(
    num_rows: int, prompt_tokens: int, num_pairs: int = DEFAULT_NUM_PAIRS, seed: int = 0
) -> list[dict[str, Any]]:
    """Recall prompts of an exact length.

    Row i depends on (seed, prompt_tokens, num_pairs, i) only: asking for more rows leaves the first ones as they are.

    Args:
        num_rows: rows to make, at least 0.
        prompt_tokens: length of every prompt in tokens, query included; at least `2 * num_pairs + 2`.
        num_pairs: key-value pairs in a prompt, 1 to 16.
        seed: a non-negative integer; the same arguments give the same rows.

    Returns:
        Rows `{"prompt": list[int] of prompt_tokens ids, "answer": int}`: the value token of the key that is queried.

    Raises:
        ValueError: an argument out of range.
    """
    if num_rows < 0:
        raise ValueError(f"num_rows={num_rows} is negative; ask for 0 rows or more.")
    if seed < 0:
        raise ValueError(f"seed={seed} is negative, and the generator takes none; choose 0 or more.")
    body_tokens = prompt_tokens - NUM_QUERY_TOKENS
    rows = []
    for index in range(num_rows):
        generator = np.random.default_rng([seed, prompt_tokens, num_pairs, index])
        body, keys, values = recall_body(generator, body_tokens, num_pairs)
        asked = int(generator.integers(num_pairs))
        query = [QUERY_TOKEN, int(keys[asked])]
        rows.append({"prompt": body.tolist() + query, "answer": int(values[asked])})
    return rows


def recall_body(
    generator: np.random.Generator, num_tokens: int, num_pairs: int = DEFAULT_NUM_PAIRS
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Filler with key-value pairs at random places: a prompt without its query.

    Every placement of the pairs that does not let two of them overlap is equally likely.

    Args:
        generator: source of randomness; advanced by the call.
        num_tokens: length of the body in tokens, at least `2 * num_pairs`.
        num_pairs: pairs to place, 1 to 16.

    Returns:
        `(body, keys, values)`: int64 ids of shapes [num_tokens], [num_pairs], [num_pairs]; pairs in order of place.

    Raises:
        ValueError: `num_pairs` out of range, or too few tokens for the pairs.
    """
    most = min(NUM_KEYS, NUM_VALUES)
    if not 1 <= num_pairs <= most:
        raise ValueError(f"num_pairs={num_pairs} is not in 1..{most}: keys and values are distinct.")
    if num_tokens < 2 * num_pairs:
        raise ValueError(
            f"{num_tokens} tokens cannot hold {num_pairs} key-value pairs of two tokens each; "
            f"raise prompt_tokens to at least {2 * num_pairs + NUM_QUERY_TOKENS} or lower num_pairs."
        )
    keys = FIRST_KEY + generator.permutation(NUM_KEYS)[:num_pairs]
    values = FIRST_VALUE + generator.permutation(NUM_VALUES)[:num_pairs]
    body = FIRST_FILLER + generator.integers(NUM_FILLERS, size=num_tokens)
    # With every pair seen as one slot, choosing slots and adding back the width of the earlier pairs spreads evenly.
    slots = np.sort(generator.choice(num_tokens - num_pairs, size=num_pairs, replace=False))
    starts = slots + np.arange(num_pairs)
    body[starts] = keys
    body[starts + 1] = values
    return body, keys, values


def reward(completion_ids: Sequence[Sequence[int]], answer: Sequence[int], **_: Any) -> list[float]:
    """1.0 where a completion begins with the answer's token, else 0.0.

    Called by keyword in TRL's reward contract: one entry a completion in `completion_ids` and in the dataset's column
    `answer`; other columns and `prompts`, `completions` are accepted and not looked at.
    """
    return [
        1.0 if len(ids) > 0 and int(ids[0]) == int(expected) else 0.0
        for ids, expected in zip(completion_ids, answer, strict=True)
    ]
