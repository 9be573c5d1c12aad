"""Does a GLM step's memory stay flat while its prompt grows?   python -m benchmarks.glm_memory

Each point is a fresh process on CPU: a tiny GLM with sparse attention (two indexers, two layers that share their
choice, 64 tokens chosen), float32, one captured prompt, one gradient step on two responses. Peak private memory is
taken above the built model and the captured state. Prints a row a point; exits 1 if it grows by more than 64 MB from
the shortest prompt to the longest.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ALLOWED = 64e6
PROMPTS = (8192, 65536)
MODES = ("none", "full")


def point(mode: str, num_prompt: int) -> dict[str, Any]:
    """One step in this process: bytes and seconds."""
    import torch
    from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

    import longstraw
    from benchmarks.memory import Watcher

    torch.manual_seed(0)
    config = GlmMoeDsaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        index_topk=64,
        index_head_dim=16,
        index_n_heads=2,
        first_k_dense_replace=1,
        indexer_types=["full", "shared", "full", "shared"],
        max_position_embeddings=1 << 20,
        initializer_range=0.2,
    )
    model = GlmMoeDsaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".indexer." not in name)
        if name.endswith("gate.weight"):  # zero at birth: every expert would tie
            torch.nn.init.normal_(parameter, std=0.5)
    prompt = torch.randint(0, 256, (num_prompt,))
    responses = [torch.randint(0, 256, (64,)) for _ in range(2)]
    engine = longstraw.Engine(model, prompt_grad=mode, segment_tokens=1024, block_tokens=128)

    def step(ids: torch.Tensor) -> int:
        """Bytes of the captured state."""
        with engine.capture(ids) as state:
            engine.backward(state, responses, lambda logps: logps[1].mean() - logps[0].mean())
            return sum(sum(tiers.values()) for tiers in state.nbytes.values())

    step(prompt[:2048])
    with Watcher() as watcher:
        watcher.enter("step")
        state_bytes = step(prompt)
    return {"peak_bytes": watcher.peak_bytes, "state_bytes": state_bytes, "seconds": watcher.seconds}


def point_in_its_own_process(mode: str, num_prompt: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.glm_memory", "--point", mode, str(num_prompt)]
    root = Path(__file__).resolve().parent.parent
    out = subprocess.run(command, capture_output=True, text=True, cwd=root)
    if out.returncode:
        raise RuntimeError(f"the point failed:\n{out.stderr[-2000:]}")
    return json.loads(out.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS, help="prompt lengths in tokens")
    parser.add_argument("--point", nargs=2, metavar=("MODE", "TOKENS"), help="measure one point in this process")
    arguments = parser.parse_args()
    if arguments.point:
        mode, num_prompt = arguments.point
        print(json.dumps(point(mode, int(num_prompt))))
        return 0
    failures = 0
    for mode in MODES:
        above = []
        for num_prompt in arguments.prompts:
            row = point_in_its_own_process(mode, num_prompt)
            above.append(row["peak_bytes"] - row["state_bytes"])
            print(
                f"prompt_grad={mode:5} prompt {num_prompt:6}  state {row['state_bytes'] / 1e6:6.1f} MB  "
                f"peak above model and state {above[-1] / 1e6:6.1f} MB  {row['seconds']:6.1f} s",
                flush=True,
            )
        growth = above[-1] - above[0]
        failures += growth > ALLOWED
        verdict = "ok" if growth <= ALLOWED else "TOO MUCH"
        print(f"  growth {growth / 1e6:.1f} MB, allowed {ALLOWED / 1e6:.0f} MB  {verdict}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
