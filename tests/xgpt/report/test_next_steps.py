"""What to try next, and what a miss of the prediction is made of."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fake_run import fake_schedule, write_fake_run

from xgpt.report.figures import BoundCheck
from xgpt.report.output import Output, QueryColumns, read_output
from xgpt.report.page import next_steps, render
from xgpt.report.run_charts import causes, memory

KEPT = BoundCheck(True, "kept")


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Output:
    return read_output(write_fake_run(tmp_path_factory.mktemp("run") / "out", num_queries=24))


def attributed(*seconds: float) -> dict[str, Any]:
    keys = ("predicted_s", "with_lengths_s", "with_times_s", "measured_s")
    return {"attribution": dict(zip(keys, seconds, strict=True))}


def commands(output: Output, metrics: dict[str, Any], check: BoundCheck = KEPT) -> list[str]:
    return [step.command for step in next_steps(output, metrics, check)]


def test_a_bound_that_costs_much_asks_for_a_sweep(output: Output) -> None:
    assert commands(output, {}) == ["sweep JOB.yaml", "schedule JOB.yaml --price"]


def test_each_cause_of_a_miss_has_its_remedy(output: Output) -> None:
    lengths = commands(output, attributed(10, 12, 12, 12))[0]
    assert lengths.startswith("schedule JOB.yaml --set 'workload.output_tokens={mean: ")
    assert commands(output, attributed(10, 10, 12, 12))[0] == "profile JOB.yaml --again"
    assert commands(output, attributed(10, 10, 10, 12))[0] == "doctor"
    busy = {**attributed(10, 10, 10, 12), "others_cpu_share": 0.2}
    assert commands(output, busy)[0] == "submit JOB.yaml --set output=out/again"
    assert "profile JOB.yaml --again" not in commands(output, attributed(10, 10, 10.1, 10.1))


def test_steps_are_told_to_be_longer_and_not_to_take_a_share(output: Output) -> None:
    for measured, words in ((22.7, "Steps took 127 % longer than"), (8, "Steps took 20 % less")):
        why = next_steps(output, attributed(10, 10, measured, measured), KEPT)[0].why
        assert why.startswith(words)


def test_a_missed_bound_a_dear_margin_and_answers_cut_short_are_told(output: Output) -> None:
    missed = commands(output, {}, BoundCheck(False, "missed"))
    assert missed[0] == "submit JOB.yaml --set constraint.confidence=0.99"
    cut = replace(output, queries=QueryColumns(
        replace(answer.figures, finish_reason="length") for answer in output.answers))
    assert "submit JOB.yaml --set workload.max_tokens=320" in commands(cut, {})
    dear = replace(output, schedule=fake_schedule(margin_cost=0.2))
    assert "schedule JOB.yaml --set constraint.confidence=0.8" in commands(dear, {})


def test_a_policy_that_is_as_good_is_named(output: Output) -> None:
    schedule = fake_schedule()
    near = replace(schedule.rejected[0], throughput_qps=0.99 * schedule.figures.throughput_qps)
    found = commands(replace(output, schedule=replace(schedule, rejected=(near,))), {})
    assert "submit JOB.yaml --set schedule.policy=waa-c --set output=out/waa-c" in found


def test_the_causes_are_drawn_from_the_prediction_to_the_measurement() -> None:
    chart = causes(attributed(10, 12, 11.5, 11.5))
    assert chart is not None and list(chart.y.names) == [
        "predicted", "output lengths", "step times", "the rest", "measured"]
    boxes = {name: (start, length) for series in chart.series for name, start, length in zip(
        series.y, series.base, series.x, strict=True)}
    assert boxes == {"predicted": (0, 10), "output lengths": (10, 2), "step times": (11.5, 0.5),
                     "the rest": (11.5, 0), "measured": (0, 11.5)}
    colours = {name: series.colour for series in chart.series for name in series.y}
    assert (colours["output lengths"], colours["step times"]) == ("bad", "good")
    for broken in ({}, {"attribution": None}, {"attribution": {"predicted_s": "x"}}):
        assert causes(broken) is None


def test_memory_is_that_of_each_rank_as_predicted_and_as_measured() -> None:
    stages = [{"ranks": [0], "peak_memory_bytes": 2**30}, {"ranks": "?"}, 3]
    chart = memory(fake_schedule(), json.loads(json.dumps({"stages": stages})))
    assert chart is not None
    predicted, measured = chart.series
    assert list(predicted.y) == pytest.approx([412e6 / 2**30, 398e6 / 2**30])
    assert list(measured.y) == [1, None]


def test_a_page_names_what_to_try(output: Output) -> None:
    pytest.importorskip("jinja2", reason="a page needs jinja2 (extra: run)")
    assert "xgpt sweep JOB.yaml" in render(output)


def test_commands_name_the_jobs_own_file_where_it_is_known(output: Output) -> None:
    known = replace(output, job={**(output.job or {}), "source": "/my jobs/one.yaml"})
    assert "sweep '/my jobs/one.yaml'" in commands(known, {})
