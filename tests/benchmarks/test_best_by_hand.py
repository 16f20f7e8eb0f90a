"""best_by_hand.py counts what is below the best drawn, and what is chosen keeps its bound."""

import math

import pytest
from best_by_hand import Judged, Row, line_of, page, planned, replayed
from hand_problems import SCENARIOS, HandScenario


def scenario_of(name: str) -> HandScenario:
    (scenario,) = [one for one in SCENARIOS if one.name == name]
    return scenario


def test_a_planner_below_the_best_drawn_is_counted():
    def row(planned_qps: float, drawn_qps: float) -> Row:
        return Row(scenario="s", bound_s=1.0, planned=Judged(planned_qps, "a"), bound_qps=11.0,
                   drawn=Judged(drawn_qps, "b"), replays=1, seconds=1.0)

    rows = [row(10.0, 10.1), row(9.0, 10.0), row(0.0, 1.0), row(10.0, 0.0), row(0.0, 0.0)]
    assert [one.is_below for one in rows] == [False, True, True, False, False]
    assert ["below" in line_of(one) for one in rows] == [one.is_below for one in rows]
    assert rows[3].ratio == math.inf
    summary = " ".join(page(rows, 7))
    assert "7 configurations drawn of each" in summary
    assert "less than 98% of the best drawn in 2." in summary


@pytest.mark.parametrize(("name", "bound"), [("llama-3.1-8b/1x2 A40/T", 1),
                                             ("opt-13b/1x8 A100-80/C2", 0)])
def test_what_is_chosen_keeps_its_bound_in_the_longest_replay(name, bound):
    """Here what was chosen kept it by few queries, and broke it by many by up to 1 %."""
    scenario = scenario_of(name)
    problem, timing = scenario.problem(scenario.bounds()[bound]), scenario.timing()
    found, _ = planned(problem, timing)
    assert found is not None and replayed(problem, timing, found.estimate).throughput_qps > 0
