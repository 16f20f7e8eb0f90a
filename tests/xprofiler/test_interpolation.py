"""Grid: exact at its points, monotone where physics is, vectorised, silent beyond four times."""

from typing import NamedTuple

import numpy as np
import pytest
from examples import examples
from hypothesis import example, given
from hypothesis import strategies as st

from xprofiler.interpolation import REFUSED_BEYOND, Grid, Shape, interpolation_errors

OPERATOR = Shape()
MESSAGE = Shape(through_zero=False)
SHARES = Shape(grows_with_y=False, is_power=True)
TILED = Shape(grows_with_x=False, grows_with_y=False, is_power=True)
SHAPES = {"operator": OPERATOR, "message": MESSAGE, "shares": SHARES, "tiled": TILED}
GROWING = ("operator", "message", "shares")
RELATIVE = 1e-9  # rounding


class Table(NamedTuple):
    """values [y, x] over the sizes xs and ys."""

    xs: list[float]
    ys: list[float]
    values: np.ndarray

    def grid(self, shape: Shape = OPERATOR) -> Grid:
        x, y = np.meshgrid(self.xs, self.ys)
        return Grid(x.ravel(), y.ravel(), self.values.ravel(), shape)


def _sizes(most: int) -> st.SearchStrategy[list[float]]:
    """Ascending, neighbours at least a quarter apart."""
    def apart(sizes: list[int]) -> list[float]:
        kept: list[float] = []
        for size in sorted(sizes):
            if not kept or size >= 1.25 * kept[-1]:
                kept.append(float(size))
        return kept

    return st.lists(st.integers(1, 4000), min_size=1, max_size=most).map(apart)


@st.composite
def tables(draw: st.DrawFn, *, is_monotone: bool = False, most_rows: int = 4) -> Table:
    """Times between 10 us and 0.1 s; `is_monotone`: that never fall with x or y."""
    xs, ys = draw(_sizes(6)), draw(_sizes(most_rows))
    count = len(xs) * len(ys)
    logs = draw(st.lists(st.floats(-5, -1), min_size=count, max_size=count))
    values = (10 ** np.array(logs)).reshape(len(ys), len(xs))
    if is_monotone:
        values = np.maximum.accumulate(np.maximum.accumulate(values, axis=0), axis=1)
    return Table(xs, ys, values)


def table(*rows: list[float]) -> Table:
    """Rows over y = 1, 2, ... and columns over x = 1, 2, ..."""
    return Table([1.0 + i for i in range(len(rows[0]))], [1.0 + i for i in range(len(rows))],
                 np.array(rows, float))


@pytest.mark.parametrize(("points", "shape", "x", "y", "seconds"), [
    # between and beyond the points lie lines
    (([1, 4, 8], [0, 0, 0], [1.0, 4.0, 6.0]), OPERATOR, [0, 0.5, 1, 2.5, 4, 8, 16], 0,
     [0, 0.5, 1, 2.5, 4, 6, 10]),
    # of two dimensions too; below the first y it costs what that costs
    (([1, 4, 1, 4], [10, 10, 20, 20], [1.0, 3.0, 2.0, 7.0]), OPERATOR,
     [1, 4, 1, 4, 2.5, 4, 0, 4, 4], [10, 10, 20, 20, 15, 30, 15, 0, 5],
     [1, 3, 2, 7, (2 + 4.5) / 2, 11, 0, 3, 3]),
    # a message smaller than the smallest costs as much
    (([100, 1100], [0, 0], [0.5, 1.5]), MESSAGE, [0, 50, 100, 600, 2100], 0,
     [0.5, 0.5, 0.5, 1.0, 2.5]),
    # shares settle beyond the last y
    (([10, 20] * 2, [1, 1, 4, 4], [1.0, 3.0, 2.0, 5.0]), SHARES, 10, [0, 1, 2.5, 4, 1e6],
     [1, 1, 1.5, 2, 2]),
    # a missing cell moves no measured point
    (([1, 2, 1, 1, 2], [1, 1, 2, 3, 3], [10.0, 60.0, 11.0, 61.0, 162.0]), OPERATOR,
     [1, 2, 1, 1, 2], [1, 1, 2, 3, 3], [10, 60, 11, 61, 162]),
    # two points out of order get their geometric mean
    (([1, 2, 3, 4], [1] * 4, [1.0, 8.0, 2.0, 9.0]), OPERATOR, [1, 2, 3, 4], 1, [1, 4, 4, 9])])
def test_what_lies_between_and_beyond_the_points(points, shape, x, y, seconds):
    assert Grid(*points, shape)(x, y).tolist() == pytest.approx(seconds)


shares_of_a_range = st.lists(st.floats(0, 1), min_size=2, max_size=12).map(sorted)


@given(table=tables(), growing=tables(is_monotone=True), name=st.sampled_from(sorted(SHAPES)))
def test_exact_at_the_points_of_a_table_that_grows_or_need_not(table, growing, name):
    for own, shape in ((growing, SHAPES[name]), (table, TILED)):
        grid = own.grid(shape)
        got = grid(np.array(own.xs), np.array(own.ys)[:, None])
        np.testing.assert_allclose(got, own.values, rtol=RELATIVE)


@given(row=st.lists(st.floats(1e-6, 1), min_size=2, max_size=6))
def test_points_below_one_of_less_work_are_moved_the_others_kept(row):
    grid = table(row).grid()
    kept = [i for i, s in enumerate(row) if all(a <= s for a in row[:i]) and all(
        b >= s for b in row[i:])]
    np.testing.assert_allclose(grid.values[0][kept], np.array(row)[kept], rtol=RELATIVE)
    assert min(row) * (1 - RELATIVE) <= grid.values.min()
    assert grid.values.max() <= max(row) * (1 + RELATIVE)


@given(table=tables(most_rows=1), along=shares_of_a_range, name=st.sampled_from(GROWING))
def test_more_work_never_takes_less_time_beyond_a_row(table, along, name):
    _assert_never_falling(table.grid(SHAPES[name])(
        np.array(along) * REFUSED_BEYOND * table.xs[-1]))


@given(table=tables(), along=shares_of_a_range, at=st.floats(0, 10))
def test_shares_never_fall_with_tokens(table, along, at):
    grid, x = table.grid(SHARES), np.array(along) * REFUSED_BEYOND * table.xs[-1]
    largest = grid(x[:, None], np.array(table.ys)).max(axis=1)  # a difference of such is rounded
    _assert_never_falling(grid(x, at * table.ys[-1]), largest)


@given(table=tables(), along=shares_of_a_range, at=st.floats(0, 4))
@example(table=table([1, 10], [10, 10]), along=[0.125, 0.25], at=1.5)
@example(table=table([1, 10], [10, 10], [10, 10]), along=[0.0, 0.16, 0.17, 1.0], at=2.0)
def test_more_work_never_takes_less_time_within_and_beyond_the_points(table, along, at):
    grid = table.grid()
    x, y = np.array(along) * table.xs[-1], np.array(along) * table.ys[-1]
    _assert_never_falling(grid(x, y))
    _assert_never_falling(grid(x, at / 4 * table.ys[-1]))
    _assert_never_falling(grid(at / 4 * table.xs[-1], y))
    x, y = (np.array(along) * REFUSED_BEYOND * most for most in (table.xs[-1], table.ys[-1]))
    _assert_never_falling(grid(x, at * table.ys[-1]))
    _assert_never_falling(grid(at * table.xs[-1], y))


def _assert_never_falling(seconds: np.ndarray, scale: np.ndarray | None = None) -> None:
    assert not np.isnan(seconds).any()
    lower, upper = seconds[:-1], seconds[1:]
    slack = RELATIVE * (lower if scale is None else scale[1:])
    assert ((upper >= lower) | (lower - upper <= slack)).all(), seconds


@given(table=tables(), name=st.sampled_from(sorted(SHAPES)),
       x=st.lists(st.floats(0, 5), min_size=1, max_size=4),
       y=st.lists(st.floats(0, 5), min_size=1, max_size=4))
def test_broadcasting_equals_one_call_each(table, name, x, y):
    grid = table.grid(SHAPES[name])
    xs, ys = np.array(x) * table.xs[-1], np.array(y) * table.ys[-1]
    together = grid(xs[:, None], ys)
    assert together.shape == (len(x), len(y))
    alone = [[float(grid(float(a), float(b))) for b in ys] for a in xs]
    np.testing.assert_allclose(together, alone, rtol=1e-12)  # numpy's loops round by their length


@given(table=tables(), name=st.sampled_from(sorted(SHAPES)), at=st.floats(0, 1))
def test_infinite_beyond_four_times_the_largest_and_nowhere_before(table, name, at):
    grid, inside = table.grid(SHAPES[name]), at * table.xs[-1]
    last_x, last_y = REFUSED_BEYOND * table.xs[-1], REFUSED_BEYOND * table.ys[-1]
    further_x, further_y = np.nextafter([last_x, last_y], np.inf)
    assert np.isfinite(grid([0.0, inside, last_x], np.array([0.0, at * last_y, last_y])[:, None])
                       ).all()
    beyond = grid([further_x, 2 * last_x], [[0.0], [last_y]])
    if not SHAPES[name].through_zero:  # a link carries messages of any size
        assert np.isfinite(beyond).all()
        return
    assert np.isinf(beyond).all()
    is_open = not SHAPES[name].grows_with_y or len(table.ys) == 1
    assert np.isfinite(grid(table.xs[0], further_y)) == is_open


@given(table=tables(), name=st.sampled_from(["operator", "shares", "tiled"]), y=st.floats(0, 10))
def test_no_work_takes_no_time(table, name, y):
    grid = table.grid(SHAPES[name])
    assert grid(0, y * table.ys[-1]) == 0
    first = float(grid(table.xs[0], 0))
    # and a step that happens half of the time half of it
    assert float(grid(table.xs[0] / 2, 0)) == pytest.approx(first / 2, rel=RELATIVE)
    message = table.grid(MESSAGE)
    assert message(0) == message(table.xs[0]), "an empty one takes as long as the smallest"


@given(xs=_sizes(5), exponent=st.floats(1, 2), scale=st.floats(1e-9, 1e-3),
       ratio=st.floats(0, REFUSED_BEYOND))
def test_powers_are_joined_exactly(xs, exponent, scale, ratio):
    grid = Grid(xs, np.zeros(len(xs)), scale * np.array(xs)**exponent, SHARES)
    at = ratio * xs[-1]
    if at >= xs[0] and len(xs) > 1:
        assert float(grid(at)) == pytest.approx(scale * at**exponent, rel=1e-7)


@given(data=st.data(), xs=_sizes(5), ys=_sizes(4))
def test_a_missing_cell_follows_the_fullest_row_in_its_ratio(data, xs, ys):
    """Times that are a product of one of x and one of y are found again, whatever is missing."""
    along_x = np.cumsum(data.draw(st.lists(st.floats(0.01, 1), min_size=len(xs),
                                           max_size=len(xs))))
    along_y = np.cumsum(data.draw(st.lists(st.floats(0.01, 1), min_size=len(ys),
                                           max_size=len(ys))))
    measured = [(0, column) for column in range(len(xs))]
    for row in range(1, len(ys)):
        columns = data.draw(st.sets(st.integers(0, len(xs) - 1), min_size=1))
        measured += [(row, column) for column in sorted(columns)]
    whole = along_y[:, None] * along_x
    grid = Grid([xs[c] for _, c in measured], [ys[r] for r, _ in measured],
                [whole[place] for place in measured])
    np.testing.assert_allclose(grid(np.array(xs), np.array(ys)[:, None]), whole, rtol=RELATIVE)


@pytest.mark.parametrize(("shape", "power"), [(OPERATOR, 1), (TILED, 2)], ids=["line", "power"])
@pytest.mark.parametrize("noise", [0.97, 1.03])
def test_noise_of_two_close_points_is_not_stretched_to_four_times(shape, power, noise):
    xs = np.array([65.0, 129, 257, 512, 520])
    grid = Grid(xs, np.zeros(5), 1e-6 * xs**power * np.array([1, 1, 1, 1, noise]), shape)
    assert float(grid(2080)) == pytest.approx(1e-6 * 2080.0**power, rel=0.25)


@pytest.mark.parametrize("points", [
    ([], [], []), ([1, 1], [2, 2], [1.0, 1.0]), ([1, 2], [0, 0], [1.0, np.nan]),
    ([1, 2], [0, 0], [1.0, np.inf])])
def test_a_table_needs_points_one_at_each_place(points):
    with pytest.raises(ValueError, match="one at each place"):
        Grid(*points)


@pytest.mark.parametrize("xs", [
    [1, 2, 4, 8, 16], [0, 1, 3, 7, 33, 130], [64, 65, 66, 1025], [0.1, 0.3, 5.0], [1000.0, 1000.001,
    1000.002], [1e-9, 1.0, 1e12], [7], [0, 7], [0]], ids=str)
@pytest.mark.parametrize("name", ["operator", "message"])
def test_many_values_are_looked_up_as_one_is(xs, name):
    seconds = 1e-6 * np.cumsum(np.arange(1.0, len(xs) + 1))
    grid = Grid(xs, np.zeros(len(xs)), seconds, SHAPES[name])
    near = np.multiply.outer(np.array(xs, float), [1 - 1e-15, 1, 1 + 1e-15, 1.5, 3.999, 4.001])
    values = np.concatenate([near.ravel(), [0.0, -0.0, 1e-300], np.geomspace(1e-6, 1e13, 500)])
    alone = np.array([float(grid(value)) for value in values])
    np.testing.assert_allclose(grid(values), alone, rtol=1e-13)


def test_what_is_repeated_by_broadcasting_is_as_if_written_out():
    grid = table([1.0, 2.0, 4.0], [2.0, 5.0, 7.0]).grid()
    x, y = np.linspace(0, 13, 40), np.linspace(0, 9, 7)[:, None]
    both = np.broadcast_arrays(x, y)
    np.testing.assert_array_equal(grid(*both), grid(*(a.copy() for a in both)))
    assert grid(np.broadcast_to(1.5, (3, 2)), np.broadcast_to(1.0, (3, 2))).shape == (3, 2)
    assert grid(np.empty((0, 3)), np.empty(3)).shape == (0, 3)


def test_errors_are_how_far_a_point_lies_from_its_neighbours_line():
    assert interpolation_errors([1, 2, 3], [1.0, 4.0, 3.0]).tolist() == [0, 0.5, 0]
    assert interpolation_errors([1, 2, 4], [1.0, 2.0, 4.0]).tolist() == [0, 0, 0]
    # of powers: the geometric mean of 1 and 16 at their geometric middle
    curved = interpolation_errors([1, 2, 4], [1.0, 2.0, 16.0], is_power=True)
    assert curved.tolist() == pytest.approx([0, 1, 0])
    assert interpolation_errors([1, 2], [1.0, 9.0]).tolist() == [0, 0]
    assert interpolation_errors([], []).size == 0


@given(xs=_sizes(5), exponent=st.floats(1, 2))
@examples(50)
def test_a_power_has_no_error_as_a_power(xs, exponent):
    seconds = list(1e-6 * np.array(xs)**exponent)
    assert interpolation_errors(xs, seconds, is_power=True) == pytest.approx(0, abs=1e-9)


def test_a_quarter_of_the_error_is_that_in_the_middle_of_an_interval():
    """Of a parabola, whose error it is exactly in the limit of small intervals."""
    xs = [100.0, 110.0, 120.0]
    error = interpolation_errors(xs, [x * x for x in xs])[1] / 4
    chord = (100.0**2 + 110.0**2) / 2
    assert error == pytest.approx(chord / 105.0**2 - 1, rel=0.1)
