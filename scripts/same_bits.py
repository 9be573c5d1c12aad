"""Do two commits compute the same bits?   python scripts/same_bits.py --against COMMIT

Every family of `tests/families.py`, in float64, float32 and bfloat16, takes a step in each of a few ways of cutting,
keeping and placing what it computes. A line is printed for each: the digest of loss, log-probabilities, entropies,
gradients and samples. With `--against`, the other commit's lines come from a copy of it in a private folder, and those
that differ are printed; exits 1 if any does. Bits are those of this machine: another processor has others.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODES = {
    "full": dict(prompt_grad="full"),
    "none": dict(prompt_grad="none"),
    "window": dict(prompt_grad=31),
    "retained": dict(prompt_grad="full", retain_graph_bytes=1 << 28),
    "disk": dict(prompt_grad="full", tier="disk"),
}


def lines(families: list[str]) -> Iterator[str]:
    """`FAMILY DTYPE MODE DIGEST`, one a case."""
    sys.path.insert(0, str(ROOT / "tests"))
    import torch
    from families import FAMILIES, build
    from group import group

    import longstraw

    torch.set_num_threads(1)
    for family in families or FAMILIES:
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            model = build(family, dtype=dtype)
            what = group(lengths=(1, 9, 20))
            for name, options in MODES.items():
                digest = hashlib.sha256()

                def add(tensors: list[torch.Tensor], digest: hashlib._Hash = digest) -> None:
                    for tensor in tensors:
                        digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())

                model.zero_grad(set_to_none=True)
                engine = longstraw.Engine(model, segment_tokens=16, block_tokens=8, **options)
                with engine.capture(what.prompt) as state:
                    outcome = engine.backward(state, what.responses, what.objective, 0.9)
                    add([outcome.loss[None], *outcome.logps, *outcome.entropies])
                    add([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
                    drafts = engine.sample(state, num=3, max_new_tokens=6, seed=5)
                    add([tensor for draft in drafts for tensor in (draft.ids, draft.logps)])
                    add(engine.score(state, [draft.ids for draft in drafts]))
                yield f"{family:20} {str(dtype).removeprefix('torch.'):9} {name:9} {digest.hexdigest()[:16]}"


def of_commit(commit: str, families: list[str]) -> list[str]:
    """The lines that another commit prints."""
    with tempfile.TemporaryDirectory(prefix="longstraw-bits-") as folder:
        subprocess.run(
            ["git", "worktree", "add", "--detach", folder, commit], cwd=ROOT, check=True, capture_output=True
        )
        try:
            scripts = Path(folder) / "scripts"
            scripts.joinpath(Path(__file__).name).write_text(Path(__file__).read_text())
            command = [sys.executable, scripts / Path(__file__).name, *families]
            environment = {**os.environ, "PYTHONPATH": str(Path(folder) / "src")}
            found = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)
    return found.stdout.splitlines()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", help="all, if none is named")
    parser.add_argument("--against", metavar="COMMIT", help="compare with what this commit computes")
    given = parser.parse_args()
    ours = []
    for line in lines(given.families):
        print(line, flush=True)
        ours.append(line)
    if given.against is None:
        return 0
    theirs = of_commit(given.against, given.families)
    different = sorted(set(theirs) - set(ours))
    print(f"{len(theirs) - len(different)} of {len(theirs)} cases of {given.against} have the same bits here")
    for line in different:
        print(f"DIFFERENT {line}")
    return 1 if different or not theirs else 0


if __name__ == "__main__":
    sys.exit(main())
