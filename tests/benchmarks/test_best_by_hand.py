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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["opt-1.3b/1x1 L4/S", "llama-3.1-8b/1x2 A40/T",
                                  "opt-13b/1x4 A40/S"])
def test_no_schedule_by_hand_is_better(name: str) -> None:
    from best_by_hand import rows_of

    (scenario,) = [one for one in SCENARIOS if one.name == name]
    rows = rows_of(scenario)
    assert len(rows) == 4 and not any(row.is_disproved for row in rows)
    assert min(row.ratio for row in rows) >= 0.995  # the search's gap
