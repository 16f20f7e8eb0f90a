"""Nothing is better by hand, on three of the problems of benchmarks/best_by_hand.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from hand_problems import SCENARIOS, copies  # noqa: E402


def test_there_are_forty_problems_of_six_models_and_five_devices() -> None:
    assert 4 * len(SCENARIOS) >= 40
    assert len({one.model for one in SCENARIOS}) >= 6
    assert len({one.device for one in SCENARIOS}) >= 5
    assert len({one.task for one in SCENARIOS}) >= 5
    devices = {one.nodes * one.per_node for one in SCENARIOS}
    assert (min(devices), max(devices)) == (1, 64)


def test_copies_use_parts_of_a_node_or_whole_nodes() -> None:
    (big,) = [one for one in SCENARIOS if one.name.startswith("llama-3.1-70b/2x8 H100")]
    parts = {count: (part.cluster.num_nodes, part.cluster.devices_per_node)
             for count, part in copies(big.problem())}
    assert parts == {1: (2, 8), 2: (1, 8), 4: (1, 4), 8: (1, 2), 16: (1, 1)}


def test_a_bound_is_exceeded_by_more_than_the_gap_proved_of_that_problem() -> None:
    from best_by_hand import Row, line_of, page
    from by_hand import Found

    def row(bound_qps: float, hand_qps: float) -> Row:
        return Row(scenario="s", bound_s=1.0, planned=Found(10.0, "a"), bound_qps=bound_qps,
                   by_hand=Found(hand_qps, "b"), drawn=Found(9.0, "c"), search_s=1.0, margin_s=1.0)

    rows = [row(10.04, 10.03), row(10.2, 10.1), row(10.01, 10.03)]  # kept, widened, exceeded
    assert [round(one.gap, 4) for one in rows] == [0.004, 0.02, 0.001]
    assert [one.is_disproved for one in rows] == [False, False, True]
    assert [one.is_below for one in rows] == [False, True, False]
    assert ["exceeded" in line_of(one) for one in rows] == [False, False, True]
    summary = " ".join(page(rows))
    assert "than 0.5% in 1, by more than the gap that it proved of the problem in 1." in summary
    assert "over 0.5% in 1, at most 2.00%" in summary


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt-1.3b/1x1 L4/S", "llama-3.1-8b/1x2 A40/T",
                                  "opt-13b/1x4 A40/S"])
def test_no_schedule_by_hand_is_better(name: str) -> None:
    from best_by_hand import rows_of

    (scenario,) = [one for one in SCENARIOS if one.name == name]
    rows = rows_of(scenario)
    assert len(rows) == 4 and not any(row.is_disproved for row in rows)
    assert min(row.ratio for row in rows) >= 0.995  # the search's gap
