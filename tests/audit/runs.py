"""Run directories made by hand: rows of metrics as the trainer writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

CONFIG: dict[str, Any] = {
    "model": {"path": "some/model", "dtype": "float32"},
    "dataset": {"source": "prompts.jsonl"},
    "reward_funcs": ["mine:reward"],
    "eval": {"held_out": {"source": "held_out.jsonl"}},
    "max_steps": 4,
    "num_generations": 8,
    "max_completion_length": 64,
    "beta": 0.05,
    "num_iterations": 2,
}


def step_row(step: int, **changes: Any) -> dict[str, Any]:
    """Metrics of an optimizer step; a change to None is written as null."""
    return {
        "step": step,
        "loss": 0.01 * step,
        "grad_norm": 1.0 + step,
        "learning_rate": 1e-4 / step,
        "num_tokens": 1000 * step,
        "reward": 0.2 * step,
        "reward_std": 0.1,
        "completions/mean_length": 10.0 * step,
        "completions/min_length": 5.0,
        "completions/max_length": 40.0,
        "prompts/mean_length": 300.0,
        "prompts/min_length": 256.0,
        "prompts/max_length": 512.0,
        "clip_ratio/region_mean": 0.02 * step,
        "ratio/mean": 1.0 + 0.01 * step,
        "kl": 0.003 * step,
        "step_time": 10.0,
        "tokens_per_second": 100.0 + step,
        "peak_memory_bytes": (500 + step) * 2**20,
        "time/capture": 2.0,
        "time/replay": 3.0,
        "time/sweep": 4.0,
        "memory/capture": 400 * 2**20,
        "memory/sweep": (500 + step) * 2**20,
    } | changes


def eval_row(step: int, reward: float = 0.5, name: str = "held_out") -> dict[str, Any]:
    """Metrics of an evaluation of one set with 25 prompts."""
    values = {"reward": reward, "reward_std": 0.5, "num_samples": 25, "time": 3.0}
    return {"step": step, **{f"eval/{name}/{key}": value for key, value in values.items()}}


def completion(reward: float | None, text: Any = "an answer", **changes: Any) -> dict[str, Any]:
    """A row of completions/."""
    return {
        "row": 3,
        "prompt_tokens": 300,
        "prompt": "… the question",
        "completion": text,
        "rewards": {"reward": reward},
        "reward": reward,
        "advantage": 0.5,
        "completion_tokens": 1,
        "finish_reason": "stop",
    } | changes


FOUR_STEPS = [eval_row(0, 0.4), *(step_row(step) for step in (1, 2, 3, 4)), eval_row(4, 0.8)]


def write_run(
    path: Path,
    rows: list[dict[str, Any]] = FOUR_STEPS,
    *,
    config: dict[str, Any] | None = CONFIG,
    summary: dict[str, Any] | None = None,
    completions: dict[int, list[dict[str, Any]]] | None = None,
    is_final: bool = True,
    tail: str = "",
) -> Path:
    """A run directory. `tail` follows the last whole row of metrics.jsonl; `config` None leaves config.yaml away."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    if config is not None:
        (path / "config.yaml").write_text(yaml.safe_dump(config))
    summary = {"status": "finished", "step": 4, "num_steps": 4} if summary is None else summary
    (path / "summary.json").write_text(json.dumps(summary))
    start = {"time": "2026-11-29T20:00:00+00:00", "command": ["longstraw", "train"], "python": "3.11.7", "cpu": "A CPU"}
    (path / "environment.json").write_text(json.dumps({"starts": [start]}))
    (path / "completions").mkdir(exist_ok=True)
    for step, samples in (completions or {}).items():
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in samples)
        (path / "completions" / f"step-{step:06d}.jsonl").write_text(lines, encoding="utf-8", errors="surrogatepass")
    if is_final:
        (path / "final").mkdir(exist_ok=True)
    return path
