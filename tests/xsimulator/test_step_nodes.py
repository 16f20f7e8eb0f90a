"""Copies on parts of a cluster ask for a layer's times once."""

from problems import roofline_of, toy_problem

from xscheduler.copies import problems_of_copies
from xsimulator.plans import Plans, StagePlans


def test_copies_on_parts_of_any_size_share_what_is_asked_of_a_layer():
    problem = toy_problem()
    plans, kept = Plans(roofline_of(problem)), []
    for parts in problems_of_copies(problem):
        for one in parts:
            layers = plans.of(one).layers
            kept.append(layers)
            assert layers is kept[0]
    assert len(kept) > 2
    other = StagePlans(problem, roofline_of(problem))
    assert other.layers is not kept[0], "another source has other times"
