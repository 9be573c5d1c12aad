"""Which metrics are drawn together, in what unit and with what words."""

from __future__ import annotations

from longstraw.audit.figures import Chart
from longstraw.audit.numbers import readable
from longstraw.audit.run_data import RunData

# Shown elsewhere, or of no use as a drawing.
BOOKKEEPING = ("step", "epoch", "num_tokens", "reward", "reward_std")
STALENESS_WORDS = ("drift", "stale", "refresh", "since_capture", "recapture")


def signal_charts(run: RunData) -> list[Chart]:
    """What the rewards hold besides their mean."""
    names = [key for row in run.steps for key in row if key.startswith("rewards/") and key.endswith("/mean")]
    functions = {key: key.removeprefix("rewards/").removesuffix("/mean") for key in dict.fromkeys(names)}
    by_function = [Chart("Reward by function", "mean reward", functions)] if len(functions) > 1 else []
    return [
        *by_function,
        Chart(
            "Prompts without signal",
            "share of prompts",
            {"frac_reward_zero_std": ""},
            "All responses to the prompt had one reward, so that nothing tells them apart.",
            zero=True,
        ),
        Chart(
            "Groups left out",
            "groups a step",
            {"groups/skipped": "skipped", "groups/replaced": "replaced"},
            "Skipped: no advantage in the group. Replaced: by dynamic sampling.",
            zero=True,
        ),
    ]


def completion_charts(run: RunData) -> list[Chart]:
    limit = run.option("max_completion_length")
    return [
        Chart(
            "Completion length",
            "tokens",
            {"completions/mean_length": ""},
            "The mean; the band reaches from the shortest to the longest.",
            band=("completions/min_length", "completions/max_length"),
            zero=True,
            rules=((limit, f"limit {readable(limit)}"),) if isinstance(limit, int) else (),
        ),
        Chart(
            "Completions cut at the length limit", "share of completions", {"completions/clipped_ratio": ""}, zero=True
        ),
        Chart(
            "Length of those that ended by themselves",
            "tokens",
            {"completions/mean_terminated_length": ""},
            "0 where none did.",
            band=("completions/min_terminated_length", "completions/max_terminated_length"),
            zero=True,
        ),
        Chart(
            "Prompt length",
            "tokens",
            {"prompts/mean_length": ""},
            "The mean; the band reaches from the shortest to the longest.",
            band=("prompts/min_length", "prompts/max_length"),
        ),
    ]


def policy_charts(run: RunData) -> list[Chart]:
    return [
        Chart("KL to the reference policy", "nats a token", {"kl": ""}, zero=True),
        Chart(
            "Clip ratio",
            "share of tokens",
            {"clip_ratio/region_mean": "either", "clip_ratio/low_mean": "below", "clip_ratio/high_mean": "above"},
            "How often the clip held the ratio of new to old probability.",
            zero=True,
        ),
        Chart("Clip ratio (CISPO)", "share of tokens", {"cispo_clip_ratio": ""}, zero=True),
        Chart(
            "KL to the policy that sampled",
            "nats a token",
            {"approx_kl": ""},
            "Grows over iterations on the same responses.",
            zero=True,
        ),
        Chart("Probability ratio, new to old", "mean ratio", {"ratio/mean": ""}),
        Chart(
            "Sampler against training engine",
            "nats",
            {"sampling/sampling_logp_difference/max": "largest", "sampling/sampling_logp_difference/mean": "mean"},
            "Absolute difference of the log-probabilities of the same tokens.",
            zero=True,
            spread=True,
        ),
        Chart("Entropy", "nats a token", {"entropy": ""}, zero=True),
    ]


def optimizer_charts(run: RunData) -> list[Chart]:
    clip = run.option("max_grad_norm")
    return [
        Chart("Loss", "loss", {"loss": ""}),
        Chart(
            "Gradient norm",
            "L2 norm before clipping",
            {"grad_norm": ""},
            zero=True,
            spread=True,
            rules=((float(clip), f"clipped to {readable(clip)}"),) if isinstance(clip, (int, float)) and clip else (),
        ),
        Chart(
            "Gradient, by side",
            "L2 norm before clipping",
            {"grad_norm/response": "response side", "grad_norm/prompt": "prompt side"},
            "Response side: with the prompt's state held constant. Prompt side: what passes through that state.",
            zero=True,
            spread=True,
        ),
        Chart(
            "Cosine of the gradient's sides",
            "cosine",
            {"grad_cosine": ""},
            "1: the prompt side points where the response side does; 0: at right angles; below 0: against it.",
        ),
        Chart("Learning rate", "learning rate", {"learning_rate": ""}, zero=True),
    ]


def staleness_charts(run: RunData) -> list[Chart]:
    """How old the captured prompts were when they were used, and every other metric that speaks of it."""
    tolerance = run.option("refresh", "drift")
    known = [
        Chart(
            "Age of the prompts' states",
            "optimizer steps",
            {"staleness/steps": ""},
            "Optimizer steps between the capture of a prompt and its use, on average.",
            zero=True,
        ),
        Chart(
            "Drift of the prompts' states",
            "relative L2 distance",
            {"staleness/drift_max": "largest", "staleness/drift": "mean"},
            "How far random segments of a kept state are from what the present parameters give.",
            zero=True,
            rules=((tolerance, f"captured again above {readable(tolerance)}"),)
            if isinstance(tolerance, (int, float))
            else (),
        ),
        Chart("Prompts captured again", "prompts a step", {"staleness/recaptured": ""}, zero=True),
    ]
    keys = {key for chart in known for key in chart.keys}
    others = [key for key in metric_keys(run) if is_staleness(key) and key not in keys]
    return [*known, *(Chart(_spoken(key), "value", {key: ""}, zero=True) for key in others)]


def remaining_charts(run: RunData, drawn: set[str]) -> list[Chart]:
    """What none of the others has drawn: metrics of reward functions, and of later versions."""
    return [
        Chart(_spoken(key), "value", {key: ""})
        for key in metric_keys(run)
        if key not in drawn and key not in BOOKKEEPING and not key.startswith(("rewards/", "time/", "memory/"))
    ]


def is_staleness(key: str) -> bool:
    return not key.startswith(("time/", "memory/")) and any(word in key for word in STALENESS_WORDS)


def metric_keys(run: RunData) -> list[str]:
    """Keys of all steps, in order of appearance."""
    return list(dict.fromkeys(key for row in run.steps for key in row))


def _spoken(key: str) -> str:
    return key.replace("_", " ").replace("/", ": ")
