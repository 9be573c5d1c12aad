"""Prompts: read rows, turn prompts into token ids, filter by length with a count, and an order that can be resumed."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from longstraw.training.config_parts import DatasetConfig
from longstraw.training.locate import FROM_HERE, is_function_reference, load_function
from longstraw.training.text import TextCodec

Row = dict[str, Any]
_FILE_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


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


class PromptStream:
    """An endless, resumable walk over a PromptSet: the n-th draw is a function of (seed, n) alone."""

    def __init__(self, prompts: PromptSet, seed: int, shuffle: bool) -> None:
        self._prompts = prompts.prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._order: list[int] = []

    def at(self, position: int) -> Prompt:
        """The prompt at a position of the walk; every `len(prompts)` positions are one epoch."""
        epoch, place = divmod(position, len(self._prompts))
        if epoch != self._epoch:
            self._order = list(range(len(self._prompts)))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._prompts[self._order[place]]


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed that depends on the parts alone, the same on every machine."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def read_rows(config: DatasetConfig, option: str) -> list[Row]:
    """Rows of a source: a function, a JSONL file, or what datasets.load_dataset reads.

    Raises:
        ValueError: the source is missing, empty, or has rows without a `prompt`; the message names the option.
    """
    source, key = config.source, f"{option}.source"
    if is_function_reference(source):
        rows = _rows_of_function(config, key)
    elif source.endswith((".jsonl", ".json")):
        rows = _rows_of_json(Path(source), key)
    else:
        rows = _rows_of_datasets(config, key)
    if not rows:
        raise ValueError(f"'{key}': {source} has no rows. Training needs at least one prompt.")
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            raise ValueError(
                f"'{key}': row {number} is of type {type(row).__name__}; every row must be a mapping of columns."
            )
        if "prompt" not in row:
            raise ValueError(
                f"'{key}': row {number} has no column 'prompt'; it has {', '.join(map(repr, row))}. Name the column "
                "of the "
                "prompts 'prompt'."
            )
    return rows


def prepare_prompts(
    rows: Sequence[Row], codec: TextCodec, option: str, *, min_length: int = 1, max_length: int | None = None
) -> PromptSet:
    """Encode the prompts and keep those of `min_length` to `max_length` tokens.

    Raises:
        ValueError: a prompt that cannot be encoded (the row is named), or nothing left (the counts are given).
    """
    too_long, too_short = f"longer than max_prompt_length={max_length}", f"shorter than min_prompt_length={min_length}"
    result = PromptSet([], {too_long: 0, too_short: 0})
    for number, row in enumerate(rows):
        ids = codec.encode(row["prompt"], where=f"'{option}': row {number}")
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


def _rows_of_function(config: DatasetConfig, key: str) -> list[Row]:
    function = load_function(config.source, key)
    try:
        rows = function(**config.args)
    except TypeError as error:
        raise ValueError(
            f"'{key}': calling {config.source} with {config.args} failed: {error}. Correct the `args`."
        ) from error
    if not isinstance(rows, Iterable):
        raise ValueError(
            f"'{key}': {config.source} returned {type(rows).__name__}; it must return rows, each a mapping."
        )
    return [dict(row) if hasattr(row, "keys") else row for row in rows]


def _rows_of_json(path: Path, key: str) -> list[Row]:
    if not path.is_file():
        raise ValueError(f"'{key}' is {path}, a file that does not exist. {FROM_HERE}")
    if path.suffix == ".json":
        try:
            array = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            array = None  # lines, then
        if isinstance(array, list):
            return array
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(
                    f"'{key}': line {number} of {path} is not JSON ({error}). Write one JSON object a line."
                ) from None
    return rows


def _rows_of_datasets(config: DatasetConfig, key: str) -> list[Row]:
    import datasets

    try:
        folder = Path(config.source)
        if (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists():
            loaded = datasets.load_from_disk(config.source)
            loaded = loaded[config.split] if isinstance(loaded, datasets.DatasetDict) else loaded
        elif folder.suffix in _FILE_BUILDERS:
            builder = _FILE_BUILDERS[folder.suffix]
            loaded = datasets.load_dataset(builder, data_files=config.source, split=config.split, **config.args)
        else:
            loaded = datasets.load_dataset(config.source, split=config.split, **config.args)
    except Exception as error:  # the library raises its own kinds for each way to fail
        raise ValueError(
            f"'{key}': {config.source} (split '{config.split}') cannot be loaded: {error}. "
            "Give a .jsonl file, a folder, a hub name, or 'module:function'."
        ) from error
    return [dict(row) for row in loaded]
