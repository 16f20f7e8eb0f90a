"""Reading an output folder: what is missing or torn is said, never raised."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_run import write_fake_run, write_spool

from xgpt.core.errors import InputError
from xgpt.core.schedule_file import SCHEDULE_VERSION
from xgpt.report.output import number, read_output
from xgpt.requests.spool import Record


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return write_fake_run(tmp_path / "out", num_queries=20)


def test_a_finished_run_is_read_without_a_remark(run_dir: Path) -> None:
    output = read_output(run_dir)
    assert output.remarks == ()
    assert len(output.queries) == len(output.answers) == 20
    assert len(output.errors) == 2 and output.steps and output.schedule is not None
    assert output.answers[9].prompt is not None
    assert output.answers[9].prompt.startswith("Say something sensible about the number 9")


def test_a_torn_last_line_is_left_out_and_said(run_dir: Path) -> None:
    path = run_dir / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    output = read_output(run_dir)
    assert len(output.queries) == 19
    assert len(output.remarks) == 1 and "last line of results.jsonl is torn" in output.remarks[0]


def test_a_line_torn_within_a_multibyte_character_is_left_out(run_dir: Path) -> None:
    path = run_dir / "results.jsonl"
    path.write_bytes(path.read_bytes() + '{"id": "\u05e9'.encode()[:-1])
    assert len(read_output(run_dir).queries) == 20


def test_unreadable_lines_in_the_middle_are_counted(run_dir: Path) -> None:
    path = run_dir / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[3], lines[7] = "not json\n", "[" * 100_000 + "\n"
    path.write_text("".join(lines))
    output = read_output(run_dir)
    assert len(output.queries) == 18
    assert output.remarks == ("2 unreadable lines of results.jsonl are left out.",)


def test_rows_without_their_figures_are_no_results(run_dir: Path) -> None:
    with (run_dir / "results.jsonl").open("a") as file:
        file.write('{"id": "x", "latency_s": NaN, "input_tokens": 1}\n{"id": "y"}\n')
    output = read_output(run_dir)
    assert len(output.queries) == 20
    assert output.remarks == ("2 lines of results.jsonl are no results and are left out.",)


def test_an_empty_folder_is_read_with_remarks_only(tmp_path: Path) -> None:
    output = read_output(tmp_path)
    assert not output.queries and output.schedule is None and output.metrics is None
    assert output.remarks == ("job.json is missing.", "results.jsonl is missing.",
                              "schedule.json is missing.")


def test_a_missing_folder_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a folder that `xgpt submit`"):
        read_output(tmp_path / "absent")


def test_a_schedule_of_another_version_is_said(run_dir: Path) -> None:
    (run_dir / "schedule.json").write_text('{"version": 999}')
    output = read_output(run_dir)
    assert output.schedule is None
    assert len(output.remarks) == 1
    assert f"this xgpt reads version {SCHEDULE_VERSION}" in output.remarks[0]


def test_answers_are_kept_for_the_first_queries_only(run_dir: Path) -> None:
    output = read_output(run_dir, max_answers=5)
    assert len(output.answers) == 5 and len(output.queries) == 20


def test_prompts_are_left_out_when_the_spool_is_gone(run_dir: Path) -> None:
    (run_dir / "spool" / "spool.json").unlink()
    output = read_output(run_dir)
    assert all(answer.prompt is None for answer in output.answers)
    assert len(output.remarks) == 1 and "spool" in output.remarks[0]


def test_prompts_are_found_by_the_query_of_each_result(tmp_path: Path) -> None:
    write_spool(tmp_path, [Record(id="a", line=1, prompt="first"), Record(id="b", line=2),
                           Record(id="c", line=3, prompt="third")])
    rows = [{"id": str(index), "index": index, "text": "t", "input_tokens": 1, "output_tokens": 1,
             "finish_reason": "stop", "latency_s": 1.0, "encode_start_s": 0.0} for index in (1, 2)]
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [a.prompt for a in read_output(tmp_path).answers] == ["3 token ids", "third"]


def test_openai_batch_lines_are_read_like_ours(tmp_path: Path) -> None:
    body = {"choices": [{"message": {"role": "assistant", "content": "Bonjour"},
                         "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 11, "completion_tokens": 3}}
    row = {"id": "batch_req_0", "custom_id": "q-1", "response": {"status_code": 200, "body": body},
           "xgpt": {"index": 0, "latency_s": 0.5, "encode_start_s": 0.25}}
    (tmp_path / "results.jsonl").write_text(json.dumps(row) + "\n")
    write_spool(tmp_path, [Record(id="q-1", line=1, prompt="Translate: hello")])
    (answer,) = read_output(tmp_path).answers
    assert (answer.id, answer.text, answer.prompt) == ("q-1", "Bonjour", "Translate: hello")
    assert answer.figures.input_tokens == 11 and answer.figures.output_tokens == 3
    assert answer.figures.end_s == 0.75


@pytest.mark.parametrize(("value", "expected"), [
    (3, 3.0), ("inf", float("inf")), (None, None), (True, None), ("3", None),
    (float("nan"), None), (10**400, None), ([1], None),
])
def test_number_takes_numbers_only(value: object, expected: float | None) -> None:
    assert number({"a": {"b": value}}, "a", "b") == expected
