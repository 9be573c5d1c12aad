"""Prompts as token ids, filtered by length; what is dropped is counted."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from longstraw.data.rows import Row
from longstraw.data.text import TextCodec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prompt:
    """One row, ready to capture.

    Attributes:
        row: its number in the source, before filtering.
        ids: token ids, int32 [num_tokens].
        prompt: as the source gave it: text, messages or ids.
        columns: the row's other columns.
    """

    row: int
    ids: np.ndarray
    prompt: Any
    columns: Row

    @property
    def name(self) -> str:
        """For messages."""
        return f"the prompt of dataset row {self.row} ({len(self.ids):,} tokens)"


@dataclass
class PromptSet:
    """The prompts that passed, and what did not.

    Attributes:
        prompts: in the source's order.
        dropped: reason to count.
    """

    prompts: list[Prompt]
    dropped: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)

    def fingerprint(self) -> str:
        """A digest of ids and order: a resumed run must see the same prompts."""
        digest = hashlib.blake2b(digest_size=16)
        for prompt in self.prompts:
            digest.update(np.int64(len(prompt.ids)).tobytes())
            digest.update(prompt.ids.tobytes())
        return digest.hexdigest()

    def summary(self) -> str:
        """One line: how many prompts, how long, what was dropped and why."""
        lengths = [len(prompt.ids) for prompt in self.prompts]
        noun = "prompt" if len(self) == 1 else "prompts"
        text = f"{len(self)} {noun} of {min(lengths):,} to {max(lengths):,} tokens"
        drops = [f"{count} dropped: {reason}" for reason, count in self.dropped.items() if count]
        return "; ".join([text, *drops])


def prepare_prompts(
    rows: Sequence[Row | ValueError],
    codec: TextCodec,
    option: str,
    *,
    source: str = "",
    min_length: int = 1,
    max_length: int | None = None,
    skip_bad_rows: bool = False,
) -> PromptSet:
    """Encode the prompts and keep those of `min_length` to `max_length` tokens.

    Args:
        rows: an error stands for a row that could not be read.
        source: where they are from, for messages.
        skip_bad_rows: leave rows without a prompt that can be read and encoded out; they are counted and logged.
    Raises:
        ValueError: a prompt that cannot be encoded (the row is named), or nothing left (the counts are given).
    """
    too_long, too_short = f"longer than max_prompt_length={max_length}", f"shorter than min_prompt_length={min_length}"
    bad = "that cannot be read or encoded"
    result = PromptSet([], {too_long: 0, too_short: 0, bad: 0})
    for number, row in enumerate(rows):
        try:
            if isinstance(row, ValueError):
                raise row
            ids = codec.encode(row["prompt"], where=f"'{option}': row {number}{f' of {source}' if source else ''}")
        except ValueError as error:
            if not skip_bad_rows:
                raise
            result.dropped[bad] += 1
            logger.warning("left out: %s", error)
            continue
        if max_length is not None and len(ids) > max_length:
            result.dropped[too_long] += 1
        elif len(ids) < min_length:
            result.dropped[too_short] += 1
        else:
            columns = {name: value for name, value in row.items() if name != "prompt"}
            result.prompts.append(Prompt(number, ids, row["prompt"], columns))
    if not result.prompts:
        counts = ", ".join(f"{count} {reason}" for reason, count in result.dropped.items() if count)
        raise ValueError(
            f"'{option}': no prompt of {len(rows)} is left ({counts}). Widen the limits, or choose other data."
        )
    return result
