"""The generic branch and bound on functions whose optimum is known."""

from __future__ import annotations

import math

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from xscheduler.branch_and_bound import (
    Box,
    Candidate,
    Earlier,
    Maximisation,
    NodeResult,
    Status,
    maximise,
)


def examiner(objective, limit, counter=None):
    """Objective and weight x + 2 y both grow; admissible within `limit`."""
    def examine(boxes):
        results = []
        for box in boxes:
            if counter is not None:
                counter.append(box)
            x, y = box.lower
            is_point = box.num_points == 1
            if x + 2 * y > limit:
                results.append(NodeResult(upper_bound=-math.inf, best=None, box=box,
                                          is_settled=True, reason="weight"))
                continue
            best = Candidate(objective=objective(x, y), root=box.root, point=box.lower)
            results.append(NodeResult(upper_bound=objective(*box.upper), best=best, box=box,
                                      is_settled=is_point, reason="a single point"))
        return results
    return examine


def product(x, y):
    return float(x * y + x)


@examples(60)
@given(limit=st.integers(0, 80), width=st.integers(1, 40), height=st.integers(1, 40))
def test_finds_the_optimum_of_a_monotone_objective(limit, width, height):
    outcome = maximise([Box(root=0, lower=(1, 1), upper=(width, height))],
                       examiner(product, limit), gap=0.0)
    values = [product(x, y) for x in range(1, width + 1) for y in range(1, height + 1)
              if x + 2 * y <= limit]
    if not values:
        assert outcome.status is Status.INFEASIBLE and outcome.best is None
        assert dict(outcome.closed) == {"weight": outcome.nodes}
    else:
        assert outcome.status is Status.OPTIMAL
        assert outcome.best.objective == max(values) == outcome.upper_bound


@pytest.mark.parametrize("gap", [0.01, 0.1, 0.5])
def test_a_gap_saves_nodes_and_is_kept(gap):
    root = [Box(root=0, lower=(1, 1), upper=(60, 60))]
    exact, loose = (maximise(root, examiner(product, 90), gap=g) for g in (0.0, gap))
    assert loose.nodes < exact.nodes
    assert exact.best.objective <= loose.upper_bound <= (1 + gap) * loose.best.objective


def test_a_node_limit_is_told_apart_and_leaves_a_valid_bound():
    root = [Box(root=0, lower=(1, 1), upper=(60, 60))]
    exact = maximise(root, examiner(product, 90), gap=0.0)
    cut = maximise(root, examiner(product, 90), gap=0.0, max_nodes=5)
    assert cut.status is Status.LIMIT
    assert cut.best.objective <= exact.best.objective <= cut.upper_bound
    assert dict(cut.closed)["left open"] > 0


def test_ties_go_to_the_earlier_root_and_the_smaller_point():
    roots = [Box(root=r, lower=(1, 1), upper=(9, 9)) for r in range(2)]
    outcome = maximise(roots, examiner(lambda x, y: 1.0, 12), gap=0.0)
    assert (outcome.best.root, outcome.best.point) == (0, (1, 1))


def test_every_root_has_its_own_best_and_bound():
    roots = [Box(root=0, lower=(1, 1), upper=(4, 4)), Box(root=1, lower=(50, 50), upper=(60, 60))]
    outcome = maximise(roots, examiner(product, 12), gap=0.0)
    (best, bound), (none, empty) = outcome.per_root
    assert best == outcome.best and bound == best.objective
    assert none is None and empty == -math.inf


def test_splitting_keeps_every_point_once():
    box = Box(root=0, lower=(1, 5), upper=(7, 9))
    pending, points = [box], []
    while pending:
        piece = pending.pop()
        if piece.num_points == 1:
            points.append(piece.lower)
        else:
            pending += piece.split()
    assert sorted(points) == [(x, y) for x in range(1, 8) for y in range(5, 10)]


def test_same_input_same_order_of_boxes():
    runs = [[], []]
    for run in runs:
        maximise([Box(root=0, lower=(1, 1), upper=(30, 30))], examiner(product, 40, run), gap=0.0)
    assert runs[0] == runs[1]


def test_a_search_that_is_gone_on_with_looks_at_no_box_twice():
    root = [Box(root=0, lower=(1, 1), upper=(40, 40))]
    looked: list[Box] = []
    search = Maximisation(root, examiner(product, 90, looked), gap=0.0)
    seen = search.go_on(max_nodes=1)
    assert seen.status is Status.LIMIT and seen.upper_bound == product(40, 40)
    done = search.go_on()
    assert done == maximise(root, examiner(product, 90), gap=0.0)
    assert len(looked) == len(set(looked)) == done.nodes
    assert search.go_on() == done, "what is done stays so"


def test_a_higher_floor_closes_what_is_no_better():
    root = [Box(root=0, lower=(1, 1), upper=(40, 40))]
    whole = maximise(root, examiner(product, 90), gap=0.0)
    search = Maximisation(root, examiner(product, 90), gap=0.0)
    search.go_on(max_nodes=1)
    floored = search.go_on(floor=whole.best.objective * 1.01)
    assert floored.nodes < whole.nodes
    assert whole.best.objective <= floored.upper_bound <= whole.best.objective * 1.01


def test_the_gap_widens_with_many_boxes_and_the_outcome_says_so(monkeypatch):
    root = [Box(root=0, lower=(1, 1), upper=(40, 40))]
    exact = maximise(root, examiner(product, 90), gap=0.005)
    monkeypatch.setattr("xscheduler.branch_and_bound.MANY_NODES", exact.nodes // 8)
    wide = maximise(root, examiner(product, 90), gap=0.005)
    assert wide.nodes < exact.nodes
    assert wide.best.objective * 1.005 < wide.upper_bound, "wider than was asked for"
    assert wide.best.objective <= exact.best.objective <= wide.upper_bound
    assert exact.upper_bound <= exact.best.objective * 1.005


def test_a_box_that_was_glanced_at_is_examined_when_it_is_its_turn_and_counts_once():
    looked, whole = [], examiner(product, 90)

    def glancing(boxes):
        results = []
        for box, result in zip(boxes, whole(boxes), strict=True):
            is_first, known = box not in looked, result.upper_bound > -math.inf
            looked.append(box)
            results.append(NodeResult(upper_bound=2.0 * product(*box.upper), box=box, reason="",
                                      is_settled=False, is_glance=True)
                           if is_first and known else result)
        return results

    root = [Box(root=0, lower=(1, 1), upper=(40, 40))]
    exact = maximise(root, examiner(product, 90), gap=0.0)
    glanced = maximise(root, glancing, gap=0.0)
    assert glanced.best == exact.best and glanced.upper_bound == exact.upper_bound
    assert glanced.nodes < len(looked), "only what was examined, and the root"


def test_where_roots_are_many_the_gap_widens_sooner(monkeypatch):
    roots = [Box(root=index, lower=(1, 1), upper=(40, 40)) for index in range(8)]
    few = maximise(roots, examiner(product, 90), gap=0.005)
    monkeypatch.setattr("xscheduler.branch_and_bound.MANY_NODES", few.nodes)
    assert maximise(roots, examiner(product, 90), gap=0.005) == few
    monkeypatch.setattr("xscheduler.branch_and_bound.MANY_ROOTS", 1)
    wide = maximise(roots, examiner(product, 90), gap=0.005)
    assert wide.nodes < few.nodes and wide.upper_bound >= few.best.objective


def test_a_search_that_finds_nothing_is_left_unless_its_gap_was_asked_for(monkeypatch):
    def nothing(boxes):
        return [NodeResult(upper_bound=float(box.num_points), box=box,
                           is_settled=box.num_points == 1, reason="") for box in boxes]

    monkeypatch.setattr("xscheduler.branch_and_bound.FRUITLESS_NODES", 200)
    root = [Box(root=0, lower=(1, 1), upper=(40, 40))]
    left = maximise(root, nothing, gap=0.005)
    assert left.status is Status.LIMIT and 200 < left.nodes < 600 and left.upper_bound > 1
    whole = Maximisation(root, nothing, gap=0.005, keeps_gap=True).go_on()
    assert whole.nodes == 2 * 1600 - 1
    had = Maximisation(root, nothing, gap=0.005).go_on(floor=1.0)
    assert had.status is Status.INFEASIBLE, "what is had elsewhere gives up boxes one by one"


def test_a_gap_that_was_asked_for_does_not_widen(monkeypatch):
    root = [Box(root=0, lower=(1, 1), upper=(40, 40))]
    exact = maximise(root, examiner(product, 90), gap=0.005)
    monkeypatch.setattr("xscheduler.branch_and_bound.MANY_NODES", exact.nodes // 8)
    kept = Maximisation(root, examiner(product, 90), gap=0.005, keeps_gap=True).go_on()
    assert kept == exact


@examples(60)
@given(limits=st.tuples(st.integers(0, 80), st.integers(0, 80)), width=st.integers(1, 40),
       height=st.integers(1, 40), nodes=st.integers(1, 60), floor=st.integers(0, 300))
def test_a_search_that_begins_with_the_boxes_of_a_wider_one_finds_the_optimum(limits, width, height,
                                                                              nodes, floor):
    root = [Box(root=0, lower=(1, 1), upper=(width, height))]
    wider = Maximisation(root, examiner(product, max(limits)), gap=0.0)
    wider.go_on(max_nodes=nodes, floor=float(floor))
    outcome = Maximisation(root, examiner(product, min(limits)), gap=0.0,
                           earlier=Earlier(wider, limits[0] == limits[1])).go_on()
    values = [product(x, y) for x in range(1, width + 1) for y in range(1, height + 1)
              if x + 2 * y <= min(limits)]
    if not values:
        assert outcome.best is None and outcome.upper_bound == -math.inf
    else:
        assert outcome.best.objective == max(values) == outcome.upper_bound


def test_what_a_wider_search_gave_up_is_examined_again_only_where_it_may_matter():
    root = [Box(root=0, lower=(1, 1), upper=(40, 40))]
    looked: list[Box] = []
    wider = Maximisation(root, examiner(product, 90), gap=0.0)
    best = wider.go_on().best
    again = Maximisation(root, examiner(product, 90, looked), gap=0.0, known=best,
                         earlier=Earlier(wider, False))
    assert again.go_on().best == best and not looked
    tighter = Maximisation(root, examiner(product, 80, looked), gap=0.0,
                 earlier=Earlier(wider, False)).go_on()
    anew = maximise(root, examiner(product, 80), gap=0.0)
    assert tighter.best.objective == anew.best.objective and tighter.nodes < anew.nodes


def test_what_a_search_under_the_same_bound_looked_into_is_not_looked_into_again(monkeypatch):
    monkeypatch.setattr("xscheduler.branch_and_bound.WORTH_IT", 0)
    root = [Box(root=0, lower=(1, 1), upper=(40, 40))]
    looked: list[Box] = []
    first = Maximisation(root, examiner(product, 90, looked), gap=0.0)
    first.go_on(floor=1100.0)
    before, looked[:] = looked.copy(), []
    again = Maximisation(root, examiner(product, 90, looked), gap=0.0,
                         earlier=Earlier(first, True)).go_on()
    assert again.best.objective == maximise(root, examiner(product, 90), gap=0.0).best.objective
    assert looked and not {box for box in before if box.num_points > 1} & set(looked)


def test_a_wider_search_of_too_many_boxes_is_not_begun_with(monkeypatch):
    root, looked = [Box(root=0, lower=(1, 1), upper=(40, 40))], []
    wider = Maximisation(root, examiner(product, 90), gap=0.0)
    wider.go_on()
    monkeypatch.setattr("xscheduler.branch_and_bound.WORTH_IT", 0)
    Maximisation(root, examiner(product, 90, looked), gap=0.0,
                 earlier=Earlier(wider, False)).go_on()
    assert looked[0] == root[0]
