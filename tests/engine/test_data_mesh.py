"""`reduce_gradients` over a data axis: every rank ends with the sum over the ranks' own prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import reference
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from families import build
from group import group
from torch.distributed.device_mesh import init_device_mesh

import longstraw

RANKS = 2


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("data",))
    model = build("llama", dtype=torch.float32)
    engine = longstraw.Engine(model, segment_tokens=9, mesh=mesh)
    results = []
    for step in range(2):
        model.zero_grad(set_to_none=True)
        if step == 0 or rank == 0:  # in the second step rank 1 has nothing to do and still takes part
            what = group(num_prompt=20 + 7 * rank, lengths=(3, 5 + rank), seed=rank)
            with engine.capture(what.prompt) as state:
                engine.backward(state, what.responses, what.objective)
        own = reference.gradients(model)
        engine.reduce_gradients()
        results.append((own, reference.gradients(model)))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_sum_over_ranks(tmp_path: Path) -> None:
    mp.spawn(worker, (str(tmp_path),), nprocs=RANKS)
    ranks: list[Any] = [torch.load(tmp_path / f"{rank}.pt") for rank in range(RANKS)]
    for step in range(2):
        own, reduced = zip(*(rank[step] for rank in ranks))
        assert bool(own[1]) == (step == 0)
        for name, first in own[0].items():
            total = first + own[1][name] if name in own[1] else first
            assert all(torch.equal(side[name], total) for side in reduced), name
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
