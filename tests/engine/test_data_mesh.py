"""`reduce_gradients` and `reduce` over a data axis: every rank ends with the sum over the ranks' own prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from families import build
from group import group
from torch.distributed.device_mesh import init_device_mesh

import longstraw

RANKS = 2
CASES = [(step, dtype) for step in (0, 1) for dtype in (torch.float32, torch.bfloat16)]


def case(rank: int, mesh: Any, step: int, dtype: torch.dtype) -> Any:
    """(own, summed) of `.grad`, then of the response side. In the second step rank 1 has nothing to do."""
    model = build("llama", dtype=dtype)
    engine = longstraw.Engine(model, segment_tokens=9, mesh=mesh)
    names = [name for name, _ in engine.host.trainable()]
    sides: list[Any] = [None] * len(names)
    if step == 0 or rank == 0:
        what = group(num_prompt=20 + 7 * rank, lengths=(3, 5 + rank), seed=rank)
        with engine.capture(what.prompt) as state:
            sides = engine.backward(state, what.responses, what.objective, keep_response_side=True).response_side
    own = reference.gradients(model)
    own_sides = {name: side.clone() for name, side in zip(names, sides) if side is not None}
    engine.reduce_gradients()
    return (own, reference.gradients(model)), (own_sides, dict(zip(names, engine.reduce(sides))))


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("data",))
    results = [case(rank, mesh, step, dtype) for step, dtype in CASES]
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_sum_over_ranks(tmp_path: Path) -> None:
    mp.spawn(worker, (str(tmp_path),), nprocs=RANKS)
    ranks: list[Any] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    for place, (step, dtype) in enumerate(CASES):
        for what, wanted in enumerate((dtype, torch.float32)):
            own, reduced = zip(*(rank[place][what] for rank in ranks))
            assert bool(own[1]) == (step == 0)
            for name, first in own[0].items():
                total = first + own[1][name] if name in own[1] else first
                assert total.dtype == wanted and all(torch.equal(side[name], total) for side in reduced), name
            assert reduced[0].keys() == reduced[1].keys() == own[0].keys()


def test_without_a_mesh_there_is_nothing_to_do() -> None:
    model, what = build("llama", dtype=torch.float32), group(num_prompt=9, lengths=(3, 2))
    engine = longstraw.Engine(model)
    engine.reduce_gradients()
    assert all(p.grad is None for p in model.parameters())
    with engine.capture(what.prompt) as state:
        engine.backward(state, what.responses, what.objective)
    before = reference.gradients(model)
    engine.reduce_gradients()
    assert all(torch.equal(gradient, before[name]) for name, gradient in reference.gradients(model).items())


def test_without_a_mesh_sums_are_what_was_given() -> None:
    engine = longstraw.Engine(build("llama", dtype=torch.bfloat16))
    parameters = [parameter for _, parameter in engine.host.trainable()]
    given = torch.ones(parameters[0].shape)
    sums = engine.reduce([given, *[None] * (len(parameters) - 1)])
    assert sums[0] is given and bool((given == 1).all())
    assert all(total.dtype == torch.float32 and not total.any() for total in sums[1:])
    with pytest.raises(ValueError, match=f"1 tensors for {len(parameters)} trainable parameters"):
        engine.reduce([given])
