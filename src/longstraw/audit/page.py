"""The page: everything about a run in one HTML file that opens from disk, without network."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shlex
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from pydantic import ValidationError

from longstraw import __version__
from longstraw.audit.cost import memory_kind, phase_costs
from longstraw.audit.gaps import find_gaps
from longstraw.audit.headline import describe_run, held_out, status, tiles
from longstraw.audit.numbers import duration, memory
from longstraw.audit.run_data import RunData, read_run
from longstraw.audit.samples import pick_samples
from longstraw.audit.sections import MAX_POINTS, build_sections
from longstraw.config.train import TrainConfig


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the report of a run; an earlier one is replaced at once.

    Args:
        run_dir: the run directory, whatever state its run ended in.
        out: the file; default: report.html in the run directory.
    Returns:
        The file.
    Raises:
        ValueError: no run directory, no row of metrics, or `out` is a directory.
    """
    run = read_run(run_dir)
    out = out or run_dir / "report.html"
    if out.is_dir():
        raise ValueError(f"'--out': {out} is a directory. Give a file, e.g. --out {out / 'report.html'}")
    page = render(run)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.writing")
    temporary.write_bytes(page.encode("utf-8", errors="replace"))  # JSON may hold half of a surrogate pair
    os.replace(temporary, out)
    return out


def render(run: RunData) -> str:
    """The page's HTML. All text from the run is escaped by the template engine."""
    environment = Environment(
        loader=PackageLoader("longstraw.audit"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["seconds"] = duration
    script = _resource("page.js")
    return environment.get_template("page.html.j2").render(
        run=run,
        name=run.path.resolve().name,
        status=status(run),
        phrases=describe_run(run),
        tiles=tiles(run),
        held_out=held_out(run),
        sections=build_sections(run),
        phases=phase_costs(run),
        memory_kind=memory_kind(run),
        steps_per_point=len(run.steps) / MAX_POINTS,
        gaps=find_gaps(run),
        samples=pick_samples(run),
        changed=changed_options(run.config),
        environment=describe_environment(run),
        css=Markup(_resource("page.css")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        made=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M"),
        version=__version__,
    )


def changed_options(config: dict[str, Any]) -> list[tuple[str, str]]:
    """(dotted key, value) of the options that differ from their defaults; none if it does not fit this version."""
    try:
        changed = TrainConfig.model_validate(config).model_dump(mode="json", exclude_defaults=True)
    except ValidationError:
        return []
    return [(key, value) for key, value in _flat(changed) if key != "output_dir"]


def describe_environment(run: RunData) -> list[tuple[str, str]]:
    """(name, value) of what the last start ran on."""
    if not run.starts:
        return []
    start = run.starts[-1]
    packages = start.get("packages")
    accelerators = start.get("accelerators")
    git = start.get("git")
    facts = [
        ("started", " · ".join(str(start["time"]) for start in run.starts if start.get("time"))),
        ("command", shlex.join(map(str, start.get("command") or []))),
        ("system", start.get("system")),
        ("processor", start.get("cpu")),
        ("threads", f"{start['cpu_threads']} of {start.get('cpu_count')}" if start.get("cpu_threads") else None),
        ("accelerators", ", ".join(_accelerator(each) for each in accelerators) if accelerators else "none"),
        ("CUDA", start.get("cuda")),
        ("Python", start.get("python")),
        ("packages", ", ".join(f"{name} {version}" for name, version in packages.items()) if packages else None),
        ("commit", f"{git.get('commit')}{' with changes' if git.get('modified') else ''}" if git else None),
    ]
    return [(name, str(value)) for name, value in facts if value]


def _accelerator(device: dict[str, Any]) -> str:
    size = device.get("bytes")
    return f"{device.get('name')} ({memory(size)})" if isinstance(size, int) else str(device.get("name"))


def _flat(values: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    pairs = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    return pairs


def _resource(name: str) -> str:
    return (resources.files("longstraw.audit") / "templates" / name).read_text(encoding="utf-8")
