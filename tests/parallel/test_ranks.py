"""One prompt over ranks: gradients, log-probabilities and samples are those of one process, whatever the split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reference
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from families import build, computing_in_float64
from group import Group, group
from torch.distributed.device_mesh import init_device_mesh

import longstraw

FAMILIES = ["llama", "mistral", "qwen3_mixed", "qwen3_5", "qwen3_next", "glm_moe_dsa", "deepseek_v3"]
FAMILIES += ["bamba", "falcon_h1", "kimi_linear", "lfm2", "gpt_oss", "gemma2", "gemma4_shared"]
PIECES = dict(segment_tokens=23, block_tokens=16)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "none": dict(prompt_grad="none"),
    "window": dict(prompt_grad=31),
    "kept": dict(retain_graph_bytes=1 << 30),
    "recomputed on disk": dict(recompute_layers=True, tier="disk", boundary_bytes=0),
}


def step(model: Any, what: Group, mesh: Any, **options: Any) -> tuple[Any, list[Any], dict[str, torch.Tensor]]:
    """(outcome, drafts, completed gradients) of one step."""
    model.zero_grad(set_to_none=True)
    engine = longstraw.Engine(model, mesh=mesh, **PIECES, **options)
    with engine.capture(what.prompt) as state:
        outcome = engine.backward(state, what.responses, what.objective, 0.9)
        drafts = engine.sample(state, num=3, max_new_tokens=3, seed=3)
    engine.reduce_gradients()
    return outcome, drafts, reference.gradients(model)


def worst(family: str, option: str, mesh: Any) -> float:
    """Largest relative difference of anything from one process's, and of a rank's gradient from rank 0's."""
    model, what = build(family), group(num_prompt=47, lengths=(1, 9, 20))
    alone, split = (step(model, what, one, **OPTIONS[option]) for one in (None, mesh))
    pairs = [(split[2][name], gradient) for name, gradient in alone[2].items()]
    pairs += [*zip(split[0].logps, alone[0].logps), (split[0].loss, alone[0].loss)]
    pairs += [(ours.logps, theirs.logps) for ours, theirs in zip(split[1], alone[1])]
    assert [draft.ids.tolist() for draft in split[1]] == [draft.ids.tolist() for draft in alone[1]]
    assert all(name in alone[2] or not gradient.any() for name, gradient in split[2].items())
    return max(float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in pairs)


def worker(rank: int, folder: str, ranks: int, cases: list[tuple[str, str]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("context",))
    found = {}
    for family, option in cases:
        with computing_in_float64():
            found[family, option] = worst(family, option, mesh)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_family_as_one_process_has_it(ranks: int, tmp_path: Path) -> None:
    cases = [(family, "full") for family in FAMILIES]
    mp.spawn(worker, (str(tmp_path), ranks, cases), nprocs=ranks)
    for rank in range(ranks):
        for case, error in torch.load(tmp_path / f"{rank}.pt").items():
            assert error < 1e-9, (rank, case, error)


def noisy_worker(rank: int, folder: str) -> None:
    """One rank's copy of the model draws random numbers: the other would wait for it in the next call."""
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("context",))
    model, what, noisy = build("llama"), group(num_prompt=47, lengths=(1, 9)), []
    model.model.layers[0].mlp.register_forward_hook(lambda *_: torch.rand(1) * 0 if noisy and rank else None)
    engine = longstraw.Engine(model, mesh=mesh, **PIECES)
    scored = engine.score_for(engine.capture(what.prompt), what.responses)
    noisy.append(True)
    with pytest.raises(RuntimeError, match=r"rand" if rank else r"random numbers \(on another rank\)"):
        engine.pull_back(scored, [torch.ones(len(logp)) for logp in scored.logps])
    assert all(parameter.grad is None for parameter in model.parameters())
    noisy.clear()
    engine.capture(what.prompt).release()
    dist.destroy_process_group()


def test_what_one_rank_refuses_all_do(tmp_path: Path) -> None:
    mp.spawn(noisy_worker, (str(tmp_path),), nprocs=2)


def test_every_way_of_running_as_one_process_has_it(tmp_path: Path) -> None:
    cases = [(family, option) for family in ("llama", "mistral", "qwen3_5", "glm_moe_dsa") for option in OPTIONS]
    mp.spawn(worker, (str(tmp_path), 3, cases), nprocs=3)
    for rank in range(3):
        for case, error in torch.load(tmp_path / f"{rank}.pt").items():
            assert error < 1e-9, (rank, case, error)


def both_axes(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=4)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    model = build("qwen3_5", dtype=torch.float32)
    groups = [group(num_prompt=30 + 11 * i, lengths=(4, 7), seed=i) for i in range(2)]
    found = step(model, groups[mesh.get_local_rank("data")], mesh)[2]
    expected: dict[str, torch.Tensor] = {}
    for what in groups:
        for name, gradient in step(model, what, None)[2].items():
            expected[name] = expected[name] + gradient if name in expected else gradient
    torch.save(reference.relative_error(found, expected), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_prompts_over_one_axis_and_tokens_over_the_other(tmp_path: Path) -> None:
    mp.spawn(both_axes, (str(tmp_path),), nprocs=4)
    assert all(torch.load(tmp_path / f"{rank}.pt") < 1e-5 for rank in range(4))
