"""A few completions of a run with their rewards: the best and the worst of steps from first to last."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longstraw.audit.numbers import readable, signed, tokens
from longstraw.audit.run_data import Row, RunData, finite, read_json_lines

NUM_STEPS = 4
MAX_CHARACTERS = 4000
_SHOWN_APART = (
    "row", "prompt", "prompt_tokens", "completion", "completion_tokens", "reward", "rewards", "advantage",
    "finish_reason",
)  # fmt: skip

_ENDINGS = {"length": "at the length limit", "stop": "by itself"}


@dataclass(frozen=True)
class Sample:
    """One completion.

    Attributes:
        rank: "best of 16" and the like.
        facts: (name, value): reward, advantage, length, ending, and what a reward function logged besides.
        prompt: its end.
        completion: its text; ids as numbers.
    """

    rank: str
    facts: list[tuple[str, str]]
    prompt: str
    completion: str


@dataclass(frozen=True)
class StepSamples:
    """Completions of one step."""

    step: int
    num_completions: int
    samples: list[Sample]


def pick_samples(run: RunData) -> list[StepSamples]:
    """Best and worst of the first, the last and evenly spaced steps between; one where all rewards are equal."""
    steps = list(run.completion_files)
    last = len(steps) - 1
    places = sorted({round(index * last / max(NUM_STEPS - 1, 1)) for index in range(NUM_STEPS)}) if steps else []
    found = [_of_step(steps[place], run.completion_files[steps[place]]) for place in places]
    return [step for step in found if step.samples]


def as_text(completion: Any) -> str:
    """Text as it is, chat messages by role, token ids as numbers, anything else as JSON; cut after MAX_CHARACTERS."""
    if isinstance(completion, str):
        words = completion
    elif isinstance(completion, list) and completion and all(isinstance(part, dict) for part in completion):
        words = "\n".join(_message(part, alone=len(completion) == 1) for part in completion)
    elif isinstance(completion, list) and all(isinstance(part, int) for part in completion):
        words = "token ids: " + " ".join(map(str, completion))
    else:
        words = json.dumps(completion, ensure_ascii=False)
    if len(words) > MAX_CHARACTERS:
        return f"{words[:MAX_CHARACTERS]}… ({len(words) - MAX_CHARACTERS:,} more characters)"
    return words


def _of_step(step: int, path: Path) -> StepSamples:
    rows, _ = read_json_lines(path)
    scored = sorted(
        (row for row in rows if finite(row, "reward") is not None), key=lambda row: finite(row, "reward") or 0.0
    )
    if not scored:
        chosen = [("without a reward", row) for row in rows[:1]]
    elif finite(scored[0], "reward") == finite(scored[-1], "reward"):
        chosen = [(f"all {len(scored):,} have this reward", scored[0])]
    else:
        chosen = [("best", scored[-1]), ("worst", scored[0])]
    return StepSamples(step, len(rows), [_sample(rank, row) for rank, row in chosen])


def _sample(rank: str, row: Row) -> Sample:
    by_function = row.get("rewards")
    facts = [("reward", readable(finite(row, "reward")))]
    if isinstance(by_function, dict) and len(by_function) > 1:
        facts += [(str(name), readable(finite(by_function, name))) for name in by_function]
    facts.append(("advantage", signed(finite(row, "advantage"))))
    facts.append(("completion", tokens(finite(row, "completion_tokens"))))
    facts.append(("ended", _ENDINGS.get(str(row.get("finish_reason")), "–")))
    facts.append(("prompt", f"{tokens(finite(row, 'prompt_tokens'))}, row {row.get('row', '–')}"))
    facts += [(name, as_text(value)[:80]) for name, value in row.items() if name not in _SHOWN_APART]
    return Sample(rank, facts, as_text(row.get("prompt", "")), as_text(row.get("completion", "")))


def _message(message: dict[str, Any], alone: bool) -> str:
    content = message.get("content")
    words = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    further = {key: value for key, value in message.items() if key not in ("role", "content")}
    words += f"\n{json.dumps(further, ensure_ascii=False)}" if further else ""
    return words if alone and message.get("role") == "assistant" else f"[{message.get('role', '?')}] {words}"
