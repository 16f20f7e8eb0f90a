"""OpenAI's `n`: as many queries while a job runs, one response with as many choices; a run that is
killed in between goes on."""

import itertools
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toy_runs
from plans import open_writer, plan_of, spooled, written
from schemas import faults

from xgpt.report.output import read_output
from xgpt.report.results_file import chunks_of
from xgpt.requests.choices import merged, num_parts, parts
from xgpt.requests.spool_columns import Columns
from xrunner.files.intake import queries_of
from xrunner.files.result_line import result_line
from xrunner.files.results import HELD_FILE, Answered, answered, count_results
from xrunner.query import FinishedQuery, PreparedQuery

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
# (custom_id, its answers): indices 0, 1 to 3, 4, 5 and 6
REQUESTS = (("a", 1), ("b", 3), ("c", 1), ("d", 2))


def finished() -> list[FinishedQuery]:
    found: list[FinishedQuery] = []
    for name, choices in REQUESTS:
        for sample in range(choices):
            index = len(found)
            query = PreparedQuery(index=index, id=name, input_ids=(1, 2, 3), max_new_tokens=9,
                                  is_openai=True, is_chat=name == "b", sample=sample,
                                  choices=choices)
            found.append(FinishedQuery(
                query=query, output_ids=tuple(range(index + 1)), finish_reason="stop",
                text=f"täxt {index}", encode_start_s=index, first_token_s=index + 0.5,
                last_token_s=2.0 * index + 1))
    return found


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_choices_of_a_request_are_one_response(tmp_path):
    path = tmp_path / "results.jsonl"
    rows = written(path, finished())
    assert [row["custom_id"] for row in rows] == ["a", "b", "c", "d"]
    body = rows[1]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert [choice["message"]["content"] for choice in body["choices"]] == [
        "täxt 1", "täxt 2", "täxt 3"]
    # the prompt once, outputs of 2, 3 and 4 tokens
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 9, "total_tokens": 12}
    assert [choice["text"] for choice in rows[3]["response"]["body"]["choices"]] == [
        "täxt 5", "täxt 6"]
    assert list(map(num_parts, rows)) == [1, 3, 1, 2]
    assert answered(path) == Answered(7, frozenset()) and count_results(path) == 7


def test_taken_apart_it_is_what_each_answer_alone_would_be():
    own = [result for result in finished() if result.query.id == "b"]
    alone = [result_line(result, "toy", str) for result in own]
    (whole,) = [json.loads(merged([json.dumps(line) for line in alone]))]
    for part, line, result in zip(parts(whole), alone, own, strict=True):
        assert part["response"]["body"]["choices"] == line["response"]["body"]["choices"]
        assert part["response"]["body"]["usage"] == line["response"]["body"]["usage"]
        assert part["xgpt"] == {**line["xgpt"], "output_tokens": len(result.output_ids)}
    assert parts(alone[0]) == [alone[0]]


@pytest.mark.parametrize("order", [
    (0, 1, 2, 3, 4, 5, 6), (6, 5, 4, 3, 2, 1, 0), (3, 0, 5, 1, 4, 6, 2), (1, 3, 2, 6, 0, 5, 4)])
def test_whenever_a_run_is_killed_the_next_one_ends_with_the_same_lines(
        tmp_path, order, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 1.8e9)  # each response says when it was made
    results = finished()
    whole = tmp_path / "whole.jsonl"
    written(whole, results)
    for killed_after in range(len(order) + 1):
        folder = tmp_path / str(killed_after)
        folder.mkdir()
        path = folder / "results.jsonl"
        killed = open_writer(path)
        for index in order[:killed_after]:
            killed.write(results[index])
        before = answered(path)
        if (folder / HELD_FILE).exists():
            assert not [fault for row in rows_of(folder / HELD_FILE)
                        for fault in faults("results-line", row)]
        done = set(range(before.written)) | before.held
        assert done == set(order[:killed_after]), "nothing is lost, or answered twice"
        written(path, (results[index] for index in order if index not in done))
        assert path.read_text() == whole.read_text()
        assert not (folder / HELD_FILE).exists()


def test_what_is_answered_keeps_the_second_in_which_it_was(tmp_path, monkeypatch):
    path, results = tmp_path / "results.jsonl", finished()
    monkeypatch.setattr(time, "time", lambda: 1_800_000_000.9)
    killed = open_writer(path)
    for index in (0, 4, 5):
        killed.write(results[index])
    monkeypatch.setattr(time, "time", lambda: 1_800_000_123.0)
    created = [row["response"]["body"]["created"] - 1_800_000_000
               for row in written(path, (results[index] for index in (1, 2, 3, 6)))]
    assert created == [0, 123, 0, 0]


def test_one_without_an_answer_leaves_the_request_without(tmp_path):
    path = tmp_path / "results.jsonl"
    row = written(path, (replace(result, finish_reason="error", error="logits")
                         if result.query.index == 2 else result for result in finished()))[1]
    assert row["response"] is None
    assert row["error"] == {"code": "no_answer", "message": "logits"}
    assert [part["xgpt"]["index"] for part in parts(row)] == [1, 2, 3]
    assert answered(path) == Answered(7, frozenset())


def test_a_run_answers_lines_with_n(llama, tmp_path):
    """Through intake, engine, results, and those who read them."""
    plan = plan_of(tmp_path, llama[0], temperature=0.0)

    def line(name: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": name, "url": "/v1/completions",
                "body": {"model": "m", "prompt": [7, 8, 9], "max_tokens": 6, **body}}

    spool, errors = spooled(plan, line("one"), line("drawn", n=4, temperature=1.5, seed=3),
                            line("greedy", n=2), line("none", n=0), line("many", n=129),
                            line("late", n=None))
    assert [error["custom_id"] for error in errors] == ["none", "many"]
    assert all("n must be a whole number from 1 to 128" in str(error["response"])
               for error in errors)
    queries = list(queries_of(spool, plan))
    assert [query.choices for query in queries] == [1, 4, 4, 4, 4, 2, 2, 1]
    sink, _ = toy_runs.run_in_process(llama[0], queries, degrees=(1,))
    lines = written(tmp_path / "results.jsonl", sink.results)
    assert not [fault for row in lines for fault in faults("results-line", row)]
    rows = {row["custom_id"]: row for row in lines}
    texts = {name: [choice["text"] for choice in row["response"]["body"]["choices"]]
             for name, row in rows.items()}
    assert {name: len(own) for name, own in texts.items()} == {
        "one": 1, "drawn": 4, "greedy": 2, "late": 1}
    assert texts["greedy"] == 2 * texts["one"] and len(set(texts["drawn"])) > 1
    output = read_output(tmp_path)
    assert len(output.queries) == len(output.answers) == 8
    assert not [remark for remark in output.remarks if "results.jsonl" in remark]
    answers = itertools.chain.from_iterable(
        chunk.answers for chunk in chunks_of(tmp_path, Columns(tmp_path)))
    assert [answer["id"] for answer in answers] == ["one", "drawn", "greedy", "none", "many",
                                                    "late"]
