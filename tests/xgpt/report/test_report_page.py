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
from urllib.parse import unquote

import pytest
from fake_run import fake_schedule, write_fake_run
from screens import check_screen

from xgpt.report.figures import BoundCheck
from xgpt.report.output import read_output
from xgpt.report.page import SHOWN_ANSWERS, next_steps, write_report
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
    answers, errors, charts, schedule = (page.text.rindex(f" {title} ") for title in (
        "Answers all 24", "Errors 2", "Charts Latency", "The schedule"))
    shown = (page.text[:answers] + "\n(...)" + page.text[errors:charts] + "\n(...)"
             + page.text[schedule:])
    words = re.sub(r"(?<=[a-z%s)]\.) ", "\n", shown)
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
    assert page.tags.count("details") == len(figures) + 1  # one folds answers
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


def test_nothing_is_fetched_and_hostile_texts_are_shown_and_are_no_elements(
        run_dir, text, page):
    for name in ("xlink:href", "src", "srcset", "action", "data"):
        assert not page.values(name)
    assert all(value.startswith("#") or (run_dir / value).is_file()
               for value in page.values("href"))
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
    assert "24 answers, 6 of them by this run in 16.4 s" in text.replace("\xa0", " ")
    assert "18 requests of this job were answered by earlier runs." in text
    assert "and this run answered the rest of it" in text and "Measured and predicted" not in text
    assert "over 24 requests of all runs of this job." in text
    assert "done" not in figures  # the runs' clocks are not one
    assert [series["name"] for series in figures["latency"]["data"]] == ["measured"]
    (directory / "metrics.json").unlink()  # killed
    (directory / "progress.json").write_text('{"done_before": 18}', encoding="utf-8")
    text = Page(write_report(directory).read_text(encoding="utf-8")).text
    assert "24 answers. smollm2-135m on 2 ranks of this machine." in text
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
    expected = "met so far" if size == 5000 else "No request is done yet"
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


def test_answers_come_first_with_the_truncated_ones_and_what_to_do_and_most_are_folded(tmp_path):
    out = write_fake_run(tmp_path / "out", num_queries=24)
    results = out / "results.jsonl"
    results.write_text("".join(json.dumps(
        line | {"finish_reason": "length" if line["index"] < 5 else "stop"}) + "\n"
        for line in map(json.loads, results.read_text().splitlines())))
    text = write_report(out).read_text("utf-8")
    page = Page(text)
    assert "24 answers in 16.4 s; 5 truncated." in page.text.replace("\xa0", " ")
    assert "5 of 24 answers were truncated at their max_tokens." in page.text
    assert "xgpt submit JOB.yaml --set workload.max_tokens=320" in page.text
    assert text.index("<article") < text.index('id="compared"') < text.index('id="schedule"')
    assert text[:text.index('id="more"')].count("<article") == SHOWN_ANSWERS
    assert text.count("<article") == 24 and f"{24 - SHOWN_ANSWERS} more answers" in page.text
    job = json.loads((out / "job.json").read_text())
    job["run"]["ignore_eos"] = True  # its lengths are as it asks
    (out / "job.json").write_text(json.dumps(job))
    assert "truncated." not in Page(write_report(out).read_text("utf-8")).text


def test_links_lead_to_files_that_are_there_wherever_the_page_lies(tmp_path):
    out, table = write_fake_run(tmp_path / "a b", num_queries=3), tmp_path / "my #1.csv"
    job = json.loads((out / "job.json").read_text())
    (out / "job.json").write_text(json.dumps(job | {"results": str(table)}))
    (out / "errors.jsonl").write_text("")
    table.write_text("id,answer\n")
    for folder in (out, tmp_path / "x" / "y"):
        folder.mkdir(parents=True, exist_ok=True)
        page = Page(write_report(out, folder / "report.html").read_text("utf-8"))
        links = [unquote(link) for link in page.values("href") if not link.startswith("#")]
        assert [(folder / link).resolve() for link in links] == [
            out / "results.jsonl", table, out / "metrics.json", out / "schedule.json"]
    table.unlink()
    assert "my #1.csv" not in Page(write_report(out).read_text("utf-8")).text


@pytest.mark.parametrize(("times", "sentence"), [
    (0.1, "Expected 35.1 s, took 3.51 s: 90 % faster"), (1, "took 35.1 s: as expected"),
    (1.4, "took 49.1 s: 40 % slower")])
def test_the_first_sentence_says_expected_and_measured_and_a_faster_run_has_no_red(
        tmp_path, times, sentence):
    rows = {key: {"measured": value * (1 / times if key.endswith(("qps", "per_s")) else times),
                  "predicted": value} for key, value in (
        ("throughput_qps", 2.05), ("output_tokens_per_s", 119.0), ("latency_p50_s", 14.9),
        ("latency_p99_s", 27.6), ("ttft_p99_s", 9.0), ("tpot_p99_s", 0.2), ("wall_s", 35.1))}
    page = page_of(tmp_path, **rows)
    assert sentence in Page(page).text.replace("\xa0", " ")
    marked = set(re.findall(r'class="(?:pill|tile|verdict) (\w+)"', page))
    assert {"bad", "fair"} & marked == ({"bad", "fair"} if times > 1 else set())


def test_device_hours_have_a_cost_where_the_price_is_known(tmp_path):
    hours = {"wall_s": {"measured": 3600.0, "predicted": None}, "load_s": {"measured": 900.0},
             "ranks": 2}
    tile = "Device-hours 2.50 {}"
    assert tile.format("2 devices, loading included") in Page(page_of(tmp_path / "a", **hours)).text
    named = page_of(tmp_path / "b", **hours, machine={"device": "H100"})
    assert tile.format("about 17.2 USD, at 6.88 an hour for each") in Page(named).text
    out = write_fake_run(tmp_path / "c")
    job = json.loads((out / "job.json").read_text()) | {"asked": {"job": {"price_per_hour": 2}}}
    (out / "job.json").write_text(json.dumps(job))
    known = json.loads((out / "metrics.json").read_text())
    (out / "metrics.json").write_text(json.dumps({**known, **hours}))
    assert "about 5.00, at 2 an hour for each" in Page(write_report(out).read_text("utf-8")).text


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
    ({"schedule": fake_schedule(margin_cost=0.2)}, {},
     "schedule JOB.yaml --set constraint.confidence=0.8"),
    ({"schedule": replace(fake_schedule(), rejected=(NEAR,))}, {},
     "submit JOB.yaml --set schedule.policy=waa-c --set output=out/waa-c")])
def test_each_cause_of_a_miss_has_its_remedy(output, changes, metrics, command):
    changes = dict(changes)
    check = changes.pop("check", BoundCheck(True, "kept"))
    if "job" in changes:
        changes["job"] = (output.job or {}) | changes["job"]
    found = [step.command for step in next_steps(replace(output, **changes), metrics, check)]
    assert any(one.startswith(command) for one in found), found
    near = [step.command for step in next_steps(output, attributed(10, 10, 10.1, 10.1), check)]
    assert "profile JOB.yaml --again" not in near
