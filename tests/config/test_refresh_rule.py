"""The rule of refresh: the ways to write it, and what is said about a mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_config import BASE, message

from longstraw.config.load import config_to_yaml, load_config


@pytest.mark.parametrize(
    ("words", "written"),
    [
        (["refresh=always"], "always"),
        (["refresh=every 3"], {"every": 3, "num_segments": 2}),
        (["refresh={drift: 0.05}"], {"drift": 0.05, "num_segments": 2}),
        (["refresh=always", "refresh.drift=1e-1", "refresh.num_segments=4"], {"drift": 0.1, "num_segments": 4}),
    ],
)
def test_the_ways_to_write_it(words: list[str], written: Any, tmp_path: Path) -> None:
    config = load_config(None, [*words, "num_iterations=2"], BASE)
    assert config.model_dump()["refresh"] == written
    (tmp_path / "config.yaml").write_text(config_to_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config
    assert load_config(None, (), BASE).refresh.is_always


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["refresh=sometimes"], "'refresh' is 'sometimes', which is no rule. Write always, {every: N} or"),
        (["refresh={every: 0}"], "'refresh.every' is 0"),
        (["refresh={drift: -0.1}"], "'refresh.drift' is -0.1"),
        (["refresh={drift: .nan}"], "'refresh.drift' is nan"),
        (["refresh={every: 2, drift: 0.1}"], "'refresh.every' and 'refresh.drift' are two rules. Remove one"),
        (["refresh={evry: 2}"], "unknown key 'refresh.evry'. Did you mean 'refresh.every'?"),
        (["refresh={every: 2}", "num_iterations=1"], "'num_iterations' is 1. Set num_iterations to 2 or more"),
        (["refresh={every: 2}", "gradient_accumulation_steps=2"], "Raise prompts_per_step instead"),
    ],
)
def test_a_mistake_names_the_key_and_the_remedy(words: list[str], expected: str) -> None:
    assert expected in message("num_iterations=4", *words)
