"""report.html: self-contained, safe against hostile texts, and there for an interrupted run."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_run import write_fake_run

from xgpt.core.errors import MissingExtraError
from xgpt.report.lanes import EXPECTED_FILE
from xgpt.report.page import expected_output_lengths, write_report
from xgpt.report.words import clean, code_and_prose

pytest.importorskip("jinja2", reason="the report needs jinja2 (extra: run)")


class Page(HTMLParser):
    """Collects what a test asks of a page: elements, attributes, ids, and text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []  # (tag, name, value)
        self.texts: list[str] = []
        self._inside: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag in self._inside:
            while self._inside.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self._inside):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def values(self, name: str) -> list[str]:
        return [value for _, attribute, value in self.attributes if attribute == name]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_fake_run(tmp_path_factory.mktemp("report") / "out", num_queries=24)
    write_report(directory)
    return directory


@pytest.fixture(scope="module")
def page(run_dir: Path) -> Page:
    return Page((run_dir / "report.html").read_text(encoding="utf-8"))


def test_the_headline_says_what_ran_where_and_how_fast(page: Page) -> None:
    assert re.search(r"24 queries through smollm2-135m on 2 ranks of this machine in [\d.]+ s, "
                     r"[\d.]+ queries a second\.", page.text)
    assert "Latency bound of 30.0 s kept" in page.text


def test_every_section_is_there(page: Page) -> None:
    headings = {"compared", "schedule", "rejected", "answers", "errors", "about"}
    assert headings <= set(page.values("id"))
    for text in ("the bound costs 15.7 % of the throughput", "within 15 %",
                 "does not fit: rank 0 would hold", "summarise-99", "hub cache",
                 "timed: decode attention 4 points", "torch version 2.13.0+cpu"):
        assert text in page.text


def test_the_choice_is_explained_its_margin_and_proof_shown_and_alternatives_weighed(
        page: Page) -> None:
    for text in ("Why this one RRA (every device encodes and decodes in turn) is the <best>.",
                 "The latency bound binds.", "margin planned for 28.2 s, so that the bound of 30.0",
                 "the margin costs 4.1 % of the throughput",
                 "search optimal, gap 1.30 %, 214 configurations in 380 ms",
                 "ruled out 1,212 groups of configurations: 1,200 expected to be no better",
                 "policy waa-m - - - no admissible schedule"):
        assert text in page.text, text
    assert re.search(r"policy waa-c: encode_batch 2, \S+ 3, tp_degree 1, tp_gpus 0 2\.04 11\.7 % "
                     r"25\.3 s lower throughput by 11\.7%", page.text)


def figures_of(page: str) -> dict[str, Any]:
    """The plotly figures of a page, by name."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    assert found is not None
    figures: dict[str, Any] = json.loads(found.group(1))
    return figures


def own_part(text: str) -> str:
    """A page without the library that draws, and the page's own script."""
    return text[:text.index("<script>")]


def test_each_chart_has_its_place_and_its_data_as_a_table(run_dir: Path, page: Page) -> None:
    figures = figures_of((run_dir / "report.html").read_text(encoding="utf-8"))
    assert list(figures) == page.values("data-chart") == [
        "latency", "done", "lengths", "utilisation", "memory", "choice", "timeline"]
    assert page.tags.count("details") == len(figures)
    assert "latency" in page.text and {"plots", "timeline"} <= set(page.values("id"))
    ids = page.values("id")
    assert len(ids) == len(set(ids))


def test_the_charts_take_their_colours_from_the_page(run_dir: Path) -> None:
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    colours = set(re.findall(r'"color":"([^"]*)"', own_part(text)))
    defined = set(re.findall(r"(--\w+):", text))
    assert colours and colours <= defined


def test_nothing_is_fetched_from_anywhere(run_dir: Path, page: Page) -> None:
    for name in ("href", "xlink:href", "src", "srcset", "action", "data"):
        assert all(value.startswith("#") for value in page.values(name))
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    assert len(text) < 6e6
    assert not re.search(r"@import|url\((?!#)|https?://", own_part(text))
    assert not {"link", "iframe", "img", "object", "base", "form"} & set(page.tags)


def test_hostile_texts_are_shown_and_are_no_elements(page: Page) -> None:
    assert page.tags.count("script") == 3 and page.tags.count("style") == 1
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert page.text.count("</script><script>document.title = 'OWNED'</script>") == 2
    assert "<b onmouseover=alert(1)>id</b>" in page.text
    assert "{{ 7 * 191 }}" in page.text and "1337" not in page.text
    assert "not JSON: </td><script>alert(1)</script>" in page.text


def test_only_the_named_scripts_may_run(run_dir: Path, page: Page) -> None:
    policy = next(v for v in page.values("content") if v.startswith("default-src 'none'"))
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]{44}' 'sha256-[A-Za-z0-9+/=]{44}';", policy)
    assert "unsafe-eval" not in policy


def test_what_has_no_glyph_or_turns_the_text_is_an_escape() -> None:
    assert clean("a\x00b\ud800c\r\nd\te\u202ef") == "a\\x00b\\ud800c\nd\te\\u202ef"
    assert clean("xyz" * 10, limit=6) == "xyzxyz [24 more characters are in results.jsonl]"


def test_fenced_code_is_told_from_prose() -> None:
    assert code_and_prose("see:\n```py\nx\n```\nthat") == [
        (False, "see:"), (True, "```py\nx\n```"), (False, "that")]
    assert code_and_prose("```\ncut off") == [(True, "```\ncut off")]
    assert code_and_prose(" plain\n") == [(False, " plain\n")]


def test_figures_of_a_run_that_went_on_are_said_to_be_of_its_own_queries(tmp_path: Path) -> None:
    directory = write_fake_run(tmp_path / "out", num_queries=24)
    path = directory / "metrics.json"
    metrics = json.loads(path.read_text(encoding="utf-8")) | {"queries_before": 18}
    for value in metrics.values():
        if isinstance(value, dict) and "predicted" in value:
            value["predicted"] = None
    path.write_text(json.dumps(metrics), encoding="utf-8")
    written = write_report(directory).read_text(encoding="utf-8")
    text, figures = Page(written).text, figures_of(written)
    assert re.search(r"6 queries of 24 through .* a second, after 18 by earlier runs", text)
    assert "18 queries of this job were answered by earlier runs." in text
    assert "and this run answered the rest of it" in text and "Predicted against" not in text
    assert "over 24 queries of all runs of this job." in text
    assert "done" not in figures  # the runs' clocks are not one
    assert [series["name"] for series in figures["latency"]["data"]] == ["measured"]


def test_a_run_that_went_on_and_was_killed_has_no_speed(tmp_path: Path) -> None:
    directory = write_fake_run(tmp_path / "out", num_queries=24)
    (directory / "metrics.json").unlink()
    (directory / "progress.json").write_text('{"done_before": 18}', encoding="utf-8")
    text = Page(write_report(directory).read_text(encoding="utf-8")).text
    assert "24 queries through smollm2-135m on 2 ranks of this machine, by several runs." in text
    assert "queries a second" not in text


def test_writing_twice_gives_the_same_bytes(run_dir: Path) -> None:
    before = (run_dir / "report.html").read_bytes()
    assert write_report(run_dir) == run_dir / "report.html"
    assert (run_dir / "report.html").read_bytes() == before
    assert not list(run_dir.glob("*.tmp"))


@pytest.mark.parametrize("size", [0, 300, 5000])
def test_a_killed_run_has_a_page_that_says_so(tmp_path: Path, size: int) -> None:
    directory = write_fake_run(tmp_path / "out", num_queries=12)
    for name in ("metrics.json", "steps.jsonl", "profile.json", "errors.jsonl"):
        (directory / name).unlink()
    results = directory / "results.jsonl"
    results.write_bytes(results.read_bytes()[:size])
    page = Page(write_report(directory).read_text(encoding="utf-8"))
    assert "This run has not finished: it wrote no metrics.json" in page.text
    assert ("The last line of results.jsonl is torn" in page.text) == (size > 0)
    expected = "kept so far" if size == 5000 else "no query is done yet"
    assert expected in page.text


FILES = ("errors.jsonl", "expected.json", "job.json", "metrics.json", "profile.json",
         "results.jsonl", "schedule.json", "spool/places.npy", "spool/queries.npy",
         "spool/records.jsonl", "spool/spool.json", "spool/tokens.bin", "steps.jsonl")
BROKEN = (b"", b'{"a": [', b"[]", b"{}", b'{"version": 1}', b"\xff\xfe")


@pytest.mark.parametrize(("name", "ways"), [
    # each way with every other file
    *((name, BROKEN[place % 2::2]) for place, name in enumerate(FILES)),
    *(pytest.param(name, BROKEN, marks=pytest.mark.slow) for name in FILES)])
def test_any_single_file_may_be_missing_or_broken(tmp_path: Path, name: str,
                                                  ways: Sequence[bytes]) -> None:
    directory = write_fake_run(tmp_path / "out", num_queries=8)
    (directory / name).unlink()
    assert "</html>" in write_report(directory).read_text(encoding="utf-8")
    for broken in ways:
        (directory / name).write_bytes(broken)
        assert "</html>" in write_report(directory).read_text(encoding="utf-8")


def test_foreign_values_in_metrics_do_not_stop_the_page(tmp_path: Path) -> None:
    directory = write_fake_run(tmp_path / "out", num_queries=4)
    (directory / "metrics.json").write_text(json.dumps({
        "queries": "many", "throughput_qps": 3, "latency_p50_s": {"measured": "inf"},
        "machine": [1], "ranks": {"a": 1}, "date": 7, "status": None}))
    assert "</html>" in write_report(directory).read_text(encoding="utf-8")


@pytest.mark.parametrize(("engine", "is_predicted"), [("xgpt", True), ("deepspeed", False)])
def test_no_pace_is_predicted_of_another_engine(tmp_path: Path, engine: str,
                                                is_predicted: bool) -> None:
    directory = write_fake_run(tmp_path / "out", num_queries=24)
    (directory / EXPECTED_FILE).unlink()
    metrics = json.loads((directory / "metrics.json").read_text())
    (directory / "metrics.json").write_text(json.dumps({**metrics, "engine": engine}))
    text = write_report(directory).read_text(encoding="utf-8")
    assert (len(figures_of(text)["done"]["data"]) == 2) == is_predicted
    assert f"Engine {engine}" in Page(text).text


def test_expected_and_measured_steps_are_on_one_clock(run_dir: Path) -> None:
    figures = figures_of((run_dir / "report.html").read_text(encoding="utf-8"))
    boxes = [trace for trace in figures["timeline"]["data"] if trace["type"] == "bar"]
    first_s: dict[str, float] = {}
    for trace in boxes:
        for lane, start_s in zip(trace["y"], trace["base"], strict=True):
            first_s[lane] = min(start_s, first_s.get(lane, start_s))
    assert list(figures["timeline"]["layout"]["yaxis"]["categoryarray"]) == [
        "stage 0 measured", "stage 0 expected", "stage 1 measured", "stage 1 expected"]
    assert first_s["stage 0 measured"] == first_s["stage 0 expected"] == 0
    done = {trace["name"]: trace for trace in figures["done"]["data"]}
    assert done["predicted"]["x"][1] == 7.5, "as expected, not shifted onto what was measured"


def test_without_jinja2_the_extra_is_named(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(MissingExtraError, match="jinja2"):
        write_report(run_dir)


def test_expected_lengths_come_from_moments_or_from_a_task() -> None:
    moments = {"kind": "normal", "mean": 58, "std": 39, "maximum": 160}
    by_moments = expected_output_lengths({"workload": {"output_tokens": moments}})
    assert by_moments is not None and by_moments.mean == pytest.approx(58, abs=1)
    by_task = expected_output_lengths(
        {"workload": {"output_tokens": {"kind": "task", "task": "S"}}})
    assert by_task is not None and by_task.max == 80
    for unknown in ({"kind": "observe"}, {"kind": "task", "task": "no such task"}, None, 3):
        assert expected_output_lengths({"workload": {"output_tokens": unknown}}) is None


def test_the_pages_policy_names_its_own_scripts_and_lets_nothing_else_in(run_dir: Path) -> None:
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in html.unescape(policy).split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
              for script in scripts}
    assert scripts and set(rules["script-src"].split()) == hashes
    assert not re.search(r"<script[^>]+src|<link|<iframe|<object|\son\w+=\"", text)
