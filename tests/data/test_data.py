"""Rows from every kind of source, prompts of every kind, filtering with counts, an order that can be resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

from longstraw.config.dataset import DatasetConfig
from longstraw.data.prompts import prepare_prompts
from longstraw.data.rows import read_rows
from longstraw.data.stream import PromptStream, derive_seed
from longstraw.data.text import TextCodec

CODEC = TextCodec(None, vocab_size=tiny.VOCAB_SIZE)


def test_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "w1", "answer": 3}\n\n{"prompt": "w2", "answer": 4}\n')
    assert read_rows(DatasetConfig(source=str(path)), "dataset")[1] == {"prompt": "w2", "answer": 4}
    path.write_text('{"prompt": "w1"}\n{"prompt": ')
    with pytest.raises(ValueError, match=r"'dataset.source': line 2 of .* is not JSON"):
        read_rows(DatasetConfig(source=str(path)), "dataset")
    path.write_text('{"question": "w1"}\n')
    with pytest.raises(ValueError, match=r"row 0 has no column 'prompt'; it has 'question'"):
        read_rows(DatasetConfig(source=str(path)), "dataset")
    path.write_text("")
    with pytest.raises(ValueError, match="has no rows"):
        read_rows(DatasetConfig(source=str(path)), "dataset")
    whole = tmp_path / "whole.json"
    whole.write_text('[{"prompt": "w1"}, {"prompt": "w2"}]')
    assert [row["prompt"] for row in read_rows(DatasetConfig(source=str(whole)), "dataset")] == ["w1", "w2"]
    with pytest.raises(ValueError, match="does not exist"):
        read_rows(DatasetConfig(source=str(tmp_path / "absent.jsonl")), "dataset")


def test_functions_and_datasets(tmp_path: Path) -> None:
    assert len(read_rows(DatasetConfig(source="tiny:rows", args={"num_rows": 3}), "dataset")) == 3
    with pytest.raises(ValueError, match=r"'dataset.source': calling tiny:rows with \{'colour': 1\} failed"):
        read_rows(DatasetConfig(source="tiny:rows", args={"colour": 1}), "dataset")
    with pytest.raises(ValueError, match="there is no function 'absent' in tiny"):
        read_rows(DatasetConfig(source="tiny:absent"), "dataset")
    with pytest.raises(ValueError, match=r"names the module 'absent_module', which is not found"):
        read_rows(DatasetConfig(source="absent_module:rows"), "dataset")

    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(tiny.rows(4)).save_to_disk(str(tmp_path / "saved"))
    rows = read_rows(DatasetConfig(source=str(tmp_path / "saved")), "dataset")
    assert rows == tiny.rows(4)
    datasets.Dataset.from_list(tiny.rows(4)).to_parquet(str(tmp_path / "rows.parquet"))
    assert read_rows(DatasetConfig(source=str(tmp_path / "rows.parquet")), "dataset") == rows


def test_lengths_are_filtered_and_counted() -> None:
    prompts = prepare_prompts(tiny.rows(6, num_tokens=20), CODEC, "dataset", min_length=21, max_length=23)
    assert [prompt.row for prompt in prompts.prompts] == [1, 2, 3]
    assert prompts.summary() == (
        "3 prompts of 21 to 23 tokens; 2 dropped: longer than max_prompt_length=23; "
        "1 dropped: shorter than min_prompt_length=21"
    )
    with pytest.raises(ValueError, match=r"no prompt of 6 is left \(6 longer than max_prompt_length=2\)"):
        prepare_prompts(tiny.rows(6), CODEC, "dataset", max_length=2)


@pytest.mark.parametrize(
    ("prompt", "problem"),
    [
        ([], "the prompt is empty"),
        ([1, 99], "token id 99, outside the model's vocabulary of 61"),
        ([-1], "token id -1"),
        ("w1", "the prompt is text, but there is no tokenizer"),
        ([{"role": "user", "content": "w1"}], "the prompt is a chat, but there is no tokenizer"),
        (3, "of type int"),
        ([True], "of type list"),
    ],
)
def test_prompts_that_cannot_be_encoded(prompt: Any, problem: str) -> None:
    with pytest.raises(ValueError, match="row 0") as raised:
        prepare_prompts([{"prompt": prompt}], CODEC, "dataset")
    assert problem in str(raised.value)


def test_text_and_chat_in_trls_form() -> None:
    codec = TextCodec(tiny.tokenizer())
    chat = [{"role": "user", "content": "w1 w2"}]
    assert codec.encode("w1 w2", "").tolist() == [5, 6]
    assert codec.encode(chat, "").tolist() == [2, 5, 6, 1, 3]  # user w1 w2 <eos> assistant
    assert codec.decode_completions("w1", [[5, 6, 1]]) == ["w1 w2"]
    assert codec.decode_completions(chat, [[5, 1]]) == [[{"role": "assistant", "content": "w1"}]]
    assert CODEC.decode_completions([5], [[5, 1]]) == [[5, 1]]


def test_the_stream_is_a_function_of_seed_and_position() -> None:
    prompts = prepare_prompts(tiny.rows(7), CODEC, "dataset")
    walked = [PromptStream(prompts, 3, shuffle=True).at(position).row for position in range(21)]
    jumping = PromptStream(prompts, 3, shuffle=True)
    assert [jumping.at(position).row for position in reversed(range(21))] == walked[::-1]
    for epoch in range(3):
        assert sorted(walked[7 * epoch : 7 * epoch + 7]) == list(range(7))
    assert walked[:7] != walked[7:14]
    assert walked != [PromptStream(prompts, 4, shuffle=True).at(position).row for position in range(21)]
    assert [PromptStream(prompts, 3, shuffle=False).at(position).row for position in range(8)] == [*range(7), 0]


def test_seeds_and_fingerprints_are_fixed() -> None:
    assert derive_seed(42, "sample", 7) == derive_seed(42, "sample", 7) != derive_seed(42, "sample", 8)
    assert derive_seed(1) < 2**63
    prompts = prepare_prompts(tiny.rows(3), CODEC, "dataset")
    assert prompts.prompts[0].ids.dtype == np.int32
    assert prompts.fingerprint() == prepare_prompts(tiny.rows(3), CODEC, "dataset").fingerprint()
    assert prompts.fingerprint() != prepare_prompts(tiny.rows(3, seed=1), CODEC, "dataset").fingerprint()
    assert json.dumps(prompts.prompts[0].columns) == json.dumps({"target": tiny.rows(3)[0]["target"]})
