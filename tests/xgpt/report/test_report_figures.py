"""Verdicts of the report: predicted against measured, and the latency bound."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
from fake_run import fake_schedule, write_fake_run, write_spool

from xgpt.core.constraint import Bound
from xgpt.core.errors import InputError
from xgpt.core.schedule_file import SCHEDULE_VERSION
from xgpt.report.figures import (
    MOST_STEPS,
    check_bound,
    check_bounds,
    comparisons,
    kept_facts,
    lost_to_bound,
    metrics_so_far,
    middle_window,
    was_changed,
    why_not_predicted,
)
from xgpt.report.lanes import Lane
from xgpt.report.output import Output, QueryColumns, QueryFigures, read_output, recorded
from xgpt.requests.spool import Record


def test_columns_hold_what_was_put_in_and_metrics_so_far_count_from_the_first_encoding():
    queries = [query(1.5, 7, 2.0), dataclasses.replace(query(9.0, 2**31 - 1), ttft_s=0.25),
               dataclasses.replace(query(3.0), finish_reason="length", tpot_s=0.125)]
    columns = QueryColumns(queries)
    assert len(columns) == 3
    assert columns.times("latency_s").tolist() == [1.5, 9.0, 3.0]
    assert recorded(columns.times("ttft_s")).tolist() == [0.25]
    assert columns.counts("output_tokens").tolist() == [7, 2**31 - 1, 10]
    assert columns.reasons() == {"stop": 2, "length": 1}
    assert not QueryColumns().reasons() and not len(QueryColumns().times("ttft_s"))
    odd = QueryColumns(dataclasses.replace(queries[0], finish_reason=str(i)) for i in range(400))
    assert sum(odd.reasons().values()) == 400
    metrics = metrics_so_far(QueryColumns(
        (query(2.0, start_s=10.0), query(3.0, start_s=11.0))), 1)
    assert metrics["wall_s"] == {"measured": 4.0}
    assert metrics["throughput_qps"] == {"measured": 0.5}
    assert metrics["output_tokens_per_s"] == {"measured": 5.0}
    assert metrics_so_far(QueryColumns(), 0) == {"queries": 0, "errors": 0}


def query(latency_s: float, output_tokens: int = 10, start_s: float = 0.0) -> QueryFigures:
    return QueryFigures(input_tokens=5, output_tokens=output_tokens, finish_reason="stop",
                        latency_s=latency_s, encode_start_s=start_s)


def output_of(queries: list[QueryFigures], bound_s: float, kind: str,
              quantile: float = 0.99) -> Output:
    schedule = fake_schedule(latency_bound_s=bound_s, constraint_kind=kind, quantile=quantile)
    return Output(directory=Path("out"), schedule=schedule, queries=QueryColumns(queries),
                  metrics={})


@pytest.mark.parametrize(("of", "measured", "verdict", "text"), [
    ("throughput_qps", 1.15, "good", "within 15 %"),
    ("throughput_qps", 0.85, "good", "within 15 %"),
    ("throughput_qps", 1.151, "good", "faster than predicted"),
    ("throughput_qps", 0.72, "fair", "28 % less"),
    ("throughput_qps", 0.69, "bad", "31 % less"), ("throughput_qps", 0.0, "bad", "100 % less"),
    # faster than planned is not red
    ("throughput_qps", 2.95, "good", "faster than predicted"),
    ("wall_s", 2.5, "bad", "2.5 times as much"),
    ("wall_s", 0.04, "good", "faster than predicted"), ("wall_s", 1.31, "bad", "31 % more")])
def test_a_prediction_is_good_within_fifteen_per_cent(of, measured, verdict, text):
    (row,) = comparisons({of: {"measured": measured, "predicted": 1.0}})
    assert (row.verdict, row.verdict_text) == (verdict, text)


SLOW = [query(1.0)] * 99 + [query(9.0)]


@pytest.mark.parametrize(("queries", "kind", "is_kept", "said"), [
    (SLOW, "queries", True, "99 % of the requests"),
    ([*SLOW, query(9.0)], "queries", False, "98 % of the requests"),
    # sequences beyond the quantile are left out, a late one within it is not
    ([query(1.0)] * 99 + [query(50.0, 80)], "sequence", True, "up to 10 tokens"),
    ([query(1.0)] * 98 + [query(2.5, 9), query(1.0, 80)], "sequence", False,
     "missed by 1 of 99 requests (1 %)"),
    ([query(9.0)] * 100, "sequence", False, "(100 %)"),
    ([query(9.0)] * 99 + [query(1.0)], "sequence", False, "(99 %)"),
    ([query(9.0)] * 12 + [query(1.0)] * 88, "sequence", False, "(12 %)"),
    ([], "sequence", None, "")])
def test_a_bound_is_kept_by_exactly_the_share_asked_for(queries, kind, is_kept, said):
    check = check_bound(output_of(queries, 2.0, kind))
    assert check.is_kept is is_kept and said in check.sentence


def test_without_a_bound_or_an_end_or_a_prediction_there_is_no_verdict():
    for predicted in (None, 0.0, "inf"):
        (row,) = comparisons({"load_s": {"measured": 2.0, "predicted": predicted}})
        assert row.ratio is None and row.verdict_text == ""
    for choice in ("keep", "redeploy", "adjust"):
        metrics = {"status": "finished", "wall_s": {"measured": 1.0},
                   "rescheduling": [{"choice": choice, "reason": "why"}]}
        said = "was changed while it ran" in (why_not_predicted(metrics) or "")
        assert was_changed(metrics) is said is (choice == "adjust"), "which takes its prediction"
    one = output_of([query(1.0)], 2.0, "sequence")
    assert "met so far" in check_bound(dataclasses.replace(one, metrics=None)).sentence
    assert check_bound(output_of([query(1.0)], math.inf, "sequence")).is_kept is None
    assert check_bound(Output(directory=Path("out"))).is_kept is None


def test_bounds_on_pace_are_of_all_queries_and_a_makespan_of_one_whole_run():
    paced = [dataclasses.replace(query(9.0, start_s=float(start)), ttft_s=start + 1.0, tpot_s=0.1)
             for start in range(99)]
    late = dataclasses.replace(query(9.0, start_s=5.0), ttft_s=8.0, tpot_s=0.3)
    schedule = dataclasses.replace(fake_schedule(latency_bound_s=math.inf), bounds=(
        Bound(limit_s=math.inf), Bound(metric="ttft", limit_s=2.0, kind="queries"),
        Bound(metric="tpot", limit_s=0.2, kind="queries", quantile=0.995),
        Bound(metric="makespan", limit_s=60.0)))
    output = Output(directory=Path("out"), schedule=schedule, queries=QueryColumns((*paced, late)),
                    metrics={"status": "done", "wall_s": {"measured": 45.0}})
    ttft, tpot, makespan = check_bounds(output)
    assert (ttft.is_kept, ttft.over, ttft.of, ttft.worst_s) == (True, 1, 100, 3.0)
    assert (tpot.is_kept, tpot.over, tpot.worst_s) == (False, 1, 0.3)
    assert "missed: 99 % of the requests" in tpot.sentence and "300 ms" in tpot.sentence
    assert makespan.is_kept is True and "it took 45.0 s" in makespan.sentence
    facts = kept_facts([ttft, tpot, makespan])
    assert facts["bound_kept"] is False
    assert [bound["share_over"] for bound in facts["bounds"]] == [0.01, 0.01, 0.0]
    schedule = dataclasses.replace(fake_schedule(latency_bound_s=math.inf), bounds=(
        Bound(limit_s=math.inf), Bound(metric="makespan", limit_s=30.0)))
    whole = Output(directory=Path("out"), schedule=schedule, queries=QueryColumns((query(1.0),)),
                   metrics={"status": "done", "wall_s": {"measured": 45.0}})
    assert check_bound(whole).is_kept is False
    assert check_bound(dataclasses.replace(whole, queries_before=1)).is_kept is None
    stopped = {"status": "stopped", "wall_s": {"measured": 5.0}}
    assert check_bound(dataclasses.replace(whole, metrics=stopped)).is_kept is None


@pytest.mark.parametrize(("changes", "lost"), [
    ({"unbounded_qps": 4.62}, pytest.approx(0.5)), ({"unbounded_qps": 2.31}, 0.0),
    ({"latency_bound_s": math.inf}, 0.0), ({"unbounded_qps": None}, None)])
def test_what_the_bound_costs(changes, lost):
    assert lost_to_bound(fake_schedule(**changes)) == lost


def test_the_window_is_the_middle_and_holds_no_more_steps_than_allowed():
    def lane(count: int) -> Lane:
        start_s, none = np.arange(count) * 100 / count, np.zeros(count, int)
        return Lane(label="stage 0", kinds=none, groups=none, start_s=start_s,
                    end_s=start_s + 100 / count)

    assert middle_window([lane(100)], 20.0) == (40.0, 60.0)
    assert middle_window([lane(100)], None) == (45.0, 55.0)
    assert middle_window([lane(100)], 1e9) == (0.0, 100.0)
    assert middle_window([lane(10 * MOST_STEPS)], 20.0) == (45.0, 55.0)
    assert middle_window([], 1.0) is None


@pytest.fixture
def run_dir(tmp_path):
    return write_fake_run(tmp_path / "out", num_queries=20)


def change(folder, cut=None, more=b""):
    path = folder / "results.jsonl"
    path.write_bytes(path.read_bytes()[:cut] + more)


def spoil(folder):
    path = folder / "results.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[3], lines[7] = "not json\n", "[" * 100_000 + "\n"
    path.write_text("".join(lines))


@pytest.mark.parametrize(("spoils", "count", "remark"), [
    (lambda folder: change(folder, -30), 19, "last line of results.jsonl is torn"),
    (lambda folder: change(folder, None, '{"id": "\u05e9'.encode()[:-1]), 20, "last line of"),
    (spoil, 18, "2 unreadable lines of results.jsonl are left out."),
    (lambda folder: change(
        folder, None, b'{"id": "x", "latency_s": NaN, "input_tokens": 1}\n{"id": "y"}\n'),
     20, "2 lines of results.jsonl are no results and are left out."),
    (lambda folder: (folder / "schedule.json").write_text('{"version": 999}'), 20,
     f"this xgpt reads version {SCHEDULE_VERSION}"),
    (lambda folder: (folder / "spool" / "spool.json").unlink(), 20, "spool")],
    ids=["torn", "torn in a letter", "unreadable", "no results", "version", "no spool"])
def test_what_is_torn_or_missing_is_left_out_and_said(run_dir, spoils, count, remark):
    spoils(run_dir)
    output = read_output(run_dir)
    assert len(output.queries) == count
    assert len(output.remarks) == 1 and remark in output.remarks[0]
    assert (output.schedule is None) == ("reads version" in remark)
    assert all((answer.prompt is None) == (remark == "spool") for answer in output.answers)


def test_a_run_is_read_without_a_remark_an_empty_folder_with_and_a_missing_one_refused(
        tmp_path, run_dir):
    output = read_output(tmp_path)
    assert not output.queries and output.schedule is None and output.metrics is None
    assert output.remarks == ("job.json is missing.", "results.jsonl is missing.",
                              "schedule.json is missing.")
    with pytest.raises(InputError, match="a folder that `xgpt submit`"):
        read_output(tmp_path / "absent")
    output = read_output(run_dir)
    assert output.remarks == ()
    assert len(output.queries) == len(output.answers) == 20
    assert len(output.errors) == 2 and output.lanes and output.schedule is not None
    assert output.answers[9].prompt is not None
    assert output.answers[9].prompt.startswith("Say something sensible about the number 9")
    few = read_output(run_dir, max_answers=5)
    assert len(few.answers) == 5 and len(few.queries) == 20


def test_results_of_ours_and_openais_are_read_with_the_prompts_of_their_queries(tmp_path):
    write_spool(tmp_path, [Record(id="a", line=1, prompt="first"), Record(id="b", line=2),
                           Record(id="c", line=3, prompt="third")])
    own = {"id": "1", "index": 1, "text": "t", "input_tokens": 1, "output_tokens": 1,
           "finish_reason": "stop", "latency_s": 1.0, "encode_start_s": 0.0}
    body = {"choices": [{"message": {"role": "assistant", "content": "Bonjour"},
                         "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 11, "completion_tokens": 3}}
    openai = {"id": "batch_req_0", "custom_id": "q-1", "response": {
        "status_code": 200, "body": body}, "xgpt": {
            "index": 2, "latency_s": 0.5, "encode_start_s": 0.25}}
    (tmp_path / "results.jsonl").write_text(f"{json.dumps(own)}\n{json.dumps(openai)}\n")
    first, second = read_output(tmp_path).answers
    assert (first.prompt, second.prompt) == ("3 token ids", "third")
    assert (second.id, second.text) == ("q-1", "Bonjour")
    assert (second.figures.encode_start_s, second.figures.latency_s) == (0.25, 0.5)
    assert (second.figures.input_tokens, second.figures.output_tokens) == (11, 3)
