"""The top of the page: how the run ended, what came out of it, what it took."""

from __future__ import annotations

import math
from dataclasses import dataclass

from longstraw.audit.cost import memory_kind
from longstraw.audit.numbers import duration, memory, readable, signed, tokens
from longstraw.audit.run_data import Row, RunData, finite, finite_values


@dataclass(frozen=True)
class Status:
    """How a run ended.

    Attributes:
        word: "finished", "stopped", "failed" or "killed or still running".
        detail: one sentence or two.
        is_good: whether the run did all that it set out to do.
    """

    word: str
    detail: str
    is_good: bool


@dataclass(frozen=True)
class Tile:
    """A figure of the headline with its name and a line of explanation."""

    name: str
    value: str
    detail: str


@dataclass(frozen=True)
class HeldOut:
    """One held-out set before and after.

    Attributes:
        before, after: mean reward, with its standard error where it is known.
        change: of the mean.
        direction: "up", "down" or "same".
    """

    name: str
    num_samples: str
    before: str
    after: str
    change: str
    direction: str


def status(run: RunData) -> Status:
    """From summary.json; without a final word of it the run was killed, or is still going on."""
    said = run.summary.get("status")
    go_on = f"Go on with: longstraw train {run.path} --resume"
    saved = f"The last checkpoint is that of step {run.checkpoint_steps[-1]:,}." if run.checkpoint_steps else ""
    if said == "finished":
        return Status("finished", "" if run.has_final else "final/ is not there.", run.has_final)
    if said == "interrupted":
        return Status("stopped", f"Stopped on request. {saved} {go_on}", False)
    if said == "failed":
        error = run.summary.get("error", "No error was noted.")
        return Status("failed", f"{error} {saved} {go_on}", False)
    written = run.last_written.strftime("%Y-%m-%d %H:%M:%S %Z")
    return Status(
        "killed or still running",
        f"No end is recorded: the run was killed, or was still going on when this page was made. Its last row of "
        f"metrics is from {written}. {saved or 'No checkpoint was written.'} {go_on}",
        False,
    )


def describe_run(run: RunData) -> list[str]:
    """What was trained and how, in short phrases; only what the configuration says."""
    precision = [str(run.option("model", "dtype") or ""), run.option("model", "quantization")]
    rank = run.option("lora", "r")
    prompts, responses = run.option("prompts_per_step"), run.option("num_generations")
    accumulated = run.option("gradient_accumulation_steps") or 1
    phrases = [
        run.option("model", "path"),
        ", ".join(filter(None, precision)),
        f"LoRA of rank {rank}" if rank else "all parameters" if not run.option("model", "adapter") else "an adapter",
        f"prompt gradient: {_prompt_gradient(run.option('prompt_grad'))}",
        f"{prompts * accumulated} prompts × {responses} completions a step" if prompts and responses else None,
        f"{run.option('loss_type')} loss" if run.option("loss_type") else None,
    ]
    return [phrase for phrase in phrases if phrase] if run.config else []


def tiles(run: RunData) -> list[Tile]:
    """Reward, steps, time, memory, prompts: those that were measured."""
    made = [_reward_tile(run), _steps_tile(run), _time_tile(run), _memory_tile(run), _prompts_tile(run)]
    return [tile for tile in made if tile is not None]


def held_out(run: RunData) -> list[HeldOut]:
    """Each set's first and last evaluation; no change where there is only one."""
    found = []
    for name in run.set_names:
        key = f"eval/{name}/reward"
        rows = [row for row in run.evaluations if key in row]
        first, last = finite(rows[0], key), finite(rows[-1], key)
        again = len(rows) > 1
        change = last - first if again and first is not None and last is not None else None
        found.append(
            HeldOut(
                name,
                readable(finite(rows[-1], f"eval/{name}/num_samples")),
                f"{_with_error(rows[0], name)} (step {rows[0]['step']:,})",
                f"{_with_error(rows[-1], name)} (step {rows[-1]['step']:,})" if again else "–",
                signed(change),
                "same" if not change else "up" if change > 0 else "down",
            )
        )
    return found


def _reward_tile(run: RunData) -> Tile | None:
    rewards = finite_values(run.steps, "reward")
    if not rewards:
        return None
    size = min(10, max(1, len(rewards) // 5))
    first, last = (sum(part) / size for part in (rewards[:size], rewards[-size:]))
    if len(rewards) == 1:
        return Tile("Training reward", readable(first), "of the only step")
    which = "first and last step" if size == 1 else f"means of the first and the last {size} steps"
    return Tile("Training reward", f"{readable(first)} → {readable(last)}", which)


def _steps_tile(run: RunData) -> Tile:
    planned = run.planned_steps
    seen = finite(run.steps[-1], "num_tokens") if run.steps else None
    return Tile(
        "Optimizer steps",
        f"{run.last_step:,}" + (f" of {planned:,}" if planned else ""),
        f"{seen:,.0f} tokens of prompts and completions" if seen else "",
    )


def _time_tile(run: RunData) -> Tile | None:
    stepping = finite_values(run.steps, "step_time")
    evaluating = [time for name in run.set_names for time in finite_values(run.evaluations, f"eval/{name}/time")]
    if not stepping and not evaluating:
        return None
    parts = [f"{duration(sum(stepping) / len(stepping))} a step"] if stepping else []
    parts += [f"evaluations took {duration(sum(evaluating))}"] if evaluating else []
    return Tile("Time", duration(sum(stepping) + sum(evaluating)), "; ".join(parts))


def _memory_tile(run: RunData) -> Tile | None:
    peaks = [
        (peak, key.removeprefix("memory/"))
        for row in run.steps
        for key in row
        if key.startswith("memory/") and (peak := finite(row, key)) is not None
    ]
    whole = [(peak, "") for peak in finite_values(run.steps, "peak_memory_bytes")]
    if not whole and not peaks:
        return None
    peak, phase = max([*whole, *peaks])
    kind = "resident, the whole process" if "process" in memory_kind(run) else "allocated on the accelerator"
    return Tile("Peak memory", memory(peak), f"{kind}; reached in {phase}" if phase else kind)


def _prompts_tile(run: RunData) -> Tile | None:
    lows, highs, means = (finite_values(run.steps, f"prompts/{which}_length") for which in ("min", "max", "mean"))
    if not (lows and highs and means):
        return None
    if min(lows) == max(highs):
        return Tile("Prompts", tokens(min(lows)), "each")
    mean = readable(sum(means) / len(means))
    return Tile("Prompts", f"{readable(min(lows))} to {readable(max(highs))} tokens", f"{mean} on average")


def _with_error(row: Row, name: str) -> str:
    """Mean and standard error over the set's prompts."""
    mean, deviation, number = (finite(row, f"eval/{name}/{key}") for key in ("reward", "reward_std", "num_samples"))
    if mean is None or deviation is None or not number:
        return readable(mean)
    return f"{readable(mean)} ± {deviation / math.sqrt(number):.2g}"


def _prompt_gradient(option: object) -> str:
    return f"last {option:,} tokens" if isinstance(option, int) else str(option)
