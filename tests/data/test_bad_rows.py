"""Rows that cannot be used: the row is named, or left out, counted and logged. Text that was rendered already."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
from tokenizers import AddedToken, processors

from longstraw.config.dataset import DatasetConfig
from longstraw.data.prompts import PromptSet, prepare_prompts
from longstraw.data.rows import read_rows
from longstraw.data.text import TextCodec

SAY = [{"role": "user", "content": "w1"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "w1"}]}]
SYSTEM = [{"role": "system", "content": "w2"}, *SAY]


def codec() -> TextCodec:
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' <eos> ' }}{% endfor %}"
    )
    return TextCodec(tokenizer)


def prompts(file: Path, skip: bool = False) -> PromptSet:
    rows = read_rows(DatasetConfig(source=str(file)), "dataset", skip)
    return prepare_prompts(rows, codec(), "dataset", source=str(file), skip_bad_rows=skip)


def write(file: Path, *rows: Any) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"prompt": SYSTEM}, r"row 1 of .*rows.jsonl: the chat template refuses .*TemplateError: no system role.*skip"),
        ({"prompt": PARTS}, r"row 1 of .*rows.jsonl: the chat template refuses these messages \(TypeError"),
        ({"prompt": 3}, r"row 1 of .*rows.jsonl: the prompt is of type int"),
        ({"question": "w1"}, r"row 1 has no column 'prompt'"),
        ('{"prompt": "w1', r"line 2 of .*rows.jsonl is not JSON"),
        ("[1]", r"row 1 is of type list"),
    ],
)
def test_a_bad_row_is_named_or_left_out(
    bad: Any, expected: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path / "rows.jsonl", {"prompt": SAY}, bad, {"prompt": "w3", "target": 4})
    with pytest.raises(ValueError, match=expected):
        prompts(file)
    with caplog.at_level(logging.WARNING):
        found = prompts(file, skip=True)
    assert [prompt.row for prompt in found.prompts] == [0, 2]
    assert "1 dropped: that cannot be read or encoded" in found.summary()
    assert caplog.text.count("left out: ") == 1


def test_nothing_left_says_so(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", {"prompt": SYSTEM})
    with pytest.raises(ValueError, match=r"no prompt of 1 is left \(1 that cannot be read or encoded\)"):
        prompts(file, skip=True)


@pytest.mark.parametrize("in_template", [False, True])
def test_one_bos_and_no_second(in_template: bool) -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"bos_token": AddedToken("<s>", special=True)})
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = ("{{ bos_token }} " if in_template else "") + tokenizer.chat_template
    rendered = tokenizer.apply_chat_template(SAY, tokenize=False, add_generation_prompt=True)
    counts = [list(TextCodec(tokenizer).encode(p, "")).count(tokenizer.bos_token_id) for p in ("w1", rendered, SAY)]
    assert counts == [1, 1, int(in_template)]
    twice = TextCodec(tokenizer).encode("<s> <s> w1", "").tolist()
    assert twice.count(tokenizer.bos_token_id) == 2  # as it was written


def test_special_tokens_reach_the_rewards_if_asked_for() -> None:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>"]})
    ids = [tokenizer.convert_tokens_to_ids(token) for token in ("<think>", "w1", "<eos>")]
    assert TextCodec(tokenizer).decode_completions("w1", [ids]) == ["w1"]
    kept = TextCodec(tokenizer, skip_special_tokens=False)
    assert [text.split() for text in kept.decode_completions("w1", [ids])] == [["<think>", "w1", "<eos>"]]
    assert "<think>" in kept.decode_completions(SAY, [ids])[0][0]["content"]
