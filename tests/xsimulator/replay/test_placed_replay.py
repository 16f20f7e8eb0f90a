"""Placed pools by FlexGen's constants: its published rows, and replays of them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.kit.problems import problem_of
from xgpt.core import catalog
from xgpt.core.controls import FixedSchedule
from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import InputError
from xgpt.core.lengths import joint_empirical
from xgpt.core.model import ModelSpec
from xgpt.core.placement import Placement, layer_tensors, stage_tiers
from xprofiler.importers import import_folder
from xprofiler.profile_file import load_profile, save_profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator
from xsimulator.layer_times import LayerTimes
from xsimulator.placed import PlacedSteps
from xsimulator.replay.job import Replayer, planned_queries
from xsimulator.rough.formulas import fixed_estimate

CONSTANTS = Path(__file__).parents[3] / "benchmarks" / "published" / "flexgen"
INPUT, OUTPUT = 512, 32
ON_DEVICE, ON_HOST, ON_DISK = (1, 0, 0), (0, 1, 0), (0, 0, 1)
MIXED, HALVES = (0.2, 0.8, 0), (0, 0.5, 0.5)


def opt(layers, hidden, heads):
    """OPT's layers as the paper's cost model counts them: nothing beside them."""
    return ModelSpec(name="opt", family="opt", num_layers=layers, hidden_size=hidden,
                     num_heads=heads, vocab_size=1, intermediate_size=4 * hidden,
                     max_positions=2048)


OPT_30B, OPT_175B = opt(48, 7168, 56), opt(96, 12288, 96)


def job(model, devices=1):
    """(problem, timing) of inputs of 512 tokens and outputs of 32 on FlexGen's machines."""
    lengths = joint_empirical(np.array([[INPUT, OUTPUT]]))
    problem = problem_of("opt-13b", "t4-gcp", lengths)
    problem = replace(problem, model=model, cluster=replace(problem.cluster, num_nodes=devices))
    profile = import_folder("flexgen", CONSTANTS, model, catalog.device("T4"), "float16")
    return problem, ProfileTiming(profile, Roofline(model, problem.cluster.device, "float16"))


def rates(model, batch, weights, kv, *, hidden=ON_HOST, serial=None, stages=1, inner=1, **options):
    """(tokens/s, decoded tokens/s) of blocks of device batches (requests, number), all terms at the
    shares themselves, with means over the outputs."""
    problem, timing = job(model, stages)
    each = model.num_layers // stages
    own = tuple(StageAssignment(index=i, ranks=(i,), first_layer=i * each, num_layers=each)
                for i in range(stages))
    placement = Placement(weights=weights, kv=kv, hidden=hidden, device_batch=batch[0],
                          **{"host_attention": True, **options})
    steps = PlacedSteps(problem, LayerTimes.of(problem, timing), own, placement, sharers=1)
    shares, block = np.concatenate((weights, kv, hidden)), batch[0] * batch[1]
    serial = steps.serial_share if serial is None else serial
    encode = float(steps.encode_step(0, block).seconds(shares, serial))
    decode = float(steps.decode_step(0, block, INPUT + np.arange(1, OUTPUT)).seconds(
        shares, serial).sum())
    whole = (inner + stages - 1) * encode + inner * decode
    return inner * block * OUTPUT / whole, block * (OUTPUT - 1) / decode


ROWS = {
    "30B": (7.18, (OPT_30B, (64, 2), MIXED, ON_HOST), {}),
    "30B, no policy search": (7.03, (OPT_30B, (64, 2), ON_HOST, ON_HOST), {}),
    "30B, no overlap": (5.98, (OPT_30B, (64, 2), MIXED, ON_HOST), {"overlap": False}),
    "30B, no host attention": (4.05, (OPT_30B, (64, 2), MIXED, ON_HOST), {"host_attention": False}),
    "30B, DeepSpeed's policy": (1.72, (OPT_30B, (8, 1), ON_HOST, ON_DEVICE), {}),
    "175B": (0.673, (OPT_175B, (32, 8), HALVES, ON_DISK), {}),
    "175B, no policy search": (0.301, (OPT_175B, (32, 1), HALVES, ON_DISK), {}),
    "175B, no overlap": (0.557, (OPT_175B, (32, 8), HALVES, ON_DISK), {"overlap": False}),
    "30B, perfect overlap": (8.60, (OPT_30B, (64, 2), MIXED, ON_HOST), {"serial": 0.0})}


@pytest.mark.parametrize("row", ROWS)
def test_published_rows_come_out_within_two_percent_of_the_cost_model(row):
    """FlexGen, Tables 2 and 5, by its cost model with a share of 0.45 that nothing overlaps."""
    expected, given, options = ROWS[row]
    assert rates(*given, **options)[0] == pytest.approx(expected, rel=0.02)


def test_decoding_alone_and_four_machines():
    """FlexGen, Table 3: four micro-batches on four stages."""
    assert rates(OPT_30B, (64, 2), MIXED, ON_HOST)[1] == pytest.approx(11.8, rel=0.02)
    assert rates(OPT_30B, (64, 3), MIXED, ON_HOST, stages=4, inner=4) == (
        pytest.approx((22.5, 49.4), rel=0.02))


def placed(policy, placement, *, devices=1, model=OPT_30B, **variables):
    """(problem, timing, estimate) of a policy whose pool has that placement."""
    problem, timing = job(model, devices)
    found = fixed_estimate(policy, problem, timing, FixedSchedule(**variables))
    return problem, timing, found.changed(placement=placement, kv_tokens=10**7)


def replayed(problem, timing, estimate, count, outputs=OUTPUT):
    """Replays of requests of 512 tokens: (by Python, by the native library)."""
    queries = planned_queries(problem, np.full(count, INPUT), np.broadcast_to(outputs, count))
    whole, quick = (Replayer(problem, timing, estimate, has_steps=has).run(queries)
                    for has in (True, False))
    return whole, quick


ONE_GROUP = {"decode_micro_batches": 1, "encode_micro_batches": 1}
BLOCK = Placement(weights=MIXED, kv=ON_HOST, hidden=ON_HOST, device_batch=64, host_attention=True)


def test_a_block_of_ft_takes_one_encode_step_and_as_many_decode_steps_as_tokens_follow():
    problem, timing, estimate = placed("ft", BLOCK, encode_batch=128, **ONE_GROUP)
    whole, quick = replayed(problem, timing, estimate, 128)
    stage = estimate.deployment.pools[0].stages[0]
    tensors = [own.elements for own in layer_tensors(problem.model)]
    tiers = stage_tiers(problem.model, 48, MIXED, is_first=True, is_last=True)
    steps = PlacedSteps(problem, LayerTimes.of(problem, timing), (stage,), BLOCK)

    def seconds(step):
        total = float(step.other_s)
        for own in tiers.layers:
            held = np.bincount(own, tensors, 3) / sum(tensors)
            terms = step.layer.at(np.concatenate((held, ON_HOST, ON_HOST)))
            total += 0.55 * terms.max() + 0.45 * terms.sum()
        terms = step.head.at(np.concatenate((np.eye(3)[tiers.head], ON_HOST, ON_HOST)))
        return total + 0.55 * terms.max() + 0.45 * terms.sum()

    by_hand = seconds(steps.encode_step(0, 128)) + sum(
        seconds(steps.decode_step(0, 128, INPUT + token)) for token in range(1, OUTPUT))
    assert whole.makespan_s == pytest.approx(by_hand, rel=1e-3)  # between contexts of the table
    assert quick.makespan_s == pytest.approx(whole.makespan_s, rel=1e-12)


@pytest.mark.parametrize(("policy", "variables"), [
    ("ft", {"encode_batch": 96, "decode_micro_batches": 2, "encode_micro_batches": 2}),
    ("rra", {"encode_batch": 32, "decode_iterations": 8, "decode_micro_batches": 2})])
def test_two_stages_are_replayed_natively_as_by_python(policy, variables):
    placement = replace(BLOCK, kv=(0.25, 0.5, 0.25), weights=(0.2, 0.4, 0.4), device_batch=16)
    case = placed(policy, placement, devices=2, tp_degree=1, tp_gpus=0, **variables)
    assert len(case[2].deployment.stages) == 2
    outputs = np.random.default_rng(7).integers(4, OUTPUT, 200)
    whole, quick = replayed(*case, 200, outputs)
    assert quick.makespan_s == pytest.approx(whole.makespan_s, rel=1e-12)
    assert np.isfinite(whole.makespan_s)


def test_early_termination_is_quicker_than_padding():
    """`rra` gives the places of finished requests to others, where `ft` keeps them to the end of
    the longest."""
    outputs = np.random.default_rng(7).integers(4, 2 * OUTPUT, 512)
    padded = placed("ft", BLOCK, encode_batch=128, **ONE_GROUP)
    early = placed("rra", BLOCK, encode_batch=32, decode_iterations=8, decode_micro_batches=1)
    seconds = [replayed(*case, 512, outputs)[0].makespan_s for case in (padded, early)]
    assert seconds[1] < seconds[0]


def test_an_imported_profile_is_the_same_from_its_file(tmp_path):
    profile = import_folder("flexgen", CONSTANTS, OPT_30B, catalog.device("T4"), "float16")
    save_profile(profile, tmp_path / "t4.json")
    read, made = (ProfileTiming(own) for own in (load_profile(tmp_path / "t4.json"), profile))
    assert read.facts.copy_rates == pytest.approx(made.facts.copy_rates, rel=1e-3)
    for operator in (Operator.LAYER_REST, Operator.DECODE_REST, Operator.HOST_ATTENTION):
        assert read.operator_s(operator, 64, 512) == pytest.approx(
            made.operator_s(operator, 64, 512), rel=1e-3)


@pytest.mark.parametrize("without", ["dtoc_bdw", "cpu_flops"])
def test_a_file_that_lacks_a_constant_is_refused_by_its_name(tmp_path, without):
    constants = json.loads((CONSTANTS / "flexgen.json").read_text())
    del constants[without]
    (tmp_path / "flexgen.json").write_text(json.dumps(constants))
    with pytest.raises(InputError, match=without):
        import_folder("flexgen", tmp_path, OPT_30B, catalog.device("T4"), "float16")
