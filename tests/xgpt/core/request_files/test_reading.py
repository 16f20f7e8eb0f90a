"""Every format of requests is read alike; what is wrong in one is told with its place."""

import csv
import gzip
import io
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from xgpt.core.errors import InputError, MissingExtraError
from xgpt.requests.reader import read_requests
from xgpt.requests.request import Request, RequestError
from xgpt.requests.request_files import STDIN, SUFFIXES, RequestFiles, format_of

pa = pytest.importorskip("pyarrow", reason="Parquet needs the extra `parquet`")
pq = pytest.importorskip("pyarrow.parquet")

ROWS = [{"id": "a", "prompt": "Hi, \"you\"", "max_tokens": 4, "topic": "x"},
        {"id": "b", "prompt": "two\nlines\r\nand\ttabs", "max_tokens": 5, "topic": "é"},
        {"id": "c", "prompt": " spaces ", "max_tokens": 6, "topic": ""}]


def read(*paths: Path, **said: Any) -> tuple[list[Request], list[RequestError]]:
    rows = list(read_requests(RequestFiles(paths=paths, **said)))
    return ([row for row in rows if isinstance(row, Request)],
            [row for row in rows if isinstance(row, RequestError)])


def write(path: Path, rows: Sequence[dict[str, Any]], known: str | None = None) -> Path:
    """A file of these rows, by the path's format."""
    known = known or format_of(path)
    if known == "parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path, row_group_size=2)
        return path
    if known in ("csv", "tsv"):
        text = io.StringIO(newline="")
        table = csv.DictWriter(text, list(rows[0]), delimiter="\t" if known == "tsv" else ",")
        table.writeheader()
        table.writerows(rows)
        content = text.getvalue()
    elif known == "json":
        content = json.dumps(rows, indent=1)
    else:
        content = "".join(json.dumps(row) + "\n" for row in rows)
    raw = content.encode()
    path.write_bytes(gzip.compress(raw) if path.name.endswith(".gz") else raw)
    return path


def refusal(*paths: Path, **said: Any) -> str:
    with pytest.raises(InputError) as caught:
        read(*paths, **said)
    return str(caught.value)


@pytest.mark.parametrize("name", [
    "r.jsonl", "r.ndjson", "r.json", "r.csv", "r.tsv", "r.parquet", "R.CSV", "r.jsonl.gz",
    "r.csv.gz", "r.json.gz"])
def test_every_format_says_the_same(tmp_path, name):
    requests, errors = read(write(tmp_path / name, ROWS))
    assert not errors
    assert [(r.id, r.prompt, r.max_tokens) for r in requests] == [
        (row["id"], row["prompt"], row["max_tokens"]) for row in ROWS]


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    path = tmp_path / "r.txt"
    path.write_bytes(b"\xef\xbb\xbf{first}\r\n\n  second \n \t\r\n"
                     b"b\xe2\x80\xa8d\nbroken \xff\nlast")
    requests, errors = read(path)
    assert [(r.line, r.id, r.prompt) for r in requests] == [
        (1, "1", "{first}"), (3, "3", "  second "), (5, "5", "b\u2028d"), (7, "7", "last")]
    assert [e.line for e in errors] == [6] and "not UTF-8" in errors[0].error


def test_a_json_array_is_of_objects_openai_lines_or_texts_and_may_be_lines(tmp_path):
    openai = {"custom_id": "o", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
    path = tmp_path / "r.json"
    path.write_text(json.dumps([{"id": "a", "prompt": "x"}, "y", openai, 7, {"id": "z"}]))
    requests, errors = read(path)
    assert [(r.id, r.prompt, r.is_openai) for r in requests] == [
        ("a", "x", False), ("2", "y", False), ("o", "x", True)]
    assert [(e.line, e.id) for e in errors] == [(4, None), (5, "z")]
    requests, errors = read(write(tmp_path / "r.json", ROWS, "jsonl"))
    assert len(requests) == 3 and not errors
    (tmp_path / "r.json").write_text('{"data": []}')
    assert read(tmp_path / "r.json")[1][0].error.startswith("needs exactly one of prompt")


TWICE = ['{"prompt": "first", "prompt": "second"}',
         '{"prompt": "x", "max_tokens": 1, "max_tokens": true}',
         '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
         '{"prompt": "x", "note": {"a": {"b": 1, "b": 2}}}']


@pytest.mark.parametrize("known", ["jsonl", "json"])
def test_a_key_given_twice_costs_its_own_line(tmp_path, known):
    """The last one counted without a word. Two that say the same are no question."""
    path, same = tmp_path / f"r.{known}", '{"prompt": "x", "max_tokens": 3, "max_tokens": 3}'
    lines = [*TWICE, same, '{"prompt": "y"}']
    path.write_text("\n".join(lines) if known == "jsonl" else f"[{','.join(lines)}]")
    requests, errors = read(path)
    assert [request.line for request in requests] == [5, 6] and requests[0].max_tokens == 3
    assert [error.line for error in errors] == [1, 2, 3, 4]
    for error, key in zip(errors, ["prompt", "max_tokens", "content", "b"], strict=True):
        assert f"the key '{key}' is given twice, with different values" in error.error


def test_cells_given_twice_or_never_closed_cost_their_rows_and_of_contents_the_first_is_taken(
        tmp_path):
    path = tmp_path / "r.csv"
    path.write_text('messages\n"[{""role"": ""user"", ""content"": ""a"", ""content"": ""b""}]"\n'
                    '"[{""role"": ""user"", ""content"": ""a""}]"\n')
    requests, errors = read(path)
    assert len(requests) == 1 and "the key 'content' is given twice" in errors[0].error
    path.write_text("tokens,messages,prompt\n17,[],Hi\n")
    requests, errors = read(path)
    assert not errors and requests[0].prompt == "Hi" and requests[0].tokens is None
    path.write_text("id,prompt\na,x\nb,\"open\nc,y\nd,z\n")
    requests, errors = read(path)
    assert [r.id for r in requests] == ["a"] and [e.line for e in errors] == [3]
    assert "never closed: lines 3 to 5" in errors[0].error


def test_columns_go_by_the_names_that_the_job_gives(tmp_path):
    rows = [{"nr": 7, "question": "Why?", "prompt": "old", "max_tokens": 3, "seed": "none"}]
    for name in ("r.csv", "r.parquet", "r.jsonl", "r.json"):
        path = write(tmp_path / name, rows)
        requests, errors = read(path, prompt="question", id="nr", has_options=False)
        assert not errors and [(r.id, r.prompt, r.max_tokens) for r in requests] == [
            ("7", "Why?", None)], name
        assert "seed" in read(path, prompt="question", id="nr")[1][0].error


def test_messages_and_tokens_are_json_in_a_cell_and_typed_in_parquet(tmp_path):
    messages = [{"role": "user", "content": "Hi"}]
    for name in ("m.csv", "m.parquet"):
        is_text = name == "m.csv"
        path = write(tmp_path / name, [
            {"messages": json.dumps(messages) if is_text else messages}])
        assert read(path)[0][0].messages == tuple(messages)
        path = write(tmp_path / name, [{"tokens": "[3, 4]" if is_text else [3, 4],
                                        "stop": '["a", "b"]' if is_text else ["a"]}])
        assert read(path)[0][0].tokens == (3, 4)
    (tmp_path / "m.csv").write_text("messages,stop\n[{,\n,.\n[],\n")
    _, errors = read(tmp_path / "m.csv")
    assert ["not JSON" in e.error or "null" in e.error or "at least one" in e.error
            for e in errors] == [True] * 3


def test_a_bad_row_costs_itself_alone(tmp_path):
    path = tmp_path / "r.csv"
    path.write_bytes(b"\xef\xbb\xbfid, prompt ,seed\r\n"
                     b"a,first,1\r\n"
                     b"\r\n"
                     b"b,too,many,cells\r\n"
                     b"c\r\n"
                     b"d,\"in\r\nquotes\",\r\n"
                     b"e,\xff\xfe,2\r\n"
                     b"f,\"x\"y,3\r\n"
                     b"g,,4\r\n"
                     b"a,twice,5\r\n"
                     b"h,last,six\r\n"
                     b",no id,-7\r\n")
    requests, errors = read(path)
    assert [(r.line, r.id, r.prompt) for r in requests] == [
        (2, "a", "first"), (6, "d", "in\r\nquotes"), (13, "10", "no id")]
    assert [(e.line, e.id) for e in errors] == [
        (4, None), (5, None), (8, "e"), (9, None), (10, "g"), (11, "a"), (12, "h")]
    said = [e.error for e in errors]
    assert "4 cells; the header has 3" in said[0] and "1 cells" in said[1]
    assert "not UTF-8 in column 'prompt'" in said[2] and "cannot be read as a row" in said[3]
    assert "not empty" in said[4] and "already that of line 2" in said[5] and "seed" in said[6]


def test_null_and_wrong_values_of_parquet_are_error_records(tmp_path):
    table = pa.table({"id": pa.array([1, None, 3, 3], pa.int32()),
                      "prompt": ["a", None, "", "d"],
                      "max_tokens": [4.0, float("nan"), 2.0, 2.0],
                      "temperature": [0.5, None, None, None]})
    pq.write_table(table, tmp_path / "r.parquet")
    requests, errors = read(tmp_path / "r.parquet")
    assert [(r.line, r.id, r.max_tokens, r.temperature) for r in requests] == [
        (1, "1", 4, 0.5), (4, "3", 2, None)]
    assert [(e.line, e.id) for e in errors] == [(2, None), (3, "3")]
    assert "null" in errors[0].error and "not empty" in errors[1].error
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"ok", b"\xff"], pa.binary()).buffers())
    pq.write_table(pa.table({"prompt": bad}), tmp_path / "r.parquet")
    requests, errors = read(tmp_path / "r.parquet")
    assert [r.prompt for r in requests] == ["ok"] and "not UTF-8" in errors[0].error


def cut(path, rows, end):
    whole = write(path, rows).read_bytes()
    return whole[:end]


def damaged(path):
    """A Parquet file with other bytes inside."""
    raw = bytearray(cut(path, [{"prompt": f"{i * 7919 % 1009} " * 40} for i in range(3000)], None))
    raw[len(raw) // 3:len(raw) // 3 + 400] = b"\xff" * 400
    return raw


NUMBERED = [{"prompt": f"number {i * i}"} for i in range(2000)]
COPY = "no whole Parquet file / Copy it again"


WRONG = [
    *((name, json.loads(content), json.loads(keys), said) for name, content, keys, said in (
        line.split(" | ", 3) for line in Path(__file__).with_name("wrong_files.txt").read_text(
            "utf-8").splitlines() if line and not line.startswith("#"))),
    ("r.json", "[" * 100_000, {}, "nested too deeply"),
    ("r.parquet", lambda path: cut(path, ROWS, 10), {}, COPY),
    ("r.parquet", lambda path: cut(path, ROWS, -20), {}, COPY),
    ("r.parquet", lambda path: cut(path, ROWS, -1), {}, COPY),
    ("r.parquet", damaged, {}, "no whole Parquet file"),
    ("r.parquet", lambda path: cut(path, [{"prompt": 7, "text": "x"}], None), {},
     "of type int64, not text; columns there: prompt (int64), text (string)"),
    ("r.jsonl.gz", lambda path: cut(path, NUMBERED, -200), {}, "damaged or cut off")]


@pytest.mark.parametrize(("name", "content", "keys", "said"), WRONG)
def test_a_file_that_is_not_whole_or_lacks_what_is_needed_is_one_error_with_its_remedy(
        tmp_path, name, content, keys, said):
    path = tmp_path / name
    path.write_bytes(content.encode("latin-1") if isinstance(content, str) else content(path))
    message = refusal(path, **keys)
    assert all(words in message for words in (str(path), *said.split(" / "))), message


@pytest.mark.parametrize(("content", "found"), [
    ("nr;prompt\n1;a, b\n", ";"), ("nr\tprompt\n1\ta;b\n", "\t"), ("nr|prompt\n1|a\n", "|"),
    ('\ufeff"nr";"prompt, in short"\n1;a\n', ";"), ("nr,prompt\n1,a;b\n", None),
    ("prompt\na;b\n", None), ("prompt;or so\na, b\n", None), ("", None)])
def test_another_delimiter_is_found_by_header_and_first_row(tmp_path, content, found):
    path = tmp_path / "r.csv"
    path.write_text(content, "utf-8")
    def told(files: RequestFiles) -> dict[Path, str]:
        divided: dict[Path, str] = {}
        with suppress(InputError):  # of a header without the column that is needed
            list(read_requests(files, divided=divided.__setitem__))
        return divided

    assert told(RequestFiles(paths=(path,))) == ({} if found is None else {path: found})
    if found is not None and "short" not in content:
        (request,) = read(path)[0]
        assert request.prompt == content.splitlines()[1][2:] and request.id == "1"
        named = RequestFiles(paths=(path,), delimiter=found)
        assert not told(named) and list(read_requests(named)) == [request]


def test_what_a_name_does_not_tell_the_content_does(tmp_path):
    for known in ("jsonl", "json", "parquet"):
        path = write(tmp_path / f"{known}-requests", ROWS, known)
        assert len(read(path)[0]) == 3, known
    stdin = io.BytesIO(b'  \n{"prompt": "x"}\n')
    (request,) = read_requests(RequestFiles(paths=(STDIN,)), stdin=stdin)
    assert request.line == 2
    (request,) = read_requests(RequestFiles(paths=(STDIN,), format="text"), stdin=stdin)
    assert isinstance(request, Request) and request.prompt == '{"prompt": "x"}'


def test_ids_are_unique_over_all_files_and_missing_ones_name_theirs(tmp_path):
    first = write(tmp_path / "a.jsonl", [{"id": "x", "prompt": "1"}, {"prompt": "2"}])
    (tmp_path / "more").mkdir()
    second = write(tmp_path / "more" / "b.csv", [{"id": "x", "prompt": "3"},
                                                 {"id": "", "prompt": "4"}])
    requests, errors = read(first, second)
    assert [(r.file, r.line, r.id) for r in requests] == [
        (0, 1, "x"), (0, 2, "a.jsonl:2"), (1, 3, "b.csv:2")]
    assert errors == [RequestError(file=1, line=2, id="x", is_openai=False,
                                   code="duplicate_custom_id",
                                   error="id 'x' is already that of line 1 of a.jsonl")]
    third = write(tmp_path / "more" / "a.jsonl", [{"prompt": "5"}])
    assert [r.id for r in read(first, third)[0]] == ["x", "a.jsonl:2", "more/a.jsonl:1"]


def test_pyarrow_that_is_missing_is_named_with_its_command(tmp_path, monkeypatch):
    path = write(tmp_path / "r.parquet", ROWS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"pyarrow.*pip install .*\[parquet\]"):
        read(path)


def test_names_tell_formats():
    assert set(SUFFIXES) == {
        format_of(Path(f"x{suffixes[0]}")) for suffixes in SUFFIXES.values()}
    assert format_of(Path("x.csv.GZ")) == "csv" and format_of(Path("x.parquet.gz")) is None
    assert format_of(Path("x.xlsx")) is None and format_of(Path("csv")) is None


_CELLS = st.text(max_size=8) | st.sampled_from(["", "\"", "\n", "\r", ",", "a\r\nb", "\0", "=1+1"])


@given(st.lists(st.tuples(_CELLS, _CELLS), min_size=1, max_size=6), st.sampled_from(",;\t|"))
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_prompt_in_quotes_arrives(tmp_path, cells, delimiter):
    with (tmp_path / "r.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL)
        table.writerows([("prompt", "other"), *cells])
    requests, errors = read(tmp_path / "r.csv", delimiter=delimiter)
    assert [r.prompt for r in requests] == [prompt for prompt, _ in cells if prompt]
    assert len(errors) == sum(not prompt for prompt, _ in cells)


@given(st.binary(max_size=60))
@examples(100, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_after_a_header_are_rows_or_error_records(tmp_path, raw):
    (tmp_path / "r.csv").write_bytes(b"prompt,x\nfirst,1\n" + raw)
    requests, errors = read(tmp_path / "r.csv")
    assert requests[0].prompt == "first"
    assert all(error.error and error.line > 2 for error in errors)


@given(st.binary(max_size=60), st.sampled_from(["r.json", "r.txt", "r.parquet", "requests"]))
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_requests_or_error_records_or_one_error(tmp_path, raw, name):
    (tmp_path / name).write_bytes(raw)
    try:
        requests, errors = read(tmp_path / name)
    except InputError as cause:
        assert str(tmp_path / name) in str(cause)
    else:
        assert len({r.line for r in requests} | {e.line for e in errors}) == (
            len(requests) + len(errors))
