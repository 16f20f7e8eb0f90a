"""Which node a rank is on, and what joins two ranks."""

from dataclasses import replace
from pathlib import Path

import pytest

from jobs import job
from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.job.resolve import resolve_cluster


@pytest.mark.parametrize("rank", [-1, 16])
def test_a_rank_outside_the_cluster_is_our_own_error(rank):
    with pytest.raises(AssertionError, match="rank"):
        catalog.cluster("a40-16").node_of(rank)


def _cluster(folder: Path, links: str) -> Cluster:
    return resolve_cluster(job(folder, cluster=(
        "{device: A40, num_nodes: 2, devices_per_node: 4, intra_link: pcie4-x16, "
        f"inter_link: ib-100g, links: {{{links}}}}}")))


def test_pairs_are_neighbours_and_the_bus_joins_them(tmp_path):
    cluster = _cluster(tmp_path, "nvlink3-bridge: 2")
    assert [cluster.link_between(a, b).name for a, b in ((0, 1), (2, 3), (1, 2), (3, 4), (4, 5))
            ] == ["nvlink3-bridge", "nvlink3-bridge", "pcie4-x16", "ib-100g", "nvlink3-bridge"]
    assert cluster.link_of((2, 3)).name == "nvlink3-bridge"
    assert cluster.link_of((0, 1, 2, 3)).name == "pcie4-x16", "its ring crosses the bus"


def test_a_group_over_nodes_says_what_joins_it_inside_one():
    link = catalog.cluster("a100-16").link_of(range(16))
    assert (link.name, link.per_node) == ("ib-8x200g", 8)
    assert link.inside == catalog.link("nvlink3")
    single = replace(catalog.cluster("a100-16"), devices_per_node=1).link_of((0, 1))
    assert single == catalog.link("ib-8x200g")


def test_equal_parts_have_the_links_that_all_of_them_have(tmp_path):
    cluster = _cluster(tmp_path, "nvlink3-bridge: 2")
    assert cluster.equal_part(2).link_between(0, 1).name == "nvlink3-bridge"
    three = cluster.equal_part(3)
    assert [three.link_between(0, rank).name for rank in (1, 2)] == ["nvlink3-bridge", "pcie4-x16"]
    twice = replace(cluster, devices_per_node=6).equal_part(3)
    assert twice.island_link is None, "of the other three of the node the last two are joined"


def test_a_bus_with_peer_access_may_join_what_one_without_it_does_not(tmp_path):
    cluster = _cluster(tmp_path, "pcie4-x16-p2p: 2")
    assert cluster.link_of((0, 1)).has_peer_access and not cluster.link_of((1, 2)).has_peer_access
