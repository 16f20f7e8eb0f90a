"""Schedules of models that their devices cannot hold: the search, what is kept after rounding, and
refusals."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.kit.problems import roofline_of, toy_problem
from tests.xsimulator.replay.test_placed_replay import INPUT, OPT_30B, OPT_175B, OUTPUT, ROWS, job
from xgpt.core.cluster import Link, Tier
from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.placement import AskedPlacement
from xgpt.core.problem import QueryLengths
from xgpt.core.schedule import Status
from xgpt.core.schedule_file import from_json, to_json
from xrunner.rules.rra import most_active
from xscheduler.placed_figures import diagonal_over_zigzag
from xscheduler.placed_programs import Programs, shares_of
from xscheduler.placements import options_of
from xscheduler.placing import Placing
from xscheduler.planner import Planner, PlanOptions
from xscheduler.price import price
from xsimulator.placed_memory import PlacedMemory

SMALL = 120_000_000  # bytes: the toy's weights take 178 MB
TIERS = tuple(
    Tier(name=name, memory_bytes=size, attention=name == "host",
         up=Link(name="up", bandwidth_bytes_per_s=rate, latency_s=0),
         down=Link(name="down", bandwidth_bytes_per_s=rate, latency_s=0))
    for name, size, rate in (("host", 2 * 10**8, 5e9), ("disk", 10**10, 1e9)))


def small(tiers=TIERS, *, memory=SMALL, **given):
    """A toy problem whose devices have `memory`, beside tiers."""
    problem = toy_problem(**{"per_node": 1, "num_queries": 64, "memory": memory, **given})
    return replace(problem, cluster=replace(problem.cluster, tiers=tiers))


def plan(problem, tell=None):
    return Planner(problem, roofline_of(problem), tell=tell).plan()


def held_of(problem, schedule):
    """([stages, tiers] bytes of its whole tensors and requests, [tiers] what a rank may have)."""
    pool, placed = schedule.deployment.decoding, schedule.placed
    memory = PlacedMemory(problem, pool.stages)
    slots = placed.block // pool.num_groups
    return memory.held(pool.placement, slots, pool.group_kv_tokens // slots,
                       pool.num_groups).sum(axis=-1), memory.room


def test_a_static_block_has_room_for_its_longest_input_with_its_longest_output():
    """A row grows with its block's longest output, and one superfluous step."""
    problem = small(fixed=FixedSchedule(policies=("ft",)))
    inputs = np.arange(64) % 8 * 11 + 3  # 3 .. 80
    known = QueryLengths(inputs=inputs, most_outputs=90 - inputs)
    pool = (schedule := plan(replace(problem, queries=known))).deployment.decoding
    assert pool.kv_tokens == schedule.placed.block * (80 + 87 + 1)


@pytest.mark.parametrize(("model", "rows"), [
    (OPT_30B, ("30B", "30B, no policy search", "30B, DeepSpeed's policy")),
    (OPT_175B, ("175B", "175B, no policy search"))])
def test_no_published_policy_that_fits_is_quicker_than_the_plan(model, rows):
    problem, timing = job(model)
    problem = replace(problem, constraint=replace(problem.constraint, confidence=0.5))
    schedule = Planner(problem, timing).plan()
    tokens_per_s = schedule.figures.throughput_qps * OUTPUT
    assert tokens_per_s >= max(ROWS[row][0] for row in rows)
    assert tokens_per_s == pytest.approx(schedule.placed.program_qps * OUTPUT, rel=0.02)
    held, room = held_of(problem, schedule)
    assert (held <= room).all()
    assert schedule.deployment.decoding.placement.budgets == tuple(
        map(tuple, np.ceil(held).astype(int).tolist()))
    assert from_json(to_json(schedule)) == schedule


def test_no_point_of_a_grid_over_the_shares_beats_the_program_of_a_block():
    problem = small(outputs=(9, 4, 20))
    placing = Placing(problem, roofline_of(problem), has_margin=False, tell=print)
    layout, = placing._layouts
    tenths = [np.array([a, b, 10 - a - b]) / 10 for a in range(11) for b in range(11 - a)]
    hidden = [np.array([a, 1 - a, 0]) for a in (0.0, 0.5, 1.0)]
    grid = np.array([np.concatenate([w, kv, h]) for w in tenths for kv in tenths for h in hidden])
    assert len(grid) > 10**4
    for iterations in (0, 4):
        programs = Programs(layout, options_of(layout.part)[-1], iterations, math.inf)
        own = programs.all()
        program = own[8][max(size for size in own[8] if size <= 64)]()
        fits = (grid @ program.memory.by_share.T + program.memory.fixed
                <= program.memory.capacity).all(axis=1)
        assert 100 < fits.sum() < len(grid)
        c, period_s = program.serial_share, 0.0
        for step in program.steps:
            period_s = period_s + step.often * step.placed.other_s
            for times, part in step.placed.parts:
                terms = grid[fits] @ part.by_share.T + part.fixed
                period_s = period_s + step.often * times * (
                    (1 - c) * terms.max(axis=1) + c * terms.sum(axis=1))
        solution = program.solve()
        assert solution.qps >= program.requests / period_s.min() * (1 - 1e-9)
        assert solution.qps < 1.3 * program.requests / period_s.min()


@pytest.mark.parametrize(("per_node", "memory"), [(1, SMALL), (2, 80_000_000)])
def test_a_plan_keeps_its_limit_and_its_memories_after_rounding(per_node, memory):
    free = plan(small(per_node=per_node, memory=memory))
    limit_s = 0.7 * free.figures.latency_s
    problem = small(per_node=per_node, memory=memory, latency_s=limit_s)
    schedule = plan(problem)
    assert schedule.figures.latency_s * schedule.margin.factor <= limit_s
    assert schedule.figures.throughput_qps <= free.figures.throughput_qps * 1.01
    assert schedule.placed.block < free.placed.block
    pool, replicas = schedule.deployment.decoding, schedule.deployment.replicas
    part = replace(problem, copies=replicas, cluster=problem.cluster.equal_part(
        len(pool.stages))) if replicas > 1 else problem
    held, room = held_of(part, schedule)
    assert (held <= room).all() and schedule.figures.fits


def test_a_limit_below_the_quickest_block_is_refused_with_its_seconds():
    with pytest.raises(InfeasibleError, match="the quickest block takes") as refused:
        plan(small(latency_s=0.001))
    least_s = refused.value.tightest_s
    assert plan(small(latency_s=1.05 * least_s)).figures.latency_s <= 1.05 * least_s


def test_too_little_of_every_memory_is_refused_with_the_bytes_of_each():
    with pytest.raises(InfeasibleError, match=r"device: .* can be used.*host: .*disk: "):
        plan(small(memory=3_000_000))
    with pytest.raises(InfeasibleError, match="needs at least, for one request: device"):
        plan(small(memory=3_000_000))
    with pytest.raises(InfeasibleError, match="needs at least, for 32 requests at once: device"):
        plan(small(memory=3_000_000, fixed=FixedSchedule(policies=("ft",), encode_batch=32)))


def test_more_memory_is_priced_by_a_placement_of_its_own():
    problem = small()
    *_, memory = price(problem, Planner(problem, roofline_of(problem)).of)
    assert "more memory" in memory.what and memory.gain is not None and memory.gain > 0.01


def test_a_short_job_gets_its_shortest_makespan_and_in_steady_state_the_throughput():
    problem = small()
    job, steady = (Planner(problem, roofline_of(problem), PlanOptions(horizon=horizon)).plan()
                   for horizon in ("job", "steady"))
    assert job.proof.status == Status.JOB != steady.proof.status
    assert steady.figures.throughput_qps >= job.figures.throughput_qps
    assert Planner(problem, roofline_of(problem)).steady().figures == steady.figures


def test_a_model_that_fits_plans_as_without_tiers():
    beside, alone = plan(small(memory=6e8)), plan(small((), memory=6e8))
    assert beside.placed is None
    assert replace(beside, proof=alone.proof) == alone


def test_offload_off_and_policies_without_placements_are_refused_as_without_tiers():
    for problem in (replace(small(), offload="off"),
                    small(fixed=FixedSchedule(policies=("sarathi",)))):
        with pytest.raises(InfeasibleError, match="too little memory"):
            plan(problem)


def test_a_placement_that_the_job_fixes_is_kept():
    asked = AskedPlacement(weights=(0.2, 0.3, 0.5), kv=(0, 1, 0), hidden=(0, 1, 0), device_batch=4,
                           order="row", overlap=False, host_attention=True)
    schedule = plan(small(fixed=FixedSchedule(policies=("ft",), encode_batch=8, placement=asked)))
    own = schedule.deployment.decoding.placement
    assert {name: getattr(own, name) for name in asked.__slots__ if not name.endswith("bits")} == {
        name: getattr(asked, name) for name in asked.__slots__ if not name.endswith("bits")}
    assert shares_of(own) == pytest.approx([0.2, 0.3, 0.5, 0, 1, 0, 0, 1, 0])
    assert schedule.controls.encode_batch == schedule.placed.block == 8


def test_a_block_of_more_requests_than_the_job_has_is_shrunk_with_a_note():
    notes = list[str]()
    schedule = plan(small(num_queries=20, fixed=FixedSchedule(
        policies=("ft",), encode_batch=64, decode_micro_batches=1)), tell=notes.append)
    assert schedule.placed.block == schedule.controls.encode_batch == 20
    assert any("64" in note and "20" in note for note in notes)


def test_chunks_are_refused():
    with pytest.raises(InputError, match="encode_chunk"):
        plan(small(fixed=FixedSchedule(policies=("rra",), encode_chunk=16)))


def test_early_termination_wins_where_output_lengths_scatter():
    lengths = {"outputs": (9, 8, 60)}
    free = plan(small(num_queries=None, **lengths))
    padded = plan(small(num_queries=None, fixed=FixedSchedule(policies=("ft",)), **lengths))
    assert free.controls.policy == "rra"
    assert most_active(free.estimate) == free.placed.block  # what the runner has slots for
    assert free.figures.throughput_qps > 1.2 * padded.figures.throughput_qps


def test_a_diagonal_block_is_larger_by_the_ratio_of_the_paper():
    """FlexGen, A.2, for OPT-175B."""
    entry, row = 4 * OPT_175B.hidden_size * OPT_175B.num_layers, 2 * OPT_175B.hidden_size
    assert diagonal_over_zigzag(entry, row, INPUT, 32) == pytest.approx(1.064, abs=5e-4)
    assert diagonal_over_zigzag(entry, row, 32, 2048) == pytest.approx(1.971, abs=5e-4)


def test_control_variables_that_the_job_fixes_are_kept():
    fixed = FixedSchedule(policies=("rra",), encode_batch=6, decode_iterations=5)
    schedule = plan(small(fixed=fixed))
    own = schedule.controls
    assert (own.policy, own.encode_batch, own.decode_iterations) == ("rra", 6, 5)
    assert schedule.placed.block >= 6


@pytest.mark.parametrize("policy", ["ft", "rra"])
def test_a_job_of_two_requests_is_planned(policy):
    schedule = plan(small(num_queries=2, fixed=FixedSchedule(policies=(policy,))))
    assert schedule.placed.block <= 2 and schedule.controls.encode_batch <= 2


def test_a_period_has_a_step_of_each_group_on_each_stage():
    """A stage waits while a pipeline fills; it takes no more steps for that."""
    schedule = plan(small(per_node=2, memory=90_000_000, fixed=FixedSchedule(
        policies=("ft",), replicas=1, encode_batch=8, decode_micro_batches=4)))
    pool, encode = schedule.deployment.decoding, schedule.placed.steps[0]
    assert (len(pool.stages), pool.num_groups, encode.count) == (2, 4, pytest.approx(4))
