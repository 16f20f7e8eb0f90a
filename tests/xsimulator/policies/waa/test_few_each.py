"""Groups of WAA's decode pool that hold a query: by the rule itself, and at least."""

from __future__ import annotations

import numpy as np
import pytest

from xrunner.rules.waa import WaaDecodeRule
from xsimulator.policies.waa.few_each import (
    FULL,
    LEAST_SHARE,
    MANY_GROUPS,
    busy_groups,
    least_busy,
)

ROUNDS, FIRST = 400, 100
LIFETIME = 30.0  # steps of a query, in the mean


def busy_by_the_rule(present: int, groups: int) -> float:
    """Steps in a round of the groups, in the mean: whoever leaves is followed by another query,
    which arrives while the head waits for a group that has some."""
    rule = WaaDecodeRule(num_groups=groups, group_max_active=present, kv_tokens=10 * present)
    rng, steps = np.random.default_rng(present), 0
    coming: list[int] = list(range(present))
    for query in coming:
        rule.submit(query, 1)
    number, coming = present, []
    for turn in range(groups * ROUNDS):
        group = turn % groups
        if rule._active[group]:
            for query in coming:
                rule.submit(query, 1)
            coming = []
        step = rule.decide()
        if step is None:
            continue
        steps += turn >= groups * FIRST
        for query in [one for one in rule._active[group] if rng.random() < 1 / LIFETIME]:
            rule.finish(query)
            coming.append(number)
            number += 1
    return steps / (ROUNDS - FIRST)


@pytest.mark.parametrize(("present", "groups"), [(20, 32), (33, 32), (44, 32), (60, 32), (65, 48),
                                                 (98, 48), (130, 40), (17, 16), (28, 16)])
def test_so_many_groups_hold_a_query(present: int, groups: int) -> None:
    (found,) = busy_groups(np.array([float(present)]), np.array([float(groups)]))
    assert found == pytest.approx(busy_by_the_rule(present, groups), rel=0.04)


def test_few_groups_and_full_ones_all_hold_some() -> None:
    groups = np.array([1.0, 4.0, 7.0, 32.0, 32.0, 32.0])
    decoding = np.array([1.3, 5.0, 3.0, 128.0, 20.0, 0.2])
    assert busy_groups(decoding, groups).tolist() == [1.0, 4.0, 3.0, 32.0, 20.0, 1.0]


@pytest.mark.parametrize(("fewest", "highest"), [(2, 6), (3, 12), (8, 8), (9, 40)])
def test_no_fewer_hold_a_query_in_any_number_of_groups(fewest: int, highest: int) -> None:
    """Nor with more queries; and what is said grows, and falls in relation to the queries."""
    decoding = np.linspace(0.5, 5 * highest, 1500)
    least = least_busy(decoding, *(np.full(len(decoding), side) for side in (fewest, highest)))
    assert (np.diff(least) >= -1e-9).all() and (np.diff(least / decoding) <= 1e-9).all()
    for groups in range(fewest, highest + 1):
        busy = busy_groups(decoding, np.full(len(decoding), float(groups)))
        assert (least <= np.minimum.accumulate(busy[::-1])[::-1] + 1e-9).all(), f"{groups = }"


@pytest.mark.parametrize("groups", [MANY_GROUPS, 12, 4096])
def test_what_bounds_take_for_the_least_share_is(groups: int) -> None:
    number = np.full(4000, groups)
    decoding = np.linspace(LEAST_SHARE, FULL, 4000) * number
    assert (least_busy(decoding, number, number) >= LEAST_SHARE * number * (1 - 1e-9)).all()
