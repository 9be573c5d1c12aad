"""Command-line values that several benchmarks take."""

from __future__ import annotations

import typer


def numbers(option: str, text: str) -> list[int]:
    """Whole numbers in rising order from a comma-separated list. Raises typer.BadParameter naming the option."""
    try:
        return sorted(int(part) for part in text.split(","))
    except ValueError as error:
        message = f"{text!r} is not a comma-separated list of whole numbers"
        raise typer.BadParameter(message, param_hint=option) from error
