"""What a run writes, or one error that says what could not be written, why and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError


class WriteError(RuntimeError):
    """The file system refused. The message names the path."""


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Turns a refusal of the file system into a `WriteError`; each library has an exception of its own for it.

    Args:
        path: what is being written, for the message.
    """
    try:
        yield
    except WriteError:
        raise
    except (OSError, SafetensorError) as error:
        raise WriteError(
            f"{path} cannot be written: {error}. Free space on its disk (save_total_limit keeps fewer checkpoints), or "
            "see to its rights and quota, then resume the run."
        ) from error
