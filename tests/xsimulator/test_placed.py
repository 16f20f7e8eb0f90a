"""Steps whose weights, entries and hidden states lie below the device: their terms and bytes."""

from dataclasses import replace

import numpy as np
import pytest

from tests.kit.problems import uniform_problem
from xgpt.core.cluster import Link, Tier
from xgpt.core.deployment import StageAssignment
from xgpt.core.lengths import joint_empirical
from xgpt.core.placement import Placement, layer_tensors
from xprofiler.roofline import Roofline
from xsimulator.layer_times import LayerTimes
from xsimulator.placed import PlacedSteps
from xsimulator.placed_terms import COMPUTE, READ, UP, WRITE

GIB = 2**30
INPUT, OUTPUT = 512, 32
ON_DEVICE, ON_HOST, ON_DISK = (1, 0, 0), (0, 1, 0), (0, 0, 1)


def tier(name, gib, up, down):
    """A tier of so many GiB, and GiB/s up and down."""
    return Tier(name=name, memory_bytes=gib * GIB, up=Link(
        name="up", bandwidth_bytes_per_s=up * GIB, latency_s=0), down=Link(
        name="down", bandwidth_bytes_per_s=down * GIB, latency_s=0))


def problem_of(model, tiers=("host", "disk"), devices=1):
    """`model` on T4s, with those tiers beside them."""
    lengths = joint_empirical(np.array([[INPUT, OUTPUT]]))
    own = uniform_problem(model, "T4", devices, lengths)
    known = {"host": tier("host", 204, 12.89, 4.82), "disk": tier("disk", 1500, 3.0, 2.015)}
    return replace(own, cluster=replace(own.cluster, tiers=tuple(known[name] for name in tiers)))


def steps_of(problem, **options):
    """The steps of one stage with all layers."""
    layers = problem.model.num_layers
    stages = (StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=layers),)
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    placement = Placement(weights=ON_DEVICE, kv=ON_DEVICE, hidden=ON_DEVICE, **options)
    return PlacedSteps(problem, LayerTimes.of(problem, timing), stages, placement)


def block_bytes(steps, requests, shares):
    """[4] bytes up, down, read and written in all layers by a block of `requests`."""
    decode = steps.decode_step(0, requests, INPUT + np.arange(1, OUTPUT))
    encode = steps.encode_step(0, requests)
    layers = decode.layers
    return layers * (encode.layer.bytes_at(shares) + decode.layer.bytes_at(shares).sum(0))


def test_a_block_of_opt_175b_moves_the_bytes_of_the_paper():
    """FlexGen, appendix A.2: weights n l W, hidden states 2 (2 h1 s bls l + 2 h1 bls l (n - 1)),
    entries 4 h1 bls l (s n + n (n - 1) / 2)."""
    steps = steps_of(problem_of("gpt3-175b"), device_batch=32)
    kinds = [block_bytes(steps, 256, np.concatenate(shares)) for shares in (
        (ON_HOST, ON_DEVICE, ON_DEVICE), (ON_DEVICE, ON_DEVICE, ON_HOST),
        (ON_DEVICE, ON_HOST, ON_DEVICE))]
    assert [moved.sum() for moved in kinds] == pytest.approx([1.113e13, 6.56e11, 2.04e13], rel=1e-3)


@pytest.mark.parametrize("attention", [True, False])
def test_host_attention_moves_hidden_states_in_place_of_entries(attention):
    problem = problem_of("opt-30b")
    steps = steps_of(problem, device_batch=64, host_attention=attention)
    shares = np.concatenate((ON_DEVICE, ON_HOST, ON_DEVICE))
    moved = steps.decode_step(0, 64, INPUT + 1).layer.bytes_at(shares)
    new = 64 * problem.model.hidden_size * 4
    assert moved.sum() == new + (new if attention else new * INPUT)


def test_row_order_loads_weights_once_a_device_batch():
    rows, blocks = (steps_of(problem_of("opt-30b"), device_batch=16, order=order)
                    for order in ("row", "zigzag"))
    shares = np.concatenate((ON_DISK, ON_DEVICE, ON_DEVICE))
    moved = [own.decode_step(0, 64, INPUT).layer.bytes_at(shares) for own in (rows, blocks)]
    assert moved[0][[UP, READ]] == pytest.approx(4 * moved[1][[UP, READ]])


def test_a_disk_below_the_device_has_no_copies_up_and_down():
    steps = steps_of(problem_of("opt-30b", tiers=("disk",)), device_batch=16)
    moved = steps.decode_step(0, 16, INPUT).layer.bytes_at(np.concatenate(
        (ON_DISK, ON_DISK, ON_DEVICE)))
    assert moved[[UP, READ, WRITE]].astype(bool).tolist() == [False, True, True]


def test_a_step_with_all_bytes_on_the_device_takes_as_long_as_one_without_a_placement():
    problem = problem_of("opt-30b")
    steps = steps_of(problem, device_batch=64)
    shares = np.concatenate((ON_DEVICE,) * 3)
    for serial in (0.0, 0.45):
        assert steps.decode_step(0, 64, 700).seconds(shares, serial) == pytest.approx(
            float(steps.decode_s(64, 700)[0]))
        tokens = 64.0 * INPUT
        assert steps.encode_step(0, 64).seconds(shares, serial) == pytest.approx(float(
            steps.encode_s(tokens, 64, {1: 64 * steps.mean_attention_s(64)[1]})[0]))


def test_four_bits_move_four_and_a_half_and_take_time_to_widen():
    whole, packed = (steps_of(problem_of("opt-30b"), device_batch=64, weight_bits=bits).decode_step(
        0, 64, INPUT).layer for bits in (16, 4))
    shares = np.concatenate((ON_HOST, ON_DEVICE, ON_DEVICE))
    assert packed.bytes_at(shares)[UP] == whole.bytes_at(shares)[UP] * 4.5 / 16
    assert packed.at(shares)[COMPUTE] > whole.at(shares)[COMPUTE]


def test_ranks_of_a_node_share_its_rates():
    one, two = (steps_of(problem_of("opt-30b", devices=count), device_batch=64).decode_step(
        0, 64, INPUT).layer.at(np.concatenate((ON_HOST, ON_DEVICE, ON_DEVICE)))
        for count in (1, 2))
    assert two[UP] == 2 * one[UP]


def test_a_disk_s_latency_counts_for_each_request():
    """Entries lie by request: of a block of tokens that is written a step writes its share."""
    problem = problem_of("opt-30b")
    disk = problem.cluster.tier("disk")
    slow = replace(disk, **{way: replace(getattr(disk, way), latency_s=0.001)
                            for way in ("up", "down")})
    late = replace(problem, cluster=replace(problem.cluster, tiers=(
        problem.cluster.tier("host"), slow)))
    shares = np.concatenate((ON_DISK, ON_DISK, ON_DEVICE))
    more = [steps_of(own, device_batch=16).decode_step(0, 64, INPUT).layer.at(shares)
            for own in (problem, late)]
    assert (more[1] - more[0])[[UP, READ, WRITE]] == pytest.approx([0, 0.064, 0.064 / 16])


def test_a_mixture_takes_an_expert_once_for_all_device_batches():
    problem = problem_of("mixtral-8x7b")
    computed = {}
    for order, batch in (("zigzag", 8), ("zigzag", 64), ("row", 8)):
        steps = steps_of(problem, device_batch=batch, order=order)
        layer = steps.decode_step(0, 64, INPUT).layer
        computed[order, batch] = layer.fixed[COMPUTE]
    assert computed["zigzag", 8] == computed["zigzag", 64] < computed["row", 8] / 2


def test_a_step_of_few_requests_reads_the_experts_that_they_reach():
    problem, shares = problem_of("mixtral-8x7b"), np.concatenate((ON_DISK, ON_DEVICE, ON_DEVICE))
    few, many = (steps_of(problem, device_batch=512).decode_step(
        0, requests, INPUT).layer.bytes_at(shares)[READ] for requests in (1, 512))
    tensors = layer_tensors(problem.model)
    expert = sum(own.elements for own in tensors if own.name.startswith("expert.0."))
    assert many == pytest.approx(2 * sum(own.elements for own in tensors))
    assert many - few == pytest.approx(6 * 2 * expert)
