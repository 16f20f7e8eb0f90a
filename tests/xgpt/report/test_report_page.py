"""report.html: self-contained, safe against hostile texts, and there for an interrupted run."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fake_run import HOSTILE_TEXTS, write_fake_run

from xgpt.core.errors import MissingExtraError
from xgpt.report import plots
from xgpt.report.output import EXPECTED_TIMELINE
from xgpt.report.page import expected_output_lengths, write_report
from xgpt.report.words import clean, code_and_prose

pytest.importorskip("jinja2", reason="the report needs jinja2 (extra: run)")
needs_matplotlib = pytest.mark.skipif(not plots.can_plot(), reason="matplotlib is not installed")


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
                 "The latency bound binds.", "Planned for 28.2 s, so that the bound of 30.0 s",
                 "the margin costs 4.1 % of the throughput.",
                 "Margin 6.5 % of the latency, costs 4.1 % of the throughput",
                 "Given up: 1,212 boxes of configurations: 1,200 no better than the best found",
                 "Proved at most 2.34 queries/s Gap 1.30 % Configurations 214 evaluated",
                 "policy waa-m - - - no admissible schedule"):
        assert text in page.text, text
    assert re.search(r"policy waa-c: encode_batch 2, \S+ 3, tp_degree 1, tp_gpus 0 2\.04 11\.7 % "
                     r"25\.3 s lower throughput by 11\.7%", page.text)


@needs_matplotlib
def test_plots_are_inline_and_their_ids_unique(page: Page) -> None:
    assert page.tags.count("svg") == 4
    assert {"plots", "timeline"} <= set(page.values("id"))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    targets = [v[1:] for v in page.values("xlink:href") if v.startswith("#")]
    assert targets and set(targets) <= set(ids)


@needs_matplotlib
def test_plots_take_their_colours_from_the_page(run_dir: Path) -> None:
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.S))
    assert "var(--decode)" in drawn and "var(--encode)" in drawn
    assert not re.findall(r"#[0-9a-f]{6}\b(?!-)", drawn)


def test_nothing_is_fetched_from_anywhere(run_dir: Path, page: Page) -> None:
    for name in ("href", "xlink:href", "src", "srcset", "action", "data"):
        assert all(value.startswith("#") for value in page.values(name))
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"@import|url\((?!#)", text)
    assert not re.search(r"https?://", text)
    assert not {"link", "iframe", "img", "object", "base", "form"} & set(page.tags)


def test_hostile_texts_are_shown_and_are_no_elements(page: Page) -> None:
    assert page.tags.count("script") == 1 and page.tags.count("style") == 1
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert page.text.count("</script><script>document.title = 'OWNED'</script>") == 2
    assert "<b onmouseover=alert(1)>id</b>" in page.text
    assert "{{ 7 * 191 }}" in page.text and "1337" not in page.text
    assert "not JSON: </td><script>alert(1)</script>" in page.text


def test_only_the_named_script_may_run(run_dir: Path, page: Page) -> None:
    policy = next(v for v in page.values("content") if v.startswith("default-src 'none'"))
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/=]{44}'", policy)


def test_what_utf8_cannot_hold_is_replaced() -> None:
    assert clean("a\x00b\ud800c\r\nd\te") == "a\N{REPLACEMENT CHARACTER}b\ufffdc\nd\te"
    assert clean("xyz" * 10, limit=6) == "xyzxyz [24 more characters are in results.jsonl]"


def test_fenced_code_is_told_from_prose() -> None:
    assert code_and_prose("see:\n```py\nx\n```\nthat") == [
        (False, "see:"), (True, "```py\nx\n```"), (False, "that")]
    assert code_and_prose("```\ncut off") == [(True, "```\ncut off")]
    assert code_and_prose(" plain\n") == [(False, " plain\n")]


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


@pytest.mark.parametrize("name", ["errors.jsonl", "job.json", "metrics.json", "profile.json",
                                  "results.jsonl", "schedule.json", "spool/places.npy",
                                  "spool/queries.npy", "spool/records.jsonl",
                                  "spool/spool.json", "spool/tokens.bin", "steps.jsonl"])
def test_any_single_file_may_be_missing_or_broken(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    directory = write_fake_run(tmp_path / "out", num_queries=8)
    if name not in ("results.jsonl", "schedule.json", "steps.jsonl"):
        monkeypatch.setattr(plots, "can_plot", lambda: False)  # drawn from those three only
    (directory / name).unlink()
    assert "</html>" in write_report(directory).read_text(encoding="utf-8")
    for broken in (b"", b'{"a": [', b"[]", b"{}", b'{"version": 1}', b"\xff\xfe"):
        (directory / name).write_bytes(broken)
        assert "</html>" in write_report(directory).read_text(encoding="utf-8")


def test_foreign_values_in_metrics_do_not_stop_the_page(tmp_path: Path) -> None:
    directory = write_fake_run(tmp_path / "out", num_queries=4)
    (directory / "metrics.json").write_text(json.dumps({
        "queries": "many", "throughput_qps": 3, "latency_p50_s": {"measured": "inf"},
        "machine": [1], "ranks": {"a": 1}, "date": 7, "status": None}))
    assert "</html>" in write_report(directory).read_text(encoding="utf-8")


def test_without_matplotlib_the_page_says_how_to_get_plots(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_fake_run(tmp_path / "out", num_queries=4)
    monkeypatch.setattr(plots, "can_plot", lambda: False)
    page = Page(write_report(directory).read_text(encoding="utf-8"))
    assert page.tags.count("svg") == 1, "the timeline alone is drawn without matplotlib"
    assert "pip install -c constraints.txt -e '.[report]'" in page.text
    assert "Answers" in page.text


@needs_matplotlib
@pytest.mark.parametrize(("engine", "is_predicted"), [("xgpt", True), ("deepspeed", False)])
def test_no_pace_is_predicted_of_another_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                engine: str, is_predicted: bool) -> None:
    directory = write_fake_run(tmp_path / "out", num_queries=24)
    metrics = json.loads((directory / "metrics.json").read_text())
    (directory / "metrics.json").write_text(json.dumps({**metrics, "engine": engine}))
    paces: list[float | None] = []
    monkeypatch.setattr(plots, "done_curve", lambda queries, pace: paces.append(pace))
    page = Page(write_report(directory).read_text(encoding="utf-8"))
    assert [pace is not None for pace in paces] == [is_predicted]
    assert f"Engine {engine}" in page.text


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


def chromium() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next((path for name in names if (path := shutil.which(name))), None)


def load_in_browser(page: Path, profile: Path) -> tuple[str, list[str]]:
    """The page's DOM after loading, and what the browser's console said."""
    program = chromium()
    assert program is not None
    command = [
        program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
        f"--user-data-dir={profile}", "--dump-dom", page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.browser
@pytest.mark.skipif(chromium() is None, reason="no headless Chromium on PATH")
def test_a_browser_loads_it_without_complaint_and_runs_nothing_hostile(
        run_dir: Path, tmp_path: Path) -> None:
    dom, console = load_in_browser(run_dir / "report.html", tmp_path / "profile")
    assert console == []
    assert "<title>quickstart - xgpt report</title>" in dom
    page = Page(dom)
    assert page.tags.count("script") == 1
    assert page.text.count(HOSTILE_TEXTS[0]) == 2
    # the page's own script ran: it shows the search box that is hidden without it
    search_label = re.search(r"<label([^>]*)>Search", dom)
    assert search_label is not None and "hidden" not in search_label.group(1)


@pytest.mark.browser
@pytest.mark.skipif(chromium() is None, reason="no headless Chromium on PATH")
def test_the_pages_policy_stops_requests_and_scripts_that_escaping_let_through(
        run_dir: Path, tmp_path: Path) -> None:
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    leak = "<script>document.title = 'OWNED'</script><img src='http://example.invalid/x.png'>"
    leaky = tmp_path / "leaky.html"
    leaky.write_text(text.replace("</main>", leak + "</main>"), encoding="utf-8")
    dom, console = load_in_browser(leaky, tmp_path / "profile")
    assert "<title>quickstart - xgpt report</title>" in dom
    assert len(console) == 2 and all("Content Security Policy" in line for line in console)


@pytest.mark.parametrize(("picture", "is_shown"), [
    ('<svg class="plot"><title>expected lanes</title></svg>', True),
    ('<svg class="plot"><script>expected lanes</script></svg>', False), ("expected lanes", False)])
def test_the_expected_timeline_is_shown_if_it_is_a_picture(
        tmp_path: Path, picture: str, is_shown: bool) -> None:
    directory = write_fake_run(tmp_path / "out", num_queries=4)
    (directory / EXPECTED_TIMELINE).write_text(picture)
    assert ("expected lanes" in write_report(directory).read_text(encoding="utf-8")) == is_shown
