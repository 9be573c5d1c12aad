"""Statistics of lists of numbers, as rows of metrics have them."""

from __future__ import annotations

import math
from collections.abc import Iterable

from longstraw.trainer.metrics import Row


def describe(values: Iterable[float], prefix: str, statistics: Iterable[str] = ("mean", "min", "max")) -> Row:
    """`{prefix}mean_…`-style statistics of a list; 0 where it is empty, as TRL logs."""
    numbers = list(values)
    functions = {"mean": lambda: sum(numbers) / len(numbers), "min": lambda: min(numbers), "max": lambda: max(numbers)}
    return {prefix.format(name): float(functions[name]()) if numbers else 0.0 for name in statistics}


def mean_and_deviation(values: Iterable[float | None]) -> tuple[float | None, float | None]:
    """Mean and standard deviation (n − 1) of what is not None; None where there is too little."""
    numbers = [value for value in values if value is not None]
    if not numbers:
        return None, None
    mean = math.fsum(numbers) / len(numbers)
    if len(numbers) == 1:
        return mean, None
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in numbers) / (len(numbers) - 1))
