"""Columns of the requests go into the results as they were, beside the answers: each input format
to each output format and back."""

import csv
import gzip
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from xgpt.core.errors import XgptError
from xgpt.report.results_file import ANSWER, names_in_results, write_results
from xgpt.requests.request import Request
from xgpt.requests.request_files import RequestFiles, format_of
from xgpt.requests.spool import SpoolWriter
from xgpt.requests.spool_columns import ColumnsWriter
from xrunner.files.results import write_errors
from xrunner.files.spooled_requests import read_and_tokenise

pa = pytest.importorskip("pyarrow", reason="Parquet needs the extra `parquet`")
pq = pytest.importorskip("pyarrow.parquet")


class OneToken:
    """A tokeniser by which every prompt is one token."""

    vocab_size = 10

    def tokenise(self, requests: Sequence[Request]) -> list[list[int] | str]:
        return [[1] for _ in requests]


def ran(output: Path, *paths: Path, answered: int | None = None, text: str = "",
        **said: Any) -> Path:
    """The folder of a run that answered these requests, the first `answered` of them. `text`: of
    each answer, before the request's id."""
    output.mkdir(exist_ok=True)
    spool = SpoolWriter(ColumnsWriter())
    requests = read_and_tokenise(RequestFiles(paths=paths, **said), OneToken(), spool)
    queries = np.stack([np.arange(len(requests)), np.full(len(requests), 5)], axis=1)
    write_errors(output / "errors.jsonl", requests.bad_lines, requests.labels)
    spool.save(output, queries, len(requests.bad_lines), requests.labels)
    lines = [_answer(i, spool.record(i).id, text, spool.record(i).is_openai)
             for i in range(len(requests))]
    (output / "results.jsonl").write_text("".join(
        json.dumps(line) + "\n" for line in lines[:answered]))
    return output


def _answer(index: int, name: str, text: str, is_openai: bool) -> dict[str, Any]:
    times = {"latency_s": 0.5 + index, "encode_start_s": 0.25, "ttft_s": 0.375, "tpot_s": None}
    if is_openai:
        body = {"choices": [{"text": text + name, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 2}}
        return {"custom_id": name, "response": {"body": body}, "xgpt": {"index": index, **times}}
    return {"id": name, "index": index, "text": text + name, "output_ids": [3, 4],
            "input_tokens": 1, "output_tokens": 2, "finish_reason": "stop", **times}


def table(path: Path) -> list[dict[str, Any]]:
    """What a table holds, nulls and typed values as far as its format tells them."""
    if format_of(path) == "parquet":
        rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
        return rows
    raw = path.read_bytes()
    content = (gzip.decompress(raw) if path.name.endswith(".gz") else raw).decode()
    if format_of(path) == "jsonl":
        return [json.loads(line) for line in content.split("\n")[:-1]]
    (path.parent / "plain").write_bytes(content.encode())
    with (path.parent / "plain").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file, delimiter="\t" if ".tsv" in path.name else ","))


def carried(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key not in ("id", *ANSWER)}
            for row in rows]


CSV = 'id,prompt,topic,"a, b"\n1,x,"in\nlines, ""quoted""",007\n2,,dry,\n3,z,,\u00e9\n'
COLUMNS = [{"prompt": "x", "topic": 'in\nlines, "quoted"', "a, b": "007"},
           {"prompt": "", "topic": "dry", "a, b": ""},
           {"prompt": "z", "topic": "", "a, b": "\u00e9"}]


@pytest.mark.parametrize("name", [
    "r.csv", "r.tsv", "r.parquet", "r.jsonl", "r.csv.gz", "r.jsonl.gz"])
def test_csv_goes_into_every_format(tmp_path, name):
    (tmp_path / "in.csv").write_text(CSV)
    output = ran(tmp_path / "out", tmp_path / "in.csv")
    said = write_results(output, tmp_path / name)
    rows = table(tmp_path / name)
    assert carried(rows) == COLUMNS and "results: 3 rows" in said and list(rows[0])[:4] == [
        "id", "prompt", "topic", "a, b"]
    assert [row["id"] for row in rows] == ["1", "2", "3"]
    assert [row["answer"] or "" for row in rows] == ["1", "", "3"]
    assert [bool(row["error"]) for row in rows] == [False, True, False]
    assert float(rows[2]["latency_s"]) == 1.5 and int(rows[2]["output_tokens"]) == 2
    again = (tmp_path / name).read_bytes()
    write_results(output, tmp_path / name)
    assert (tmp_path / name).read_bytes() == again
    assert [path.name for path in tmp_path.glob(".*")] == []


def typed() -> Any:
    return pa.table({
        "id": pa.array([10, 20, 30], pa.int32()), "prompt": ["x", None, "z"],
        "when": pa.array([1, None, 10**18 + 7], pa.timestamp("ns", "UTC")),
        "price": pa.array([Decimal("1.10"), None, Decimal("-3.25")], pa.decimal128(9, 2)),
        "raw": pa.array([b"\xff\x00", None, b""], pa.binary()),
        "tags": pa.array([["a", "b"], None, []], pa.list_(pa.string())),
        "nested": pa.array([{"x": 1}, None, {"x": None}]), "flag": [True, False, None],
        "kind": pa.array(["u", "v", "u"]).dictionary_encode(),
        "small": pa.array([1, None, 3], pa.uint8()), "nothing": pa.nulls(3)})


def test_parquet_keeps_its_types_and_becomes_words_in_csv(tmp_path):
    pq.write_table(typed(), tmp_path / "in.parquet", row_group_size=2)
    write_results(ran(tmp_path / "out", tmp_path / "in.parquet"), tmp_path / "r.parquet")
    written = pq.read_table(tmp_path / "r.parquet")
    expected = typed().drop_columns(["id"])
    assert written.select(expected.schema.names).cast(expected.schema).equals(expected)
    assert written.schema.field("when").type == pa.timestamp("ns", "UTC")
    assert written.schema.field("kind").type == expected.schema.field("kind").type
    assert written.schema.field("id").type == pa.int64()
    assert written.column("id").to_pylist() == [10, 20, 30]
    assert written.column("answer").to_pylist() == ["10", None, "30"]
    assert written.schema.field("output_tokens").type == pa.int64()
    pq.write_table(typed(), tmp_path / "in.parquet")
    write_results(ran(tmp_path / "out", tmp_path / "in.parquet"), tmp_path / "r.csv")
    first, second, third = table(tmp_path / "r.csv")
    assert third["when"].startswith("2001-09-09 01:46:40.000000007")
    assert (first["price"], first["raw"], first["tags"], first["nested"]) == (
        "1.10", "/wA=", '["a", "b"]', '{"x": 1}')
    assert (first["flag"], first["kind"], first["small"]) == ("true", "u", "1")
    assert set(carried([second])[0].values()) == {"", "false", "v"}


def test_objects_of_json_lines_are_carried_as_what_they_are(tmp_path):
    rows = [{"prompt": "a", "n": 1, "x": 1, "mixed": "t", "deep": {"k": [1]}, "late": None},
            {"prompt": "b", "n": 2**70, "x": 2.5, "mixed": 3, "more": True}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "bad\n")
    output = ran(tmp_path / "out", tmp_path / "in.jsonl")
    write_results(output, tmp_path / "r.parquet")
    first, second, bad = carried(table(tmp_path / "r.parquet"))
    assert first == {"n": "1", "x": 1.0, "mixed": "t", "deep": '{"k": [1]}', "late": None,
                     "more": None}
    assert second == {"n": str(2**70), "x": 2.5, "mixed": "3", "deep": None, "late": None,
                      "more": True}
    assert set(bad.values()) == {None}
    write_results(output, tmp_path / "r.jsonl")
    assert [{key: row[key] for key in one if key != "prompt"} for one, row in zip(
        rows, table(tmp_path / "r.jsonl"), strict=False)] == [
        {key: value for key, value in row.items() if key != "prompt"} for row in rows]


def test_openai_lines_texts_arrays_and_files_of_several_kinds_become_one_table(tmp_path):
    openai = {"custom_id": "o", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
    (tmp_path / "in.json").write_text(json.dumps([openai, "y"]))
    (tmp_path / "in.txt").write_text("one\n\ntwo\n")
    output = ran(tmp_path / "out", tmp_path / "in.json", tmp_path / "in.txt")
    write_results(output, tmp_path / "r.csv")
    rows = table(tmp_path / "r.csv")
    assert [(row["id"], row["answer"], row["output_tokens"]) for row in rows] == [
        ("o", "o", "2"), ("in.json:2", "in.json:2", "2"), ("in.txt:1", "in.txt:1", "2"),
        ("in.txt:3", "in.txt:3", "2")]
    pq.write_table(pa.table({"prompt": ["p", "q"], "n": pa.array([1, 2], pa.int16()),
                             "both": [1, 2]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"prompt": ["r"], "n": pa.array([70000], pa.int32()),
                             "only": [b"x"]}), tmp_path / "b.parquet")
    (tmp_path / "c.csv").write_text("prompt,both,answer\n,t,u\ns,v,w\n")
    paths = [tmp_path / name for name in ("a.parquet", "b.parquet", "c.csv")]
    said = write_results(ran(tmp_path / "out", *paths), tmp_path / "r.parquet")
    assert "'answer' of the requests is 'input_answer' there" in " ".join(said.split())
    rows = table(tmp_path / "r.parquet")
    assert [row["id"] for row in rows] == [
        "a.parquet:1", "a.parquet:2", "b.parquet:1", "c.csv:1", "c.csv:2"]
    assert [(row["n"], row["both"], row["only"], row["input_answer"]) for row in rows] == [
        (1, "1", None, None), (2, "2", None, None), (70000, None, b"x", None),
        (None, "t", None, "u"), (None, "v", None, "w")]
    assert rows[3]["error"] and rows[4]["answer"] == "c.csv:2"


def test_columns_called_as_ours_get_another_name_and_moments_are_of_one_zone(tmp_path):
    assert names_in_results(["topic", "answer", "input_answer", "text", "error", "id"]) == {
        "topic": "topic", "answer": "input_input_answer", "input_answer": "input_answer",
        "text": "text", "error": "input_error", "id": "input_id"}
    moment = datetime(2026, 3, 1, 12, tzinfo=UTC)
    pq.write_table(pa.table({"prompt": ["x"], "at": [[moment]]}), tmp_path / "in.parquet")
    write_results(ran(tmp_path / "out", tmp_path / "in.parquet"), tmp_path / "r.jsonl")
    assert table(tmp_path / "r.jsonl")[0]["at"] == ["2026-03-01T12:00:00+00:00"]


def test_only_the_columns_that_are_asked_for_are_carried(tmp_path):
    (tmp_path / "in.csv").write_text(CSV)
    for carry, names in ((("prompt", "topic"), ["prompt", "topic"]), ((), [])):
        output = ran(tmp_path / "out", tmp_path / "in.csv", carry=carry)
        write_results(output, tmp_path / "r.csv")
        assert list(carried(table(tmp_path / "r.csv"))[0]) == names
    pq.write_table(typed(), tmp_path / "in.parquet")
    write_results(ran(tmp_path / "out", tmp_path / "in.parquet", carry=()), tmp_path / "r.parquet")
    assert len(table(tmp_path / "r.parquet")) == 3


def test_a_stopped_run_has_what_it_answered_and_rows_are_read_a_thousand_at_a_time(tmp_path):
    lines = [f"{i},{'' if i in (0, 5) else 'x'},t{i}\n" for i in range(8)]
    (tmp_path / "in.csv").write_text("id,prompt,topic\n" + "".join(lines))
    output = ran(tmp_path / "out", tmp_path / "in.csv", answered=3)
    with (output / "results.jsonl").open("a") as file:
        file.write('{"id": "4", "te')  # torn
    write_results(output, tmp_path / "r.csv")
    assert [(row["id"], row["topic"], bool(row["error"])) for row in table(tmp_path / "r.csv")] == [
        ("0", "t0", True), ("1", "t1", False), ("2", "t2", False), ("3", "t3", False)]
    (tmp_path / "in.csv").write_text("prompt,n\n" + "".join(f"x,{i}\n" for i in range(2500)))
    (tmp_path / "in.txt").write_text("x\n" * 2500)
    for name in ("in.csv", "in.txt"):
        said = write_results(ran(tmp_path / "out", tmp_path / name), tmp_path / "r.parquet")
        assert "results: 2500 rows" in said
    read = pq.read_table(tmp_path / "r.parquet")
    assert read.column("id").to_pylist() == [str(i + 1) for i in range(2500)]


def test_what_keeps_a_table_from_being_written_is_told(tmp_path):
    (tmp_path / "in.txt").write_text("x\n")
    output = ran(tmp_path / "out", tmp_path / "in.txt")
    (tmp_path / "file").touch()
    with pytest.raises(XgptError, match="cannot be written.*results.jsonl"):
        write_results(output, tmp_path / "file" / "r.csv")
    with pytest.raises(XgptError, match="spool cannot be read"):
        write_results(tmp_path, tmp_path / "r.csv")


_TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(
    ["\"", "\r", "a\r\nb", "\0", "\ufeff", "'", "\t", "\u2028", "=cmd()", " "])


@given(st.lists(_TEXTS, min_size=1, max_size=5), _TEXTS.filter(bool), _TEXTS)
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cell_any_name_and_any_text_arrive_in_every_format(tmp_path, cells, name, text):
    rows = [{"id": str(i), "prompt": "x", name: cell} for i, cell in enumerate(cells)]
    if name in rows[0].keys() & {"id", "prompt"}:
        return
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    output = ran(tmp_path / "out", tmp_path / "in.jsonl", text=text)
    for out in ("r.csv", "r.tsv", "r.jsonl", "r.parquet"):
        write_results(output, tmp_path / out)
        assert [(row["id"], row[name], row["answer"]) for row in table(tmp_path / out)] == [
            (row["id"], row[name], text + row["id"]) for row in rows], out


def test_lone_surrogates_cost_no_file(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"prompt": "x", "topic": "\\ud800", "deep": ["\\udfff"]}\n')
    output = ran(tmp_path / "out", tmp_path / "in.jsonl", text="\ud83d")
    for name in ("r.csv", "r.jsonl", "r.parquet"):
        write_results(output, tmp_path / name)
        (row,) = table(tmp_path / name)
        assert row["topic"] == "\ufffd" and row["answer"] == "\ufffd1"


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_what_is_no_number_is_null_in_json(tmp_path, suffix):
    nan, inf = float("nan"), float("inf")
    path = tmp_path / f"in.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.table({"prompt": ["x"], "score": [nan], "all": [[1.5, -inf, nan]]}), path)
    else:
        path.write_text(json.dumps({"prompt": "x", "score": nan, "all": [1.5, -inf, nan]}) + "\n")
    write_results(ran(tmp_path / "out", path), tmp_path / "r.jsonl")
    (row,) = carried(table(tmp_path / "r.jsonl"))
    assert (row["score"], row["all"]) == (None, [1.5, None, None])


@pytest.mark.parametrize("name", ["r.csv", "r.tsv"])
def test_texts_that_a_spreadsheet_would_compute_can_be_quoted(tmp_path, name):
    texts = ["=1+1", "+x", "-2+3", "@sum", "\tx", "\rx", "-1.5", "+7", "a=b", ""]
    (tmp_path / "in.jsonl").write_text("".join(
        json.dumps({"prompt": "x", "=say": text, "number": -1.5}) + "\n" for text in texts))
    output = ran(tmp_path / "out", tmp_path / "in.jsonl", carry=("=say", "number"))
    write_results(output, tmp_path / name, quote_formulas=True)
    rows = table(tmp_path / name)
    assert [row["'=say"] for row in rows] == [
        "'=1+1", "'+x", "'-2+3", "'@sum", "'\tx", "'\rx", "-1.5", "+7", "a=b", ""]
    assert {row["number"] for row in rows} == {"-1.5"}
    write_results(output, tmp_path / name)
    assert [row["=say"] for row in table(tmp_path / name)] == texts
