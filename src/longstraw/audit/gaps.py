"""What a report does not show: not measured, measured in part, or true by construction; and how to have it measured."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from longstraw.audit.catalogue import is_staleness, metric_keys
from longstraw.audit.headline import status
from longstraw.audit.run_data import RunData, finite


@dataclass(frozen=True)
class Gap:
    """Something that is not there.

    Attributes:
        what: the quantity.
        why: the reason in this run, and how to have it.
    """

    what: str
    why: str


def find_gaps(run: RunData) -> list[Gap]:
    """All that the reader might take for measured and is not."""
    return [*_of_the_ending(run), *_of_evaluation(run), *_of_the_policy(run), *_of_costs(run), *_of_files(run)]


def _of_the_ending(run: RunData) -> Iterator[Gap]:
    planned = run.planned_steps
    if planned and run.last_step < planned:
        yield Gap(
            f"Steps {run.last_step + 1:,} to {planned:,}",
            f"The run ended after step {run.last_step:,} ({status(run).word}), so every “last” here is of that step.",
        )
    if not run.steps:
        yield Gap("Training", "No optimizer step was completed; only evaluations were written.")
    if not run.has_final:
        yield Gap("The trained model", "There is no final/: the model is saved after the last step.")
    yield Gap(
        "Spread over seeds",
        "This is one run with one seed. Bands show the spread of samples within a step, not that of repeated runs.",
    )


def _of_evaluation(run: RunData) -> Iterator[Gap]:
    if not run.set_names:
        named = run.option("eval")
        yield Gap(
            "Held-out evaluation",
            "The configuration names sets, but the run ended before it evaluated them."
            if named
            else "The configuration has no evaluation set; the training reward alone cannot show that anything general "
            "was learned. Add one, e.g. eval: {held_out: {source: data.jsonl}}.",
        )
        return
    first, last = run.evaluations[0]["step"], run.evaluations[-1]["step"]
    if first > 0:
        yield Gap(
            "Held-out reward before training", f"The first evaluation is of step {first:,}. Set eval_on_start to true."
        )
    if run.steps and last < run.last_step:
        yield Gap("Held-out reward after the last step", f"The last evaluation is of step {last:,}.")
    if len(run.evaluations) > 1 and run.option("eval_steps") is None:
        yield Gap("Held-out reward during training", "Only before and after. Set eval_steps to evaluate in between.")


def _of_the_policy(run: RunData) -> Iterator[Gap]:
    if not run.steps:
        return
    keys = metric_keys(run)
    if "reward" not in keys:
        yield Gap("Training reward", "No row of metrics has one.")
    unrewarded = sum(1 for row in run.steps if "reward" in row and finite(row, "reward") is None)
    if unrewarded:
        yield Gap("Reward of some steps", f"In {unrewarded:,} steps no reward function scored any completion.")
    if "kl" not in keys:
        yield Gap(
            "KL to a reference policy",
            "beta is 0, so no reference policy was kept. Set beta above 0."
            if run.option("beta") == 0
            else "No row of metrics has one.",
        )
    if run.option("num_iterations") == 1:
        yield Gap(
            "Clipping",
            "With one iteration on each batch the policy that is trained is the one that sampled: ratios are 1 and "
            "nothing is clipped, by construction. Set num_iterations above 1 to reuse completions.",
        )
    silent = sum(1 for row in run.steps if "ratio/mean" not in row)
    if silent:
        yield Gap(
            "Ratios and clipping of some steps",
            f"In {silent:,} of {len(run.steps):,} steps every group was left out for want of signal.",
        )
    if run.option("prompt_grad") not in (None, "full"):
        yield Gap(
            "The gradient through the whole prompt",
            f"prompt_grad is {run.option('prompt_grad')}: what was left out of the gradient was not computed, so its "
            "size is unknown. Set prompt_grad to full.",
        )
    if not any("drift" in key for key in keys if is_staleness(key)):
        yield Gap("Drift of captured prompts", _why_no_drift(run))


def _why_no_drift(run: RunData) -> str:
    if run.option("num_iterations") == 1 or run.option("refresh") == "always":
        return "No prompt's state outlived an optimizer step, so none was stale when it was used."
    return "No state was probed. With refresh: {drift: TOLERANCE} states are probed before they are used again."


def _of_costs(run: RunData) -> Iterator[Gap]:
    keys = metric_keys(run)
    if run.steps and not any(key.startswith("memory/") for key in keys):
        yield Gap("Memory by phase", "The system did not tell the run its peak memory.")
    elif run.starts and not run.starts[-1].get("accelerators"):
        yield Gap(
            "Accelerator memory",
            "The run had no accelerator. Memory is the resident memory of the whole process, in which a phase keeps "
            "what earlier ones did not give back to the system.",
        )
    if len(run.starts) > 1:
        yield Gap(
            "Time of lost steps",
            f"The run was started {len(run.starts)} times. Steps that an earlier start did after its last checkpoint "
            "were run again, and only the last try is counted.",
        )


def _of_files(run: RunData) -> Iterator[Gap]:
    if run.num_unreadable:
        lines = "1 line" if run.num_unreadable == 1 else f"{run.num_unreadable:,} lines"
        yield Gap(
            "Part of metrics.jsonl",
            f"{lines} cut short or damaged, and left out. A kill while a row is being written does that.",
        )
    if not run.completion_files:
        why = "log_completions is false." if run.option("log_completions") is False else "completions/ is empty."
        yield Gap("Samples of completions", why)
    if not run.config:
        yield Gap("The configuration", "config.yaml is missing or cannot be read.")
    if not run.starts:
        yield Gap("The environment", "environment.json is missing or cannot be read.")
