"""Sizes beyond four times the measured ones are not estimated or searched; sizes beyond the
measured range are noted."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from problems import LINK, TOY, toy_problem
from profiles import metadata

from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import InfeasibleError
from xprofiler.profile import STEP_OVERHEAD, TRANSFER, Profile, Sample, TableKey
from xprofiler.profile_timing import ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.timing import MessageKind, Operator, Reach
from xscheduler.search_planner import SearchPlanner
from xsimulator.measured_range import LargestSizes, beyond_measured
from xsimulator.plans import StagePlans
from xsimulator.rough.formulas import fixed_estimate

SMALL = {"queries": (1, 3, 8), "tokens": (8, 64, 256), "contexts": (10, 40, 100),
         "lengths": (5, 20, 80), "together": (1, 4)}
AXES = {Operator.LAYER_REST: ("tokens", None), Operator.EMBED: ("tokens", None),
        Operator.HEAD: ("queries", None), Operator.DECODE_ATTENTION: ("queries", "contexts"),
        Operator.ENCODE_ATTENTION: ("lengths", "together")}


def job(*, latency_s=math.inf, devices=2, memory=6e9, **fixed):
    return toy_problem(latency_s=latency_s, per_node=devices, memory=memory, fixed=FixedSchedule(
        policies=("rra",), encode_chunk=0, **fixed))


def profiled(problem, *, messages=None, **sizes):
    """The roofline's times at a few small sizes, as a measured profile."""
    sizes, truth = {**SMALL, **sizes}, Roofline(TOY, problem.cluster.device, "float16")
    tables = {TableKey(STEP_OVERHEAD): (
        Sample(x=0, samples_s=(truth.facts.step_overhead_s,)),)}
    for degree in (1, 2, 4):
        for operator, (along_x, along_y) in AXES.items():
            tables[TableKey(operator.value, degree)] = tuple(
                Sample(x=x, y=y, samples_s=(float(truth.operator_s(operator, x, y,
                                                                   tp_degree=degree)),))
                for y in sizes.get(along_y, (0,)) for x in sizes[along_x])
    if messages is not None:
        tables[TableKey(TRANSFER, 1, LINK.name)] = tuple(
            Sample(x=x, samples_s=(float(truth.message_s(MessageKind.TRANSFER, x, LINK)),))
            for x in messages)
    own = Profile(metadata=metadata(device="toy", dtype="float16"), tables=tables)
    return ProfileTiming(own, fallback=truth)


def rra_of(problem, timing, encode_batch, decode_iterations=4, **plan):
    return fixed_estimate("rra", problem, timing, FixedSchedule(
        encode_batch=encode_batch, decode_iterations=decode_iterations, **plan))


def find_schedule(problem, timing):
    return SearchPlanner(problem, timing).best(problem.constraint.latency_s, has_margin=False)


def test_sizes_far_beyond_those_measured_have_no_throughput_and_no_end():
    problem = job()
    timing = profiled(problem)
    with np.errstate(divide="raise", invalid="raise"):
        found = [rra_of(problem, timing, batch, iterations, tp_degree=t, tp_gpus=t - t % 2).figures
                 for batch in (1, 2, 5, 9, 20, 33, 40, 70, 150, 1000)
                 for iterations in (1, 4, 19) for t in (1, 2)]
    refused = [one for one in found if one.throughput_qps == 0]
    assert refused and len(refused) < len(found)
    assert all(math.isinf(one.latency_s) and math.isinf(one.period_s) for one in refused)
    assert all(math.isfinite(one.latency_s) for one in found if one.throughput_qps > 0)
    assert max(max(one.memory_bytes) for one in found) < math.inf, "memory is known all the same"
    assert not any(math.isnan(one.decode_iteration_s) for one in found)


def test_within_the_measured_sizes_the_profile_answers_as_what_it_was_measured_of():
    problem = job()
    finely = profiled(problem, queries=range(1, 40), tokens=range(1, 400),
                      contexts=range(1, 101, 3), lengths=range(1, 81))
    truth = Roofline(TOY, problem.cluster.device, "float16")
    ours, own = (rra_of(problem, timing, 6).figures for timing in (finely, truth))
    assert ours.throughput_qps == pytest.approx(own.throughput_qps, rel=0.05)


@pytest.mark.parametrize("sizes", [{}, {"queries": (1, 8)}, {"tokens": (8, 64, 100)},
                                   {"messages": (8, 16)}],
                         ids=["both", "coarse", "tokens bind", "messages of any size"])
def test_schedules_are_timed_and_name_unmeasured_sizes(sizes):
    problem = job()
    found = find_schedule(problem, profiled(problem, **sizes))
    assert 0 < found.figures.throughput_qps < math.inf > found.figures.latency_s
    assert found.proof.bound_qps >= found.figures.throughput_qps
    assert any(note.startswith("extrapolated: ") for note in found.estimate.notes)


@pytest.mark.parametrize(("batch", "sizes", "note"), [
    (30, {}, "tokens encoded at once, measured up to 256"),
    (30, {}, "requests decoded at once, measured up to 8"),
    (2, {"contexts": (10, 40, 60)},
     "extrapolated: up to 100 tokens of context, measured up to 60"),
    (2, {"lengths": (5, 20, 50)},
     "extrapolated: up to 80 tokens of one input, measured up to 50")])
def test_extrapolated_times_are_noted(batch, sizes, note):
    problem = job()
    notes = rra_of(problem, profiled(problem, **sizes), batch).notes
    assert any(own.endswith(note) for own in notes)
    assert not sizes or note not in rra_of(problem, profiled(problem), batch).notes


@pytest.mark.parametrize("latency_s", [math.inf, 0.05])
@pytest.mark.parametrize(("sizes", "given"), [
    ({"tokens": (1, 2, 4)}, {"memory": 6e10}), ({}, {"memory": 6e10, "encode_batch": 1000}),
    ({}, {"devices": 4, "memory": 6e8, "encode_batch": 500}),
    ({"contexts": (2, 4)}, {"tp_degree": 1}), ({"lengths": (2, 4)}, {"tp_degree": 1})], ids=str)
def test_a_job_beyond_the_measured_range_is_infeasible_and_says_why(latency_s, sizes, given):
    problem = job(latency_s=latency_s, **given)
    with pytest.raises(InfeasibleError, match="measured for smaller sizes") as raised:
        find_schedule(problem, profiled(problem, **sizes))
    if given.get("memory") == 6e10:
        assert "4 times" in str(raised.value) and "memory" not in str(raised.value)


def test_layers_are_balanced_although_the_reference_workload_is_beyond_the_range():
    problem = job(devices=3)
    stages = StagePlans(problem, profiled(problem, queries=(1, 2))).both(1, 0).stages
    assert max(stage.num_layers for stage in stages) <= 3


# --- how far beyond ---------------------------------------------------------------------------

REACHES = {Operator.LAYER_REST: (100.0, 1.0), Operator.HEAD: (8.0, 1.0),
           Operator.DECODE_ATTENTION: (16.0, 50.0), Operator.ENCODE_ATTENTION: (40.0, 1.0)}
MANY = REACHES | {Operator.HEAD: (900.0, 1.0), Operator.DECODE_ATTENTION: (900.0, 50.0)}
ENDLESS = dict.fromkeys(REACHES, (math.inf, math.inf))


@pytest.mark.parametrize(("reaches", "presented", "degrees", "captured", "named"), [
    (REACHES, LargestSizes(encode_tokens=201.0, input_tokens=41), (1, 1), (), [
        "up to 201 tokens encoded at once, measured up to 100",
        "up to 41 tokens of one input, measured up to 40"]),
    (REACHES, LargestSizes(encode_tokens=200.0), (2,), (), []),
    (REACHES, LargestSizes(decode_queries=9.0), (1,), (), [  # it needs the head, too
        "up to 9 requests decoded at once, measured up to 8"]),
    (MANY | {Operator.DECODE_REST: (100.0, 1.0)}, LargestSizes(decode_queries=450.0), (1,), (1,), [
        "up to 450 requests decoded at once, measured up to 100"]),
    # larger steps than 512 rows are not captured
    (MANY | {Operator.DECODE_REST: (128.0, 1.0)}, LargestSizes(decode_queries=450.0), (1,), (1,),
     []),
    (ENDLESS, LargestSizes(encode_tokens=1e9), (1,), (), [])])
def test_sizes_beyond_the_range_are_named_once(reaches, presented, degrees, captured, named):
    def reach(operator, degree):
        x, y = reaches[operator]
        return Reach(x=x * degree, y=y)

    problem = SimpleNamespace(model=SimpleNamespace(is_encoder_decoder=False))
    timing = SimpleNamespace(reach=reach, facts=SimpleNamespace(
        captured_degrees=frozenset(captured)))
    assert beyond_measured(problem, timing, degrees, presented) == named
