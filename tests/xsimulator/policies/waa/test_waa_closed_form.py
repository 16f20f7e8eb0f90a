"""WAA-C and WAA-M in closed form: against the replay by their own rules, and by laws."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from problems import problem_of, roofline_of

from xgpt.core import catalog
from xgpt.core.errors import InputError
from xgpt.core.lengths import JointLengths, empirical, truncated_normal
from xrunner.rules.batch_sizer import ADJUSTMENT
from xsimulator.allocation import pool_ranks
from xsimulator.plans import StagePlans
from xsimulator.policies.waa.chunk_rates import ChunkRates, StepSeconds, mixed_s
from xsimulator.policies.waa.closed_form import Waa, waa_c, waa_m
from xsimulator.policies.waa.config import WaaConfig
from xsimulator.policies.waa.divisions import FixedDivision
from xsimulator.policies.waa.plans import WaaPlans
from xsimulator.policies.waa.pool_times import PoolRates
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.steady import steady_figures
from xsimulator.stage_times import HandoverCost


def divided(encode_devices):
    """WAA whose first devices encode, so many of them whatever the configuration."""
    def made(problem, timing, **options):
        return Waa("waa-c", problem, timing, lambda *_: FixedDivision(encode_devices), **options)
    return made


one_encodes, two_encode = divided(1), divided(2)


def waa_of(problem, policy=one_encodes, *, padded=True, **options):
    return policy(problem, roofline_of(problem, padded=padded), **options)


def configs_of(batches, groups=(2,), plans=((1, 0),)):
    return [WaaConfig(encode_batch=b, decode_micro_batches=g, tp_degree=d, tp_gpus=n)
            for b in batches for g in groups for d, n in plans]


def lengths_of(inputs, outputs):
    return JointLengths(inputs=empirical(inputs), outputs=empirical(outputs))


# (model, task, policy, bound, padded, configuration); both sides of what limits the throughput
CASES = [
    ("opt-13b", "S", waa_c, "sequence", True, WaaConfig(encode_batch=3, decode_micro_batches=2)),
    ("opt-13b", "S", waa_m, "sequence", True, WaaConfig(encode_batch=6, decode_micro_batches=3)),
    ("opt-13b", "T", waa_m, "queries", True, WaaConfig(encode_batch=1, decode_micro_batches=2)),
    ("opt-13b", "S", waa_m, "queries", False, WaaConfig(
        encode_batch=10, decode_micro_batches=2, tp_degree=2, tp_gpus=2)),
    ("gpt3-39b", "S", waa_m, "sequence", False, WaaConfig(
        encode_batch=3, decode_micro_batches=3, tp_degree=4, tp_gpus=8)),
    ("t5-11b", "S", waa_m, "queries", False, WaaConfig(encode_batch=8, decode_micro_batches=2)),
    # one query joins every eighth step, and its input is projected in that one alone
    ("t5-11b", "C1", waa_m, "queries", True, WaaConfig(encode_batch=2, decode_micro_batches=8)),
    # 33 queries in 32 groups, of which 11 are empty; 33 in 16
    ("gpt3-39b", "S", waa_m, "sequence", False, WaaConfig(
        encode_batch=1, decode_micro_batches=32)),
    ("gpt3-39b", "S", waa_m, "queries", True, WaaConfig(
        encode_batch=1, decode_micro_batches=16, tp_degree=2, tp_gpus=4))]
# decode pools that take chunks: in every step, and as many as keep the planned batch
CHUNKED = [
    ("opt-13b", "S", waa_m, "sequence", True, WaaConfig(
        encode_batch=12, decode_micro_batches=2, encode_chunk=96)),
    ("opt-13b", "S", waa_m, "queries", False, WaaConfig(
        encode_batch=10, decode_micro_batches=2, tp_degree=2, tp_gpus=2, encode_chunk=64)),
    ("gpt3-39b", "S", waa_m, "sequence", False, WaaConfig(
        encode_batch=3, decode_micro_batches=3, tp_degree=4, tp_gpus=8, encode_chunk=512))]


@pytest.mark.parametrize(("model", "task", "policy", "kind", "padded", "config"),
                         [*CASES, *CHUNKED])
def test_agrees_with_the_replay(model, task, policy, kind, padded, config):
    problem = problem_of(model, lengths=task, kind=kind, quantile=0.95)
    found = waa_of(problem, policy, padded=padded).estimate(config)
    assert found.figures.fits
    inputs, outputs = problem.lengths.sample(
        max(14 * found.controls.max_in_system, 2500), np.random.default_rng(1))
    result = replay_job(problem, roofline_of(problem, padded=padded), found,
                        planned_queries(problem, inputs, outputs))
    steady = steady_figures(result, problem.constraint, problem.lengths.outputs)
    assert steady is not None and steady.queries > 1000
    assert found.figures.throughput_qps == pytest.approx(steady.throughput_qps, rel=0.05)
    assert found.figures.latency_s == pytest.approx(steady.latency_s, rel=0.06)


# outputs of one to three tokens, of which most in the system are not decoding: 1.06 to 1.23 times
# the replay's throughput where pools that have little to spare were planned no queue
@pytest.mark.parametrize(("inputs", "outputs", "batch", "groups"), [
    (592, [1, 3], 2, 8), (826, [1, 3, 3, 3], 1, 4), (655, [2, 3], 1, 4), (134, [1], 11, 2),
    (428, [1, 2], 2, 8), (724, [2], 1, 4)])
def test_no_more_is_promised_of_few_tokens_than_the_system_has_room_for(inputs, outputs, batch,
                                                                        groups):
    problem = problem_of("t5-11b", "a40-8", quantile=0.95, lengths=JointLengths(
        inputs=truncated_normal(inputs, inputs / 4, 2 * inputs), outputs=empirical(outputs)))
    found = waa_of(problem, waa_c).estimate(
        WaaConfig(encode_batch=batch, decode_micro_batches=groups))
    result = replay_job(problem, roofline_of(problem), found, planned_queries(
        problem, *problem.lengths.sample(2500, np.random.default_rng(1))))
    steady = steady_figures(result, problem.constraint, problem.lengths.outputs)
    assert found.figures.fits and steady is not None
    assert 0.93 < found.figures.throughput_qps / steady.throughput_qps < 1.045


@pytest.mark.parametrize("model", ["opt-13b", "t5-11b"])
@pytest.mark.parametrize("padded", [True, False])
def test_queries_decoded_are_throughput_times_their_iterations(model, padded):
    waa = waa_of(problem_of(model), padded=padded)
    batches = np.arange(1, 80)
    found = waa.evaluate(configs_of(batches, (3,)))
    present = found.throughput_qps * waa.flow.mean_iterations * found.period_s
    np.testing.assert_allclose(present, found.decode_batch, rtol=1e-9)
    assert (found.decode_batch <= batches * waa.problem.lengths.outputs.mean * (1 + 1e-9)).all()


@pytest.mark.parametrize("chunk", [16, 128, 2048])
def test_chunks_bring_what_the_encode_pool_lacks_and_no_more(chunk):
    waa = waa_of(problem_of(lengths="S"), padded=False)
    batches = np.arange(4, 80)
    alone = waa.evaluate(configs_of(batches, (3,)))
    found, slower_s = waa.evaluate_either_way([
        replace(config, encode_chunk=chunk) for config in configs_of(batches, (3,))])
    meant = batches * waa.problem.lengths.outputs.mean
    is_behind = alone.decode_batch < meant * (1 - 1e-9)
    assert is_behind.any(), "short outputs: one device cannot encode as much"
    np.testing.assert_array_equal(found.throughput_qps[~is_behind],
                                  alone.throughput_qps[~is_behind])
    more = found.throughput_qps[is_behind] - alone.throughput_qps[is_behind]
    assert (more > 0).all() and (slower_s >= alone.latency_s).all()
    assert (slower_s >= found.latency_s).all() and (slower_s > found.latency_s)[is_behind].any()
    # Little's law holds of both ways of encoding, and the decode batch stays as planned
    present = found.throughput_qps * waa.flow.mean_iterations * found.period_s
    np.testing.assert_allclose(present, found.decode_batch, rtol=1e-9)
    assert (found.decode_batch <= meant * (1 + 1e-9)).all()
    # no more is encoded beside decoding than its chunks hold
    tokens = more * waa.problem.lengths.inputs.mean * found.period_s[is_behind]
    assert (tokens <= 3 * chunk * (1 + 1e-9)).all()
    is_full = found.decode_batch[is_behind] < meant[is_behind] * (1 - 1e-6)
    np.testing.assert_allclose(tokens[is_full], 3 * chunk, rtol=1e-6)
    assert is_full.any()


@pytest.mark.parametrize(("stages", "groups"), [(1, 1), (1, 3), (4, 2), (4, 4), (4, 6), (2, 3)])
@pytest.mark.parametrize("share", [0.0, 0.15, 0.5, 1.0])
def test_long_steps_among_short_ones_take_what_the_pipeline_does(stages, groups, share):
    short_s, long_s, steps, skipped = 1.0, 1.7, 3000, 500
    rng, ends, groups_end = np.random.default_rng(3), [0.0] * stages, [0.0] * groups
    began = 0.0
    for step, is_long in enumerate((rng.random(steps) < share).tolist()):
        now = groups_end[step % groups]
        for stage in range(stages):
            now = ends[stage] = max(now, ends[stage]) + (long_s if is_long else short_s)
        groups_end[step % groups] = now
        began = now if step == skipped else began
    simulated_s = (now - began) / (steps - 1 - skipped) * groups
    one, short, long = np.ones(1), *(StepSeconds(np.array([own]), np.array([own * stages]))
                                     for own in (short_s, long_s))
    (found_s,) = mixed_s(groups * one, share * one, short, long, one)
    assert 0.95 * simulated_s <= found_s <= 1.015 * simulated_s


@pytest.mark.parametrize("kind", ["sequence", "queries"])
def test_the_latency_is_of_both_ways_of_encoding_by_their_shares(kind):
    waa = waa_of(problem_of(lengths="S", kind=kind, quantile=0.9), padded=False)
    handed_s, taken_s, share = np.array([9.0, 9.0, 9.0]), np.array([1.0, 3.0, 0.0]), np.array(
        [0.25, 0.75, 0.0])
    every = np.full(3, 0.1)
    rates = PoolRates(*[np.ones(3)] * 2, every, *[np.ones(3)] * 3)
    latency_s, slower_s = waa.waits.either_way(
        ChunkRates(rates, share, taken_s, taken_s, np.ones(3)), handed_s)
    own_s = taken_s + (waa.iterations_waited - 0.5) * every
    assert (slower_s[:2] == np.maximum(handed_s, own_s)[:2]).all()
    assert latency_s[2] == slower_s[2] == 9.0, "none is encoded in chunks"
    if kind == "sequence":
        np.testing.assert_allclose(latency_s[:2], ((1 - share) * handed_s + share * own_s)[:2])
        return
    rng, outputs = np.random.default_rng(5), waa.problem.lengths.outputs
    waited = rng.choice(outputs.support, 400_000, p=outputs.pmf) - 1 + rng.random(400_000)
    for row in range(2):
        is_taken = rng.random(len(waited)) < share[row]
        begun_s = np.where(is_taken, own_s[row], handed_s[row]) - waa.iterations_waited * every[row]
        assert latency_s[row] == pytest.approx(
            np.quantile(begun_s + waited * every[row], 0.9), rel=2e-3)


@pytest.mark.parametrize(("task", "is_throttled"), [("T", True), ("S", False)])
def test_the_slower_pool_sets_the_pace(task, is_throttled):
    # one device encodes: short inputs leave it idle, long ones with short outputs never do
    waa = waa_of(problem_of(lengths=task))
    batches = np.arange(1, 80)
    found = waa.evaluate(configs_of(batches, (3,)))
    meant = batches * waa.problem.lengths.outputs.mean
    busy = found.throughput_qps * found.encode_s / batches
    if is_throttled:
        np.testing.assert_allclose(found.decode_batch, meant, rtol=1e-9)
        assert (busy < 0.97).all()
    else:
        np.testing.assert_allclose(busy[3:], 1.0, rtol=1e-9)
        np.testing.assert_allclose(busy[:3], 1.0, rtol=0.005)  # uneven, but of one stage
        assert (found.decode_batch < 0.95 * meant).all()


@pytest.mark.parametrize(("devices", "is_first_slowest"), [(3, True), (5, False)])
def test_a_full_encode_pool_queues_before_its_slowest_stage(devices, is_first_slowest):
    """Two steps more than there are stages are under way, one of them handed over: where the first
    stage is not the slowest, those that are wait there."""
    waa, batch = waa_of(problem_of("gpt3-39b"), divided(devices)), 60
    found = waa.estimate(WaaConfig(encode_batch=batch, decode_micro_batches=6))
    times = WaaPlans(StagePlans(waa.problem, waa.timing), 1, 0).plan(devices).encode.times
    inputs = waa.problem.lengths.inputs
    steps = times.encode_s(batch * inputs.mean, batch, {
        degree: batch * one for degree, one in times.mean_attention_s(batch).items()})
    assert (steps[0] == steps.max()) == is_first_slowest
    assert found.figures.decode_batch < 0.99 * batch * waa.flow.mean_iterations, "it is not full"
    plan = WaaPlans(StagePlans(waa.problem, waa.timing), 1, 0).plan(devices)
    cost = HandoverCost(waa.problem, waa.timing, plan.encode.stages, plan.decode.stages)
    handover = cost.seconds(batch * inputs.mean * (1 - waa.problem.lengths.outputs.pmf[0]))
    assert found.figures.encode_s == pytest.approx(
        steps.sum() if is_first_slowest else (devices + 2) * steps.max() - handover)


@pytest.mark.parametrize("division", [one_encodes, two_encode])
@pytest.mark.parametrize(("model", "task"), [("opt-13b", "S"), ("opt-13b", "T"), ("t5-11b", "S")])
def test_larger_encode_batches_take_longer_and_serve_no_fewer(model, task, division):
    # unpadded: in a larger group the longest context is longer, which all would pay for
    waa = waa_of(problem_of(model, lengths=task), division, padded=False)
    for groups in (1, 4):
        found = waa.evaluate(configs_of(range(1, 120), (groups,)))
        assert (np.diff(found.encode_s) >= 0).all()
        assert (np.diff(found.latency_s) > 0).all()
        assert (np.diff(found.throughput_qps) >= -1e-4 * found.throughput_qps[1:]).all()
        assert found.throughput_qps[-1] > found.throughput_qps[0]


def test_many_at_once_equal_one_at_a_time():
    problem = problem_of("gpt3-39b", kind="queries", quantile=0.9)
    plans = ((1, 0), (4, 8))
    for policy in (waa_c, waa_m):
        configs = configs_of((1, 60), (1, 3), plans)
        waa = waa_of(problem, policy)
        together = waa_of(problem, policy).evaluate(configs)
        for row, config in enumerate(configs):
            alone = waa.estimate(config)
            for name in ("throughput_qps", "latency_s", "period_s", "encode_s", "decode_batch"):
                assert getattr(together, name)[row] == pytest.approx(
                    getattr(alone.figures, name), rel=1e-9)
            assert together.fits[row] == alone.figures.fits
            assert together.kv_tokens[row] == alone.deployment.kv_tokens
            assert together.memory_bytes[row] == pytest.approx(
                max(alone.figures.memory_bytes), abs=1)


def test_the_buffer_is_part_of_the_latency_alone():
    problem = problem_of()
    config = WaaConfig(encode_batch=8, decode_micro_batches=2)
    without, usual, more = (waa_of(problem, adjustment=a).estimate(config)
                            for a in (0.0, ADJUSTMENT, 2 * ADJUSTMENT))
    assert usual.figures.throughput_qps == more.figures.throughput_qps
    assert 0.99 < without.figures.throughput_qps / usual.figures.throughput_qps <= 1  # uneven
    assert without.figures.latency_s < usual.figures.latency_s < more.figures.latency_s
    longer_s = usual.figures.latency_s - without.figures.latency_s
    assert longer_s < 1.1 * ADJUSTMENT * without.figures.encode_s


def test_all_queries_and_the_sequence_differ_by_when_their_turn_comes():
    # every query is as long: what differs is the part of an iteration it waits for its group
    lengths, config = lengths_of([100] * 9, [40] * 9), WaaConfig(encode_batch=4)
    own = waa_of(problem_of(lengths=lengths, quantile=0.9)).estimate(config)
    every = waa_of(problem_of(lengths=lengths, kind="queries", quantile=0.9)).estimate(config)
    assert every.figures.throughput_qps == own.figures.throughput_qps
    later_s = every.figures.latency_s - own.figures.latency_s
    assert later_s / own.figures.period_s == pytest.approx(0.9 - 0.5)


def test_the_bound_of_all_queries_grows_with_its_quantile():
    found = [waa_of(problem_of(kind="queries", quantile=q)).estimate(
        WaaConfig(encode_batch=4)).figures.latency_s for q in (0.5, 0.9, 0.99)]
    assert found == sorted(found) and found[0] < 0.8 * found[-1]


@pytest.mark.parametrize(("devices", "degree", "gpus", "expected"), [
    (1, 1, 0, ([(0,)], [(1,), (2,), (3,)])),
    (3, 1, 0, ([(0,), (1,), (2,)], [(3,)])),
    (2, 2, 2, ([(0,), (1,)], [(2, 3)])),
    (2, 2, 4, ([(0, 1)], [(2, 3)])),
    (1, 2, 2, ([(0,)], [(1,), (2, 3)])),
    (1, 2, 4, None),  # a second group finds no place in either pool
    (3, 2, 2, ([(0, 1), (2,)], [(3,)])),
    (2, 4, 4, None), (2, 2, 3, None), (2, 1, 2, None), (2, 2, 8, None)])
def test_groups_are_formed_in_the_decode_pool_first(devices, degree, gpus, expected):
    assert pool_ranks(catalog.cluster("a40-4"), devices, degree, gpus) == expected


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_groups_lie_within_a_node_and_every_rank_is_in_one_stage(degree):
    cluster = catalog.cluster("a40-16")
    found = 0
    for devices in range(1, 16):
        for gpus in range(degree, 17, degree):
            ranks = pool_ranks(cluster, devices, degree, gpus)
            if ranks is None:
                continue
            found += 1
            encode, decode = ranks
            assert sorted(r for group in encode for r in group) == list(range(devices))
            assert sorted(r for group in decode for r in group) == list(range(devices, 16))
            groups = [group for group in encode + decode if len(group) > 1]
            assert len(groups) * degree == gpus and {len(g) for g in groups} == {degree}
            assert all(cluster.node_of(g[0]) == cluster.node_of(g[-1]) for g in groups)
    assert found


@pytest.mark.parametrize(("degree", "gpus"), [(4, 4), (2, 3), (1, 2), (3, 3), (8, 8)])
def test_plans_that_have_no_place_are_refused(degree, gpus):
    config = WaaConfig(encode_batch=4, tp_degree=degree, tp_gpus=gpus)
    with pytest.raises(InputError) as caught:
        waa_of(problem_of(), waa_c).estimate(config)
    assert caught.value.mistakes[0].value == (degree, gpus)


def test_a_decoder_only_model_is_stored_twice_an_encoder_decoder_model_once():
    for model, copies in (("opt-13b", 2), ("t5-11b", 1)):
        problem = problem_of(model)
        timing, spec = roofline_of(problem), problem.model
        plan = WaaPlans(StagePlans(problem, timing), 1, 0).plan(2)
        layers = 2.0 * (spec.num_layers * spec.decoder_layer_params
                        + spec.num_encoder_layers * spec.encoder_layer_params)
        ends = 2.0 * (2 * spec.embedding_params + spec.head_params)
        stored = sum(float(np.sum(pool.weight_bytes)) for pool in (plan.encode, plan.decode))
        if copies == 2:  # the encode pool of a decoder-only model gives the first token
            ends += 2.0 * spec.head_params
        assert stored == pytest.approx(copies * layers + ends, rel=1e-9)
        found = waa_of(problem, two_encode).estimate(WaaConfig(encode_batch=1))
        assert sum(found.figures.memory_bytes) > stored
        assert {pool.role for pool in found.deployment.pools} == {"encode", "decode"}


def test_memory_grows_with_the_batch_and_what_fits_is_below_the_capacity():
    waa = waa_of(problem_of(), waa_c)
    found = waa.evaluate(configs_of(range(1, 100), (2,)))
    assert found.fits[0] and not found.fits[-1]
    np.testing.assert_array_equal(found.fits, found.memory_bytes <= waa.capacity_bytes)
    one, many = (waa_of(problem_of()).estimate(WaaConfig(encode_batch=b)) for b in (2, 20))
    assert all(a < b for a, b in zip(
        one.figures.memory_bytes, many.figures.memory_bytes, strict=True))


def test_waa_c_gives_encoding_more_devices_where_inputs_are_long():
    notes = []
    for inputs, outputs in ((30, 200), (400, 200), (1000, 5)):
        problem = problem_of("gpt3-39b", lengths=lengths_of([inputs] * 9, [outputs] * 9))
        found = waa_of(problem, waa_c).estimate(WaaConfig(encode_batch=4))
        notes.append(len(found.deployment.encoding.stages))
    assert notes[0] < notes[1] < notes[2]


@pytest.mark.parametrize("model", ["opt-13b", "t5-11b"])
def test_waa_m_divides_so_that_the_fullest_device_is_emptiest(model):
    problem = problem_of(model)
    configs = configs_of((1, 8, 64), (1, 3))
    best = waa_of(problem, waa_m).evaluate(configs).memory_bytes
    others = [waa_of(problem, divided(count)).evaluate(configs).memory_bytes
              for count in range(1, problem.cluster.num_devices)]
    np.testing.assert_allclose(best, np.min(others, axis=0), rtol=1e-12)
