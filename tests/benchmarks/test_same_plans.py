"""The judge of two commits: this tree against a stored schedule, and what makes it object."""

import json
from dataclasses import replace
from pathlib import Path

from hand_problems import SCENARIOS
from same_plans import ROOT, Planned, Replayed, Row, judged, plan_in, planned_of, summary

BOUND_S = 2.46
STORED = Path(__file__).with_name("same_plans_opt-1.3b.json")  # of commit 993b91f5


def stored() -> Planned:
    return planned_of(json.loads(STORED.read_text("utf-8")))


def row(own: Planned | None = None, *, qps: float = 30.0, latency_s: float = 1.0) -> Row:
    """The stored schedule at 30 requests/s and 1 s, beside this tree's at these figures."""
    own = own or stored()
    return Row(name="p", bound_s=BOUND_S, older=stored(), own=own,
               older_replay=Replayed(throughput_qps=30.0, latency_s=1.0),
               own_replay=None if own.schedule is None else Replayed(
                   throughput_qps=qps, latency_s=latency_s))


def test_this_tree_plans_a_small_problem_as_well_as_the_stored_schedule():
    older, own = stored(), planned_of(plan_in(ROOT, SCENARIOS[0], BOUND_S))
    found = judged(SCENARIOS[0], BOUND_S, older, own, seeds=1, queries=5000)
    assert not (found.is_below or found.is_broken or found.is_lost)


def test_a_worse_schedule_is_below_and_so_is_one_without_a_steady_state():
    assert not row(qps=29.5).is_below
    assert row(qps=29.0).is_below and row(qps=float("nan")).is_below
    assert "- Problems below 0.98: 1 (p under 2.46 s)." in summary([row(), row(qps=29.0)])


def test_a_bound_is_kept_with_the_schedule_s_own_margin():
    older = stored()
    assert older.schedule is not None
    margin = older.schedule.margin
    assert not row(latency_s=BOUND_S / margin.factor).is_broken
    assert row(latency_s=1.01 * BOUND_S / margin.factor).is_broken
    bare = replace(older, schedule=replace(older.schedule, margin=replace(margin, factor=1.0)))
    assert not row(bare, latency_s=BOUND_S).is_broken
