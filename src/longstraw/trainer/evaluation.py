"""Held-out evaluation: the mean reward of each named set."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from longstraw.config.dataset import EvalConfig
from longstraw.config.train import TrainConfig
from longstraw.data.prompts import PromptSet
from longstraw.data.stream import derive_seed
from longstraw.data.text import TextCodec
from longstraw.engine.engine import Engine
from longstraw.parallel.processes import Processes, in_order
from longstraw.rollout.groups import Group
from longstraw.rollout.judge import Judged, judge
from longstraw.rollout.rewards import RewardFunction
from longstraw.trainer.metrics import Row
from longstraw.trainer.rng import untouched_rng
from longstraw.trainer.statistics import describe, mean_and_deviation


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
        processes: Processes | None = None,
    ) -> None:
        self._config = config
        self._sets = sets
        self._engine = engine
        self._codec = codec
        self._rewards = rewards
        self._stop_ids = stop_ids
        self._processes = processes or Processes()

    def __bool__(self) -> bool:
        return bool(self._sets)

    def run(self, trainer_state: Any) -> Row:
        """Of each set `eval/NAME/…`: `reward`, `reward_std`, `num_samples`, `completions/mean_length`, `time`."""
        row: Row = {}
        with untouched_rng():
            for name, (prompts, options) in self._sets.items():
                begin = time.perf_counter()
                judged = in_order(
                    self._processes.together(partial(self._judge_share, name, prompts, options, trainer_state))
                )
                row |= {f"eval/{name}/{key}": value for key, value in _summary(judged).items()}
                row[f"eval/{name}/time"] = time.perf_counter() - begin
        return row

    def _judge_share(self, name: str, prompts: PromptSet, options: EvalConfig, trainer_state: Any) -> dict[int, Judged]:
        """This process's share of a set: sampled and judged, by position."""
        config = self._config
        groups = []
        for position, prompt in enumerate(prompts.prompts[: options.num_samples]):
            if not self._processes.owns(position):
                continue
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
        self._engine.meter.phases.clear()
        return judge(self._rewards, config.reward_weights, groups, self._codec, trainer_state)


def _summary(judged: Sequence[Judged]) -> Row:
    mean, deviation = mean_and_deviation(reward for entry in judged for reward in entry.group.rewards)
    lengths = (len(ids) for entry in judged for ids in entry.group.responses)
    return {
        "reward": mean,
        "reward_std": deviation,
        "num_samples": len(judged),
        **describe(lengths, "completions/{}_length", ["mean"]),
    }
