"""What is loaded for a schedule, and what moves between two."""

import pytest

from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.deployment import Pool, StageAssignment
from xscheduler.live.deployment import holdings, redeployment
from xsimulator import memory

OPT = catalog.model("opt-13b")  # 40 layers
T5 = catalog.model("t5-11b")
NODE = catalog.cluster("a40-4").with_nodes(ssd_bytes_per_s=4e9, host_bytes_per_s=2e9)


def pool_of(counts, *, degree=1, role="both", first_rank=0, first_index=0, encoder=None):
    found, layer, encoder_layer = [], 0, 0
    for index, count in enumerate(counts):
        own = 0 if encoder is None else encoder[index]
        begin = first_rank + index * degree
        found.append(StageAssignment(
            index=first_index + index, ranks=tuple(range(begin, begin + degree)),
            first_layer=layer, num_layers=count, first_encoder_layer=encoder_layer,
            num_encoder_layers=own))
        layer, encoder_layer = layer + count, encoder_layer + own
    return (Pool(name=role, role=role, stages=tuple(found), num_groups=1, kv_tokens=0),)


def two_nodes(**rates: float) -> Cluster:
    return NODE.with_nodes(num_nodes=2, devices_per_node=2, **rates)


@pytest.mark.parametrize("pools", [
    pool_of([10, 10, 10, 10]), pool_of([20, 20], degree=2), pool_of([13, 9, 9, 9]),
    pool_of([40], degree=4)])
def test_a_rank_loads_what_the_simulator_says_it_holds(pools) -> None:
    (pool,) = pools
    stages, found = pool.stages, redeployment((), pools, OPT, "float16", NODE)
    expected = memory.weight_bytes(OPT, stages, "float16")
    by_rank = {rank: size for stage, size in zip(stages, expected, strict=True)
               for rank in stage.ranks}
    assert found.rank_bytes == pytest.approx([by_rank[rank] for rank in range(4)], rel=1e-9)
    assert found.from_dram_s == pytest.approx(max(expected) / 2e9)


def test_waa_loads_a_decoder_only_model_twice_and_the_parts_of_another_once() -> None:
    twice = (*pool_of([20, 20], role="encode"),
             *pool_of([20, 20], role="decode", first_rank=2, first_index=2))
    once = pool_of([10, 10, 10, 10])
    ends = OPT.embedding_params + OPT.head_params
    layers = 40 * OPT.decoder_layer_params
    assert redeployment((), once, OPT, "float16", NODE).total_bytes == 2 * (layers + ends)
    assert redeployment((), twice, OPT, "float16", NODE).total_bytes == 2 * 2 * (layers + ends)
    parts = (*pool_of([0, 0], role="encode", encoder=[12, 12]),
             *pool_of([12, 12], role="decode", first_rank=2, first_index=2))
    # the encode pool has no output head, but an embedding of its own
    assert redeployment((), parts, T5, "float16", NODE).total_bytes == 2 * (
        24 * T5.encoder_layer_params + 24 * T5.decoder_layer_params
        + 2 * T5.embedding_params + T5.head_params)


def test_the_ssd_is_shared_by_a_nodes_devices_and_reads_a_piece_once() -> None:
    pools = pool_of([40], degree=4)
    found = redeployment((), pools, OPT, "float16", NODE)
    distinct = 2 * (40 * OPT.decoder_layer_params + OPT.embedding_params + OPT.head_params)
    # the embedding lies on all four ranks, and comes off the drive once
    assert found.node_bytes == pytest.approx((distinct,))
    assert found.total_bytes == pytest.approx(distinct + 3 * 2 * OPT.embedding_params)
    assert found.from_ssd_s == pytest.approx(distinct / 4e9)


def test_nodes_load_at_the_same_time_and_the_fullest_counts() -> None:
    pools = pool_of([10, 10, 10, 10])
    one = redeployment((), pools, OPT, "float16", NODE)
    two = redeployment((), pools, OPT, "float16", two_nodes(ssd_bytes_per_s=1e9))
    assert sum(two.node_bytes) == one.node_bytes[0] and two.from_dram_s == one.from_dram_s
    assert two.from_ssd_s == pytest.approx(max(two.node_bytes) / 1e9)
    # a drive quicker than the copies does not make these any quicker
    quick = redeployment((), pools, OPT, "float16", two_nodes(ssd_bytes_per_s=100e9))
    assert quick.from_ssd_s == quick.from_dram_s


def test_nothing_moves_between_equal_stages() -> None:
    pools = pool_of([13, 9, 9, 9])
    found = redeployment(pools, pools, OPT, "float16", NODE)
    assert found.total_bytes == 0 and found.from_dram_s == found.from_ssd_s == 0


def test_only_layers_that_a_rank_lacks_are_loaded() -> None:
    old, new = pool_of([10, 10, 10, 10]), pool_of([12, 10, 10, 8])
    layer = 2 * OPT.decoder_layer_params
    # rank 0 gets layers 10, 11; rank 1 holds 12..21, has 10..19; rank 2 22..31; rank 3 32..39
    assert redeployment(old, new, OPT, "float16", NODE).rank_bytes == (
        2 * layer, 2 * layer, 2 * layer, 0)


def test_another_degree_is_another_shard() -> None:
    old, new = pool_of([20, 20], degree=2), pool_of([40], degree=4)
    found = redeployment(old, new, OPT, "float16", NODE)
    everything = redeployment((), new, OPT, "float16", NODE)
    embedding = 2 * OPT.embedding_params  # whole on ranks 0 and 1 before and after
    assert found.rank_bytes == tuple(
        size - (embedding if rank < 2 else 0) for rank, size in enumerate(everything.rank_bytes))


def test_ranks_of_a_group_hold_different_shards() -> None:
    held = holdings(pool_of([20, 20], degree=2), OPT, "float16")
    assert not {p for p in held[0] if p.part == "layer"} & set(held[1])
    assert {p for p in held[0] if p.part == "embedding"} <= set(held[1])
