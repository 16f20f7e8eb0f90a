"""Which node a rank is on, and what joins two ranks."""

from __future__ import annotations

import pytest

from xgpt.core import catalog


def test_ranks_fill_a_node_before_the_next() -> None:
    cluster = catalog.cluster("a40-16")
    assert [cluster.node_of(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]


def test_ranks_of_one_node_use_the_link_inside_and_others_the_link_between() -> None:
    cluster = catalog.cluster("a40-16")
    assert cluster.link_between(0, 7) == cluster.intra_link
    assert cluster.link_between(7, 8) == cluster.inter_link


@pytest.mark.parametrize("rank", [-1, 16])
def test_a_rank_outside_the_cluster_is_our_own_error(rank: int) -> None:
    with pytest.raises(AssertionError, match="rank"):
        catalog.cluster("a40-16").node_of(rank)
