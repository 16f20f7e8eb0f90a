"""Devices divided into parts of several sizes, against every division there is."""

from collections.abc import Iterator

import numpy as np
import pytest
from problems import toy_problem

from xgpt.core.copies import sum_of
from xgpt.core.job import FixedSchedule
from xscheduler.partition import best_division, division_of


def divisions(devices: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every multiset of sizes of at most so many devices, the largest first."""
    yield ()
    for size in range(min(devices, most or devices), 0, -1):
        for rest in divisions(devices - size, size):
            yield (size, *rest)


@pytest.mark.parametrize("parts", [None, 1, 2, 3, 5])
def test_no_division_is_better_than_the_best(parts: int | None) -> None:
    rng = np.random.default_rng(7)
    for devices in range(1, 10):
        worth = {size: float(rng.uniform(0, size) * (rng.random() < 0.7))
                 for size in range(1, devices + 1)}
        every = [sizes for sizes in divisions(devices)
                 if (parts is None or len(sizes) == parts) and all(worth[one] for one in sizes)]
        found = best_division(worth, devices, parts)
        if not every:
            assert found is None
            continue
        assert found is not None and found.sizes in every
        assert found.worth == pytest.approx(sum(worth[one] for one in found.sizes))
        assert found.worth == pytest.approx(max(
            sum(worth[one] for one in sizes) for sizes in every))


def test_of_equals_the_fewest_parts_are_taken() -> None:
    found = best_division({1: 1.0, 2: 2.0, 4: 4.0}, 6)
    assert found is not None and found.sizes == (4, 2)


def test_sizes_read_as_a_sum() -> None:
    assert sum_of((4, 3)) == "4 + 3" and sum_of((1, 5, 1, 1)) == "5 + 3 x 1"


def over_nodes(nodes: int, each: int) -> Iterator[tuple[int, ...]]:
    """Every division of nodes, of copies within one or over whole ones."""
    if nodes == 0:
        yield ()
    for count in range(1, nodes + 1):
        own = divisions(each) if count == 1 else [(count * each,)]
        for sizes in own:
            for rest in over_nodes(nodes - count, each):
                yield (*sizes, *rest)


@pytest.mark.parametrize("copies", [None, 1, 2, 3, 5])
def test_nodes_are_divided_into_as_many_copies_as_the_job_fixes(copies: int | None) -> None:
    rng = np.random.default_rng(3)
    for nodes, each in ((1, 3), (1, 5), (2, 2), (2, 4), (3, 2)):
        problem = toy_problem(nodes=nodes, per_node=each, fixed=FixedSchedule(replicas=copies))
        worth = {size: float(rng.uniform(0, size) * (rng.random() < 0.8)) for size in (
            *range(1, each), *range(each, nodes * each + 1, each))}
        able = [sizes for sizes in over_nodes(nodes, each) if copies in (None, len(sizes))
                and all(worth[one] for one in sizes)]
        found = division_of(problem, worth)
        if not able:
            assert found is None
            continue
        assert found is not None and copies in (None, len(found.sizes))
        assert found.worth == pytest.approx(sum(worth[one] for one in found.sizes))
        assert found.worth == pytest.approx(max(
            sum(worth[one] for one in sizes) for sizes in able))
