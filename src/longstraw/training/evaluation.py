"""Held-out evaluation: the mean reward of each named set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from longstraw.engine.engine import Engine
from longstraw.objective import combine_rewards
from longstraw.training.config import TrainConfig
from longstraw.training.config_parts import EvalConfig
from longstraw.training.data import PromptSet, derive_seed
from longstraw.training.groups import Group
from longstraw.training.metrics import Row, describe, mean_and_deviation
from longstraw.training.rewards import RewardFunction
from longstraw.training.rng import untouched_rng
from longstraw.training.rollout import score_groups
from longstraw.training.text import TextCodec


class Evaluator:
    """Evaluates named sets with the training rewards. Leaves every random number generator as it was.

    Args:
        sets: prompts and options by name; the first `num_samples` prompts are used.
        engine: without prompt gradient.
    """

    def __init__(
        self,
        config: TrainConfig,
        sets: dict[str, tuple[PromptSet, EvalConfig]],
        engine: Engine,
        codec: TextCodec,
        rewards: Sequence[RewardFunction],
        stop_ids: list[int],
    ) -> None:
        self._config = config
        self._sets = sets
        self._engine = engine
        self._codec = codec
        self._rewards = rewards
        self._stop_ids = stop_ids

    def __bool__(self) -> bool:
        return bool(self._sets)

    def run(self, trainer_state: Any) -> Row:
        """Of each set `eval/NAME/…`: `reward`, `reward_std`, `num_samples`, `completions/mean_length`, `time`."""
        row: Row = {}
        with untouched_rng():
            for name, (prompts, options) in self._sets.items():
                begin = time.perf_counter()
                row |= self._run_set(name, prompts, options, trainer_state)
                row[f"eval/{name}/time"] = time.perf_counter() - begin
        return row

    def _run_set(self, name: str, prompts: PromptSet, options: EvalConfig, trainer_state: Any) -> Row:
        config = self._config
        groups, completions = [], []
        for position, prompt in enumerate(prompts.prompts[: options.num_samples]):
            with self._engine.capture(prompt.ids) as state:
                drafts = self._engine.sample(
                    state,
                    num=options.num_generations,
                    max_new_tokens=options.max_completion_length or config.max_completion_length,
                    temperature=0.0 if options.greedy else config.temperature,
                    top_p=1.0 if options.greedy else config.top_p,
                    top_k=0 if options.greedy else config.top_k,
                    min_p=0.0 if options.greedy else config.min_p or 0.0,
                    repetition_penalty=config.repetition_penalty,
                    stop_ids=self._stop_ids,
                    seed=derive_seed(config.seed, "eval", name, position),
                )
            groups.append(Group(position, prompt, [draft.ids for draft in drafts], [], [], []))
            completions += self._codec.decode_completions(prompt.prompt, [draft.ids.tolist() for draft in drafts])
        self._engine.meter.phases.clear()
        scores = score_groups(self._rewards, groups, completions, trainer_state)
        totals = combine_rewards(scores.per_function, config.reward_weights).tolist()
        mean, deviation = mean_and_deviation(None if total != total else total for total in totals)
        lengths = describe((len(ids) for group in groups for ids in group.responses), "completions/{}_length", ["mean"])
        row: Row = {"reward": mean, "reward_std": deviation, "num_samples": len(groups), **lengths}
        return {f"eval/{name}/{key}": value for key, value in row.items()}
