"""Everything that a run is made of, built from its configuration: cheap checks first, then the model."""

from __future__ import annotations

import math
from typing import Any

from longstraw.config.locate import is_function_reference, is_hub_name, load_function
from longstraw.config.train import TrainConfig
from longstraw.data.prompts import PromptSet, prepare_prompts
from longstraw.data.rows import read_rows
from longstraw.data.stream import PromptStream
from longstraw.data.text import TextCodec
from longstraw.engine.engine import Engine
from longstraw.parallel.processes import Processes
from longstraw.rollout.collector import RolloutCollector
from longstraw.rollout.function_sampler import FunctionSampler
from longstraw.rollout.judge import Judge
from longstraw.rollout.rewards import load_reward, with_own_names
from longstraw.rollout.samplers import EngineSampler, Sampler
from longstraw.trainer.evaluation import Evaluator
from longstraw.trainer.loading import Policy, load_policy, trainable_parameters
from longstraw.trainer.loop import Trainer
from longstraw.trainer.optimizer import NamedOptimizer
from longstraw.trainer.reference import ReferencePolicy
from longstraw.trainer.report import Reporter
from longstraw.trainer.run_dir import RunDir


def build_trainer(config: TrainConfig, run: RunDir, reporter: Reporter, processes: Processes | None = None) -> Trainer:
    """Rewards and rows first, then the model, then what needs both."""
    functions = {name: load_reward(name) for name in config.reward_funcs if is_function_reference(name)}
    rollout_func = load_function(config.rollout_func, "rollout_func") if config.rollout_func else None
    skip = config.skip_bad_rows
    rows = read_rows(config.dataset, "dataset", skip)
    held_out = {name: read_rows(options, f"eval.{name}", skip) for name, options in config.eval.items()}

    processes = processes or Processes()
    if is_hub_name(config.model.path):
        reporter.say(f"model: there is no folder {config.model.path} here; asking the hub for it")
    policy = load_policy(config)
    processes.broadcast(trainable_parameters(policy.model).values())
    codec = TextCodec(
        policy.tokenizer,
        config.chat_template_kwargs,
        policy.model.config.get_text_config().vocab_size,
        config.skip_special_tokens,
    )
    rewards = [
        functions.get(name)
        or load_reward(
            name,
            device=str(policy.device),
            trust_remote_code=config.model.trust_remote_code,
            chat_template_kwargs=config.chat_template_kwargs,
        )
        for name in config.reward_funcs
    ]
    rewards = with_own_names(rewards, config.reward_funcs)
    prompts = prepare_prompts(
        rows,
        codec,
        "dataset",
        source=config.dataset.source,
        min_length=config.min_prompt_length,
        max_length=config.max_prompt_length,
        skip_bad_rows=skip,
    )
    _check_positions(prompts, config.max_completion_length, policy, "dataset")
    sets = {}
    for name, options in config.eval.items():
        own = held_out[name][: options.num_samples]
        found = prepare_prompts(own, codec, f"eval.{name}", source=options.source, skip_bad_rows=skip)
        sets[name] = (found, options)
        _check_positions(
            sets[name][0], options.max_completion_length or config.max_completion_length, policy, f"eval.{name}"
        )
    reporter.say(f"dataset: {prompts.summary()}")

    def make_engine(model: Any, trained: bool = False) -> Engine:
        return Engine(
            model,
            prompt_grad=config.prompt_grad if trained else "none",
            segment_tokens=config.segment_tokens,
            block_tokens=config.block_tokens,
            tier=config.tier,
            tier_bytes=config.tier_bytes or None,
            page_dir=config.page_dir,
            retain_graph_bytes=config.retain_graph_bytes if trained else 0,
            recompute_layers=config.recompute_layers,
            boundary_bytes=config.boundary_bytes,
            progress=reporter.phase,
            mesh=processes.mesh if trained else None,
        )

    score_reference = ReferencePolicy(policy, make_engine).score if config.beta > 0 else None
    parameters = trainable_parameters(policy.model)
    trained = sum(parameter.numel() for parameter in parameters.values())
    reporter.say(f"model: {config.model.path} on {policy.device}, {trained:,} trained parameters; run: {run.path}")

    num_steps = config.max_steps
    if num_steps < 0:
        batches = math.ceil(config.num_train_epochs * len(prompts) / config.prompts_per_update)
        num_steps = batches * config.num_iterations
    stream = PromptStream(prompts, config.seed, config.shuffle_dataset)
    engine = make_engine(policy.model, trained=True)
    sampler: Sampler = FunctionSampler(rollout_func, engine, codec.tokenizer) if rollout_func else EngineSampler(engine)
    judge = Judge(rewards, config.reward_weights, codec)
    collector = RolloutCollector(config, engine, sampler, judge, stream, policy.stop_ids, score_reference, processes)
    evaluator = Evaluator(config, sets, make_engine(policy.model), judge, policy.stop_ids, processes)
    optimizer = NamedOptimizer(parameters, config, num_steps)
    return Trainer(
        config, run, policy, engine, prompts, stream, collector, optimizer, evaluator, reporter, num_steps, processes
    )


def _check_positions(prompts: PromptSet, max_completion_length: int, policy: Policy, option: str) -> None:
    longest = max(prompts.prompts, key=lambda prompt: len(prompt.ids))
    limit = policy.max_positions
    if limit is not None and len(longest.ids) + max_completion_length > limit:
        raise ValueError(
            f"'{option}': row {longest.row} has {len(longest.ids):,} tokens; with "
            f"max_completion_length={max_completion_length:,} that exceeds the model's {limit:,} positions. Set "
            f"max_prompt_length to {max(1, limit - max_completion_length)} or less to drop such rows, lower "
            "max_completion_length, or override RoPE with model.rope_scaling."
        )
