"""Division of tensors and requests over tiers."""

import pytest

from xgpt.core import catalog
from xgpt.core.placement import (
    kv_block_tokens,
    queries_by_tier,
    stage_tensors,
    stage_tiers,
    tier_of_tensors,
)


@pytest.mark.parametrize("shares", [(0.2, 0.8, 0.0), (0.0, 0.5, 0.5), (0.1, 0.3, 0.6)])
def test_tensors_of_every_stretch_of_layers_lie_on_tiers_by_their_shares(shares):
    tensors = stage_tensors(catalog.model("opt-30b"), 48, is_first=True, is_last=True)
    sizes = [tensor.elements for tensor in tensors]
    tiers = tier_of_tensors(sizes, shares)
    for count in (len(sizes) // 4, len(sizes) // 2, len(sizes)):
        whole = sum(sizes[:count])
        for tier, share in enumerate(shares):
            held = sum(size for size, own in zip(sizes[:count], tiers, strict=False) if own == tier)
            assert abs(held - share * whole) <= max(sizes[:count])
            assert share or not held


def test_a_stage_has_the_tiers_of_its_tensors_in_order():
    model, shares = catalog.model("opt-125m"), (0.3, 0.3, 0.4)
    tiers = stage_tiers(model, 3, shares, is_first=True, is_last=True)
    sizes = [own.elements for own in stage_tensors(model, 3, is_first=True, is_last=True)]
    assert [tiers.embedding, *sum(tiers.layers, []), tiers.head] == tier_of_tensors(sizes, shares)
    inner = stage_tiers(model, 3, shares, is_first=False, is_last=False)
    assert inner.embedding is inner.head is None and len(inner.layers) == 3


@pytest.mark.parametrize(("shares", "sizes"), [
    ((0.2, 0.8, 0.0), (2, 8, 0)), ((0.0, 0.0, 1.0), (0, 0, 10)), ((0.25, 0.0, 0.75), (3, 0, 7)),
    ((0.0, 0.5, 0.5), (0, 5, 5))])
def test_requests_lie_on_tiers_in_the_order_of_their_slots(shares, sizes):
    parts = queries_by_tier(10, shares)
    assert tuple(map(len, parts)) == sizes
    assert [slot for part in parts for slot in part] == [*range(10)]


@pytest.mark.parametrize("shape", [(3, 64, 2), (2, 8, 4), (8, 128, 2), (1, 80, 2)])
def test_a_block_of_entries_fills_whole_sectors(shape):
    tokens = kv_block_tokens(*shape)
    assert tokens % 16 == 0
    assert tokens * shape[0] * shape[1] * shape[2] % 4096 == 0
