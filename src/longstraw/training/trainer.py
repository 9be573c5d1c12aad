"""The loop: rollouts, gradient and optimizer step as a transaction; evaluation, checkpoints, stopping, resuming."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from transformers import TrainerState

from longstraw.engine.engine import Engine
from longstraw.training.checkpoint import Checkpoint, load_newest, save_checkpoint
from longstraw.training.config import TrainConfig
from longstraw.training.data import PromptSet, PromptStream
from longstraw.training.evaluation import Evaluator
from longstraw.training.groups import Batch
from longstraw.training.interrupts import Interrupts
from longstraw.training.loading import Policy
from longstraw.training.metrics import Row
from longstraw.training.optimizer import NamedOptimizer
from longstraw.training.phases import PhaseLedger
from longstraw.training.report import Reporter, evaluated_names
from longstraw.training.rng import RngState
from longstraw.training.rollout import RolloutCollector
from longstraw.training.rollout_store import batch_from_stored, batch_to_stored
from longstraw.training.run_dir import RunDir
from longstraw.training.snapshot import load_parameters, restore_rng, snapshot_tensors
from longstraw.training.step_metrics import completion_rows, rollout_metrics
from longstraw.training.update import accumulate


@dataclass
class Progress:
    """Where a run is between two optimizer steps.

    Attributes:
        step: optimizer steps done.
        position: prompts drawn.
        num_tokens: tokens of prompts and responses seen.
        batch: rollouts that further iterations will use.
    """

    step: int = 0
    position: int = 0
    num_tokens: int = 0
    batch: Batch | None = field(default=None, repr=False)


class Trainer:
    """Trains a policy in a run directory.

    Args:
        config: the resolved configuration.
        run: its directory, begun.
        policy: model and tokenizer.
        engine: over the policy's model.
        prompts: the training prompts.
        collector: makes the rollouts.
        optimizer: over the trained parameters.
        evaluator: may be empty.
        reporter: prints.
        num_steps: optimizer steps in all.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: RunDir,
        policy: Policy,
        engine: Engine,
        prompts: PromptSet,
        stream: PromptStream,
        collector: RolloutCollector,
        optimizer: NamedOptimizer,
        evaluator: Evaluator,
        reporter: Reporter,
        num_steps: int,
    ) -> None:
        self.config = config
        self.run = run
        self.policy = policy
        self.engine = engine
        self.optimizer = optimizer
        self.evaluator = evaluator
        self.reporter = reporter
        self.num_steps = num_steps
        self.progress = Progress()
        self._collector = collector
        self._stream = stream
        self._num_prompts = len(prompts)
        self._fingerprint = prompts.fingerprint()
        self._loss = config.policy_loss()
        self._interrupts = Interrupts()
        self._step_rng = RngState.capture()
        self._history: list[Row] = run.metrics.rows()

    def resume(self) -> int:
        """Go back to the newest sound checkpoint, or to the start if there is none. Returns the step.

        Raises:
            ValueError: the checkpoint belongs to other prompts or other parameters.
        """
        checkpoint = load_newest(self.run.checkpoints)
        if checkpoint is None:
            self.run.drop_after(-1)
            self._history = []
            return 0
        if checkpoint.state["prompts"] != self._fingerprint:
            raise ValueError(
                "'dataset': the prompts are not those that the checkpoint was made with, so the run cannot go on "
                "exactly. "
                "Restore the data and the length limits, or start a new run."
            )
        load_parameters(self.optimizer.parameters, checkpoint)
        self.optimizer.load_tensors(checkpoint.tensors.get("optimizer", {}), checkpoint.step)
        self.progress = Progress(
            checkpoint.step,
            checkpoint.state["position"],
            checkpoint.state["num_tokens"],
            batch_from_stored(checkpoint.state.get("batch"), checkpoint.tensors.get("rollouts", {}), self._stream),
        )
        restore_rng(checkpoint)
        self._step_rng = RngState.capture()
        self.run.drop_after(checkpoint.step)
        self._history = self.run.metrics.rows()
        return checkpoint.step

    def train(self) -> None:
        """Run to the last step, evaluate, save the final model.

        On Ctrl-C, SIGTERM or an exception a checkpoint of the last complete step is written, and the exception goes on.
        """
        with self._interrupts.active():
            try:
                with self.reporter.bar(self.progress.step, self.num_steps):
                    self._loop()
                with self._interrupts.deferred():
                    self.save()
                    self.run.save_final(self.policy.model, self.policy.tokenizer)
            except BaseException:
                with self._interrupts.deferred():
                    self.optimizer.zero_grad()
                    self.save()
                raise

    def save(self) -> None:
        """Write a checkpoint of the last complete step, with the random state that the next one started from."""
        progress = self.progress
        stored, rollouts = batch_to_stored(progress.batch)
        state: dict[str, Any] = {
            "position": progress.position,
            "num_tokens": progress.num_tokens,
            "prompts": self._fingerprint,
            "rng": self._step_rng.numbers,
            "batch": stored,
            "iteration": progress.step % self.config.num_iterations,
        }
        tensors = snapshot_tensors(self.optimizer, self._step_rng) | {"rollouts": rollouts}
        save_checkpoint(self.run.checkpoints, Checkpoint(progress.step, state, tensors), self.config.save_total_limit)

    def _loop(self) -> None:
        config = self.config
        while True:
            step = self.progress.step
            if self._evaluation_due(step):
                self._evaluate(step)
            if step > 0 and step % config.save_steps == 0:
                with self._interrupts.deferred():
                    self.save()
            if step >= self.num_steps:
                return
            self._step_rng = RngState.capture()
            self._one_step(step)
            self._step_rng = RngState.capture()

    def _one_step(self, step: int) -> None:
        """One transaction: until the optimizer's step nothing of the run has changed."""
        begin = time.perf_counter()
        phases = PhaseLedger()
        old = self.progress
        fresh = old.batch is None or step % self.config.num_iterations == 0
        batch = self._collector.collect(old.position, self._trainer_state(), phases) if fresh else old.batch
        assert batch is not None
        try:
            gradient = accumulate(
                batch,
                self.config,
                self.engine,
                self._loss,
                self.optimizer,
                phases,
                keep_old_logps=self.config.num_iterations > 1,
            )
        except BaseException:
            batch.release()
            raise
        learning_rate = self.optimizer.learning_rate
        with self._interrupts.deferred():
            with phases.timed("optimizer"):
                self.optimizer.step()
            more_iterations = (step + 1) % self.config.num_iterations != 0
            tokens = sum(len(group.prompt.ids) + sum(map(len, group.responses)) for group in batch.groups)
            self.progress = Progress(
                step + 1,
                batch.next_position,
                old.num_tokens + (tokens if fresh else 0),
                batch if more_iterations else None,
            )
            seconds = time.perf_counter() - begin
            row: Row = {
                "step": step + 1,
                "epoch": batch.next_position / self._num_prompts,
                "learning_rate": learning_rate,
                "loss": gradient.loss,
                "grad_norm": gradient.norm,
                "num_tokens": self.progress.num_tokens,
                **(rollout_metrics(batch, self.config.reward_weights) if fresh else {}),
                "groups/skipped": gradient.num_skipped,
                **gradient.metrics,
                "step_time": seconds,
                "tokens_per_second": tokens / seconds,
                "peak_memory_bytes": phases.peak_bytes,
                **phases.metrics(),
            }
            self._log(row)
            if fresh and self.config.log_completions:
                self.run.write_completions(step + 1, completion_rows(batch, self.policy.tokenizer))
        self.reporter.step(row, self.num_steps)

    def _evaluation_due(self, step: int) -> bool:
        if not self.evaluator:
            return False
        every = self.config.eval_steps
        due = (
            (step == 0 and self.config.eval_on_start)
            or step >= self.num_steps
            or (every is not None and step > 0 and step % every == 0)
        )
        return due and not any(row["step"] == step and evaluated_names(row) for row in self._history)

    def _evaluate(self, step: int) -> None:
        row = {"step": step, **self.evaluator.run(self._trainer_state())}
        self._log(row)
        self.reporter.evaluation(row)

    def _log(self, row: Row) -> None:
        self.run.metrics.append(row)
        self._history.append(row)

    def _trainer_state(self) -> TrainerState:
        progress = self.progress
        return TrainerState(
            epoch=progress.position / self._num_prompts,
            global_step=progress.step,
            max_steps=self.num_steps,
            num_input_tokens_seen=progress.num_tokens,
            log_history=self._history,
        )
