"""Combinations of options that cannot be, each with its remedy."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longstraw.config.train import TrainConfig


def find_problems(config: TrainConfig) -> Iterator[str]:
    """Yield what cannot be, each with its remedy."""
    with warnings.catch_warnings():  # the trainer warns once, when it builds the loss
        warnings.simplefilter("ignore")
        try:
            config.policy_loss()
        except ValueError as error:
            yield str(error)
    if config.num_generations < 2:
        yield (
            f"'num_generations' is {config.num_generations}: an advantage compares the responses of one group, and a "
            "group of one has nothing to compare with. Set num_generations to 2 or more."
        )
    if config.model.quantization and not (config.lora or config.model.adapter):
        yield (
            "'model.quantization: nf4' freezes the base weights, so nothing would be trained. Add a `lora` group, or "
            "model.adapter."
        )
    if config.lora and config.model.adapter:
        yield "'lora' makes new adapters and 'model.adapter' goes on with a trained one. Remove one of them."
    if config.model.reference_adapter and not (config.beta > 0 and (config.lora or config.model.adapter)):
        yield (
            "'model.reference_adapter' is the reference of the KL term between adapters. Set beta above 0 and train an "
            "adapter (`lora` or model.adapter), or remove it."
        )
    if config.reward_weights is not None and len(config.reward_weights) != len(config.reward_funcs):
        yield (
            f"'reward_weights' has {len(config.reward_weights)} values for {len(config.reward_funcs)} reward "
            "functions. Give one weight a function."
        )
    if config.max_steps == 0:
        yield "'max_steps' is 0: there is nothing to do. Set it to 1 or more, or to -1 to go by num_train_epochs."
    if config.warmup_steps >= 1 and config.warmup_steps != int(config.warmup_steps):
        yield f"'warmup_steps' is {config.warmup_steps}: give a whole number of steps, or a share below 1."
    if config.max_prompt_length is not None and config.min_prompt_length > config.max_prompt_length:
        yield "'min_prompt_length' exceeds 'max_prompt_length': no prompt could pass. Lower min_prompt_length."
    if config.eval_steps is not None and not config.eval:
        yield "'eval_steps' is set, but 'eval' names no set. Add one, e.g. eval: {held_out: {source: data.jsonl}}."
    if not config.refresh.is_always and config.num_iterations == 1:
        yield (
            "'refresh' says when a prompt's state is captured again between iterations over the same responses, but "
            "'num_iterations' is 1. Set num_iterations to 2 or more, or refresh to always."
        )
    if not config.refresh.is_always and config.gradient_accumulation_steps > 1:
        yield (
            "'refresh' keeps the states of all prompts of a step, but 'gradient_accumulation_steps' above 1 holds one "
            "batch of them at a time. Raise prompts_per_step instead, or set refresh to always."
        )
    if config.dynamic_sampling and config.beta > 0:
        yield (
            "'dynamic_sampling' drops groups whose rewards do not differ, but with 'beta' above 0 their KL term "
            "counts. Set beta to 0, or dynamic_sampling to false."
        )
