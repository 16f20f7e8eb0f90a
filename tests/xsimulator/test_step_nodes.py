"""Tables of step times and of lower bounds of them ask once for the times that both rest on."""

import numpy as np
from problems_suite import roofline_of, toy_problem

from xscheduler.copies import problems_of_copies
from xsimulator.plans import StagePlans
from xsimulator.stage_times import StageTimes


def test_a_plan_s_times_are_asked_for_once(monkeypatch):
    asked = []

    def counted(self, tokens, _own=StageTimes.encode_rows_s):
        if np.size(tokens) > 100:  # the nodes of a table
            asked.append(len(tokens))
        return _own(self, tokens)

    monkeypatch.setattr(StageTimes, "encode_rows_s", counted)
    problem = toy_problem()
    plan = StagePlans(problem, roofline_of(problem)).both(1, 0)
    sizes = np.array([3.0, 40.0])
    usual, least = plan.steps.rows_s(sizes), plan.least_steps.rows_s(sizes)
    assert len(asked) == 1
    assert (least <= usual).all()


def test_copies_on_parts_of_any_size_share_what_is_asked_of_a_layer():
    problem = toy_problem(devices=4)
    timing, kept = roofline_of(problem), []
    for parts in problems_of_copies(problem):
        for one in parts:
            layers = StagePlans(one, timing).layers
            kept.append(layers)
            assert layers is kept[0]
    assert len(kept) > 2
    other = StagePlans(problem, roofline_of(problem))
    assert other.layers is not kept[0], "another source has other times"
