"""Releases of engines: which row stands for one, and what is said of one that nobody measured."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner

from xgpt.cli.main import cli
from xgpt.core import catalog
from xgpt.core.catalog.releases import engine_rows, row_named


@pytest.mark.parametrize(("text", "row"), [
    *((name, name) for name in catalog.names("engine")),
    ("vllm-0.12.0", "vllm-0.12"), ("vllm-0.19.1", "vllm"), ("vllm-v0.14", "vllm"),
    ("vllm-0.2.7", "vllm-0.2"), ("vllm-0.32.0", "vllm-0.32"), ("vllm-0.40", "vllm-0.32"),
    ("vllm-1.0", "vllm-0.32"), ("sglang-0.5.6.post2", "sglang"), ("tensorrt-llm-1.2rc5",
    "tensorrt-llm"), ("tensorrt-llm-1.0.0rc3", "tensorrt-llm-1.0"), ("deepspeed-0.19",
    "deepspeed")])
def test_a_release_has_the_row_that_rests_on_it(text, row):
    assert row_named(text) == row


@pytest.mark.parametrize(("text", "nearest"), [
    ("vllm-0.25", "0.19 (plan.engine: vllm;"), ("vllm-0.13", "0.14 (plan.engine: vllm;"),
    ("vllm-0.7", "0.12 (plan.engine: vllm-0.12;"), ("vllm-0.1", "0.2 (plan.engine: vllm-0.2;"),
    ("sglang-0.4", "0.5 (plan.engine: sglang;"),
    ("tensorrt-llm-0.9", "0.14 (plan.engine: tensorrt-llm;"),
    ("tensorrt-llm-1.1", "1.2 (plan.engine: tensorrt-llm;"),
    ("tensorrt-llm-2.0", "1.2 (plan.engine: tensorrt-llm;")])
def test_a_release_that_nobody_measured_is_refused_with_the_nearest_and_its_error(text, nearest):
    with pytest.raises(ValueError) as refused:
        row_named(text)
    words = str(refused.value)
    assert f"nobody measured this release; the nearest measured one is {nearest}" in words
    rows = {row["engine"]: row for row in engine_rows()}
    row = rows[words.partition("plan.engine: ")[2].partition(";")[0]]
    assert f"{row['cases']} published cases, {row['error']:.0%} off" in words
    for name, row in rows.items():
        if name.startswith(text.rpartition("-")[0]):
            assert all(one.replace("+", " and later") in words for one in row["releases"])


@pytest.mark.parametrize("text", ["vlm-0.12", "vllm-", "vllm-12", "vllm-a.b", "-0.12", ""])
def test_what_is_no_release_of_an_engine_is_an_unknown_name(text):
    with pytest.raises(ValueError, match="allowed: fastertransformer, vllm"):
        row_named(text)


def test_every_row_says_when_it_was_measured_or_that_it_never_was():
    rows = {row["engine"]: row for row in json.loads(
        CliRunner().invoke(cli, ["models", "--accuracy", "--json"]).stdout)["engines"]}
    assert [*rows] == catalog.names("engine")
    for name, row in rows.items():
        assert row["source"] and bool(row["date"]) == (row["cases"] > 0) == (
            row["error"] is not None), name
    assert rows["vllm-0.32"]["cases"] == 0 and rows["vllm-0.12"]["cases"] >= 12
    shown = CliRunner().invoke(cli, ["models", "--accuracy"]).stdout
    assert any(line.startswith("vllm-0.32 ") and line.endswith("never compared")
               for line in shown.splitlines())


def test_the_table_of_the_documents_has_every_row_and_its_releases():
    page = (Path(__file__).resolve().parents[3] / "docs/engines.md").read_text("utf-8")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in page.splitlines()
             if line.startswith("| `")]
    rows = {name.strip("` "): (releases, date) for names, releases, *_, date in (
        row for row in cells if len(row) == 4) for name in names.split(",")}
    for row in map(catalog.engine, catalog.names("engine")):
        releases, date = rows[row.name]
        assert all(one.replace("+", " and later") in releases for one in row.releases), row.name
        assert date == row.date, row.name


def test_a_release_that_nobody_measured_differs_from_the_row_it_is_like_in_name_alone():
    like, row = (asdict(catalog.engine(name)) for name in ("vllm", "vllm-0.32"))
    told = {"name", "releases", "source", "date", "like", "constants", "errors"}
    assert {key for key in like if like[key] != row[key]} <= told
