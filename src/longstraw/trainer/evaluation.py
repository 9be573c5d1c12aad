"""Held-out evaluation: the mean reward of each named set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from longstraw.config.dataset import EvalConfig
from longstraw.config.train import TrainConfig
from longstraw.data.prompts import PromptSet
from longstraw.data.stream import derive_seed
from longstraw.engine.engine import Engine
from longstraw.parallel.processes import Processes, in_order
from longstraw.rollout.judge import Judge
from longstraw.rollout.records import Group
from longstraw.rollout.samplers import EngineSampler, sampling_options
from longstraw.trainer.metrics import Row
from longstraw.trainer.rng import untouched_rng
from longstraw.trainer.statistics import describe, mean_and_deviation


@dataclass
class Evaluator:
    """Evaluates named sets with the training rewards. Leaves every random number generator as it was.

    Attributes:
        sets: prompts and options by name; the first `num_samples` prompts are used.
        engine: without prompt gradient.
        stop_ids: ids that end a response.
    """

    config: TrainConfig
    sets: dict[str, tuple[PromptSet, EvalConfig]]
    engine: Engine
    judge: Judge
    stop_ids: list[int]
    processes: Processes

    def __bool__(self) -> bool:
        return bool(self.sets)

    def run(self, trainer_state: Any) -> Row:
        """Of each set `eval/NAME/…`: `reward`, `reward_std`, `num_samples`, `completions/mean_length`, `time`."""
        row: Row = {}
        with untouched_rng():
            for name, (prompts, options) in self.sets.items():
                begin = time.perf_counter()
                groups = in_order(
                    self.processes.together(partial(self._judge_share, name, prompts, options, trainer_state))
                )
                row |= {f"eval/{name}/{key}": value for key, value in _summary(groups).items()}
                row[f"eval/{name}/time"] = time.perf_counter() - begin
        return row

    def _judge_share(self, name: str, prompts: PromptSet, options: EvalConfig, trainer_state: Any) -> dict[int, Group]:
        """This process's share of a set: sampled and judged, by position."""
        config = self.config
        groups = []
        for position, prompt in enumerate(prompts.prompts[: options.num_samples]):
            if not self.processes.owns(position):
                continue
            sampling = sampling_options(config, self.stop_ids, derive_seed(config.seed, "eval", name, position)) | {
                "num": options.num_generations,
                "max_new_tokens": options.max_completion_length or config.max_completion_length,
            }
            if options.greedy:
                sampling |= {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
            with self.engine.capture(prompt.ids) as state:
                rollouts = EngineSampler(self.engine).sample(prompt, state, sampling, trainer_state.global_step)
            groups.append(Group(position, prompt, rollouts))
        self.engine.meter.phases.clear()
        self.judge(groups, trainer_state)
        return {group.position: group for group in groups}


def _summary(groups: Sequence[Group]) -> Row:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    mean, deviation = mean_and_deviation(rollout.reward for rollout in rollouts)
    return {
        "reward": mean,
        "reward_std": deviation,
        "num_samples": len(groups),
        **describe((len(rollout.ids) for rollout in rollouts), "completions/{}_length", ["mean"]),
    }
