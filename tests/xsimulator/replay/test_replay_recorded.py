"""A run's record as the source of step times."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from problems import problem_of, roofline_of

from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import XgptError
from xgpt.core.schedule import Estimate
from xrunner.rules.steps import StepKind
from xsimulator.replay.job import Replayer, planned_queries
from xsimulator.replay.recordings import load_recordings
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.step_clock import ScaledClock, StepClocks
from xsimulator.rough.formulas import fixed_estimate

QUERIES, MOST_CONTEXT = 150, 577  # tokens: task T's longest input and output, and one
PROBLEM = problem_of("opt-13b", "a40-4", "T")
RRA, WAA = FixedSchedule(encode_batch=12, decode_iterations=6), FixedSchedule(encode_batch=3)


def leave(folder: Path, result: ReplayResult, inputs: np.ndarray) -> None:
    """Writes the files of a run that went as `result`."""
    steps = [
        {"stage": stage, "kind": step.kind.value, "group": step.group, "phase": step.phase,
         "iteration": step.iteration, "start_s": pool.start_s[i, s], "end_s": pool.end_s[i, s],
         "queries": int(pool.encoded[i] if step.kind is StepKind.ENCODE
                        else pool.decoded[i] + pool.encoded[i]), "tokens": 0}
        for pool in result.pools for s, stage in enumerate(pool.stages)
        for i, step in enumerate(pool.steps)]
    results = [{"input_tokens": int(a), "output_tokens": int(b), "text": "one\u2028two\x85three"}
               for a, b in zip(inputs, result.output_tokens, strict=True)]
    for name, lines in (("steps.jsonl", steps), ("results.jsonl", results)):
        (folder / name).write_text("".join(
            json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    (folder / "measured.json").write_text(json.dumps(
        {"state": "done", "queries_before": 0, "wall_s": result.makespan_s}))


def made(config: FixedSchedule, folder: Path) -> tuple[Replayer, Estimate, np.ndarray]:
    """A replayer whose own step times are half of those of the run in `folder`."""
    problem, timing = PROBLEM, roofline_of(PROBLEM)
    estimate = fixed_estimate("rra" if config is RRA else "waa-c", problem, timing, config)
    inputs, outputs = problem.lengths.sample(QUERIES, np.random.default_rng(3))
    replayer, known = Replayer(problem, timing, estimate), StepClocks(problem, timing)
    slow = [ScaledClock(known.of(pool.stages, MOST_CONTEXT), [2.0] * len(pool.stages))
            for pool in estimate.deployment.pools]
    leave(folder, replayer.run(planned_queries(problem, inputs, outputs), clocks=slow), inputs)
    return replayer, estimate, inputs


@pytest.mark.parametrize("config", [RRA, WAA], ids=["rra", "waa"])
def test_recorded_times_and_lengths_give_the_runs_makespan(config, tmp_path):
    replayer, estimate, inputs = made(config, tmp_path)
    (recording,) = load_recordings(tmp_path, estimate.deployment)
    assert recording.inputs.tolist() == inputs.tolist()
    queries = planned_queries(PROBLEM, recording.inputs, recording.outputs)
    clocks = recording.clocks()
    timed = replayer.run(queries, clocks=clocks)
    plain = replayer.run(queries)
    assert plain.makespan_s < 0.7 * recording.wall_s
    if config is RRA:
        assert timed.makespan_s == pytest.approx(recording.wall_s, rel=1e-9)
        assert all(clock.num_matched == clock.num_steps for clock in clocks)
    else:  # the handover is the replayer's own, so that a batch may join a step earlier
        assert timed.makespan_s == pytest.approx(recording.wall_s, rel=0.05)


def test_a_record_that_is_not_whole_is_refused(tmp_path):
    _, estimate, _ = made(RRA, tmp_path)
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    (tmp_path / "steps.jsonl").write_text("\n".join(lines[:-3]) + "\n")
    with pytest.raises(XgptError, match="every step"):
        load_recordings(tmp_path, estimate.deployment)
    (tmp_path / "measured.json").write_text(json.dumps(
        {"state": "stopped", "queries_before": 0, "wall_s": 1.0}))
    with pytest.raises(XgptError, match="whole run"):
        load_recordings(tmp_path, estimate.deployment)


def test_a_kind_of_step_that_the_run_never_took_is_named(tmp_path):
    replayer, estimate, inputs = made(RRA, tmp_path)
    (recording,) = load_recordings(tmp_path, estimate.deployment)
    only_encodes = replace(recording, pools=tuple(
        tuple(step for step in pool if step.kind == "encode") for pool in recording.pools))
    queries = planned_queries(PROBLEM, inputs, recording.outputs)
    with pytest.raises(XgptError, match="'decode'"):
        replayer.run(queries, clocks=only_encodes.clocks())


def test_each_replica_has_a_record_of_its_own(tmp_path):
    """Every second request by the second replica, whose stages are numbered after those of the
    first."""
    timing = roofline_of(PROBLEM)
    estimate = fixed_estimate("rra", PROBLEM, timing, RRA)
    replayer, lines = Replayer(PROBLEM, timing, estimate), []
    inputs, outputs = PROBLEM.lengths.sample(QUERIES, np.random.default_rng(3))
    results: dict[int, dict[str, float]] = {}
    runs = []
    for replica in (0, 1):
        runs.append(replayer.run(planned_queries(PROBLEM, inputs[replica::2], outputs[replica::2])))
        leave(tmp_path, runs[-1], inputs[replica::2])
        first = replica * len(estimate.deployment.stages)
        lines += [{**step, "stage": step["stage"] + first} for step in read(tmp_path, "steps")]
        for place, (line, start_s) in enumerate(zip(
                read(tmp_path, "results"), runs[-1].times.start_s.tolist(), strict=True)):
            results[2 * place + replica] = {
                **line, "replica": replica, "encode_start_s": start_s}
    for name, rows in (("steps", lines), ("results", [results[i] for i in range(QUERIES)])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recordings = load_recordings(tmp_path, estimate.in_copies(2).deployment)
    for replica, (recording, run) in enumerate(zip(recordings, runs, strict=True)):
        assert recording.queries.tolist() == list(range(replica, QUERIES, 2))
        assert recording.inputs.tolist() == inputs[replica::2].tolist()
        timed = replayer.run(planned_queries(PROBLEM, recording.inputs, recording.outputs),
                             clocks=recording.clocks())
        assert timed.makespan_s == pytest.approx(run.makespan_s, rel=1e-9)


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text("utf-8").split("\n")
            if line]


@pytest.mark.parametrize("line", [
    {"index": 3, "input_tokens": 5, "output_tokens": 0, "error": "no numbers"},
    {"custom_id": "a", "response": None, "error": {"code": "no_answer", "message": "no numbers"},
     "xgpt": {"index": 3, "output_ids": []}}])
def test_a_run_with_a_failed_request_is_no_source_of_times(tmp_path, line):
    _, estimate, _ = made(RRA, tmp_path)
    results = tmp_path / "results.jsonl"
    lines = results.read_text(encoding="utf-8").split("\n")
    results.write_text("\n".join([*lines[:3], json.dumps(line), *lines[4:]]), encoding="utf-8")
    with pytest.raises(XgptError, match="request 3 failed"):
        load_recordings(tmp_path, estimate.deployment)
