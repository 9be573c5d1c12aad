"""Rows of a source: a function, a file, or what the datasets library reads."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from longstraw.config.dataset import DatasetConfig
from longstraw.config.locate import FROM_HERE, is_function_reference, load_function

Row = dict[str, Any]
_FILE_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


def read_rows(config: DatasetConfig, option: str, skip_bad_rows: bool = False) -> list[Row | ValueError]:
    """Rows of a source: a function, a JSONL file, or what datasets.load_dataset reads.

    Args:
        skip_bad_rows: give the error in place of a row that is no JSON, or has no `prompt`.
    Raises:
        ValueError: the source is missing, empty, or has such rows; the message names the option.
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
    checked = [_checked(row, number, key) for number, row in enumerate(rows)]
    for row in checked:
        if isinstance(row, ValueError) and not skip_bad_rows:
            raise row
    return checked


def _checked(row: Any, number: int, key: str) -> Row | ValueError:
    if isinstance(row, ValueError):
        return row
    if not isinstance(row, dict):
        return ValueError(
            f"'{key}': row {number} is of type {type(row).__name__}; every row must be a mapping of columns."
        )
    if "prompt" not in row:
        return ValueError(
            f"'{key}': row {number} has no column 'prompt'; it has {', '.join(map(repr, row))}. Name the column of the "
            "prompts 'prompt'."
        )
    return row


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


def _rows_of_json(path: Path, key: str) -> list[Any]:
    if not path.is_file():
        raise ValueError(f"'{key}' is {path}, a file that does not exist. {FROM_HERE}")
    if path.suffix == ".json":
        try:
            array = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError:
            array = None  # lines, then
        if isinstance(array, list):
            return array
    rows: list[Any] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError as error:
                rows.append(
                    ValueError(f"'{key}': line {number} of {path} is not JSON ({error}). Write one JSON object a line.")
                )
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
