"""Beyond four times what was measured nothing is estimated, searched or promised."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from xgpt.core.cluster import Device, Link, uniform_cluster
from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import InfeasibleError
from xgpt.core.lengths import JointLengths, truncated_normal
from xgpt.core.model import ModelSpec
from xgpt.core.problem import Problem
from xprofiler.profile import (
    STEP_OVERHEAD,
    TRANSFER,
    Profile,
    ProfileMetadata,
    Sample,
    TableKey,
)
from xprofiler.profile_timing import ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.timing import MessageKind, Operator
from xscheduler.found_schedule import SearchPlanner
from xsimulator.plans import StagePlans
from xsimulator.rough.forms import fixed_estimate

TOY = ModelSpec(name="toy", family="opt", num_layers=6, hidden_size=1024, num_heads=16,
                vocab_size=8000, intermediate_size=4096, max_positions=512,
                has_learned_positions=True)
LINK = Link(name="fast", bandwidth_bytes_per_s=200e9, latency_s=3e-6)
METADATA = ProfileMetadata(
    model="toy", model_shape="m", device="toy", dtype="float16", ranks=1, threads_per_rank=1,
    kernels="k", libraries="l")
SMALL = {"queries": (1, 3, 8), "tokens": (8, 64, 256), "contexts": (10, 40, 100),
         "lengths": (5, 20, 80)}


def toy_problem(*, latency_s=math.inf, devices=2, memory=6e9, fixed=None):
    device = Device(name="toy", kind="gpu", memory_bytes=int(memory), bandwidth_bytes_per_s=4e11,
                    flops_per_s=(("float32", 1e13), ("float16", 5e13)))
    cluster = uniform_cluster(name="toy", device=device, num_nodes=1, devices_per_node=devices,
                      intra_link=LINK, inter_link=LINK)
    lengths = JointLengths(inputs=truncated_normal(40, 20, 80), outputs=truncated_normal(9, 4, 20))
    return Problem(model=TOY, cluster=cluster, lengths=lengths, dtype="float16",
                   constraint=latency_constraint(latency_s=latency_s),
                   fixed=replace(fixed or FixedSchedule(), policies=("rra",), encode_chunk=0),
                   num_queries=None, default_max_tokens=20)


def profiled(problem, *, messages=None, **sizes):
    """The roofline's times at a few small sizes, as if they had been measured."""
    sizes, truth = {**SMALL, **sizes}, Roofline(TOY, problem.cluster.device, "float16")
    tables = {TableKey(STEP_OVERHEAD): (
        Sample(x=0, samples_s=(truth.facts.step_overhead_s,)),)}
    axes = {Operator.LAYER_REST: ("tokens", None), Operator.EMBED: ("tokens", None),
            Operator.HEAD: ("queries", None), Operator.DECODE_ATTENTION: ("queries", "contexts"),
            Operator.ENCODE_ATTENTION: ("lengths", "together")}
    sizes["together"] = (1, 4)
    for degree in (1, 2, 4):
        for operator, (along_x, along_y) in axes.items():
            tables[TableKey(operator.value, degree)] = tuple(
                Sample(x=x, y=y, samples_s=(float(truth.operator_s(operator, x, y,
                                                                   tp_degree=degree)),))
                for y in sizes.get(along_y, (0,)) for x in sizes[along_x])
    if messages is not None:
        tables[TableKey(TRANSFER, 1, LINK.name)] = tuple(
            Sample(x=x, samples_s=(float(truth.message_s(MessageKind.TRANSFER, x, LINK)),))
            for x in messages)
    return ProfileTiming(Profile(metadata=METADATA, tables=tables), fallback=truth)


CONFIGS = [
    FixedSchedule(encode_batch=b, decode_iterations=n, tp_degree=t, tp_gpus=0 if t == 1 else t)
           for b in (1, 2, 5, 9, 20, 33, 40, 70, 150, 1000)
           for n in (1, 4, 19) for t in (1, 2)]


def figures_of(problem, timing, config):
    return fixed_estimate("rra", problem, timing, config).figures


def test_sizes_far_beyond_those_measured_have_no_throughput_and_no_end():
    problem = toy_problem()
    found = [figures_of(problem, profiled(problem), config) for config in CONFIGS]
    refused = [one for one in found if one.throughput_qps == 0]
    assert refused and len(refused) < len(found)
    assert all(math.isinf(one.latency_s) and math.isinf(one.period_s) for one in refused)
    assert all(math.isfinite(one.latency_s) for one in found if one.throughput_qps > 0)
    assert max(max(one.memory_bytes) for one in found) < math.inf, "memory is known all the same"


def test_within_the_measured_sizes_the_profile_answers_as_what_it_was_measured_of():
    problem = toy_problem()
    finely = profiled(problem, queries=range(1, 40), tokens=range(1, 400),
                      contexts=range(1, 101, 3), lengths=range(1, 81))
    truth = Roofline(TOY, problem.cluster.device, "float16")
    config = FixedSchedule(encode_batch=6, decode_iterations=4)
    ours = fixed_estimate("rra", problem, finely, config).figures
    assert ours.throughput_qps == pytest.approx(
        fixed_estimate("rra", problem, truth, config).figures.throughput_qps, rel=0.05)


def find_schedule(problem, timing):
    return SearchPlanner(problem, timing).best(problem.constraint.latency_s, has_margin=False)


@pytest.mark.parametrize("sizes", [{}, {"queries": (1, 8)}, {"tokens": (8, 64, 100)}],
                         ids=["both", "coarse", "tokens bind"])
def test_what_is_found_is_timed_and_says_what_was_not_measured(sizes):
    problem = toy_problem()
    found = find_schedule(problem, profiled(problem, **sizes))
    assert 0 < found.figures.throughput_qps < math.inf > found.figures.latency_s
    assert found.proof.bound_qps >= found.figures.throughput_qps
    assert any(note.startswith("extrapolated: ") for note in found.estimate.notes)


def test_what_rests_on_extrapolated_times_says_so():
    problem = toy_problem()
    largest = fixed_estimate("rra", problem, profiled(problem), FixedSchedule(
        encode_batch=30, decode_iterations=4)).notes
    assert any(note.endswith("tokens encoded at once, measured up to 256") for note in largest)
    assert any(note.endswith("queries decoded at once, measured up to 8") for note in largest)


@pytest.mark.parametrize(("sizes", "note"), [
    ({"contexts": (10, 40, 60)}, "extrapolated: up to 100 tokens of context, measured up to 60"),
    ({"lengths": (5, 20, 50)}, "extrapolated: up to 80 tokens of one input, measured up to 50")])
def test_longer_queries_than_measured_are_noted_too(sizes, note):
    problem = toy_problem()
    config = FixedSchedule(encode_batch=2, decode_iterations=4)
    assert note in fixed_estimate("rra", problem, profiled(problem, **sizes), config).notes
    assert note not in fixed_estimate("rra", problem, profiled(problem), config).notes


@pytest.mark.parametrize("latency_s", [math.inf, 0.05])
@pytest.mark.parametrize("fixed", [None, FixedSchedule(encode_batch=1000)], ids=["any", "fixed"])
def test_a_job_beyond_the_measured_range_is_infeasible_and_says_why(latency_s, fixed):
    problem = toy_problem(latency_s=latency_s, fixed=fixed, memory=6e10)
    sizes = {} if fixed else {"tokens": (1, 2, 4)}
    with pytest.raises(InfeasibleError, match="for smaller sizes.*beyond 4 times") as raised:
        find_schedule(problem, profiled(problem, **sizes))
    assert "memory" not in str(raised.value)


def test_a_refused_size_divides_by_nothing():
    problem = toy_problem()
    config = FixedSchedule(encode_batch=33, decode_iterations=1, tp_degree=2, tp_gpus=2)
    with np.errstate(divide="raise", invalid="raise"):
        assert figures_of(problem, profiled(problem), config).throughput_qps == 0


@pytest.mark.parametrize("latency_s", [math.inf, 0.05])
@pytest.mark.parametrize("sizes", [
    {"contexts": (2, 4)}, {"lengths": (2, 4)}], ids=["contexts", "lengths"])
def test_a_job_of_longer_queries_than_four_times_is_infeasible_too(latency_s, sizes):
    problem = toy_problem(latency_s=latency_s, fixed=FixedSchedule(tp_degree=1))
    with pytest.raises(InfeasibleError, match="measured for smaller sizes"):
        find_schedule(problem, profiled(problem, **sizes))


def test_messages_of_any_size_are_answered_for():
    problem = toy_problem(fixed=FixedSchedule(tp_degree=1))
    found = find_schedule(problem, profiled(problem, messages=(8, 16))).estimate.figures
    assert found.throughput_qps > 0 and math.isfinite(found.latency_s)


def test_layers_are_balanced_although_the_reference_workload_is_beyond_the_range():
    problem = toy_problem(devices=3)
    stages = StagePlans(problem, profiled(problem, queries=(1, 2))).both(1, 0).stages
    assert max(stage.num_layers for stage in stages) <= 3


def test_memory_is_not_blamed_where_it_suffices():
    problem = toy_problem(devices=4, memory=6e8, fixed=FixedSchedule(encode_batch=500))
    with pytest.raises(InfeasibleError) as raised:
        find_schedule(problem, profiled(problem))
    assert "measured for smaller sizes" in str(raised.value)


def test_a_refused_estimate_has_no_figure_that_is_no_number():
    problem = toy_problem()
    estimate = fixed_estimate("rra", problem, profiled(problem), FixedSchedule(
        encode_batch=1000, decode_iterations=4))
    assert not math.isnan(estimate.figures.decode_iteration_s)
