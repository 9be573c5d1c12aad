"""The profile's operation counts against formulas, and its command end to end."""

import json

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import profile_step
from benchmarks.methods import METHODS
from benchmarks.workload import Workload

# The benchmark's Llama: hidden and inner size, layers, vocabulary, heads and their size.
E, INNER, L, V, HEADS, KV_HEADS, D = 256, 768, 4, 4096, 4, 2, 64
QKV = 2 * E * (HEADS + 2 * KV_HEADS) * D
REST = 2 * HEADS * D * E + 3 * 2 * E * INNER
PAIR = 4 * HEADS * D  # operations of a query-key pair, forward


def test_operations_are_counted_as_formulas_say():
    workload = Workload("llama", prompt=65, group=2, response=8)
    step = METHODS["longstraw"](workload.model(), prompt_grad="full", segment_tokens=24, block_tokens=64)
    counts = profile_step.count(lambda phases: step(workload.data(), phases))
    totals = {phase: sum(found.values()) for phase, found in counts.items()}

    captured, scored = 64, 16
    pairs = captured * (captured + 1) // 2
    # Nothing reads a prompt's output: its last layer stops once keys and values are there.
    capture = captured * (L * QKV + (L - 1) * REST) + (L - 1) * PAIR * pairs
    assert totals["capture"] == capture

    pairs_scored = 2 * (captured * 8 + 8 * 9 // 2)
    linear = scored * (L * (QKV + REST) + 2 * E * V)
    assert totals["score"] == linear + L * PAIR * pairs_scored

    # Again forward, and twice that backward; in attention 10 operations to the forward pass's 4.
    assert totals["replay"] == pytest.approx(3 * linear + 3.5 * L * PAIR * pairs_scored, rel=0.01)


def test_the_command_writes_a_receipt(tmp_path):
    app = typer.Typer()
    app.command()(profile_step.main)
    arguments = ["--prompt", "80", "--group", "2", "--response", "8", "--segment-tokens", "32"]
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "p.json")])
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "p.json").read_text())
    assert set(report["phases"]) == {"capture", "score", "replay", "sweep"}
    assert report["matmul_operations_per_second"] > 1e8
    by_name = {row["operator"]: row for row in report["operators"]}
    assert by_name["aten::mm"]["seconds"] > 0 and by_name["aten::mm"]["operations"] > 0
    assert "outside operators" in by_name
