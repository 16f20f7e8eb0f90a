"""The screen of a run: at most 25 lines of 80 columns, whatever there is to say."""

import math
from dataclasses import replace

import pytest
from fake_run import fake_schedule
from problems import problem_of

from xgpt.core.constraint import Bound
from xgpt.report.figures import BoundCheck
from xgpt.report.run_screen import begin_screen, end_screen, machine_words
from xsimulator.replay.prediction import JobPrediction

EXPECTED = JobPrediction(
    throughput_qps=9.0, output_tokens_per_s=490.0, latency_p50_s=4.5, latency_p99_s=7.4,
    ttft_p50_s=1.0, ttft_p99_s=2.0, tpot_p50_s=0.1, tpot_p99_s=0.2, wall_s=8.0)
FILES = {"answers": "out/results.csv", "report": "out/report.html", "next": "xgpt explain out"}


SHARED = ("94 % of 3.0 M input tokens are shared: 50 prefixes of 3,000 tokens, each encoded once; "
          "5.6 x as fast as this schedule without sharing",
          "order prefix, window job: first results after 40 s (2 s in the input's order, which "
          "would save 45 %)")


def begun(sharing=(), expected=EXPECTED, **changes):
    of = replace(problem_of("opt-1.3b", "a40-4"), num_queries=72, **changes)
    return begin_screen(of, fake_schedule(), expected, model="opt-1.3b, bfloat16 (a folder)",
                        machine=machine_words(of, 2), times="measured here, 2026-11-29",
                        sharing=sharing)


def pairs(measured, predicted=EXPECTED, **more):
    keys = ("throughput_qps", "output_tokens_per_s", "latency_p50_s", "latency_p99_s", "wall_s")
    return {"queries": 72, "status": "done", **more, **{key: {
        "measured": getattr(EXPECTED, key) * (1 / measured if key.endswith("_s") and (
            "per" not in key) else measured),
        "predicted": getattr(predicted, key, None)} for key in keys}}


def lines_of(*parts):
    lines = "\n".join(parts).splitlines()
    assert len(lines) <= 25 and max(map(len, lines)) <= 80, "\n".join(lines)
    return lines


def test_the_first_line_is_the_duration_and_says_what_is_assumed_of_lengths():
    assert " ".join(lines_of(begun())[0].split()).startswith("time 8.00 s for 72 requests, ")
    loaded = " ".join(begun(expected=replace(EXPECTED, load_s=14.0)).split())
    assert "for 72 requests, " in loaded and ", after 14.0 s of loading model" in loaded
    unknown = " ".join(begun(observes=True, default_max_tokens=200).split())
    assert unknown.startswith("time at most 8.00 s for 72 requests") and (
        "if every answer has 200 tokens (how long answers are is not known)" in unknown)
    of = problem_of("opt-1.3b", "a40-4")
    assert begin_screen(of, fake_schedule(), "nothing is known", model="m", machine="h",
                        times="t").startswith("time         not predicted: nothing is known")


@pytest.mark.parametrize(("measured", "said"), [
    (1.0, "within 15 %"), (1.6, "faster than predicted"), (0.5, "50 % less")])
def test_a_run_that_was_faster_is_no_warning(measured, said):
    kept = [BoundCheck(True, "", Bound(limit_s=30.0)),
            BoundCheck(True, "limit of 9 s on all met", Bound(metric="makespan", limit_s=9.0))]
    text = end_screen(pairs(measured), kept, [], FILES)
    assert "limits       limit of 9 s on all met" in text
    row = next(line for line in lines_of(text) if "requests/s" in line)
    assert row.endswith(said) and "limit 30.0 s met" in text


def test_lengths_that_came_are_named_and_a_run_without_a_prediction_has_no_column_of_it():
    text = end_screen(pairs(1.0, is_predicted_for_lengths=True), [], [], FILES)
    assert "for these lengths" in text and "predicted" not in text
    alone = end_screen(pairs(1.0, None), [], [], FILES)
    assert "measured" in alone and "predicted" not in alone
    assert "requests/s" not in end_screen({"queries": 3}, [], [], FILES)


def test_however_much_there_is_to_say_it_is_one_screen():
    missed = BoundCheck(False, "", Bound(limit_s=2.0))
    notes = [f"{'word ' * 20}{number}" for number in range(9)]
    text = end_screen(pairs(0.4, queries_before=30, failed=2, errors=1), [missed], notes, FILES)
    lines = lines_of(begun(), text)
    assert any("MISSED" in line for line in lines) and "more notes: --verbose" in text
    assert len(lines_of(begun(SHARED), end_screen(
        pairs(1.0, prefixes={}), [], ["short"] * 9, FILES))) <= 25
    assert "42 requests (and 30 by earlier runs) in 20.0 s, 3 of them without" in text
    endless = BoundCheck(None, "", Bound(limit_s=math.inf))
    assert "limit" not in end_screen(pairs(1.0, status="stopped"), [endless], [], FILES)
