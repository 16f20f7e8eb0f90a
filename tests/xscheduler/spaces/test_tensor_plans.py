"""Ranges of control variables and how they are divided."""

import numpy as np

from xscheduler.tensor_plans import between, even_parts


def test_borders_in_even_ratios_are_those_of_geomspace():
    rng = np.random.default_rng(1)
    pairs = [(1, 1), (1, 2), (7, 7), *((int(low), int(low + rng.integers(10 ** rng.integers(1, 7))))
                                       for low in rng.integers(1, 3000, 300))]
    for low, high in pairs:
        for count in (3, 4, 5, 9, 16):
            wanted = np.unique(np.rint(np.geomspace(low, high, count)).astype(np.int64))
            assert between(low, high, count) == wanted.tolist(), (low, high, count)


def test_even_parts_cover_a_range_without_a_gap():
    for first, last in ((1, 1), (1, 5), (3, 400), (17, 100_000)):
        parts = even_parts(first, last, 8)
        assert parts[0][0] == first and parts[-1][1] == last
        assert all(up + 1 == low for (_, up), (low, _) in zip(parts[:-1], parts[1:], strict=True))
