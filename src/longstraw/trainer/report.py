"""What a user sees while a run goes on: one line a step, a bar on a terminal, tables of evaluations."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from longstraw.trainer.metrics import Row


class Reporter:
    """Prints to a rich console. The bar appears on terminals only."""

    def __init__(self, console: Console, logging_steps: int) -> None:
        self.console = console
        self._logging_steps = logging_steps
        self._progress: Progress | None = None
        self._reward: float | None = None
        self._phase_name, self._phase_done = "", 0

    @contextmanager
    def bar(self, done: int, total: int) -> Iterator[None]:
        """A progress bar over the steps while inside."""
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True, disable=not self.console.is_terminal) as progress:
            self._progress = progress
            self._task = progress.add_task("step", total=total, completed=done)
            self._phase = progress.add_task("", total=None, visible=False)
            try:
                yield
            finally:
                self._progress = None

    def phase(self, name: str, done: int, total: int) -> None:
        """Tokens done and left of a phase, in a second bar; the engine calls it after every piece."""
        if self._progress is None:
            return
        if name != self._phase_name or done < self._phase_done:
            self._phase_name = name
            self._progress.reset(self._phase, total=total, description=f"{name}, tokens", visible=True)
        self._phase_done = done
        self._progress.update(self._phase, completed=done, total=total)

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def step(self, row: Row, total: int) -> None:
        """One line for a row of metrics."""
        step = int(row["step"])
        if self._progress is not None:
            self._progress.update(self._task, completed=step)
        if "reward" in row:
            self._reward = row["reward"]
        if step % self._logging_steps and step != total:
            return
        parts = [
            f"step {step:>{len(str(total))}}/{total}",
            f"reward {_number(self._reward, '.3f')}",
            f"loss {_number(row['loss'], '+.4f')}",
            f"grad {_number(row['grad_norm'], '.3g')}",
            f"{row['tokens_per_second']:,.0f} tok/s",
        ]
        if row.get("peak_memory_bytes"):
            parts.append(f"peak {row['peak_memory_bytes'] / 2**20:,.0f} MiB")
        parts.append(f"{row['step_time']:.1f} s")
        if row.get("groups/skipped"):
            parts.append(f"{row['groups/skipped']} without signal")
        if row.get("groups/replaced"):
            parts.append(f"{row['groups/replaced']} replaced")
            if row["reward"] is None:
                parts.append("no group's rewards differ: nothing to learn from")
        self.say("  ".join(parts))

    def evaluation(self, row: Row) -> None:
        """One line a named set."""
        for name in evaluated_names(row):
            self.say(
                f"eval {name}: reward {_number(row[f'eval/{name}/reward'], '.3f')} over "
                f"{row[f'eval/{name}/num_samples']} prompts at step {row['step']}"
            )

    def before_and_after(self, first: Row, last: Row) -> None:
        """A table of each set's mean reward before and after training."""
        table = Table("held-out set", "prompts", "before", "after", "change", title="Mean reward")
        for name in evaluated_names(last):
            before, after = first.get(f"eval/{name}/reward"), last.get(f"eval/{name}/reward")
            change = None if before is None or after is None else after - before
            table.add_row(
                name,
                str(last[f"eval/{name}/num_samples"]),
                _number(before, ".3f"),
                _number(after, ".3f"),
                _number(change, "+.3f"),
            )
        self.console.print(table)


def quiet_transformers() -> None:
    """No bars of the library's own, and on a CPU no advice to install kernels that would not be used."""
    import torch
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    if not torch.cuda.is_available():
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
        for handler in logging.getLogger("transformers").handlers:
            handler.addFilter(lambda record: "is falling back to its reference PyTorch" not in record.getMessage())


def evaluated_names(row: Row) -> list[str]:
    """Names of the sets that a row of metrics has evaluations of."""
    return [key.split("/")[1] for key in row if key.startswith("eval/") and key.endswith("/reward")]


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)
