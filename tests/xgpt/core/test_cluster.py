"""Which node a rank is on, and what joins two ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from xgpt.core import catalog
from xgpt.core.errors import InputError
from xgpt.job.job_file import load_job


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


@pytest.mark.parametrize("cluster", [
    "[a40-4, l4-4]", "{device: [A40, L4], devices_per_node: 4, intra_link: pcie4-x16}"])
def test_two_kinds_of_gpu_are_refused_in_words(tmp_path: Path, cluster: str) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"model: opt-13b\nworkload: {{task: S}}\ncluster: {cluster}\n", "utf-8")
    with pytest.raises(InputError) as caught:
        load_job(job)
    (mistake,) = caught.value.mistakes
    assert "one kind of device" in mistake.allowed and "a job of its own" in mistake.allowed
