"""Reading requests: what runs, what becomes an error record, and synthetic ones."""

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from examples import examples
from hypothesis import HealthCheck, assume, given
from hypothesis import strategies as st
from job_folder import xgpt

from xgpt.core.errors import InputError
from xgpt.core.lengths import JointLengths, joint_empirical, truncated_normal
from xgpt.requests import formats as lines
from xgpt.requests import spool_columns
from xgpt.requests.chat import BadRecord, has_form, passed_of
from xgpt.requests.reader import SeenIds, read_requests
from xgpt.requests.request import Request, RequestError, Terms, read_record, synthetic_requests
from xgpt.requests.request_files import RequestFiles
from xgpt.requests.spool import NUM_PROMPTS, SPOOL_VERSION, Record, Spool, SpoolWriter, num_queries
from xrunner.files.runnable import CharacterTokens

WRONG = [(*(part.strip() for part in f"{line} | ".split(" | ")[:2]), line.split(" | ")[2:])
         for line in Path(__file__).with_name("wrong_requests.txt").read_text("utf-8").splitlines()
         if line and not line.startswith("#")]
BEYOND = [(b'{"prompt": "\xff"}', "not UTF-8", []), ("[" * 100_000, "nested too deeply", []),
          ('{"prompt": "x", "seed": ' + "9" * 5000 + "}", "not JSON", []),
          ('{"prompt": "x", "temperature": 1' + "0" * 400 + "}", "temperature", [])]


def _read(folder: Path, *lines: bytes | str | dict[str, Any], engine: str | None = None) -> tuple[
        list[Request], list[RequestError]]:
    raw = [line if isinstance(line, bytes) else (
        line if isinstance(line, str) else json.dumps(line)).encode() for line in lines]
    path = folder / "requests.jsonl"
    path.write_bytes(b"\n".join(raw) + b"\n")
    found = list(read_requests(RequestFiles(paths=(path,), terms=Terms(engine=engine))))
    return ([line for line in found if isinstance(line, Request)],
            [line for line in found if isinstance(line, RequestError)])


def _one(folder: Path, line: bytes | str | dict[str, Any]) -> Request:
    (request,), errors = _read(folder, line)
    assert not errors
    return request


def test_our_three_forms_and_every_option_are_read_and_other_columns_ignored(tmp_path):
    requests, errors = _read(
        tmp_path, {"id": "a", "prompt": "Hi"}, {"id": 7, "tokens": [1, 2]},
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stop": "."},
        {"prompt": "x", "forced_tokens": 4, "max_tokens": 4, "seed": 9, "temperature": 0.5,
         "top_k": 3, "top_p": 0.2}, {"prompt": "x", "idx": 3, "label": None, "text": "y"})
    assert not errors
    assert requests == [
        Request(line=1, id="a", prompt="Hi"),
        Request(line=2, id="7", tokens=(1, 2)),
        Request(line=3, id="3", messages=({"role": "user", "content": "Hi"},),
                max_tokens=5, stop=(".",)),
        Request(line=4, id="4", prompt="x", forced_tokens=4, max_tokens=4, seed=9,
                temperature=0.5, top_k=3, top_p=0.2), Request(line=5, id="5", prompt="x")]


def test_openai_batch_lines_are_read_and_keys_that_ask_for_nothing_ignored(tmp_path):
    request = _one(tmp_path, {
        "custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": {
            "model": "gpt-4o", "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Hi "},
                                             {"type": "text", "text": "you"}]}],
            "max_tokens": 5, "max_completion_tokens": 9, "temperature": 0, "top_p": 1,
            "seed": -3, "stop": ["a", "b"], "logprobs": False, "n": 1, "user": "x"}})
    assert request.is_openai and request.id == "r-1" and request.messages is not None
    assert request.messages[1] == {"role": "user", "content": "Hi you"}
    assert (request.max_tokens, request.temperature, request.top_p) == (9, 0.0, 1.0)
    assert request.stop == ("a", "b") and request.seed is not None and request.seed >= 0


@pytest.mark.parametrize(("line", "reason", "engine"), [*WRONG, *BEYOND],
                         ids=[str(row[0])[:60] for row in (*WRONG, *BEYOND)])
def test_a_bad_line_is_an_error_record_and_the_rest_runs(tmp_path, line, reason, engine):
    """Those of wrong_requests.txt, and some beyond any page."""
    requests, errors = _read(tmp_path, {"id": "x1", "prompt": "a"}, line,
                             {"id": "x3", "prompt": "b"}, engine=engine[0] if engine else None)
    assert [(r.line, r.id) for r in requests] == [(1, "x1"), (3, "x3")]
    assert [error.line for error in errors] == [2] and reason in errors[0].error


def test_a_repeated_id_is_an_error_of_the_later_line_and_that_of_a_bad_line_free_again(tmp_path):
    requests, errors = _read(tmp_path, {"id": "2", "prompt": "x"}, {"prompt": "y"})
    assert [r.id for r in requests] == ["2"]
    assert errors == [RequestError(line=2, id="2", error="id '2' is already that of line 1",
                                   is_openai=False, code="duplicate_custom_id")]
    requests, errors = _read(tmp_path, {"id": "a"}, {"id": "a", "prompt": "x"})
    assert [r.line for r in requests] == [2] and [e.id for e in errors] == ["a"]


def test_blank_lines_windows_ends_and_a_byte_order_mark_are_taken_and_nothing_is_no_request(
        tmp_path):
    requests, errors = _read(tmp_path, b'\xef\xbb\xbf{"prompt": "a"}\r', b"", b"  \r",
                             b'{"prompt": "b\xe2\x80\xa8c"}\r')
    assert not errors and [(r.line, r.id, r.prompt) for r in requests] == [
        (1, "1", "a"), (4, "4", "b\u2028c")]
    assert _read(tmp_path, "") == ([], [])
    with pytest.raises(InputError, match="cannot be read"):
        list(read_requests(RequestFiles(paths=(tmp_path / "none.jsonl",))))


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "prompt", "messages"]), inner,
        max_size=3), max_leaves=6)
_RECORDS = st.dictionaries(st.sampled_from(
    ["id", "custom_id", "body", "url", "method", "prompt", "messages", "tokens", "max_tokens",
     "forced_tokens", "seed", "stop", "temperature", "top_k", "top_p", "n"]), _VALUES, max_size=5)


@given(st.lists(_RECORDS.map(lambda r: json.dumps(r).encode())
                | st.binary(max_size=20).filter(lambda b: b"\n" not in b), max_size=6))
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_line_that_is_not_blank_becomes_a_request_or_an_error(tmp_path, lines):
    # what begins so is another kind of file, which is one error of its own
    assume(not b"\n".join(lines).startswith((b"\xff\xfe", b"\xfe\xff", b"\x1f\x8b")))
    requests, errors = _read(tmp_path, *lines)
    told = [r.line for r in requests] + [e.line for e in errors]
    whole = b"\n".join(lines).removeprefix(b"\xef\xbb\xbf").split(b"\n")
    assert sorted(told) == [n for n, line in enumerate(whole, start=1) if line.strip()]
    assert len({r.id for r in requests}) == len(requests)


def test_a_requests_own_limit_comes_before_the_jobs():
    base = Request(line=1, id="a", prompt="x")
    assert base.output_cap(50) == 50
    assert Request(line=1, id="a", prompt="x", max_tokens=7).output_cap(50) == 7
    assert Request(line=1, id="a", prompt="x", max_tokens=7,
                   forced_tokens=3).output_cap(50) == 3


def test_engines_with_likelihoods_give_them():
    for engine in (None, "vllm"):
        request = read_record({"prompt": "x", "logprobs": 2, "min_tokens": 1}, 1, "a",
                              terms=Terms(engine=engine))
        assert request.top_logprobs == 2


def test_synthetic_requests_have_the_lengths_asked_for_and_repeat_with_the_seed():
    lengths = JointLengths(inputs=truncated_normal(20, 5, 40), outputs=truncated_normal(8, 3, 16))
    requests = list(synthetic_requests(lengths, 500, seed=3, vocab_size=100))
    inputs = np.array([len(tokens) for tokens, _ in requests])
    outputs = np.array([count for _, count in requests])
    assert inputs.mean() == pytest.approx(lengths.inputs.mean, rel=0.05) and inputs.max() <= 40
    assert outputs.mean() == pytest.approx(lengths.outputs.mean, rel=0.1) and outputs.min() >= 1
    assert all(0 <= token < 100 for tokens, _ in requests for token in tokens)
    again, other = (list(synthetic_requests(lengths, 500, seed=seed, vocab_size=100))
                    for seed in (3, 4))
    assert all((a == b).all() and n == m
               for (a, n), (b, m) in zip(requests, again, strict=True))
    assert [n for _, n in requests] != [n for _, n in other]
    pairs = joint_empirical(np.array([[3, 1], [9, 3]]))  # whose correlation is kept
    assert all(len(tokens) == 3 * count for tokens, count in synthetic_requests(
        pairs, 50, seed=0, vocab_size=10))


SCHEMA = {"type": "object"}


@pytest.mark.parametrize(("body", "told"), [
    ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
     {"structured_outputs": {"json": SCHEMA}}),
    ({"structured_outputs": {"regex": "a+"}}, {"structured_outputs": {"regex": "a+"}}),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}},
     {"structured_outputs": {"json": SCHEMA}}),
    ({"structured_outputs": {"choice": ["a"]}}, {"structured_outputs": {"choice": ["a"]}}),
    ({"min_p": 0.1, "logit_bias": {"7": -100}}, {"min_p": 0.1, "logit_bias": {"7": -100}}),
    ({"response_format": {"type": "text"}, "logit_bias": {}, "min_p": None}, {})])
def test_what_is_asked_is_told_in_vllms_words(body, told):
    assert json.loads(passed_of(body) or "{}") == told and bool(passed_of(body)) == bool(told)
    assert has_form(passed_of(body)) == ("structured_outputs" in told)


@pytest.mark.parametrize("is_openai", [True, False])
def test_a_line_keeps_all_that_its_messages_and_their_template_are_told(is_openai):
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": '{"city": "B"}'}}
    body = {"messages": [
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "rain", "tool_call_id": "1", "weight": {"a": [1]}}],
        "chat_template_kwargs": {"enable_thinking": False}}
    request = read_record(
        {"custom_id": "a", "body": {"model": "m", **body}} if is_openai else body, 1, "a")
    assert request.messages == (
        {"role": "assistant", "tool_calls": [{**call, "function": {
            "name": "w", "arguments": {"city": "B"}}}]},
        {"role": "tool", "content": "rain", "tool_call_id": "1", "weight": {"a": [1]}})
    assert json.loads(request.chat_template_kwargs) == {"enable_thinking": False}
    for wrong in ([], "x", {"a": "\ud800"}):
        with pytest.raises(BadRecord, match="chat_template_kwargs"):
            read_record({**body, "chat_template_kwargs": wrong}, 1, "a")


def test_a_message_of_calls_alone_is_counted_where_texts_are(tmp_path):
    """By who looks at a file of prompts, and where the model's tokenizer is not to be had."""
    call = {"id": "1", "type": "function", "function": {"name": "w", "arguments": "{}"}}
    line = {"messages": [{"role": "user", "content": "Weather in Bonn?"},
                         {"role": "assistant", "content": None, "tool_calls": [call]}]}
    (tmp_path / "r.jsonl").write_text(json.dumps(line) + "\n")
    request = read_record(line, 1, "a")
    assert len(CharacterTokens().tokenise([request])[0]) > 2
    assert xgpt("init", "--prompts", tmp_path / "r.jsonl", tmp_path / "job.yaml").returncode == 0


# The spool: what is put in comes out, by the index of a query.


_KEPT = st.builds(
    Record, id=st.text(max_size=5), line=st.integers(1, 10**9), is_forced=st.booleans(),
    seed=st.none() | st.integers(0, 2**63 - 1), temperature=st.none() | st.floats(0, 9),
    top_k=st.none() | st.integers(1, 99), top_p=st.none() | st.floats(0.01, 1),
    stop=st.lists(st.text(min_size=1, max_size=3), max_size=2).map(tuple),
    is_openai=st.booleans(), is_chat=st.booleans(), prompt=st.none() | st.text(max_size=9))
_TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=6)


@given(rows=st.lists(st.tuples(_KEPT, _TOKENS), max_size=6), data=st.data())
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_put_in_comes_out_by_query(tmp_path, rows, data):
    chosen = data.draw(st.lists(st.integers(0, max(len(rows) - 1, 0)), unique=True,
                                max_size=len(rows)).map(sorted))
    writer = SpoolWriter()
    for record, ids in rows:
        writer.add(record, ids)
    assert [writer.record(i) for i in range(len(rows))] == [record for record, _ in rows]
    writer.save(tmp_path, np.array([(row, 7 + row) for row in chosen]).reshape(-1, 2), 3)
    spool = Spool(tmp_path)
    assert (len(spool), spool.num_errors, num_queries(tmp_path)) == (len(chosen), 3, len(chosen))
    assert list(spool.records()) == [rows[row][0] for row in chosen]
    for query, row in enumerate(chosen):
        tokens = spool.tokens(query)
        assert [*tokens] == rows[row][1] == tokens[:] and len(tokens) == len(rows[row][1])
        assert spool.most_output_tokens(query) == 7 + row


def test_tokens_outlive_their_spool_and_take_no_memory(tmp_path):
    """What is mapped would stay with rank 0: a gigabyte of ten million requests."""
    writer, count, length = SpoolWriter(), 64, 16_384
    for i in range(count):
        writer.add(Record(id=str(i), line=i + 1), np.full(length, i))
    writer.save(tmp_path, np.stack([np.arange(count), np.full(count, 1)], axis=1), 0)
    before = resident_bytes()
    tokens = [Spool(tmp_path).tokens(query) for query in range(count)]
    assert all(one[0] == one[-1] == i and len(one) == length for i, one in enumerate(tokens))
    assert resident_bytes() - before < 2e6, "of 4 MB"


def resident_bytes() -> int:
    """Of files that are mapped."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssFile")).split()[1])


@pytest.mark.parametrize("in_memory", [2**26, 5])  # else it lies in a temporary file
def test_a_writer_saves_again_and_in_the_place_of_what_was_there(tmp_path, monkeypatch, in_memory):
    monkeypatch.setattr(spool_columns, "_BYTES_IN_MEMORY", in_memory)
    for count in (1, 3):
        writer = SpoolWriter()
        for i in range(count):
            writer.add(Record(id=str(i), line=i + 1), (i, i))
        for _ in range(2):
            writer.save(tmp_path, np.array([(i, 1) for i in range(count)]), 0)
            assert [[*Spool(tmp_path).tokens(i)] for i in range(count)] == [
                [i, i] for i in range(count)]
    assert [path.name for path in tmp_path.iterdir()] == ["spool"]


def test_prompts_are_kept_of_the_first_requests_alone(tmp_path):
    writer = SpoolWriter()
    for i in range(NUM_PROMPTS + 1):
        writer.add(Record(id=str(i), line=i + 1, prompt="text" if i == 1 else None), (5, 6))
    writer.save(tmp_path, np.array([(i, 1) for i in range(1, NUM_PROMPTS + 1)]), 0)
    shown = Spool(tmp_path).prompts(NUM_PROMPTS + 9)
    assert shown[:2] == ["text", "2 token ids"] and shown[-1] is None
    assert len(shown) == NUM_PROMPTS


def test_another_version_is_refused_and_nothing_is_no_spool(tmp_path):
    assert num_queries(tmp_path) is None
    with pytest.raises(OSError, match="No such file"):
        Spool(tmp_path)
    SpoolWriter().save(tmp_path, np.empty((0, 2), np.int64), 0)
    path = tmp_path / "spool" / "spool.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": SPOOL_VERSION + 1}))
    with pytest.raises(ValueError, match=f"of version {SPOOL_VERSION + 1}"):
        Spool(tmp_path)


# What is too long or too deep is an error record of its own line, and takes no memory.


def read(path: Path) -> list[Request | RequestError]:
    return list(read_requests(RequestFiles(paths=(path,))))


@pytest.mark.parametrize("suffix", [".jsonl", ".txt", ".csv"])
def test_a_line_of_50_megabytes_costs_itself_alone(tmp_path, suffix):
    path, long = tmp_path / f"requests{suffix}", "x" * 50_000_000
    texts = {".jsonl": ['{"prompt": "a"}', json.dumps({"prompt": long}), '{"prompt": "b"}'],
             ".txt": ["a", long, "b"], ".csv": ["prompt", "a", long, "b"]}
    path.write_text("\n".join(texts[suffix]) + "\n")
    del long, texts
    tracemalloc.start()
    first, bad, last = read(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(first, Request) and first.prompt == "a"
    assert isinstance(bad, RequestError) and "longer than 16 MiB" in bad.error
    assert isinstance(last, Request) and last.prompt == "b"
    assert last.line == bad.line + 1
    assert peak < 120e6, f"{peak / 1e6:.0f} MB"


def test_a_cell_of_50_megabytes_costs_its_row_alone(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "requests.parquet"
    pq.write_table(pa.table({"prompt": ["a", "x" * 50_000_000, "b"]}), path)
    first, bad, last = read(path)
    assert isinstance(first, Request) and isinstance(last, Request) and last.prompt == "b"
    assert isinstance(bad, RequestError) and "prompt is longer than 16 MiB" in bad.error


def test_an_array_beyond_what_is_held_in_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "MAX_ARRAY_BYTES", 2**20)
    path = tmp_path / "requests.json"
    path.write_text(json.dumps(["x" * 2**20]))
    with pytest.raises(InputError, match="more than 1 MiB: .*jsonl"):
        read(path)
    row, = lines.read_text(io.BytesIO(b"x" * (2**24 + 2)), RequestFiles(paths=(path,)))
    assert row.record == lines._TOO_LONG


@pytest.mark.parametrize("value", ["[" * 500 + "]" * 500, '{"a":' * 500 + "1" + "}" * 500])
def test_what_is_nested_too_deeply_is_an_error_record(tmp_path, value):
    path = tmp_path / "requests.jsonl"
    path.write_text(f'{{"prompt": "a", "extra": {value}}}\n{{"prompt": "b"}}\n')
    bad, good = read(path)
    assert isinstance(bad, RequestError) and "nested more than 100 deep" in bad.error
    assert isinstance(good, Request)


@pytest.mark.parametrize("line", [
    {"prompt": "a", "id": "i" * 2000}, {"prompt": "a", "stop": ["s"] * 65},
    {"prompt": "a", "stop": "s" * 1001}, {"prompt": "a", "max_tokens": 2**63 - 1},
    {"prompt": "a", "top_k": 2**63 - 1}, {"prompt": "a", "forced_tokens": 2**63 - 1},
    {"prompt": "a", "seed": 2**63}, {"prompt": "a", "temperature": 1e300},
    {"prompt": "a", "temperature": float("inf")}, {"tokens": [2**63 - 1]},
    {"messages": [{"role": "r" * 10**6, "content": "a"}]}])
def test_every_number_and_text_of_a_request_has_a_range(tmp_path, line):
    path = tmp_path / "requests.jsonl"
    path.write_text(json.dumps(line) + "\n")
    [bad] = read(path)
    assert isinstance(bad, RequestError) and len(bad.error) < 300, bad


def test_ids_are_told_apart_in_few_bytes_each():
    """16 bytes each, and as many of a column while some are sorted in; the last ones by themselves
    take more."""
    seen = SeenIds()
    tracemalloc.start()
    for line in range(1, 8_151):
        name = f"a rather long id of a request, number {line}"
        assert seen.place(name) is None
        seen.add(name, 0, line)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [seen.place(f"a rather long id of a request, number {n}") for n in (1, 8_150, 0)
            ] == [(0, 1), (0, 8_150), None]
    assert len(seen) == 8_150 and peak / 8_150 < 48, f"{peak / 8_150:.0f} bytes an id"
    seen, places = SeenIds(), [(0, 1), (0, 7), (2, 1), (2, 2), (5, 4)]
    for file, line in places:
        seen.add(f"{file}/{line}", file, line)
    assert [seen.place(f"{file}/{line}") for file, line in places] == places
    assert seen.place("1/1") is None
