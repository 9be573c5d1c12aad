"""Errors as one message and an exit code, unless a traceback is asked for."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

BAD_CONFIG, FAILED, INTERRUPTED = 2, 1, 130


@contextmanager
def reported_errors(debug: bool) -> Iterator[None]:
    """Turn what a user can act on into a message on stderr: ValueError exits with 2, RuntimeError with 1.

    Args:
        debug: let exceptions pass with their traceback.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("warning: %(message)s"))
    logging.getLogger("longstraw").addHandler(handler)
    shown = warnings.showwarning
    warnings.showwarning = _show_warning
    try:
        yield
    except typer.Exit:  # itself a RuntimeError
        raise
    except (ValueError, RuntimeError, OSError) as error:
        if debug:
            raise
        typer.echo("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]), err=True)
        raise typer.Exit(BAD_CONFIG if isinstance(error, ValueError) else FAILED) from None
    finally:
        warnings.showwarning = shown
        logging.getLogger("longstraw").removeHandler(handler)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
) -> None:
    if "longstraw" in filename and issubclass(category, UserWarning):
        print(f"warning: {message}", file=sys.stderr)
