"""README and docs name what is there: files, modules, rooms, code words; and their examples run."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tiny import VOCAB_SIZE, llama
from transformers import Qwen2Config

import longstraw
from longstraw.models import family
from longstraw.pages import PageStore
from longstraw.state.kv import KVChain
from longstraw.state.window import WindowChain

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "longstraw"
README = ROOT / "README.md"
HOW = ROOT / "docs" / "how-it-works.md"
DOCUMENTS = sorted([README, ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")])
HELD_TO_THEIR_PATHS = [README, HOW]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SUFFIXES = r"py|md|ya?ml|json|svg|toml|css|js|j2|safetensors"


def prose(path: Path) -> str:
    return FENCE.sub("", path.read_text())


def codes(path: Path, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall(path.read_text()) if kind == language]


def exists(name: str) -> bool:
    """Under the repository, or, shortened, under the package."""
    return (ROOT / name).exists() or (SOURCE / name).exists()


def named_paths(text: str) -> list[str]:
    """File names, and folders that end in a slash or contain one, between backticks."""
    words = re.findall(r"`([^`\n]+)`", text)
    return [word for word in words if re.fullmatch(rf"[\w./-]+\.({SUFFIXES})|[a-z_]+/[\w/-]*", word)]


def glossary() -> list[tuple[str, str, list[str]]]:
    """(word, meaning, files) of every row."""
    text = HOW.read_text().split("## Glossary")[1]
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in text.splitlines() if line.startswith("| ")]
    return [(word, meaning, re.findall(r"`([^`]+)`", files)) for word, meaning, files in rows if word != "word"]


@pytest.mark.parametrize("document", HELD_TO_THEIR_PATHS, ids=lambda path: path.name)
def test_every_path_exists(document: Path) -> None:
    found = named_paths(prose(document))
    assert len(found) > 5
    assert not (missing := sorted({name for name in found if not exists(name)})), f"{document.name} names {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", document.read_text())
    missing = [name for name in targets if "://" not in name and not (document.parent / name).exists()]
    assert not missing, f"{document.name} links to {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_and_command_exists(document: Path) -> None:
    text = document.read_text()
    for name in sorted(set(re.findall(r"\blongstraw(?:\.\w+)+", text))):
        found, parts = longstraw, name.split(".")[1:]
        for depth, part in enumerate(parts, start=1):
            module = ".".join(["longstraw", *parts[:depth]])
            is_module = not hasattr(found, part) and find_spec(module) is not None
            found = import_module(module) if is_module else getattr(found, part)
    for name in set(re.findall(r"python -m (benchmarks(?:\.\w+)+)", text)):
        assert (ROOT / f"{name.replace('.', '/')}.py").exists(), f"{document.name} names {name}"


def test_the_tree_is_the_tree() -> None:
    """Rooms with a line each in the README, and no room without."""
    (tree,) = [code for code in codes(README, "") if code.startswith("src/longstraw/")]
    rooms = re.findall(r"^  (\w+)/ ", tree, re.MULTILINE)
    assert set(rooms) == {path.parent.name for path in SOURCE.glob("*/*.py")}
    assert all(exists(name) for name in re.findall(r"^(\w+)/ ", tree, re.MULTILINE))


def test_the_glossary_places_every_word_once() -> None:
    rows = glossary()
    words = [word for word, _, _ in rows]
    assert len(words) > 50 and len(set(words)) == len(words)
    for word, meaning, files in rows:
        assert files, f"{word} has no file"
        assert not (missing := [name for name in files if not exists(name)]), f"{word} is in {missing}"
        text = "".join((SOURCE / name if (SOURCE / name).exists() else ROOT / name).read_text() for name in files)
        for name in re.findall(r"`([A-Za-z_][\w.]*)`", meaning):
            last = name.rsplit(".", 1)[-1]
            assert re.search(rf"\b{last}\b", text), f"{word}: {files} does not speak of {name}"


def test_the_figure_names_what_is_there() -> None:
    figure = (ROOT / "docs" / "figures" / "house.svg").read_text()
    names = re.findall(r"\b((?:\w+/)?\w+\.py)\b", figure)
    assert names
    for name in names:
        assert exists(name) or list(SOURCE.glob(f"*/{name}")), name
    rooms = set(re.findall(r"\b([a-z]+)/(?![\w<])", figure))
    assert rooms and all((SOURCE / room).is_dir() for room in rooms), rooms


def test_the_readmes_engine_example_runs() -> None:
    """Backward, and its two halves: the same gradient twice."""
    code, of_trees = codes(README, "python")
    model, prompt_ids = llama(max_position_embeddings=512), torch.arange(40) % VOCAB_SIZE
    before, scored, after = code.partition("scored = ")
    assert scored

    def objective(logps: list[torch.Tensor]) -> torch.Tensor:
        return sum((logp.mean() * (place + 1) for place, logp in enumerate(logps)), start=torch.zeros(()))

    names = {"model": model, "prompt_ids": prompt_ids, "objective": objective}
    exec(before.replace("max_new_tokens=256", "max_new_tokens=6"), names)
    once = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    exec(scored + after, names)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name], msg=name)
    sequences = [torch.tensor([3, 1, 4, 1, 5]), torch.tensor([3, 1, 4, 2])]
    names |= {"sequences": sequences, "masks": [torch.arange(len(s)) > 1 for s in sequences]}
    exec(of_trees, names)
    assert names["tree"].num_tokens == 6 and [len(logp) for logp in names["outcome"].logps] == [3, 2]


def test_the_family_example_is_a_whole_file(monkeypatch: pytest.MonkeyPatch) -> None:
    (code,) = [code for code in codes(HOW, "python") if "register(" in code]
    assert "mine" not in family.supported_model_types()  # loads them all, once, before they are copied
    monkeypatch.setattr(family, "_FAMILIES", dict(family._FAMILIES))
    names: dict[str, object] = {}
    exec(code, names)
    config = Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=4)
    config.sliding_window = 4
    layers = family.family_of("mine").layers(config)
    full, window = (layer.chain(PageStore("cpu"), 0) for layer in layers)
    assert isinstance(full, KVChain) and isinstance(window, WindowChain) and window.size == 4


def test_the_trainer_example_takes_any_loss() -> None:
    """The lines between the engine and a trainer's loss, as they stand."""
    (code,) = [code for code in codes(HOW, "python") if "trainer_loss" in code]
    model = llama()
    engine = longstraw.Engine(model)
    with engine.capture(torch.arange(9)) as state:
        names = {
            "engine": engine,
            "state": state,
            "responses": [torch.tensor([3, 4]), torch.tensor([5])],
            "trainer_loss": lambda logps: -sum(logp.sum() for logp in logps),
        }
        exec(code, names)
    assert all(parameter.grad is not None for parameter in model.parameters())
