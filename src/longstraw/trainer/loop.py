"""The loop: rollouts, gradient and optimizer step as a transaction; evaluation, checkpoints, stopping, resuming."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from transformers import TrainerState

from longstraw.config.train import TrainConfig
from longstraw.data.prompts import PromptSet
from longstraw.data.stream import PromptStream, derive_seed
from longstraw.engine.engine import Engine
from longstraw.parallel.processes import Processes
from longstraw.rollout.collector import RolloutCollector
from longstraw.trainer.checkpoint import Checkpoint, load_newest, save_checkpoint
from longstraw.trainer.evaluation import Evaluator
from longstraw.trainer.interrupts import Interrupts
from longstraw.trainer.loading import Policy
from longstraw.trainer.metrics import Row
from longstraw.trainer.optimizer import NamedOptimizer
from longstraw.trainer.receipt import StepReceipt, completion_rows
from longstraw.trainer.report import Reporter, evaluated_names
from longstraw.trainer.rng import RngState, seed_everything
from longstraw.trainer.run_dir import RunDir
from longstraw.trainer.snapshot import Progress, copied, restore_snapshot, take_snapshot
from longstraw.trainer.update import StepGradient
from longstraw.trainer.written import WriteError, written


@dataclass(eq=False, repr=False)
class Trainer:
    """Trains a policy in a run directory.

    Attributes:
        config: the resolved configuration.
        run: its directory, begun.
        policy: model and tokenizer.
        engine: over the policy's model.
        prompts: the training prompts; `stream` is their order.
        collector: makes the rollouts.
        optimizer: over the trained parameters.
        evaluator: may be empty.
        reporter: prints.
        num_steps: optimizer steps in all.
        processes: those that train together.
        progress: where the run is.
        saved_step: the step of the checkpoint that was last written or resumed from.
        history: rows of metrics, of steps and evaluations.
    """

    config: TrainConfig
    run: RunDir
    policy: Policy
    engine: Engine
    prompts: PromptSet
    stream: PromptStream
    collector: RolloutCollector
    optimizer: NamedOptimizer
    evaluator: Evaluator
    reporter: Reporter
    num_steps: int
    processes: Processes
    progress: Progress = field(default_factory=Progress)
    saved_step: int = 0
    history: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gradient = StepGradient(self.config, self.engine, self.optimizer, self.processes)
        self._fingerprint = self.prompts.fingerprint()
        self._boundary: Checkpoint | None = None  # of the last step between two rollouts, where states are kept
        self._interrupts = Interrupts()
        self._step_rng = RngState.capture()

    def resume(self) -> int:
        """Go back to the newest sound checkpoint, or to the start if there is none. Returns the step.

        Raises:
            ValueError: the checkpoint belongs to other prompts or other parameters, or processes see different ones.
        """
        checkpoint = load_newest(self.run.checkpoints)
        steps = self.processes.together(lambda: checkpoint.step if checkpoint else None)
        if len(set(steps)) > 1:
            raise ValueError(
                f"'output_dir': the processes find checkpoints of different steps ({steps}) in {self.run.path}. Put it "
                "on a file system that they share."
            )
        if checkpoint is None:
            self.run.drop_after(-1)
            return 0
        self.progress = restore_snapshot(checkpoint, self.optimizer, self.stream, self._fingerprint)
        self.saved_step = checkpoint.step
        self._step_rng = RngState.capture()
        self.run.drop_after(checkpoint.step)
        self.history = self.processes.together(lambda: self.run.metrics.rows() if self.run.writes else [])[0]
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
                    self.run.save_final(self.policy.model, self.policy.tokenizer, self.policy.published)
            except BaseException as error:
                with self._interrupts.deferred():
                    self.optimizer.zero_grad()
                    try:
                        self.save()
                    except WriteError as further:  # what went wrong first is what matters
                        if str(further) != str(error):
                            error.add_note(str(further))
                raise

    def save(self) -> None:
        """Write a checkpoint of the last complete step, with the random state that the next one started from.

        A stale state could not be captured again after resuming. While one is kept, the checkpoint is that of the step
        before the responses in use were sampled, and a resumed run repeats the iterations since. Of several processes
        the first one writes.
        """
        if not self.run.writes:
            return
        checkpoint = self._boundary if self._between_iterations and self._boundary else self._snapshot()
        self.run.metrics.flush()  # a checkpoint is of a step whose row is written
        with written(self.run.checkpoints):
            save_checkpoint(self.run.checkpoints, checkpoint, self.config.save_total_limit)
        self.saved_step = checkpoint.step

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
            self._keep_boundary()
            self._one_step(step)
            self._step_rng = RngState.capture()

    def _one_step(self, step: int) -> None:
        """One transaction: until the optimizer's step nothing of the run has changed."""
        begin = time.perf_counter()
        receipt = StepReceipt(step + 1)
        if not self.processes.is_alone:
            # What rewards draw then depends on step and process alone, and no random state has to be gathered.
            seed_everything(derive_seed(self.config.seed, "step", step, self.processes.rank))
        old = self.progress
        iteration = step % self.config.num_iterations
        batch = old.batch
        if batch is None or iteration == 0:
            batch = receipt.sampled = self.collector.collect(old.position, self._trainer_state(), receipt.phases)
        try:
            self.gradient.take(batch, iteration, receipt)
        except BaseException:
            batch.release()
            raise
        receipt.learning_rate = self.optimizer.learning_rate
        with self._interrupts.deferred():
            if receipt.sampled and self.config.log_completions:  # before the step is taken: a full disk may refuse them
                self.run.write_completions(step + 1, completion_rows(batch, self.policy.tokenizer))
            with receipt.phases.timed("optimizer"):
                self.optimizer.step()
            receipt.step_tokens = batch.num_tokens
            receipt.num_tokens = old.num_tokens + (receipt.step_tokens if receipt.sampled else 0)
            receipt.epoch = batch.next_position / len(self.prompts)
            more_iterations = (step + 1) % self.config.num_iterations != 0
            self.progress = Progress(
                step + 1, batch.next_position, receipt.num_tokens, batch if more_iterations else None
            )
            receipt.seconds = time.perf_counter() - begin
            row = receipt.row()
            self._log(row)
        self.reporter.step(row, self.num_steps)

    @property
    def _between_iterations(self) -> bool:
        """Whether the next step uses responses that are there."""
        return self.progress.step % self.config.num_iterations != 0

    def _keep_boundary(self) -> None:
        if self.config.refresh.is_always or not self.run.writes:
            return
        if not self._between_iterations or self._boundary is None:
            self._boundary = copied(self._snapshot())

    def _snapshot(self) -> Checkpoint:
        return take_snapshot(
            self.progress, self.optimizer, self._step_rng, self._fingerprint, self.config.num_iterations
        )

    def _evaluation_due(self, step: int) -> bool:
        every = self.config.eval_steps
        due = (
            (step == 0 and self.config.eval_on_start)
            or step >= self.num_steps
            or (every is not None and step > 0 and step % every == 0)
        )
        is_done = any(row["step"] == step and evaluated_names(row) for row in self.history)
        return bool(self.evaluator) and due and not is_done

    def _evaluate(self, step: int) -> None:
        row = {"step": step, **self.evaluator.run(self._trainer_state())}
        self._log(row)
        self.reporter.evaluation(row)

    def _log(self, row: Row) -> None:
        self.run.metrics.append(row)
        self.history.append(row)

    def _trainer_state(self) -> TrainerState:
        progress = self.progress
        return TrainerState(
            epoch=progress.position / len(self.prompts),
            global_step=progress.step,
            max_steps=self.num_steps,
            num_input_tokens_seen=progress.num_tokens,
            log_history=[dict(row) for row in self.history],  # a reward function may write to it
        )
