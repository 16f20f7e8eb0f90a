"""Verdicts of the report: predicted against measured, and the latency bound."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
from fake_run import fake_schedule

from xgpt.core.constraint import Bound
from xgpt.report.figures import (
    check_bound,
    check_bounds,
    comparisons,
    kept_facts,
    lost_to_bound,
    metrics_so_far,
    middle_window,
    plain,
)
from xgpt.report.output import LoggedStep, Output, QueryColumns, QueryFigures, told


def test_columns_hold_what_was_put_in() -> None:
    queries = [query(1.5, 7, 2.0), dataclasses.replace(query(9.0, 2**31 - 1), ttft_s=0.25),
               dataclasses.replace(query(3.0), finish_reason="length", tpot_s=0.125)]
    columns = QueryColumns(queries)
    assert len(columns) == 3
    assert columns.times("latency_s").tolist() == [1.5, 9.0, 3.0]
    assert told(columns.times("ttft_s")).tolist() == [0.25]
    assert columns.counts("output_tokens").tolist() == [7, 2**31 - 1, 10]
    assert columns.reasons() == {"stop": 2, "length": 1}
    assert not QueryColumns().reasons() and not len(QueryColumns().times("ttft_s"))
    odd = QueryColumns(dataclasses.replace(queries[0], finish_reason=str(i)) for i in range(400))
    assert sum(odd.reasons().values()) == 400


def query(latency_s: float, output_tokens: int = 10, start_s: float = 0.0) -> QueryFigures:
    return QueryFigures(input_tokens=5, output_tokens=output_tokens, finish_reason="stop",
                        latency_s=latency_s, encode_start_s=start_s)


def output_of(queries: list[QueryFigures], bound_s: float, kind: str,
              quantile: float = 0.99) -> Output:
    schedule = fake_schedule(latency_bound_s=bound_s, constraint_kind=kind, quantile=quantile)
    return Output(directory=Path("out"), schedule=schedule, queries=QueryColumns(queries),
                  metrics={})


@pytest.mark.parametrize(("measured", "verdict", "text"), [
    (1.15, "good", "within 15 %"), (0.85, "good", "within 15 %"), (1.0, "good", "within 15 %"),
    (1.151, "fair", "15.1 % more"), (0.72, "fair", "28 % less"), (1.31, "bad", "31 % more"),
    (0.0, "bad", "100 % less"), (2.95, "bad", "3.0 times as much"),
])
def test_a_prediction_is_good_within_fifteen_per_cent(measured: float, verdict: str,
                                                      text: str) -> None:
    (row,) = comparisons({"throughput_qps": {"measured": measured, "predicted": 1.0}})
    assert (row.verdict, row.verdict_text) == (verdict, text)


@pytest.mark.parametrize("predicted", [None, 0.0, "inf"])
def test_there_is_no_ratio_without_a_usable_prediction(predicted: object) -> None:
    (row,) = comparisons({"load_s": {"measured": 2.0, "predicted": predicted}})
    assert row.ratio is None and row.verdict_text == ""


def test_queries_bound_is_kept_by_exactly_the_share_asked_for() -> None:
    latencies = [1.0] * 99 + [9.0]
    kept = check_bound(output_of([query(s) for s in latencies], 2.0, "queries"))
    assert kept.is_kept is True and "99 % of the queries" in kept.sentence
    missed = check_bound(output_of([query(s) for s in [*latencies, 9.0]], 2.0, "queries"))
    assert missed.is_kept is False and "98 % of the queries" in missed.sentence


def test_sequence_bound_leaves_out_sequences_beyond_the_quantile() -> None:
    queries = [query(1.0, output_tokens=10)] * 99 + [query(50.0, output_tokens=80)]
    check = check_bound(output_of(queries, 2.0, "sequence"))
    assert check.is_kept is True and "up to 10 tokens" in check.sentence


def test_sequence_bound_is_missed_by_one_late_sequence_within_the_quantile() -> None:
    queries = [query(1.0, output_tokens=10)] * 98 + [query(2.5, output_tokens=9),
                                                     query(1.0, output_tokens=80)]
    check = check_bound(output_of(queries, 2.0, "sequence"))
    assert check.is_kept is False and "missed by 1 of 99 sequences (1 %)" in check.sentence


@pytest.mark.parametrize(("late", "shown"), [(100, "100 %"), (99, "99 %"), (12, "12 %")])
def test_the_share_of_late_sequences_is_a_plain_number(late: int, shown: str) -> None:
    queries = [query(9.0)] * late + [query(1.0)] * (100 - late)
    assert f"({shown})" in check_bound(output_of(queries, 2.0, "sequence")).sentence


def test_an_unfinished_run_keeps_the_bound_only_so_far() -> None:
    output = dataclasses.replace(output_of([query(1.0)], 2.0, "sequence"), metrics=None)
    assert "kept so far" in check_bound(output).sentence


def test_no_bound_and_no_query_are_no_verdict() -> None:
    assert check_bound(output_of([query(1.0)], math.inf, "sequence")).is_kept is None
    assert check_bound(output_of([], 2.0, "sequence")).is_kept is None
    assert check_bound(Output(directory=Path("out"))).is_kept is None


def test_the_job_names_the_bound_where_the_schedule_is_lost() -> None:
    job = {"constraint": {"latency_s": 2, "kind": "queries", "quantile": 0.5}}
    output = Output(directory=Path("out"), job=job, queries=QueryColumns((query(1.0), query(3.0))))
    check = check_bound(output)
    assert check.is_kept is True and "50 % were asked for" in check.sentence


def test_bounds_on_the_tokens_pace_are_of_all_queries_from_the_start_of_their_encoding() -> None:
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
    assert "missed: 99 % of the queries" in tpot.sentence and "300 ms" in tpot.sentence
    assert makespan.is_kept is True and "it took 45.0 s" in makespan.sentence
    facts = kept_facts([ttft, tpot, makespan])
    assert facts["bound_kept"] is False
    assert [bound["share_over"] for bound in facts["bounds"]] == [0.01, 0.01, 0.0]


def test_a_makespan_is_judged_of_one_whole_run_alone() -> None:
    schedule = dataclasses.replace(fake_schedule(latency_bound_s=math.inf), bounds=(
        Bound(limit_s=math.inf), Bound(metric="makespan", limit_s=30.0)))
    whole = Output(directory=Path("out"), schedule=schedule, queries=QueryColumns((query(1.0),)),
                   metrics={"status": "done", "wall_s": {"measured": 45.0}})
    assert check_bound(whole).is_kept is False
    assert check_bound(dataclasses.replace(whole, queries_before=1)).is_kept is None
    stopped = {"status": "stopped", "wall_s": {"measured": 5.0}}
    assert check_bound(dataclasses.replace(whole, metrics=stopped)).is_kept is None


def test_what_the_bound_costs() -> None:
    assert lost_to_bound(fake_schedule(unbounded_qps=4.62)) == pytest.approx(0.5)
    assert lost_to_bound(fake_schedule(unbounded_qps=2.31)) == 0.0
    assert lost_to_bound(fake_schedule(latency_bound_s=math.inf)) == 0.0
    assert lost_to_bound(fake_schedule(unbounded_qps=None)) is None


def test_metrics_so_far_count_from_the_first_encoding_to_the_last_token() -> None:
    metrics = metrics_so_far(QueryColumns(
        (query(2.0, start_s=10.0), query(3.0, start_s=11.0))), 1)
    assert metrics["wall_s"] == {"measured": 4.0}
    assert metrics["throughput_qps"] == {"measured": 0.5}
    assert metrics["output_tokens_per_s"] == {"measured": 5.0}
    assert metrics_so_far(QueryColumns(), 0) == {"queries": 0, "errors": 0}


def step(stage: int, start_s: float, end_s: float) -> LoggedStep:
    return LoggedStep(stage=stage, kind="decode", queries=1, tokens=1, start_s=start_s, end_s=end_s)


def test_the_window_is_the_middle_and_holds_no_more_steps_than_allowed() -> None:
    steps = [step(0, float(i), i + 1.0) for i in range(100)]
    assert middle_window(steps, 20.0) == (40.0, 60.0)
    assert middle_window(steps, None) == (45.0, 55.0)
    assert middle_window(steps, 1e9) == (0.0, 100.0)
    assert middle_window(steps, 20.0, most_steps=10) == (45.0, 55.0)
    assert middle_window([], 1.0) is None
    assert middle_window([step(0, 1.0, 1.0)], 1.0) is None


@pytest.mark.parametrize(("value", "text"), [
    (2.1, "2.10"), (99.96, "100"), (99.94, "99.9"), (12345.6, "12,346"), (0.0, "0.00"),
    (math.inf, "inf"),
])
def test_plain_numbers_have_three_digits(value: float, text: str) -> None:
    assert plain(value) == text
