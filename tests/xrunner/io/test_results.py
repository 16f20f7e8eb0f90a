"""results.jsonl: in the input's order, a valid prefix at any moment, resumable."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from xgpt.core.workload import RequestError
from xrunner.io import results
from xrunner.io.results import (
    ResultWriter,
    answered,
    answered_by_last_line,
    count_results,
    write_errors,
)
from xrunner.query import FinishedQuery, PreparedQuery


def finished(index: int, *, text: str = "täxt\n", openai: bool = False) -> FinishedQuery:
    query = PreparedQuery(index=index, id=f"id{index}", input_ids=(1, 2, 3), max_new_tokens=5,
                          is_openai=openai, is_chat=openai)
    return FinishedQuery(query=query, output_ids=(4, 5), finish_reason="stop", text=text,
                         encode_start_s=0.5, first_token_s=1.5, last_token_s=1.75)


def test_results_leave_in_input_order_and_each_as_soon_as_it_can(tmp_path):
    path = tmp_path / "results.jsonl"
    writer = ResultWriter(path, first_index=0, model="toy")
    seen = []
    for index in (2, 0, 3, 1, 4):
        writer.write(finished(index))
        seen.append([json.loads(line)["index"] for line in path.read_text().splitlines()])
    assert seen == [[], [0], [0], [0, 1, 2, 3], [0, 1, 2, 3, 4]]
    assert writer.num_held == 0
    writer.close()
    line = json.loads(path.read_text().splitlines()[0])
    assert line == {"id": "id0", "index": 0, "text": "täxt\n", "output_ids": [4, 5],
                    "input_tokens": 3, "output_tokens": 2, "finish_reason": "stop",
                    "latency_s": 1.25, "encode_start_s": 0.5, "ttft_s": 1.5, "tpot_s": 0.25}


def test_a_query_without_an_answer_says_why_in_its_line(tmp_path):
    path = tmp_path / "results.jsonl"
    writer = ResultWriter(path, first_index=0, model="toy")
    for index in range(2):
        writer.write(replace(finished(index, openai=index == 1), finish_reason="error",
                             error="logits not finite"))
    writer.close()
    own, openai = (json.loads(line) for line in path.read_text().splitlines())
    assert (own["finish_reason"], own["error"]) == ("error", "logits not finite")
    assert openai["response"] is None and openai["custom_id"] == "id1"
    assert openai["error"] == {"code": "no_answer", "message": "logits not finite"}


def test_a_torn_last_line_is_cut_and_the_rest_counted(tmp_path):
    path = tmp_path / "results.jsonl"
    assert count_results(path) == 0
    path.write_text('{"index": 0}\n{"index": 1}\n{"index": 2, "te')
    assert count_results(path) == 2
    assert path.read_text() == '{"index": 0}\n{"index": 1}\n'
    writer = ResultWriter(path, first_index=2, model="toy")
    writer.write(finished(2))
    writer.close()
    assert count_results(path) == 3


@pytest.mark.parametrize("chunk", [1, 2**16])
@pytest.mark.parametrize("torn", ["", '{"index": 9, "te', "\0" * 40])
@pytest.mark.parametrize("last", ['{"index": 7}', '{"id": "a", "xgpt": {"index": 7, "tokens": []}}',
                                  '{"xgpt": {"index": 6, "choices": [{"index": 6}, {}]}}'])
def test_the_last_whole_line_tells_how_many_there_are(tmp_path, monkeypatch, chunk, torn, last):
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f'{{"index": {i}, "text": "{i}"}}\n' for i in range(
        6 if "choices" in last else 7)) + f"{last}\n{torn}")
    (tmp_path / "held.jsonl").write_text('{"index": 7}\n{"index": 9}\n')
    found = answered(path)
    monkeypatch.setattr(results, "_CHUNK_BYTES", chunk)
    monkeypatch.setattr(results, "checked", None)  # which reads all
    assert answered_by_last_line(path) == found and found[:2] == (8, {9})


@pytest.mark.parametrize("text", [None, "", '{"index": 0', '{"index": 0}\n{"text": ""}\n',
                                  '{"index": 0}\n\0\0\n', '{"index": 0}\n[1]\n'])
def test_where_the_last_line_does_not_tell_all_are_counted(tmp_path, text):
    path = tmp_path / "results.jsonl"
    if text is not None:
        path.write_text(text)
    assert answered_by_last_line(path) == answered(path)


def test_an_openai_request_is_answered_with_a_batch_response(tmp_path):
    path = tmp_path / "results.jsonl"
    writer = ResultWriter(path, first_index=0, model="toy")
    writer.write(finished(0, text="Hello", openai=True))
    writer.close()
    line = json.loads(path.read_text())
    body = line["response"]["body"]
    assert line["custom_id"] == "id0" and line["response"]["status_code"] == 200
    assert body["choices"][0]["message"] == {
        "role": "assistant", "content": "Hello", "refusal": None}
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert line["xgpt"]["latency_s"] == 1.25
    assert (line["xgpt"]["ttft_s"], line["xgpt"]["tpot_s"]) == (1.5, 0.25)


def test_errors_are_written_in_line_order_and_no_file_when_there_are_none(tmp_path):
    path = tmp_path / "errors.jsonl"
    write_errors(path, [RequestError(line=9, id=None, error="b"),
                        RequestError(line=2, id="x", error="a")])
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"line": 2, "id": "x", "error": "a"}, {"line": 9, "id": None, "error": "b"}]
    write_errors(path, [])
    assert not path.exists()
