"""Numbers for people: ticks of an axis, durations, memory."""

from __future__ import annotations

import math

MINUS = "\N{MINUS SIGN}"


def linear_ticks(low: float, high: float, most: int, whole: bool = False) -> list[float]:
    """At most `most` round numbers in [low, high], spaced by 1, 2 or 5 times a power of ten.

    Args:
        whole: whole numbers only.
    """
    span = high - low
    if span <= 0 or most < 2:
        return [low]
    power = 10.0 ** math.floor(math.log10(span / most))
    for factor in (1, 2, 5, 10, 20, 50):
        step = max(power * factor, 1.0) if whole else power * factor
        first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
        if last - first + 1 <= most:
            break
    return [index * step for index in range(first, last + 1)]


def log_ticks(low: float, high: float, most: int) -> list[float]:
    """Powers of ten in [low, high], thinned to `most`; with 2 and 5 between them where they are fewer than three."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1,), (1, 2, 5)):
        ticks = [factor * 10.0**power for power in powers for factor in factors]
        inside = [tick for tick in ticks if low * (1 - 1e-9) <= tick <= high * (1 + 1e-9)]
        if len(inside) >= 3:
            break
    return inside[:: math.ceil(len(inside) / most)] if inside else [low]


def readable(value: float | None) -> str:
    """Three to four significant digits, thousands separated; a dash for None."""
    if value is None:
        return "–"
    size = abs(value)
    if size == 0:
        return "0"
    if size >= 1e7 or size < 1e-3:
        mantissa, power = f"{value:.2e}".split("e")
        text = f"{mantissa.rstrip('0').rstrip('.')}e{int(power)}"
    elif size >= 1000 or (size >= 100 and value == round(value)):
        text = f"{value:,.0f}"
    else:
        text = f"{value:.{max(0, 2 - math.floor(math.log10(size)))}f}"
        text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.replace("-", MINUS)


def tick_label(value: float, step: float) -> str:
    """As many decimals as the distance between ticks needs."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6 or step < 1e-4:
        return readable(value)
    return f"{value:,.{max(0, -math.floor(math.log10(step) + 1e-9))}f}".replace("-", MINUS)


def signed(value: float | None) -> str:
    """`readable` with its sign."""
    return f"+{readable(value)}" if value is not None and value > 0 else readable(value)


def duration(seconds: float) -> str:
    """E.g. 420 ms, 38 s, 12 min 5 s, 3 h 20 min."""
    if 0 < seconds < 1:
        return f"{readable(seconds * 1000)} ms"
    if seconds < 10:
        return f"{readable(seconds)} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def tokens(number: float | None) -> str:
    """E.g. 1 token, 8,192 tokens."""
    return f"{readable(number)} token{'' if number == 1 else 's'}"


def memory_unit(most: float) -> tuple[float, str]:
    """Bytes a unit and its name, fit for values up to `most` bytes."""
    return (2.0**30, "GiB") if most >= 2 * 2**30 else (2.0**20, "MiB")


def memory(num_bytes: float) -> str:
    """E.g. 513 MiB, 2.5 GiB."""
    size, unit = memory_unit(num_bytes)
    return f"{readable(num_bytes / size)} {unit}"
