"""The page: what it says of finished and of killed runs, what it admits, and that nothing of a run becomes markup."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from runs import CONFIG, FOUR_STEPS, completion, eval_row, step_row, write_run

from longstraw.audit.gaps import find_gaps
from longstraw.audit.page import changed_options, render, write_report
from longstraw.audit.run_data import read_run
from longstraw.audit.sections import build_sections

VOID = {"meta", "br", "link", "img", "input"}


class Page(HTMLParser):
    """Checks that elements nest, and collects tags, attributes and visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.words: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def page_of(path: Path) -> Page:
    return Page(render(read_run(path)))


def gaps_of(path: Path) -> dict[str, str]:
    return {gap.what: gap.why for gap in find_gaps(read_run(path))}


def figure(path: Path, title: str) -> Any:
    found = [each for section in build_sections(read_run(path)) for each in section.figures if each.title == title]
    assert found, f"no figure '{title}'"
    return found[0]


def test_the_headline_of_a_finished_run(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path / "run")).text
    for words in ("finished", "some/model", "4 of 4", "256 to 512 tokens", "0.2 → 0.8", "46 s", "504 MiB", "in sweep"):
        assert words in text, words
    assert "0.4 ± 0.1 (step 0)" in text and "0.8 ± 0.1 (step 4)" in text and "+0.4" in text


def test_the_page_needs_no_network_and_runs_only_its_own_script(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", completions={1: [completion(1.0)]})
    html = render(read_run(path))
    page = Page(html)
    assert not {"link", "img", "iframe", "object", "form"} & set(page.tags)
    assert not [each for each in page.attributes if each[1] in ("src", "srcset") or each[1].startswith("on")]
    assert all(value.startswith("#") for _, name, value in page.attributes if name == "href")
    assert "url(" not in html and "@import" not in html and html.count("<script") == 1
    assert "default-src 'none'" in html and "script-src 'sha256-" in html


def test_nothing_of_a_run_becomes_markup(tmp_path: Path) -> None:
    attack = "</pre><script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
    config = CONFIG | {"model": {"path": attack}, "eval": {attack: {"source": "x.jsonl"}}}
    rows = [
        eval_row(0, name=attack),
        step_row(1, **{attack: 1.0, f"rewards/{attack}/mean": 0.5, "rewards/b/mean": 1.0}),
    ]
    rows.append(
        step_row(2, **{attack: 2.0, f"rewards/{attack}/mean": 0.7, "rewards/b/mean": 0.0, f"time/{attack}": 5.0})
    )
    samples = [completion(1.0, attack, prompt=attack, **{attack: attack}), completion(0.0, [{"role": attack}])]
    summary = {"status": "failed", "error": attack}
    path = write_run(tmp_path / "run", rows, config=config, summary=summary, completions={1: samples})
    clean = write_run(tmp_path / "clean", [eval_row(0), step_row(1), step_row(2)], completions={1: samples[:1]})
    page = page_of(path)
    assert page.tags.count("script") == 1 and "img" not in page.tags
    assert not [each for each in page.attributes if each[1].startswith("on")]
    assert set(page.tags) == set(page_of(clean).tags)
    assert page.text.count("alert(1)") >= 6


def test_text_that_is_no_utf8_and_odd_separators_are_survived(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", completions={1: [completion(1.0, "a\u2028b\x00c\ud800d")]})
    out = write_report(path)
    assert "a\u2028b" in out.read_text(encoding="utf-8")


def test_charts_are_whole_svgs_with_title_units_and_table(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    for section in build_sections(read_run(path)):
        for each in section.figures:
            assert each.rows and all(len(row) == len(each.header) for row in each.rows)
            for view in each.views:
                svg = ElementTree.fromstring(view.svg)
                assert svg.get("role") == "img" and svg.get("aria-label") == svg.findtext("title") == each.title
                assert svg.findtext("desc")
                assert {"optimizer step"} <= {node.text for node in svg.iter("text")}
                hover = json.loads(view.hover)
                assert len(hover["at"]) == len(hover["text"]) == len(each.rows)
                assert all(0 <= x <= hover["width"] for x in hover["at"])
                assert "nan" not in view.svg


def test_points_lie_where_the_values_are(tmp_path: Path) -> None:
    """Equal steps of the metric are equal distances on paper, upwards."""
    view = figure(write_run(tmp_path / "run"), "KL to the reference policy").views[0]
    circles = [node for node in ElementTree.fromstring(view.svg).iter("circle")]
    x, y = ([float(node.get(name, "")) for node in circles] for name in ("cx", "cy"))
    assert len(circles) == 4 and y[0] > y[1] > y[2] > y[3]
    assert [b - a for a, b in pairwise(x)] == pytest.approx([x[1] - x[0]] * 3, abs=0.2)
    assert [b - a for a, b in pairwise(y)] == pytest.approx([y[1] - y[0]] * 3, abs=0.2)


def test_stacked_bars_add_up_to_the_step(tmp_path: Path) -> None:
    found = figure(write_run(tmp_path / "run"), "Seconds a step by phase")
    assert found.header == ["step", "all, seconds", "capture", "replay", "sweep", "other"]
    assert found.rows[0] == ["step 1", "10", "2", "3", "4", "1"]
    bars = [node for node in ElementTree.fromstring(found.views[0].svg).iter("rect") if node.get("class") == "bar"]
    heights = [float(node.get("height", "")) for node in bars]
    assert len(bars) == 4 * 4
    assert heights[0] * 2 == pytest.approx(heights[8], abs=0.3)  # capture's 2 s against sweep's 4 s


def test_what_never_changes_is_said_instead_of_drawn(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [step_row(step, kl=0.25) for step in (1, 2, 3)])
    (policy,) = (section for section in build_sections(read_run(path)) if section.key == "policy")
    assert ("KL to the reference policy", "0.25 (nats a token)") in policy.constants
    assert "KL to the reference policy" not in [each.title for each in policy.figures]


def test_drift_and_metrics_of_the_users_are_drawn(tmp_path: Path) -> None:
    config = CONFIG | {"refresh": {"drift": 0.25}}
    drift = {"staleness/drift": 0.1, "staleness/drift_max": 0.2, "staleness/steps": 1.0}
    rows = [step_row(1, **drift), step_row(2, **{key: 2 * value for key, value in drift.items()})]
    rows[1] |= {"my/tool_calls": 3, "staleness/other": 1.5}
    path = write_run(tmp_path / "run", rows, config=config)
    titles = {section.key: [each.title for each in section.figures] for section in build_sections(read_run(path))}
    assert titles["staleness"] == [
        "Age of the prompts' states", "Drift of the prompts' states", "staleness: other",
    ] and titles["others"] == ["my: tool calls"]  # fmt: skip
    assert "captured again above 0.25" in figure(path, "Drift of the prompts' states").views[0].svg
    assert "Drift of captured prompts" not in gaps_of(path)


def test_the_gradients_sides_are_drawn_where_they_were_logged(tmp_path: Path) -> None:
    sides = [
        {"grad_norm/response": 2.0, "grad_norm/prompt": 0.0, "grad_cosine": None},
        {"grad_norm/response": 3.0, "grad_norm/prompt": 1.5, "grad_cosine": -0.25},
        {"grad_norm/response": 4.0, "grad_norm/prompt": 0.5, "grad_cosine": 0.5},
    ]
    path = write_run(tmp_path / "run", [step_row(step, **row) for step, row in enumerate(sides, start=1)])
    found = figure(path, "Gradient, by side")
    assert found.header == ["step", "response side", "prompt side"] and found.rows[1] == ["step 2", "3", "1.5"]
    assert [row[1] for row in figure(path, "Cosine of the gradient's sides").rows] == ["−0.25", "0.5"]
    assert "others" not in [section.key for section in build_sections(read_run(path))]
    page = page_of(write_run(tmp_path / "without"))
    assert "Gradient norm" in page.text and "by side" not in page.text and "Cosine" not in page.text


def test_a_killed_run_still_gives_a_report_and_says_so(tmp_path: Path) -> None:
    running = {"status": "running", "step": 0}
    path = write_run(tmp_path / "run", FOUR_STEPS[:3], summary=running, is_final=False, tail='{"step": 3, "lo')
    text = page_of(path).text
    assert "killed or still running" in text and f"longstraw train {path} --resume" in text and "2 of 4" in text
    gaps = gaps_of(path)
    assert {"Steps 3 to 4", "The trained model", "Part of metrics.jsonl"} <= set(gaps)
    assert gaps["Held-out reward after the last step"] == "The last evaluation is of step 0."


def test_a_run_killed_in_its_first_step_gives_a_report(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [eval_row(0)], summary={"status": "running"}, is_final=False)
    assert "Training" in gaps_of(path) and "0 of 4" in page_of(path).text


def test_nothing_but_metrics_gives_a_report(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "loss": null}\n')
    gaps = gaps_of(path)
    assert {"The configuration", "The environment", "Samples of completions", "Held-out evaluation"} <= set(gaps)
    assert "some/model" not in page_of(path).text


def test_gaps_name_the_option_that_closes_them(tmp_path: Path) -> None:
    config = {key: value for key, value in CONFIG.items() if key != "eval"} | {
        "beta": 0, "num_iterations": 1, "prompt_grad": "none", "log_completions": False,
    }  # fmt: skip
    rows = [{key: value for key, value in step_row(step).items() if key != "kl"} for step in (1, 2, 3, 4)]
    gaps = gaps_of(write_run(tmp_path / "run", rows, config=config))
    assert "beta" in gaps["KL to a reference policy"]
    assert "num_iterations" in gaps["Clipping"]
    assert "eval:" in gaps["Held-out evaluation"]
    assert "prompt_grad" in gaps["The gradient through the whole prompt"]
    assert "log_completions" in gaps["Samples of completions"]
    whole = gaps_of(write_run(tmp_path / "whole", completions={1: [completion(1.0)]}))
    closed = ("KL to a reference policy", "Clipping", "Held-out evaluation", "Samples of completions")
    assert not set(closed) & set(whole) and "The gradient through the whole prompt" not in whole


def test_the_configuration_shows_what_differs_from_the_defaults(tmp_path: Path) -> None:
    changed = dict(changed_options(CONFIG))
    assert changed["model.path"] == "some/model" and changed["beta"] == "0.05" and changed["num_iterations"] == "2"
    assert "num_generations" not in changed and "model.dtype" not in changed  # as by default
    assert changed_options({"unknown": 1}) == []
    assert "reward_funcs: - mine:reward" in page_of(write_run(tmp_path / "run")).text


def test_samples_are_the_best_and_the_worst(tmp_path: Path) -> None:
    messages = [{"role": "assistant", "content": "the best answer"}]
    samples = [
        completion(0.5, "middling"),
        completion(0.9, messages),
        completion(0.1, [7, 8]),
        completion(None, "mute"),
    ]
    text = page_of(write_run(tmp_path / "run", completions={2: samples, 4: [completion(1.0)] * 2})).text
    assert "Step 2, best of 4" in text and "the best answer" in text and "[assistant]" not in text
    assert "Step 2, worst of 4" in text and "token ids: 7 8" in text
    assert "middling" not in text and "all 2 have this reward" in text and "1 token " in text


def test_a_long_run_is_thinned_and_says_so(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", [step_row(step, reward=step % 7) for step in range(1, 1001)])
    assert "each point stands for about 4.2 of them" in page_of(path).text
    assert len(figure(path, "Loss").rows) == 240


def test_the_report_needs_no_torch(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run")
    program = (
        "import sys; from longstraw.cli import app\n"
        f"app(['report', {str(path)!r}], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    assert (path / "report.html").is_file()
