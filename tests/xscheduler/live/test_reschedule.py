"""Keep, adjust or redeploy: the search on fixed stages against random configurations, and the
choice."""

import math
from dataclasses import replace

import numpy as np
import pytest
from examples import some
from problems import estimate_of, roofline_of, schedule_of, toy_problem

from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.controls import FixedSchedule
from xgpt.core.deployment import Pool, StageAssignment
from xgpt.core.errors import InfeasibleError, InputError
from xscheduler.evaluator import Evaluator
from xscheduler.live.fixed_stages import FixedStages
from xscheduler.live.reschedule import break_even, reschedule
from xscheduler.live.weight_loading import holdings, loading_between
from xsimulator import memory

LONGER, SHORTER = (14, 6, 30), (6, 3, 14)
DRAWN, MOST_DRAWN = 60, 200  # configurations, and the largest batch of them
BELOW = 0.02  # by so much may the search stay below the best of them


def rra(problem=None, **variables):
    return estimate_of(problem or toy_problem(), "rra", **{
        "encode_batch": 6, "decode_iterations": 5, **variables})


def waa(policy="waa-c", **variables):
    return estimate_of(toy_problem(), policy, **{
        "encode_batch": 6, "decode_micro_batches": 2, **variables})


def uneven():
    """RRA on stages that no search would choose."""
    found = rra()
    counts, first, stages = [3, 1, 1, 1], 0, []
    for stage, count in zip(found.deployment.stages, counts, strict=True):
        stages.append(replace(stage, first_layer=first, num_layers=count))
        first += count
    (pool,) = found.deployment.pools
    return found.changed(pools=(replace(pool, stages=tuple(stages)),))


def given(deployed, problem):
    return FixedStages(deployed, problem, roofline_of(problem))


def adjusted(deployed, problem):
    return given(deployed, problem).best(problem.constraint, has_margin=False)


def drawn(deployed, problem):
    """Figures of random configurations that fit on the stages of `deployed`."""
    rng, found = np.random.default_rng(5), []
    chunked = [name for name, value in deployed.variables.items() if value]
    most = min(problem.num_queries or MOST_DRAWN, MOST_DRAWN)
    for _ in range(DRAWN):
        own = FixedSchedule(
            encode_batch=round(most ** rng.random()),
            encode_chunk=int(rng.choice([4, 16, 40, 100])) if "encode_chunk" in chunked else 0,
            **({"decode_iterations": int(rng.integers(1, problem.lengths.outputs.max))}
               if deployed.policy == "rra" else
               {"decode_micro_batches": int(rng.integers(1, 7))}))
        way = adjusted(deployed, replace(problem, fixed=own))
        if way.qps:
            found.append(way.estimate.figures)
    return found


DEPLOYED = {
    "rra": rra, "rra in groups": lambda: rra(tp_degree=2, tp_gpus=4),
    "rra in part": lambda: rra(tp_degree=2, tp_gpus=2),
    "rra in chunks": lambda: rra(encode_chunk=50), "uneven": uneven, "waa-c": waa,
    "waa-m": lambda: waa("waa-m"), "waa in groups": lambda: waa(tp_degree=2, tp_gpus=2),
}


CASES = [(LONGER, {"tightness": 1.05}), (SHORTER, {"tightness": 1.6, "num_queries": 70}),
         (SHORTER, {"tightness": math.inf, "memory": 1.6e8})]


# each kind of deployment with one of the cases
@pytest.mark.parametrize(("name", "outputs", "case"), some(
    [(name, *case) for name in DEPLOYED for case in CASES],
    lambda one: list(DEPLOYED).index(one[0]) % 3 == CASES.index(one[1:])))
def test_the_search_on_given_stages_is_not_below_what_is_drawn(name, case, outputs):
    deployed, case = DEPLOYED[name](), dict(case)
    tightness = case.pop("tightness")
    problem = toy_problem(outputs=outputs, **case)
    ways = drawn(deployed, problem)
    assert len(ways) >= 5, "else this test shows nothing"
    limit_s = tightness * min(figures.latency_s for figures in ways)
    problem = toy_problem(outputs=outputs, latency_s=limit_s, **case)
    best_qps = max(figures.throughput_qps for figures in ways if figures.latency_s <= limit_s)
    found = adjusted(deployed, problem)
    assert found.reason is None and found.estimate is not None
    assert found.qps >= (1 - BELOW) * best_qps
    assert found.estimate.figures.latency_s <= limit_s and found.estimate.figures.fits
    assert found.estimate.policy == deployed.policy
    assert found.estimate.deployment.stages == deployed.deployment.stages


@pytest.mark.parametrize("name", ["rra", "rra in part", "waa-c", "waa-m", "waa in groups"])
def test_the_running_schedule_has_the_figures_of_its_replay(name):
    deployed, problem = DEPLOYED[name](), toy_problem()
    way = given(deployed, problem).unchanged(problem.constraint, has_margin=False)
    assert (way.estimate.controls, way.estimate.deployment) == (
        deployed.controls, deployed.deployment)
    shown = Evaluator(problem, roofline_of(problem)).shown(deployed).figures  # of fewer requests
    assert way.qps == pytest.approx(shown.throughput_qps, rel=0.01)
    assert way.estimate.figures.latency_s == pytest.approx(shown.latency_s, rel=0.01)


def test_stages_stay_where_new_lengths_would_place_layers_elsewhere():
    deployed = uneven()
    found = adjusted(deployed, toy_problem(outputs=LONGER))
    assert found.estimate.deployment.stages == deployed.deployment.stages
    # the fullest stage holds half of the layers: an even split must be quicker
    even = adjusted(rra(), toy_problem(outputs=LONGER))
    assert even.qps > found.qps * 1.1


def test_a_refusal_names_the_smallest_latency():
    deployed, problem = rra(), toy_problem(outputs=LONGER)
    least_s = min(figures.latency_s for figures in drawn(deployed, problem))
    found = adjusted(deployed, toy_problem(outputs=LONGER, latency_s=0.5 * least_s))
    assert found.qps == 0.0 and found.estimate.figures.latency_s <= 1.02 * least_s
    assert f"{found.estimate.figures.latency_s:.4g} s" in found.reason
    assert "encode_batch" in found.reason


def test_values_that_the_job_fixes_stay_fixed():
    fixed = FixedSchedule(decode_iterations=3, decode_micro_batches=2, encode_batch=5)
    found = adjusted(rra(), toy_problem(outputs=LONGER, fixed=fixed)).estimate
    figures = found.figures
    assert (figures.decode_iterations, found.deployment.num_groups, figures.encode_batch) == (
        3, 2, 5)
    other = adjusted(rra(), toy_problem(fixed=FixedSchedule(policies=("waa-c",))))
    assert other.estimate is None and "policy waa-c" in other.reason
    narrow = adjusted(rra(), toy_problem(memory=2e7))
    assert narrow.qps == 0.0 and "memory" in narrow.reason


# --- the choice -------------------------------------------------------------------------------


def test_break_even_is_where_both_have_answered_as_many():
    queries = break_even(10.0, 15.0, 2.0)
    assert queries / 10 == pytest.approx(2.0 + queries / 15)
    assert math.isinf(break_even(10.0, 10.0, 2.0)) and break_even(0.0, 5.0, 2.0) == 0.0


@pytest.mark.parametrize(("factor", "choice"), [(0.9, "adjust"), (1.1, "redeploy")])
def test_redeploys_where_queries_are_left_for_it_to_pay(factor, choice):
    problem = toy_problem(outputs=LONGER)
    # so slow that far more requests must be left than are ever present
    problem = replace(problem, cluster=replace(problem.cluster, host_bytes_per_s=1e6))
    better = rra(problem, tp_degree=2, tp_gpus=4).changed(throughput_qps=1e5)
    free = reschedule(rra(), problem, roofline_of(problem), best=schedule_of(problem, better))
    assert free.choice == "redeploy" and free.chosen == better and math.isinf(free.queries_left)
    assert free.loading == loading_between(rra().deployment.pools, better.deployment.pools,
                                        problem.model, problem.dtype, problem.cluster)
    assert free.cost_s == free.loading.from_dram_s > 0
    left = replace(problem, num_queries=int(factor * free.break_even_queries))
    found = reschedule(rra(), left, roofline_of(problem), best=schedule_of(left, better))
    assert found.adjust == free.adjust
    assert found.choice == choice
    assert ("pays after" in found.sentence) == (choice == "adjust")


def test_keeps_what_is_still_best():
    problem = toy_problem()
    best = adjusted(rra(), problem).estimate
    found = reschedule(schedule_of(problem, best), problem, roofline_of(problem),
                       best=schedule_of(problem, best))
    assert found.choice == "keep" and found.chosen == best and found.loading is None
    assert found.redeploy.reason == "no layer would move" and found.cost_s == 0.0


def test_adjusts_where_the_current_variables_break_the_bound():
    old = rra(encode_batch=40, decode_iterations=2)
    tightest_s = adjusted(old, toy_problem(
        outputs=LONGER, latency_s=1e-9)).estimate.figures.latency_s
    problem = toy_problem(outputs=LONGER, latency_s=tightest_s * 1.3)

    none = InfeasibleError("no schedule")
    found = reschedule(old, problem, roofline_of(problem), best=none)
    assert found.keep.qps == 0.0 and found.keep.reason.startswith("latency")
    assert found.choice == "adjust"
    assert found.chosen.figures.latency_s <= problem.constraint.latency_s
    assert found.redeploy.reason == "no schedule" and "latency" in found.sentence
    tighter = reschedule(old, problem, roofline_of(problem), best=none,
                         latency_limit_s=found.chosen.figures.latency_s * 0.9)
    assert tighter.adjust.estimate.figures.latency_s <= found.chosen.figures.latency_s * 0.9
    impossible = reschedule(old, problem, roofline_of(problem), best=none, latency_limit_s=1e-9)
    assert impossible.choice is None and impossible.chosen is None
    assert "No schedule keeps the limit" in impossible.sentence


def test_redeploys_where_nothing_else_is_admissible():
    problem = toy_problem(outputs=LONGER, latency_s=1e-9)
    other = rra(problem, tp_degree=4, tp_gpus=4)
    found = reschedule(rra(), problem, roofline_of(problem), best=schedule_of(problem, other))
    assert found.choice == "redeploy" and found.break_even_queries == 0.0
    assert "Without moving layers no schedule is admissible" in found.sentence


def test_the_real_search_never_loses_to_the_deployed_schedule():
    problem = toy_problem(outputs=SHORTER)
    found = reschedule(rra(), problem, roofline_of(problem))
    best = max(found.keep.qps, found.adjust.qps, found.redeploy.qps)
    assert found.chosen.figures.throughput_qps >= best * 0.99
    assert found.adjust.qps >= found.keep.qps > 0


def test_a_schedule_that_cannot_be_deployed_here_is_refused():
    problem = toy_problem()
    with pytest.raises(InputError, match="devices of cluster"):
        reschedule(rra(), toy_problem(per_node=2), roofline_of(problem))
    fewer = replace(problem, model=replace(problem.model, num_layers=5))
    with pytest.raises(InputError, match="layers of toy"):
        reschedule(rra(), fewer, roofline_of(fewer))
    with pytest.raises(InputError, match="policy"):
        reschedule(rra().changed(policy="ft"), problem, roofline_of(problem))


# --- what is loaded ---------------------------------------------------------------------------


OPT = catalog.model("opt-13b")  # 40 layers
T5 = catalog.model("t5-11b")
NODE = replace(catalog.cluster("a40-4"), ssd_bytes_per_s=4e9, host_bytes_per_s=2e9)


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
    return replace(NODE, num_nodes=2, devices_per_node=2, **rates)


@pytest.mark.parametrize("pools", [
    pool_of([10, 10, 10, 10]), pool_of([20, 20], degree=2), pool_of([13, 9, 9, 9]),
    pool_of([40], degree=4)])
def test_a_rank_loads_what_the_simulator_says_it_holds(pools):
    (pool,) = pools
    stages, found = pool.stages, loading_between((), pools, OPT, "float16", NODE)
    expected = memory.weight_bytes(OPT, stages, "float16")
    by_rank = {rank: size for stage, size in zip(stages, expected, strict=True)
               for rank in stage.ranks}
    assert found.rank_bytes == pytest.approx([by_rank[rank] for rank in range(4)], rel=1e-9)
    assert found.from_dram_s == pytest.approx(max(expected) / 2e9)


def test_waa_loads_a_decoder_only_model_twice_and_the_parts_of_another_once():
    twice = (*pool_of([20, 20], role="encode"),
             *pool_of([20, 20], role="decode", first_rank=2, first_index=2))
    once = pool_of([10, 10, 10, 10])
    ends = OPT.embedding_params + OPT.head_params
    layers = 40 * OPT.decoder_layer_params
    assert loading_between((), once, OPT, "float16", NODE).total_bytes == 2 * (layers + ends)
    assert loading_between((), twice, OPT, "float16", NODE).total_bytes == 2 * 2 * (layers + ends)
    parts = (*pool_of([0, 0], role="encode", encoder=[12, 12]),
             *pool_of([12, 12], role="decode", first_rank=2, first_index=2))
    # the encode pool has no output head, but an embedding of its own
    assert loading_between((), parts, T5, "float16", NODE).total_bytes == 2 * (
        24 * T5.encoder_layer_params + 24 * T5.decoder_layer_params
        + 2 * T5.embedding_params + T5.head_params)


def test_the_ssd_is_shared_by_a_nodes_devices_and_reads_a_piece_once():
    pools = pool_of([40], degree=4)
    found = loading_between((), pools, OPT, "float16", NODE)
    distinct = 2 * (40 * OPT.decoder_layer_params + OPT.embedding_params + OPT.head_params)
    # the embedding lies on all four ranks, and comes off the drive once
    assert found.node_bytes == pytest.approx((distinct,))
    assert found.total_bytes == pytest.approx(distinct + 3 * 2 * OPT.embedding_params)
    assert found.from_ssd_s == pytest.approx(distinct / 4e9)


def test_nodes_load_at_the_same_time_and_the_fullest_counts():
    pools = pool_of([10, 10, 10, 10])
    one = loading_between((), pools, OPT, "float16", NODE)
    two = loading_between((), pools, OPT, "float16", two_nodes(ssd_bytes_per_s=1e9))
    assert sum(two.node_bytes) == one.node_bytes[0] and two.from_dram_s == one.from_dram_s
    assert two.from_ssd_s == pytest.approx(max(two.node_bytes) / 1e9)
    # a drive quicker than the replicas does not make these any quicker
    quick = loading_between((), pools, OPT, "float16", two_nodes(ssd_bytes_per_s=100e9))
    assert quick.from_ssd_s == quick.from_dram_s


def test_only_layers_that_a_rank_lacks_are_loaded():
    old, new = pool_of([10, 10, 10, 10]), pool_of([12, 10, 10, 8])
    layer = 2 * OPT.decoder_layer_params
    same = loading_between(old, old, OPT, "float16", NODE)
    assert same.total_bytes == 0 and same.from_dram_s == same.from_ssd_s == 0
    # rank 0 gets layers 10, 11; rank 1 holds 12..21, has 10..19; rank 2 22..31; rank 3 32..39
    assert loading_between(old, new, OPT, "float16", NODE).rank_bytes == (
        2 * layer, 2 * layer, 2 * layer, 0)


def test_another_degree_is_another_shard():
    old, new = pool_of([20, 20], degree=2), pool_of([40], degree=4)
    found = loading_between(old, new, OPT, "float16", NODE)
    everything = loading_between((), new, OPT, "float16", NODE)
    embedding = 2 * OPT.embedding_params  # whole on ranks 0 and 1 before and after
    assert found.rank_bytes == tuple(
        size - (embedding if rank < 2 else 0) for rank, size in enumerate(everything.rank_bytes))


def test_ranks_of_a_group_hold_different_shards():
    held = holdings(pool_of([20, 20], degree=2), OPT, "float16")
    assert not {p for p in held[0] if p.part == "layer"} & set(held[1])
    assert {p for p in held[0] if p.part == "embedding"} <= set(held[1])
