"""The package as a whole: what importing it costs, names, and which room may import which."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import longstraw

SOURCE = Path(longstraw.__file__).parent
ROOMS = ["objective", "parallel", "pages", "attention", "state", "models", "engine"]
ROOMS += ["config", "data", "tasks", "rollout", "trainer", "studies", "planner", "audit", "integrations", "cli"]


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120).stdout


@pytest.mark.parametrize("module", ["longstraw", "longstraw.config.load", "longstraw.planner"])
def test_imports_without_torch(module: str) -> None:
    """Configuration and planning stay instant."""
    if module == "longstraw.planner" and not (SOURCE / "planner").exists():
        pytest.skip("no planner in this tree")
    run(f"import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; import {module}")


def test_public_names() -> None:
    for name in longstraw.__all__:
        assert getattr(longstraw, name) is not None
    assert longstraw.Engine.__module__ == "longstraw.engine.engine"
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        longstraw.Motor  # noqa: B018
    assert longstraw.__version__.count(".") == 2


def test_the_version_is_that_of_the_distribution() -> None:
    from importlib.metadata import version

    assert version("longstraw") == longstraw.__version__


def test_the_engine_registers_its_attention_and_changes_no_default() -> None:
    import transformers
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert longstraw.Engine is not None and "longstraw" in ALL_ATTENTION_FUNCTIONS
    shape = dict(num_hidden_layers=1, hidden_size=8, intermediate_size=8, num_attention_heads=1, vocab_size=9)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    assert model.config._attn_implementation != "longstraw"


def imports(path: Path) -> set[str]:
    """Rooms of the house that a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        found |= {name.split(".")[1] for name in names if name.startswith("longstraw.")}
    return found


def test_every_room_has_its_place() -> None:
    assert {path.parent.name for path in SOURCE.glob("*/*.py")} <= set(ROOMS)


@pytest.mark.parametrize("room", [room for room in ROOMS if (SOURCE / room).exists()])
def test_imports_run_one_way(room: str) -> None:
    """A room imports from itself and from earlier rooms alone, inside functions and for type checking too."""
    later = set(ROOMS[ROOMS.index(room) + 1 :])
    for path in (SOURCE / room).rglob("*.py"):
        assert not (wrong := imports(path) & later), f"{path.relative_to(SOURCE)} imports from {sorted(wrong)}"


def test_no_user_error_is_an_assertion() -> None:
    """Optimised away by `python -O`, the engine's checks are not: none of them is an `assert`."""
    for room in ("engine", "config", "data", "rollout", "trainer", "planner"):
        for path in (SOURCE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Assert):
                    assert node.msg is None, f"{path.name}:{node.lineno} explains itself to a user by assert"
