"""Which ranks are timed together: groups within a node, or evenly over several."""

import pytest

pytest.importorskip("torch", reason="ranks need the extra `run`")
from xprofiler.measure.network import RankNodes  # noqa: E402


@pytest.mark.parametrize(("node_of", "size", "near", "far"), [
    ((0, 0, 0, 0), 2, [(0, 1), (2, 3)], []),
    ((0, 0, 1, 1), 2, [(0, 1), (2, 3)], [(0, 2)]),
    ((0, 0, 1, 1), 4, [], [(0, 1, 2, 3)]),
    ((0, 1, 2, 3), 2, [], [(0, 1)]),
    ((0, 1, 2, 3), 4, [], [(0, 1, 2, 3)]),
    ((0, 0, 0, 1), 2, [(0, 1)], [(0, 3)]),
    ((0, 0, 0, 1), 3, [(0, 1, 2)], []),
])
def test_groups_lie_within_a_node_or_evenly_over_several(
        node_of: tuple[int, ...], size: int, near: list[tuple[int, ...]],
        far: list[tuple[int, ...]]) -> None:
    where = RankNodes(node_of=node_of)
    assert where.near_groups(size) == near
    assert where.far_groups(size) == far
