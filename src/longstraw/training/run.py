"""From a configuration to a finished run: everything is built here, cheap checks first."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from longstraw.engine.engine import Engine
from longstraw.training.config import TrainConfig
from longstraw.training.data import PromptSet, PromptStream, prepare_prompts, read_rows
from longstraw.training.evaluation import Evaluator
from longstraw.training.interrupts import StopRequested
from longstraw.training.loading import Policy, load_policy, trainable_parameters
from longstraw.training.locate import is_function_reference
from longstraw.training.optimizer import NamedOptimizer
from longstraw.training.reference import ReferencePolicy
from longstraw.training.report import Reporter, evaluated_names
from longstraw.training.rewards import load_reward
from longstraw.training.rng import seed_everything
from longstraw.training.rollout import RolloutCollector
from longstraw.training.run_dir import RunDir
from longstraw.training.text import TextCodec
from longstraw.training.trainer import Trainer


@dataclass
class RunResult:
    """How a run ended.

    Attributes:
        path: the run directory.
        step: optimizer steps done.
        before, after: mean reward by held-out set, of the first and the last evaluation.
    """

    path: Path
    step: int
    before: dict[str, float | None]
    after: dict[str, float | None]


def train(config: TrainConfig, *, resume: bool = False, console: Console | None = None) -> RunResult:
    """Train as configured, in a fresh run directory or on from the last checkpoint of one.

    Raises:
        ConfigError, ValueError: something cannot be used; the message names the option and the remedy.
        RewardError, StepRefused: a step failed; a checkpoint of the last complete step is saved.
        StopRequested: Ctrl-C or SIGTERM; the same. Notes on the exception say how to go on.
    """
    reporter = Reporter(console or Console(), config.logging_steps)
    run = RunDir.open(config, resume)
    config = config.model_copy(update={"output_dir": str(run.path)})
    seed_everything(config.seed)
    trainer = _build(config, run, reporter)
    run.begin(config)
    if resume:
        step = trainer.resume()
        reporter.say(
            f"Resuming {run.path} after step {step}."
            if step
            else f"{run.path} has no sound checkpoint: from the start."
        )
    begin = time.perf_counter()
    try:
        run.write_summary({"status": "running", "step": trainer.progress.step})
        trainer.train()
    except BaseException as error:
        status = "interrupted" if isinstance(error, StopRequested) else "failed"
        run.write_summary(
            {
                "status": status,
                "step": trainer.progress.step,
                "num_steps": trainer.num_steps,
                **({} if status == "interrupted" else {"error": f"{type(error).__name__}: {error}"}),
            }
        )
        error.add_note(
            f"The state after step {trainer.progress.step} is saved. Go on with: longstraw train {run.path} --resume"
        )
        raise
    evaluations = [row for row in run.metrics.rows() if evaluated_names(row)]
    if evaluations:
        reporter.before_and_after(evaluations[0], evaluations[-1])
    first, last = (evaluations[0], evaluations[-1]) if evaluations else ({}, {})
    result = RunResult(
        run.path,
        trainer.progress.step,
        *({name: row[f"eval/{name}/reward"] for name in evaluated_names(row)} for row in (first, last)),
    )
    run.write_summary(
        {
            "status": "finished",
            "step": result.step,
            "num_steps": trainer.num_steps,
            "seconds": time.perf_counter() - begin,
            "before": result.before,
            "after": result.after,
        }
    )
    return result


def _build(config: TrainConfig, run: RunDir, reporter: Reporter) -> Trainer:
    """Rewards and rows first, then the model, then what needs both."""
    functions = {name: load_reward(name) for name in config.reward_funcs if is_function_reference(name)}
    rows = read_rows(config.dataset, "dataset")
    held_out = {name: read_rows(options, f"eval.{name}") for name, options in config.eval.items()}

    policy = load_policy(config)
    codec = TextCodec(policy.tokenizer, config.chat_template_kwargs, policy.model.config.get_text_config().vocab_size)
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
    prompts = prepare_prompts(
        rows, codec, "dataset", min_length=config.min_prompt_length, max_length=config.max_prompt_length
    )
    _check_positions(prompts, config.max_completion_length, policy, "dataset")
    sets = {}
    for name, options in config.eval.items():
        sets[name] = (prepare_prompts(held_out[name][: options.num_samples], codec, f"eval.{name}"), options)
        _check_positions(
            sets[name][0], options.max_completion_length or config.max_completion_length, policy, f"eval.{name}"
        )
    reporter.say(f"dataset: {prompts.summary()}")

    def make_engine(model: Any, prompt_grad: str | int = "none") -> Engine:
        return Engine(
            model,
            prompt_grad=prompt_grad,
            segment_tokens=config.segment_tokens,
            block_tokens=config.block_tokens,
            tier=config.tier,
        )

    reference = ReferencePolicy(policy, make_engine) if config.beta > 0 else None
    parameters = trainable_parameters(policy.model)
    trained = sum(parameter.numel() for parameter in parameters.values())
    reporter.say(f"model: {config.model.path} on {policy.device}, {trained:,} trained parameters; run: {run.path}")

    num_steps = config.max_steps
    if num_steps < 0:
        batches = math.ceil(config.num_train_epochs * len(prompts) / config.prompts_per_update)
        num_steps = batches * config.num_iterations
    stream = PromptStream(prompts, config.seed, config.shuffle_dataset)
    engine = make_engine(policy.model, config.prompt_grad)
    collector = RolloutCollector(config, engine, codec, stream, rewards, reference, policy.stop_ids)
    evaluator = Evaluator(config, sets, make_engine(policy.model), codec, rewards, policy.stop_ids)
    return Trainer(
        config,
        run,
        policy,
        engine,
        prompts,
        stream,
        collector,
        NamedOptimizer(parameters, config, num_steps),
        evaluator,
        reporter,
        num_steps,
    )


def _check_positions(prompts: PromptSet, max_completion_length: int, policy: Policy, option: str) -> None:
    longest = max(prompts.prompts, key=lambda prompt: len(prompt.ids))
    limit = policy.max_positions
    if limit is not None and len(longest.ids) + max_completion_length > limit:
        raise ValueError(
            f"'{option}': row {longest.row} has {len(longest.ids):,} tokens; with "
            f"max_completion_length={max_completion_length:,} "
            f"that exceeds the model's {limit:,} positions. Set max_prompt_length to "
            f"{max(1, limit - max_completion_length)} or less "
            "to drop such rows, lower max_completion_length, or override RoPE with model.rope_scaling."
        )
