"""The command of another engine for a schedule: its flags say the schedule's own numbers, and what
no flag says is told or refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from problems import estimate_of, roofline_of, schedule_of, toy_problem

from xgpt.core.errors import XgptError
from xgpt.core.job import FixedSchedule
from xgpt.core.schedule import Schedule
from xgpt.launch.engine_commands import ENGINES, EngineCommand, engine_command
from xsimulator.rough.forms import fixed_estimate

PROBLEM = toy_problem()


def continuous(copies: int = 1) -> Schedule:
    one = fixed_estimate("sarathi", PROBLEM, roofline_of(PROBLEM),
        FixedSchedule(max_active=12, token_budget=64))
    return schedule_of(PROBLEM, one.in_copies(copies))


def of(engine: str, schedule: Schedule, times_of: str = "xgpt") -> EngineCommand:
    return engine_command(engine, schedule, PROBLEM, model="org/some", times_of=times_of)


def value(command: EngineCommand, flag: str) -> str:
    return command.words[command.words.index(flag) + 1]


@pytest.mark.parametrize("engine", ENGINES)
def test_flags_say_the_schedules_numbers(engine: str) -> None:
    schedule, flags = continuous(), ENGINES[engine]
    command = of(engine, schedule)
    assert value(command, flags.queries) == "12" and value(command, flags.tokens) == "64"
    assert set(flags.chunked) <= set(command.words) and flags.chunked_note in str(command)
    assert value(command, flags.pp) == str(len(schedule.deployment.stages))
    assert value(command, flags.tp) == str(schedule.deployment.tp_degree)
    assert int(value(command, flags.length)) >= PROBLEM.lengths.inputs.max
    assert command.words[:len(flags.start)] == flags.start
    assert f"{schedule.figures.throughput_qps:.3g} queries/s" in command.notes[0]
    lines = str(command).splitlines()
    assert all(line.startswith("# ") for line in lines[:-1]) and "org/some" in lines[-1]


@pytest.mark.parametrize("engine", ENGINES)
def test_copies_are_a_flag_or_several_commands(engine: str) -> None:
    command, flag = of(engine, continuous(copies=2)), ENGINES[engine].copies
    assert value(command, flag) == "2" if flag else "start it 2 times" in str(command)


def test_whole_inputs_have_no_chunks() -> None:
    whole = schedule_of(PROBLEM, fixed_estimate(
        "vllm", PROBLEM, roofline_of(PROBLEM), FixedSchedule(max_active=12)))
    assert "--no-enable-chunked-prefill" in of("vllm", whole).words
    assert value(of("sglang", whole), "--chunked-prefill-size") == "-1"


def test_what_no_flag_says_is_told() -> None:
    rra = schedule_of(PROBLEM, estimate_of(PROBLEM, encode_batch=4, decode_iterations=8))
    assert "4 queries are encoded every 8 iterations" in str(of("vllm", rra))
    assert "times of xgpt, not of vllm" in str(of("vllm", rra))
    assert "by the times of vllm" in str(of("vllm", rra, times_of="vllm"))


def test_two_pools_and_static_batches_are_refused() -> None:
    schedule = continuous()
    pool = schedule.deployment.pools[0]
    two = replace(schedule.deployment, pools=(
        replace(pool, role="encode"), replace(pool, role="decode")))
    with pytest.raises(XgptError, match="handed from a pool"):
        of("vllm", schedule.changed(estimate=replace(schedule.estimate, deployment=two)))
    static = schedule.changed(estimate=replace(
        schedule.estimate, controls=replace(schedule.estimate.controls, policy="ft")))
    with pytest.raises(XgptError, match="until its longest query is done"):
        of("sglang", static)
