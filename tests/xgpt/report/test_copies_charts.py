"""Copies of the model, in the charts of a schedule and of a sweep."""

from __future__ import annotations

from fake_run import fake_schedule

from xgpt.core.schedule import CopiesTried
from xgpt.report.run_charts import choice
from xgpt.report.sweep_page import line_of, sweep_charts


def tried(count: int, devices: int, qps: float | None, words: str = "rra") -> CopiesTried:
    return CopiesTried(replicas=count, devices_per_replica=devices, throughput_qps=qps,
                       latency_s=None if qps is None else 3.0, words=words,
                       bound_qps=0.0 if qps is None else 1.01 * qps)


def test_the_chart_of_the_choice_has_the_copies_with_their_words() -> None:
    chart = choice(fake_schedule().changed(over_copies=(tried(2, 1, 1.5, "waa-c"),
                                                        tried(1, 2, 2.3))))
    assert chart is not None
    (copies,) = [own for own in chart.series if "copies" in own.label]
    assert list(copies.y) == [1.5, 2.3] and copies.notes[0] == "2 x 1 devices: waa-c"


def test_a_sweep_over_copies_draws_a_line_for_each_policy_and_number() -> None:
    rows = [{"status": "ok", "scenario": "toy", "policy": policy, "copies": copies,
             "bound_s": bound_s, "bound": f"{bound_s} s", "throughput_qps": bound_s * copies,
             "latency_s": bound_s, "replicas": copies}
            for policy in ("rra", "sarathi") for copies in (1, 4) for bound_s in (2.0, 8.0)]
    assert line_of(rows[0]) == "RRA, 1 copy" and line_of({"policy": "auto"}) == "best of all"
    (chart,) = [one for one in sweep_charts(rows) if one.name == "scenario-0"]
    assert [own.label for own in chart.series] == [
        "RRA, 1 copy", "RRA, 4 copies", "Sarathi, 1 copy", "Sarathi, 4 copies"]
    assert list(chart.series[1].columns["copies of the model"]) == [4, 4]
