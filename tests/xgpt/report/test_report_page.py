"""report.html: self-contained, safe against hostile texts, and there for an interrupted run."""

import base64
import hashlib
import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fake_run import fake_schedule, write_fake_run
from screens import check_screen

from xgpt.report.figures import BoundCheck
from xgpt.report.output import QueryColumns, read_output
from xgpt.report.page import next_steps, write_report
from xgpt.report.run_charts import memory
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
def run_dir(tmp_path_factory):
    directory = write_fake_run(tmp_path_factory.mktemp("report") / "out", num_queries=24)
    write_report(directory)
    return directory


@pytest.fixture(scope="module")
def text(run_dir):
    return (run_dir / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text):
    return Page(text)


def test_the_page_says_in_words_what_its_screen_does(run_dir, page):
    assert {"compared", "schedule", "rejected", "answers", "errors", "about"} <= set(
        page.values("id"))
    first, last = page.text.index("The run in pictures"), page.text.rindex(" Errors ")
    words = re.sub(r"(?<=[a-z%s)]\.) ", "\n", page.text[:first] + "\n(...)" + page.text[last:])
    check_screen(Path(__file__).with_name("screens.txt"), "page of a run",
                 words.replace(str(run_dir.parent), "FOLDER"))


def figures_of(page: str) -> dict[str, Any]:
    """The plotly figures of a page, by name."""
    found = re.search(r'<script type="application/json" id="figures">(.*?)</script>', page)
    figures: dict[str, Any] = json.loads(found.group(1))
    return figures


def own_part(text: str) -> str:
    """A page without the library that draws, and the page's own script."""
    return text[:text.index("<script>")]


def test_each_chart_has_its_place_its_data_as_a_table_and_one_clock(text, page):
    figures = figures_of(text)
    assert list(figures) == page.values("data-chart") == [
        "latency", "done", "lengths", "memory", "timeline"]
    assert page.tags.count("details") == len(figures)
    assert "latency" in page.text and {"plots", "timeline"} <= set(page.values("id"))
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    colours = set(re.findall(r'"color":"([^"]*)"', own_part(text)))
    assert colours and colours <= set(re.findall(r"(--\w+):", text))
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


def test_nothing_is_fetched_and_hostile_texts_are_shown_and_are_no_elements(text, page):
    for name in ("href", "xlink:href", "src", "srcset", "action", "data"):
        assert all(value.startswith("#") for value in page.values(name))
    assert len(text) < 6e6
    assert not re.search(r"@import|url\((?!#)|https?://", own_part(text))
    assert not {"link", "iframe", "img", "object", "base", "form"} & set(page.tags)
    assert page.tags.count("script") == 3 and page.tags.count("style") == 1
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert page.text.count("</script><script>document.title = 'OWNED'</script>") == 2
    assert "<b onmouseover=alert(1)>id</b>" in page.text
    assert "{{ 7 * 191 }}" in page.text and "1337" not in page.text
    assert "not JSON: </td><script>alert(1)</script>" in page.text


def test_texts_are_shown_as_code_and_prose_and_what_turns_them_as_escapes():
    assert clean("a\x00b\ud800c\r\nd\te\u202ef") == "a\\x00b\\ud800c\nd\te\\u202ef"
    assert clean("xyz" * 10, limit=6) == "xyzxyz [24 more characters are in the files beside]"
    assert code_and_prose("see:\n```py\nx\n```\nthat") == [
        (False, "see:"), (True, "```py\nx\n```"), (False, "that")]
    assert code_and_prose("```\ncut off") == [(True, "```\ncut off")]
    assert code_and_prose(" plain\n") == [(False, " plain\n")]


def test_memory_is_that_of_each_rank_as_predicted_and_as_measured():
    stages = [{"ranks": [0], "peak_memory_bytes": 2**30}, {"ranks": "?"}, 3]
    chart = memory(fake_schedule(), json.loads(json.dumps({"stages": stages})))
    predicted, measured = chart.series
    assert list(predicted.y) == pytest.approx([412e6 / 2**30, 398e6 / 2**30])
    assert list(measured.y) == [1, None]


def test_figures_of_a_run_that_went_on_are_said_to_be_of_its_own_queries(tmp_path):
    directory = write_fake_run(tmp_path / "out", num_queries=24)
    path = directory / "metrics.json"
    metrics = json.loads(path.read_text(encoding="utf-8")) | {"queries_before": 18}
    for value in metrics.values():
        if isinstance(value, dict) and "predicted" in value:
            value["predicted"] = None
    path.write_text(json.dumps(metrics), encoding="utf-8")
    written = write_report(directory).read_text(encoding="utf-8")
    text, figures = Page(written).text, figures_of(written)
    assert re.search(r"6 requests of 24 through .* a second, after 18 by earlier runs", text)
    assert "18 requests of this job were answered by earlier runs." in text
    assert "and this run answered the rest of it" in text and "Predicted against" not in text
    assert "over 24 requests of all runs of this job." in text
    assert "done" not in figures  # the runs' clocks are not one
    assert [series["name"] for series in figures["latency"]["data"]] == ["measured"]
    (directory / "metrics.json").unlink()  # killed
    (directory / "progress.json").write_text('{"done_before": 18}', encoding="utf-8")
    text = Page(write_report(directory).read_text(encoding="utf-8")).text
    assert "24 requests through smollm2-135m on 2 ranks of this machine, by several runs." in text
    assert "queries a second" not in text


@pytest.mark.parametrize("size", [0, 300, 5000])
def test_a_killed_run_has_a_page_that_says_so(tmp_path, size):
    directory = write_fake_run(tmp_path / "out", num_queries=12)
    for name in ("metrics.json", "steps.jsonl", "profile.json", "errors.jsonl"):
        (directory / name).unlink()
    results = directory / "results.jsonl"
    results.write_bytes(results.read_bytes()[:size])
    page = Page(write_report(directory).read_text(encoding="utf-8"))
    assert "This run has not finished: it wrote no metrics.json" in page.text
    assert ("The last line of results.jsonl is torn" in page.text) == (size > 0)
    expected = "met so far" if size == 5000 else "no request is done yet"
    assert expected in page.text


FILES = ("errors.jsonl", "expected.json", "job.json", "metrics.json", "profile.json",
         "results.jsonl", "schedule.json", "spool/places.npy", "spool/queries.npy",
         "spool/records.jsonl", "spool/spool.json", "spool/tokens.bin", "steps.jsonl")
BROKEN = (b"", b'{"a": [', b"[]", b"{}", b'{"version": 1}', b"\xff\xfe")
FOREIGN = json.dumps({"queries": "many", "throughput_qps": 3, "latency_p50_s": {"measured": "inf"},
                      "machine": [1], "ranks": {"a": 1}, "date": 7, "status": None}).encode()


@pytest.mark.parametrize(("name", "ways"), [
    # each way with every other file
    *((name, BROKEN[place % 2::2]) for place, name in enumerate(FILES)),
    ("metrics.json", (FOREIGN,)),
    *(pytest.param(name, BROKEN, marks=pytest.mark.slow) for name in FILES)])
def test_any_single_file_may_be_missing_or_broken(tmp_path, name, ways):
    directory = write_fake_run(tmp_path / "out", num_queries=8)
    (directory / name).unlink()
    assert "</html>" in write_report(directory).read_text(encoding="utf-8")
    for broken in ways:
        (directory / name).write_bytes(broken)
        assert "</html>" in write_report(directory).read_text(encoding="utf-8")


def test_the_pages_policy_names_its_own_scripts_and_lets_nothing_else_in(text):
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    rules = dict(rule.strip().split(" ", 1) for rule in html.unescape(policy).split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
              for script in scripts}
    assert scripts and set(rules["script-src"].split()) == hashes
    assert not re.search(r"<script[^>]+src|<link|<iframe|<object|\son\w+=\"", text)


def page_of(folder: Path, **metrics: Any) -> str:
    out = write_fake_run(folder / "out", num_queries=12)
    known = json.loads((out / "metrics.json").read_text())
    (out / "metrics.json").write_text(json.dumps({**known, **metrics}))
    return write_report(out).read_text()


def test_the_page_tells_each_decision_and_has_no_section_without(tmp_path):
    page = page_of(tmp_path / "a", rescheduling=[{"sentence": "back to <b>16</b>"}])
    assert "Changes while it ran" in page and "<li>back to &lt;b&gt;16&lt;/b&gt;</li>" in page
    assert "Changes while it ran" not in page_of(tmp_path / "b", rescheduling=[])


@pytest.mark.parametrize("rows", [3, None, "x", [1, None], [{}], [{"sentence": 7}]])
def test_foreign_values_do_not_stop_the_page(tmp_path, rows):
    assert page_of(tmp_path, rescheduling=rows)


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    return read_output(write_fake_run(tmp_path_factory.mktemp("run") / "out", num_queries=24))


def attributed(*seconds: float) -> dict[str, Any]:
    keys = ("predicted_s", "with_lengths_s", "with_times_s", "measured_s")
    return {"attribution": dict(zip(keys, seconds, strict=True))}


BUSY = {**attributed(10, 10, 10, 12), "others_cpu_share": 0.2}
NEAR = replace(fake_schedule().rejected[0],
               throughput_qps=0.99 * fake_schedule().figures.throughput_qps)


@pytest.mark.parametrize(("changes", "metrics", "command"), [
    ({}, {}, "sweep JOB.yaml"), ({}, {}, "schedule JOB.yaml --price"),  # the bound costs much
    ({}, attributed(10, 12, 12, 12), "schedule JOB.yaml --set 'workload.output_tokens={mean: "),
    ({}, attributed(10, 10, 12, 12), "profile JOB.yaml --again"),
    ({}, attributed(10, 10, 10, 12), "doctor"),
    ({}, BUSY, "submit JOB.yaml --set output=out/again"),
    ({"job": {"source": "/my jobs/one.yaml"}}, {}, "sweep '/my jobs/one.yaml'"),
    ({"check": BoundCheck(False, "missed")}, {}, "submit JOB.yaml --set constraint.conf"),
    ({"finish_reason": "length"}, {}, "submit JOB.yaml --set workload.max_tokens=320"),
    ({"schedule": fake_schedule(margin_cost=0.2)}, {},
     "schedule JOB.yaml --set constraint.confidence=0.8"),
    ({"schedule": replace(fake_schedule(), rejected=(NEAR,))}, {},
     "submit JOB.yaml --set schedule.policy=waa-c --set output=out/waa-c")])
def test_each_cause_of_a_miss_has_its_remedy(output, changes, metrics, command):
    changes = dict(changes)
    check, reason = changes.pop("check", BoundCheck(True, "kept")), changes.pop("finish_reason", 0)
    if reason:
        changes["queries"] = QueryColumns(replace(answer.figures, finish_reason=reason)
                                          for answer in output.answers)
    if "job" in changes:
        changes["job"] = (output.job or {}) | changes["job"]
    found = [step.command for step in next_steps(replace(output, **changes), metrics, check)]
    assert any(one.startswith(command) for one in found), found
    near = [step.command for step in next_steps(output, attributed(10, 10, 10.1, 10.1), check)]
    assert "profile JOB.yaml --again" not in near
