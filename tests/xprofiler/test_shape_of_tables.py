"""Tables of few points, filled in the shape that the roofline gives."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from xgpt.core import catalog
from xprofiler.shape import Measured, filled, fitted
from xprofiler.timing import Operator
from xprofiler.work import work

MODEL = catalog.model("smollm2-135m")
costs = st.floats(1e-13, 1e-10)


def seconds(operator: Operator, x: np.ndarray, y: np.ndarray, fixed_s: float, byte_s: float,
            flop_s: float) -> np.ndarray:
    least = work(MODEL, operator, x, y, tp_degree=1, item_bytes=1)
    return fixed_s + byte_s * least.num_bytes + flop_s * least.flops


@given(fixed_s=st.floats(1e-6, 1e-4), byte_s=costs, flop_s=costs)
def test_what_is_of_that_shape_is_found_from_three_points(
        fixed_s: float, byte_s: float, flop_s: float) -> None:
    x = np.array([1.0, 33.0, 2080.0])
    table = Measured(x, np.zeros(3), seconds(
        Operator.LAYER_REST, x, np.zeros(3), fixed_s, byte_s, flop_s))
    other = np.array([9.0, 130.0, 700.0])
    expected = seconds(Operator.LAYER_REST, other, np.zeros(3), fixed_s, byte_s, flop_s)
    found = filled(MODEL, Operator.LAYER_REST, 1, table, [(n, 0.0) for n in other])
    assert found.seconds[:3] == pytest.approx(table.seconds)
    assert found.seconds[3:] == pytest.approx(expected, rel=1e-3)


times = st.floats(1e-6, 1e-1)


@given(measured=st.tuples(times, times, times, times))
def test_what_was_measured_stays_and_what_is_filled_lies_between(
        measured: tuple[float, ...]) -> None:
    table = Measured(np.array([1.0, 33, 130, 130]), np.array([17.0, 520, 17, 520]),
                     np.sort(np.array(measured)))
    wanted = [(x, y) for x in (1.0, 9.0, 33.0, 130.0) for y in (17.0, 520.0)]
    found = filled(MODEL, Operator.DECODE_ATTENTION, 1, table, wanted)
    assert (found.seconds[:4] == table.seconds).all() and (found.seconds > 0).all()
    assert sorted(zip(found.x, found.y, strict=True)) == wanted
    at = dict(zip(zip(found.x, found.y, strict=True), found.seconds, strict=True))
    for (x, y), own in at.items():
        for (less, shorter), known in list(at.items())[:4]:
            if less <= x and shorter <= y:
                assert known <= own * (1 + 1e-9)


def test_a_single_point_and_a_full_table_serve() -> None:
    one = Measured(np.array([100.0]), np.array([0.0]), np.array([2e-3]))
    curve = fitted(MODEL, Operator.LAYER_REST, 1, one)
    assert curve(np.array([100.0]), np.array([0.0])) == pytest.approx([2e-3])
    assert filled(MODEL, Operator.LAYER_REST, 1, one, [(100.0, 0.0)]) is one


def test_a_share_of_a_batch_has_a_share_of_its_fixed_time() -> None:
    x, y = np.array([64.0, 256.0, 64.0]), np.array([1.0, 1.0, 4.0])
    least = work(MODEL, Operator.ENCODE_ATTENTION, x, y, tp_degree=1, item_bytes=1)
    table = Measured(x, y, 2e-5 / y + 1e-11 * least.flops)
    found = filled(MODEL, Operator.ENCODE_ATTENTION, 1, table, [(192.0, 4.0)])
    of = work(MODEL, Operator.ENCODE_ATTENTION, 192.0, 4.0, tp_degree=1, item_bytes=1)
    assert found.seconds[-1] == pytest.approx(5e-6 + 1e-11 * float(of.flops), rel=1e-3)
