"""What the launcher makes of the output lengths it sees: when it plans anew, what it hands to the
run, and what it says. No ranks: a replay stands for them."""

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from problems import timing_of
from watched_jobs import follow, outputs_of, session_of, write_state

from xgpt.app.opened import OpenedJob
from xgpt.app.running.follow import rescheduler_of
from xgpt.app.schedule import plan_job
from xgpt.core.problem import QueryLengths
from xgpt.core.schedule import Estimate, Schedule
from xrunner.files.launcher_link import OBSERVED_FILE, load_change_order
from xrunner.rules.rra import most_active
from xscheduler.room import slots_for

PLANNED_MEAN = 30.0


def latency_s(session: OpenedJob, schedule: Schedule, lengths: Sequence[int]) -> float:
    """Of the bound's quantile, in a replay of the lengths there really are."""
    from xsimulator.replay.job import replay_job

    own = np.array(lengths)
    inputs = np.resize(session.problem.queries.inputs, len(own))
    result = replay_job(session.problem, timing_of(session), schedule.estimate, QueryLengths(
        inputs=inputs, outputs=own, most_outputs=np.full(len(own), 200)))
    long = own >= np.quantile(own, 0.985)
    return float(np.median(result.latency_s[long & (np.arange(len(own)) > 500)]))


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    session = session_of(tmp_path_factory.mktemp("job"))
    return session, plan_job(session, timing_of(session)).schedule


def test_as_planned_nothing_happens(planned):
    session, schedule = planned
    own = follow(session, schedule)
    assert own.update() is False, "the run has written nothing yet"
    for phases in (2, 6, 12, 20):
        write_state(session, session.problem.lengths.outputs.sample(
            3000, np.random.default_rng(phases)).tolist(), phases=phases)
        assert own.update() is False
    assert not own.decisions and load_change_order(session.job.output) is None


@pytest.mark.parametrize("mean", [45.0, pytest.param(18.0, marks=pytest.mark.slow)])
def test_other_lengths_change_batches_and_iterations_and_the_bound_is_kept(planned, mean):
    session, schedule = planned
    (session.job.output / "adjust.json").unlink(missing_ok=True)
    lengths = outputs_of(mean)
    own = follow(session, schedule)
    write_state(session, lengths, phases=3)
    assert own.update() is False, "too few are done"
    write_state(session, lengths)
    assert own.update() is True
    (found,) = own.decisions
    assert found.record["choice"] == "adjust" and found.schedule is not None
    assert found.record["cause"] == "drift"
    assert found.record["mean_output_tokens"]["observed"] == pytest.approx(mean, rel=0.06)
    before, after = schedule.estimate, found.schedule.estimate
    assert f"mean {session.problem.lengths.outputs.mean:.3g} -> " in found.sentence
    assert (
        f"encode_batch {before.figures.encode_batch} -> {after.figures.encode_batch}"
        in found.sentence
    )
    assert (after.deployment.stages, after.deployment.num_groups) == (before.deployment.stages,
                                                          before.deployment.num_groups)
    limit_s = session.problem.constraint.latency_s
    assert latency_s(session, found.schedule, lengths) <= 1.02 * limit_s
    if mean > PLANNED_MEAN:
        assert latency_s(session, schedule, lengths) > 1.02 * limit_s, "else why change"
    else:
        assert found.record["throughput_qps"]["after"] > 1.02 * (
            found.record["throughput_qps"]["before"])
    told = load_change_order(session.job.output)
    assert told is not None and told.revision == 1
    assert (told.controls.encode_batch, told.controls.decode_iterations) == (
        after.figures.encode_batch,
        after.figures.decode_iterations,
    )
    assert told.controls.group_max_active <= own.slots
    assert told.controls.group_kv_tokens >= own.decider.followed.longest
    assert own.update() is False, "once"
    write_state(session, outputs_of(mean, seed=2), first=960)
    assert own.update() is False, "and not again while lengths stay what they have become"


def test_of_queries_whose_companions_are_forgotten_none_is_counted(planned):
    session, schedule = planned
    own = follow(session, schedule)
    lengths = session.problem.lengths.outputs.sample(3000, np.random.default_rng(7)).tolist()
    write_state(session, lengths, first=400, phases=20)
    path = session.job.output / OBSERVED_FILE
    state = json.loads(path.read_text())
    state["active"] += [(query, 30, 60) for query in range(300)]
    path.write_text(json.dumps(state))
    assert own.update() is False
    path.write_text(json.dumps({**state, "first": 0}))
    assert own.update() is True, "which would have been drift"


def test_nothing_is_changed_for_the_end_of_a_job(planned):
    session, schedule = planned
    own = follow(session, schedule, num_queries=1000)
    write_state(session, outputs_of(45))  # 960 of them admitted
    assert own.update() is False and not own.decisions


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failing_plan_leaves_the_run_alone(planned, monkeypatch):
    session, schedule = planned
    own = follow(session, schedule)

    def fail(*_: object) -> None:
        raise RuntimeError("the plan")

    monkeypatch.setattr("xscheduler.live.decisions.revise", fail)
    write_state(session, outputs_of(45))
    assert own.update() is False and own.update() is False
    monkeypatch.undo()
    assert own.update() is False and not own.decisions, "nothing more is planned"


def test_waa_is_told_what_a_redeployment_would_bring(tmp_path):
    session = session_of(tmp_path, schedule="policy: waa-c")
    schedule = plan_job(session, timing_of(session)).schedule
    own = follow(session, schedule)
    assert own.slots == 0
    lengths = outputs_of(60)
    finished = [(i, 20 + i % 40, n) for i, n in enumerate(lengths[:400])]
    (session.job.output / OBSERVED_FILE).write_text(json.dumps(
        {"first": 0, "finished": finished, "active": []}))
    assert own.update() is True
    (found,) = own.decisions
    assert found.schedule is None and load_change_order(session.job.output) is None
    assert found.record["choice"] == "redeploy" and found.record["to"]
    assert "Ctrl-C" in found.sentence and "drifted" in found.sentence
    assert found.record["throughput_qps"]["after"] > 0
    assert own.decider.running is schedule


@pytest.mark.parametrize(("given", "is_followed"), [
    ({}, True), ({"run": "reschedule: off"}, False), ({"run": "reschedule: 20%"}, True),
    ({"count": 50}, False), ({"outputs": "observe"}, True),
    ({"outputs": "from_requests", "request": ', "forced_tokens": 9'}, True),  # its steps
    ({"outputs": "from_requests", "request": ', "forced_tokens": 9', "run": "step_times: off"},
     False),
    ({"schedule": "encode_batch: 8, decode_iterations: 4"}, False),
    ({"schedule": "encode_batch: 8"}, True)])
def test_what_is_followed(tmp_path, given, is_followed, planned):
    session = session_of(tmp_path, **given)
    found = rescheduler_of(session, timing_of(session), planned[1])
    assert (found is not None) == is_followed
    if "20%" in str(given):
        assert found is not None and found.decider.followed.threshold == pytest.approx(0.2)


def test_slots_leave_room_for_changes_within_memory_and_job(tmp_path):
    session = session_of(tmp_path, schedule="policy: rra")
    schedule = plan_job(session, timing_of(session)).schedule
    problem, estimate = session.problem, schedule.estimate

    def slots(estimate: Estimate, longest: int = 300, headroom: float = 2.0) -> int:
        return slots_for(estimate, problem, longest, headroom)

    roomy = schedule.changed(memory_capacity_bytes=10**15).estimate
    assert slots(roomy) == math.ceil(2 * most_active(estimate))
    assert slots(roomy, headroom=1e6) == math.ceil(3000 / estimate.deployment.num_groups)
    tight = schedule.changed(memory_capacity_bytes=max(estimate.figures.memory_bytes)).estimate
    assert slots(tight, longest=10**6) == most_active(estimate), "never fewer than planned"
    per_token = 2 * 5120 * 2 * max(stage.num_layers for stage in estimate.deployment.stages)
    middle = schedule.changed(memory_capacity_bytes=10**12).estimate
    found = slots(middle, headroom=1e6, longest=2000)
    held = found * estimate.deployment.num_groups * 2000 * per_token
    others = max(estimate.figures.memory_bytes) - estimate.deployment.kv_tokens * per_token
    assert found > most_active(estimate) and held <= 10**12 - 0.99 * others
