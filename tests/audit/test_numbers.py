"""Numbers as people read them, ticks, thinning and running means."""

from __future__ import annotations

from itertools import pairwise

import pytest
from runs import step_row

from longstraw.audit.numbers import duration, linear_ticks, log_ticks, memory, readable, signed, tick_label
from longstraw.audit.svg import spread
from longstraw.audit.thinning import running_mean, steps_label, thin


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0.0, "0"), (1.0, "1"), (0.6719, "0.672"), (-0.0833, "−0.0833"), (99.96, "100"), (1234.5, "1,234"),
        (2048.0, "2,048"), (0.0004, "4e−4"), (1.25e-6, "1.25e−6"), (3.2e9, "3.2e9"), (None, "–"),
    ],
)  # fmt: skip
def test_numbers_keep_three_digits(value: float | None, words: str) -> None:
    assert readable(value) == words


def test_units() -> None:
    assert [duration(s) for s in (0.0125, 4.5, 38.2, 725, 12_000)] == [
        "12.5 ms", "4.5 s", "38 s", "12 min 5 s", "3 h 20 min",
    ]  # fmt: skip
    assert memory(512 * 2**20) == "512 MiB" and memory(2.5 * 2**30) == "2.5 GiB"
    assert signed(0.25) == "+0.25" and signed(-0.25) == "−0.25" and signed(0.0) == "0" and signed(None) == "–"


@pytest.mark.parametrize(("low", "high"), [(0, 1), (-0.13, 0.07), (1e-7, 9e-7), (0, 5000), (99.9, 100.1)])
def test_linear_ticks_are_inside_even_and_few(low: float, high: float) -> None:
    ticks = linear_ticks(low, high, 5)
    assert 2 <= len(ticks) <= 5
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    assert [b - a for a, b in pairwise(ticks)] == pytest.approx([ticks[1] - ticks[0]] * (len(ticks) - 1))
    labels = [tick_label(tick, ticks[1] - ticks[0]) for tick in ticks]
    assert len(set(labels)) == len(labels)


def test_ticks_of_steps_are_whole() -> None:
    assert linear_ticks(0, 3, 8, whole=True) == [0, 1, 2, 3]


def test_log_ticks_are_inside() -> None:
    assert log_ticks(0.5, 2000, 8) == pytest.approx([1, 10, 100, 1000])
    assert log_ticks(0.4, 60, 12) == pytest.approx([0.5, 1, 2, 5, 10, 20, 50])


def test_thinning_averages_and_keeps_peaks() -> None:
    rows = [step_row(step, **({} if step % 2 else {"reward": None})) for step in range(1, 11)]
    merged = thin(rows, 3)
    assert [steps_label(row) for row in merged] == ["steps 1 to 3", "steps 4 to 6", "steps 7 to 10"]
    assert merged[0]["loss"] == pytest.approx(0.02) and merged[0]["step"] == 2
    assert merged[0]["reward"] == pytest.approx((0.2 + 0.6) / 2)  # of the steps that have one
    assert merged[-1]["peak_memory_bytes"] == 510 * 2**20
    assert thin(rows, 100) == rows and thin([], 5) == []


def test_running_mean_is_centred() -> None:
    assert running_mean([0, 3, 6, 9], 3) == [1.5, 3, 6, 7.5]


def test_labels_do_not_overlap_and_stay_inside() -> None:
    placed = spread([100, 100, 101, 20], 10, 105)
    ordered = sorted(placed)
    assert all(b - a >= 14 - 1e-9 for a, b in pairwise(ordered))
    assert ordered[0] >= 10 and ordered[-1] <= 105
    assert placed[3] == 20
