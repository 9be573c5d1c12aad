"""Trains the weights that ship in `longstraw/tasks/assets/recall`: supervised associative recall on short prompts.

    python scripts/warm_start.py [--output DIR] [--seed 0]

A Qwen3.5-style hybrid of 0.2 M parameters (one GatedDeltaNet layer, one full-attention layer) reads a body of pairs
among filler and is then asked for every key; the loss is on the values. The body grows as accuracy allows, and training
stops when the longest is solved. The script then prints the accuracy by prompt length, one key queried, far beyond what
was trained. Same seed, same machine, same versions: same weights.
"""

import argparse
import math
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from longstraw.tasks import recall

STAGES = ((4, 8), (8, 24), (8, 32), (8, 48), (8, 64), (8, 96), (8, 128), (8, 192), (8, 256))
"""Pairs, and tokens of the body that holds them."""
MAX_STEPS = 1000
BATCH_SIZE = 32
LEARNING_RATE = 3e-3
NUM_WARMUP_STEPS = 20
ACCURACY_TO_GROW = 0.95
ACCURACY_TO_STOP = 0.99
NUM_STEPS_AVERAGED = 5
EVALUATED_TOKENS = (128, 256, 512, 1024, 2048, 4096, 8192)
EVALUATION_SEED = 1_000_003
TOKENS_A_BATCH = 1 << 16


def tiny_hybrid() -> Qwen3_5ForCausalLM:
    """The untrained model, initialised from torch's global generator."""
    config = Qwen3_5TextConfig(
        vocab_size=recall.VOCAB_SIZE,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=32,
        linear_num_key_heads=3,
        linear_num_value_heads=3,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=1 << 20,
        initializer_range=0.05,
    )
    model = Qwen3_5ForCausalLM(config)
    # The stock initial decay forgets within a token or two, which is far from any solution; start from slow decay.
    for layer in model.model.layers:
        if layer.block_type == "linear_attention":
            torch.nn.init.uniform_(layer.linear_attn.A_log, math.log(0.001), math.log(0.05))
    return model


def supervised_batch(
    generator: np.random.Generator, num_pairs: int, body_tokens: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bodies and then a query for every key: ids [num_rows, T], and the indices [num_pairs] of the values in T."""
    rows = []
    for _ in range(num_rows):
        body, keys, values = recall.recall_body(generator, body_tokens, num_pairs)
        order = generator.permutation(num_pairs)
        queries = np.stack([np.full(num_pairs, recall.QUERY_TOKEN), keys[order], values[order]], axis=1)
        rows.append(np.concatenate([body, queries.reshape(-1)]))
    value_indices = body_tokens + 2 + 3 * torch.arange(num_pairs)
    return torch.from_numpy(np.stack(rows)), value_indices


def train(model: Qwen3_5ForCausalLM, seed: int) -> None:
    """Trains in place until the longest body is solved.

    Raises:
        RuntimeError: the longest body was not solved in `MAX_STEPS` steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.0)
    generator = np.random.default_rng([seed, 7])
    stage = 0
    recent: list[float] = []
    for step in range(MAX_STEPS):
        ids, value_indices = supervised_batch(generator, *STAGES[stage], BATCH_SIZE)
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits[:, value_indices - 1]
        targets = ids[:, value_indices]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * min(1.0, (step + 1) / NUM_WARMUP_STEPS)
        optimizer.step()

        recent.append((logits.argmax(-1) == targets).float().mean().item())
        recent = recent[-NUM_STEPS_AVERAGED:]
        accuracy = sum(recent) / len(recent)
        if step % 25 == 0:
            print(f"step {step:4d}  body {STAGES[stage][1]:4d}  loss {loss.item():.3f}  accuracy {accuracy:.3f}")
        if len(recent) < NUM_STEPS_AVERAGED:
            continue
        if stage < len(STAGES) - 1 and accuracy >= ACCURACY_TO_GROW:
            stage += 1
            recent = []
        elif stage == len(STAGES) - 1 and accuracy >= ACCURACY_TO_STOP:
            print(f"step {step:4d}  body {STAGES[stage][1]:4d}  loss {loss.item():.3f}  accuracy {accuracy:.3f}")
            return
    raise RuntimeError(f"Bodies of {STAGES[-1][1]} tokens were not solved in {MAX_STEPS} steps; try another --seed.")


@torch.no_grad()
def accuracy_at(model: Qwen3_5ForCausalLM, prompt_tokens: int, num_rows: int) -> float:
    """Share of held-out prompts of this length whose greedy answer is right."""
    rows = recall.prompts(num_rows, prompt_tokens, seed=EVALUATION_SEED)
    num_right = 0
    rows_a_batch = max(1, TOKENS_A_BATCH // prompt_tokens)
    for start in range(0, num_rows, rows_a_batch):
        batch = rows[start : start + rows_a_batch]
        ids = torch.tensor([row["prompt"] for row in batch])
        answers = torch.tensor([row["answer"] for row in batch])
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=1).logits[:, -1]
        num_right += int((logits.argmax(-1) == answers).sum())
    return num_right / num_rows


def main() -> None:
    package_assets = Path(recall.__file__).parent / "assets" / "recall"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=package_assets, help="folder for config.json and weights")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()

    torch.set_num_threads(1)  # sums split over threads would make the weights depend on their number
    torch.manual_seed(arguments.seed)
    model = tiny_hybrid()
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{num_parameters:,} parameters")
    started = time.perf_counter()
    train(model, arguments.seed)
    print(f"trained in {time.perf_counter() - started:.0f} s")
    model.eval()
    model.save_pretrained(arguments.output)
    (arguments.output / "generation_config.json").unlink(missing_ok=True)
    print(f"saved in {arguments.output}\n\ntokens  accuracy (256 held-out prompts, greedy)")
    for prompt_tokens in EVALUATED_TOKENS:
        print(f"{prompt_tokens:6d}  {accuracy_at(model, prompt_tokens, num_rows=256):.2f}")


if __name__ == "__main__":
    main()
