"""What csrc/planning_waa.cpp finds of WAA's boxes is what arrays find, within 1e-9."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from compilers import has_compiler
from problems import problem_of, roofline_of
from xsimulator.policies.waa.bounds import BoxBounds, WaaBounds
from xsimulator.policies.waa.plan_bounds import PlanBounds

from xsimulator.native import native
from xsimulator.policies import make_policy
from xsimulator.policies.waa import native as waa_native
from xsimulator.policies.waa.config import WaaBoxes

BOXES, NEAR = 60, 1e-9


pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


def boxes_of(seed, *, takes_chunks):
    rng = np.random.default_rng(seed)

    def drawn(most):
        first = np.exp(rng.uniform(0, np.log(most), BOXES)).astype(np.int64)
        return first, (first * np.exp(rng.uniform(0, 1.5, BOXES))).astype(np.int64)

    (least, most), (fewest, highest), (chunk, largest) = drawn(400), drawn(16), drawn(1500)
    is_plain = rng.random(BOXES) < (0.5 if takes_chunks else 1.1)
    return WaaBoxes(least=least, most=most, fewest=fewest, highest=highest,
                    chunk=np.where(is_plain, 0, chunk),
                    largest_chunk=np.where(is_plain, 0, largest))


def bounds_of(case, boxes, bound_s, *, is_modest, unanswered=False) -> BoxBounds:
    """`unanswered`: some tables have a place that is infinite."""
    model, policy, plan = case
    problem = replace(problem_of(model, "a40-16"))  # of its own: tables are kept by problem
    waa = make_policy(policy, problem, roofline_of(problem))
    bounds, split = WaaBounds(waa, is_modest=is_modest), waa.split(*plan)
    if unanswered:
        bounds.bound(split, boxes, latency_bound_s=bound_s)
        for tables in [one for one in waa.times.kept.values() if isinstance(one, PlanBounds)][::2]:
            tables._through[20] = np.inf
    with np.errstate(invalid="ignore"):
        return bounds.bound(split, boxes, latency_bound_s=bound_s)


def both(case, boxes, bound_s, **options) -> tuple[BoxBounds, BoxBounds, list[int]]:
    """Natively and by arrays; and how many boxes arrays served natively."""
    served, own = [], PlanBounds.bound
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanBounds, "bound", lambda self, some, limit_s: (
            served.append(len(some)), own(self, some, limit_s))[1])
        natively = bounds_of(case, boxes, bound_s, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waa_native, "native", lambda: None)
        return natively, bounds_of(case, boxes, bound_s, **options), served


CASES = [("opt-13b", "waa-m", (1, 0)), ("opt-13b", "waa-c", (4, 8)), ("gpt3-39b", "waa-m", (2, 8)),
         ("t5-11b", "waa-m", (1, 0))]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
@pytest.mark.parametrize(("bound_s", "is_modest"), [(math.inf, True), (20.0, True), (60.0, False)])
def test_bounds_are_the_same(case, bound_s, is_modest):
    assert native() is not None
    boxes = boxes_of(3, takes_chunks=case[0] != "t5-11b")
    natively, arrays, served = both(case, boxes, bound_s, is_modest=is_modest)
    for name, one, other in zip(BoxBounds._fields, natively, arrays, strict=True):
        np.testing.assert_allclose(one, other, rtol=NEAR, err_msg=name)
    assert (arrays.most_qps > 0).any() and not served


def test_arrays_serve_where_a_table_does_not_answer():
    natively, arrays, served = both(CASES[0], boxes_of(4, takes_chunks=False), 60.0,
                                    is_modest=True, unanswered=True)
    for name, one, other in zip(BoxBounds._fields, natively, arrays, strict=True):
        np.testing.assert_allclose(one, other, rtol=NEAR, err_msg=name)
    assert served


def test_a_table_that_lacks_a_size_costs_no_boxes_of_other_divisions(monkeypatch):
    library, looked = native(), []

    class Told:
        """The library, and from which box to which it looked, of how many."""

        def waa_bounds(self, *given):
            stopped = library.waa_bounds(*given)
            looked.append((given[3], min(stopped + 1, given[4]), given[4]))
            return stopped

    monkeypatch.setattr(waa_native, "native", Told)
    problem = replace(problem_of("opt-13b", "a40-16"))
    waa = make_policy("waa-m", problem, roofline_of(problem))
    bounds, split, boxes = WaaBounds(waa), waa.split(1, 0), boxes_of(3, takes_chunks=True)
    found = bounds.bound(split, boxes, latency_bound_s=60.0)
    (count,) = {of for _, _, of in looked}
    assert len(looked) > 10, "tables of most divisions lack a size"
    assert sum(end - begin for begin, end, _ in looked) < 2 * count, looked
    for name, one, other in zip(BoxBounds._fields, found, bounds.bound(
            split, boxes, latency_bound_s=60.0), strict=True):
        np.testing.assert_array_equal(one, other, err_msg=name)
