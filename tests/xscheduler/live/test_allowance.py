"""What the queries that are done have left of a bound on a share of all queries."""

import math

import pytest

from xgpt.core.constraint import latency_constraint
from xscheduler.live.allowance import ENOUGH, LEAST, Allowance, Kept

OWN = latency_constraint(10.0, kind="queries", quantile=0.95)


def test_what_is_left_is_what_the_whole_job_may_have() -> None:
    own = Allowance(OWN, 1000)
    assert own.share(None) == pytest.approx(0.05)
    assert own.share(Kept(0, 400, 32)) == pytest.approx(18 / 600)
    left = own.constrained(OWN, Kept(0, 400, 32))
    assert left.quantile == pytest.approx(0.97) and left.latency_s == OWN.latency_s
    # where nobody knows what was over it of 500 queries of an earlier run: of its own 500 alone
    assert own.share(Kept(500, 100, 9)) == pytest.approx(16 / 400)


def test_it_is_never_more_than_was_asked_for() -> None:
    own = Allowance(OWN, 1000)
    assert own.share(Kept(0, 400, 2)) == pytest.approx(0.05)
    assert own.constrained(OWN, Kept(0, 400, 20)) is OWN


def test_what_is_lost_costs_no_more() -> None:
    own = Allowance(OWN, 1000)
    assert own.share(Kept(0, 400, 49)) == pytest.approx(LEAST * 0.05), "a plan for less is hopeless"
    assert own.share(Kept(0, 400, 50)) == pytest.approx(LEAST * 0.05), "not one more may"
    assert own.share(Kept(0, 400, 51)) == pytest.approx(0.05), "nothing saves the bound now"


def test_a_bound_that_is_lost_is_said_to_be_once() -> None:
    own = Allowance(OWN, 1000)
    lost = own.look(Kept(0, 400, 60))
    assert lost is not None and lost.is_lost
    assert lost.sentence == ("60 of 400 queries took longer than the bound, more than may of the "
                             "whole job: it is lost, and the rest is planned for as if it were a "
                             "job of its own")
    own.take(lost.kept)
    assert own.look(Kept(0, 900, 300)) is None


def test_queries_that_failed_are_none_of_those_that_may_be_late() -> None:
    own = Allowance(OWN, 1000)
    assert own.share(Kept(0, 400, 22, failed=300)) == pytest.approx(13 / 300)
    lost = own.look(Kept(0, 400, 36, failed=300))
    assert lost is not None and lost.is_lost and lost.left == 300


def test_a_look_is_due_when_less_is_left_than_planned_for() -> None:
    own = Allowance(OWN, 1000)
    assert own.look(None) is None
    assert own.look(Kept(0, ENOUGH - 1, 40)) is None, "few tell little of a share"
    assert own.look(Kept(0, 200, 15)) is None, "35 of 800 is about as much"
    found = own.look(Kept(0, 300, 24))
    assert found is not None and found.share == pytest.approx(26 / 700)
    assert (found.done, found.left) == (300, 700)
    assert found.sentence == ("24 of 300 queries took longer than the bound: 3.7% of those left "
                              "may (5.0% were planned for)")
    own.take(found.kept)
    assert own.look(Kept(0, 320, 30)) is None, "it has only just been planned"
    assert own.look(Kept(0, 400, 28)) is None, "as planned"
    worse = own.look(Kept(0, 400, 33))
    assert worse is not None and worse.planned == pytest.approx(found.share)


def test_what_came_back_is_given_back() -> None:
    own = Allowance(OWN, 1000)
    own.take(Kept(0, 400, 38))  # 2 % are left
    assert own.look(Kept(0, 600, 39)) is None
    back = own.look(Kept(0, 700, 39))
    assert back is not None and back.share == pytest.approx(11 / 300)


@pytest.mark.parametrize("constraint", [
    latency_constraint(10.0, kind="sequence", quantile=0.95),
    latency_constraint(math.inf, kind="queries", quantile=0.95)])
def test_other_bounds_have_none(constraint: object) -> None:
    own = Allowance(constraint, 1000)  # type: ignore[arg-type]
    assert own.look(Kept(0, 400, 300)) is None
    assert own.constrained(constraint, Kept(0, 400, 300)) is constraint  # type: ignore[arg-type]
