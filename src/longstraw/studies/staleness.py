"""How kept prompt states age while the policy trains: probe and oracle after every optimizer step.

A round samples responses to some prompts and takes several optimizer steps on them, each with the gradient on fresh
captures. The first captures are kept aside and compared with the fresh ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from transformers import TrainerState

from longstraw.rollout.phases import PhaseLedger
from longstraw.rollout.records import Batch
from longstraw.studies.oracle import compare
from longstraw.trainer.loop import Trainer
from longstraw.trainer.receipt import StepReceipt


@dataclass(frozen=True)
class Measurement:
    """One prompt, some optimizer steps after its capture.

    Attributes:
        round, row: which round; the prompt's row in the dataset.
        prompt_tokens: its length.
        steps: optimizer steps since the capture.
        loss_kept, loss_fresh, logp_difference: see `oracle.Comparison`.
        probe: what `Engine.drift` found.
        probe_seconds, capture_seconds: of the probe and of the fresh capture.
    """

    round: int
    row: int
    prompt_tokens: int
    steps: int
    loss_kept: float
    loss_fresh: float
    logp_difference: float
    probe: float
    probe_seconds: float
    capture_seconds: float


def study(trainer: Trainer, num_rounds: int, num_segments: int) -> Iterator[Measurement]:
    """Yield the measurements of every step of every round.

    Args:
        trainer: set up for `prompts_per_step` prompts a round and `num_iterations` steps on each.
        num_segments: that a probe recomputes.

    Raises:
        ValueError: in some round no prompt's responses differ in their rewards, so that there is nothing to learn from.
    """
    position = 0
    for number in range(num_rounds):
        state = TrainerState(global_step=number, max_steps=num_rounds)
        batch = trainer.collector.collect(position, state, PhaseLedger())
        position = batch.next_position
        try:
            yield from _round(trainer, batch, number, num_segments)
        finally:
            batch.release()


def _round(trainer: Trainer, batch: Batch, number: int, num_segments: int) -> Iterator[Measurement]:
    config, engine = trainer.config, trainer.engine
    loss = config.policy_loss()
    studied = [group for group in batch.groups if group.state is not None]
    if not studied:
        raise ValueError(
            f"round {number + 1}: no prompt's responses differ in their rewards, so there is nothing to learn from. "
            "Study more prompts, raise num_generations, or choose prompts that are neither solved nor hopeless."
        )
    kept = {}
    try:
        for group in studied:
            state, group.state = group.state, None
            assert state is not None
            kept[group.position] = state
            for rollout, logp in zip(group.rollouts, engine.score(state, group.responses, config.temperature)):
                rollout.old_logps = logp.cpu()
        for steps in range(config.num_iterations + 1):
            for group in studied:
                engine.meter.phases.clear()
                group.state, group.captured_in = engine.capture(group.prompt_ids), steps
                if steps:
                    state = kept[group.position]
                    probe = engine.drift(state, num_segments, seed=steps)
                    found = compare(engine, group, state, group.state, batch.normalizer, loss, config.temperature)
                    yield Measurement(
                        number,
                        group.prompt.row,
                        len(group.prompt.ids),
                        steps,
                        found.loss_kept,
                        found.loss_fresh,
                        found.logp_difference,
                        probe,
                        engine.meter.phases["probe"].seconds,
                        engine.meter.phases["capture"].seconds,
                    )
            if steps < config.num_iterations:
                trainer.gradient.take(batch, steps, StepReceipt())
                trainer.optimizer.step()
    finally:
        for state in kept.values():
            state.release()
