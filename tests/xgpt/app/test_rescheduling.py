"""What the launcher makes of the output lengths it sees: when it plans anew, what it hands to the
run, and what it says. No ranks: a replay stands for them."""

import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from problems import timing_of
from watched_jobs import Factors, follow, outputs_of, session_of, steps_of, tell_all, write_state

from xgpt.app.opened_job import OpenedJob
from xgpt.app.running.follow import Rescheduler, rescheduler_of
from xgpt.app.schedule import plan_job
from xgpt.core.problem import QueryLengths
from xgpt.core.schedule import Estimate, Schedule
from xprofiler.profile_timing import Factor, Retimed
from xrunner.files.launcher_link import OBSERVED_FILE, load_change_order
from xrunner.rules.rra import most_active
from xscheduler.cache_sizing import slots_for
from xscheduler.evaluator import Evaluator

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


def test_as_planned_or_at_the_end_of_a_job_nothing_happens(planned):
    session, schedule = planned
    own = follow(session, schedule)
    assert own.update() is False, "the run has written nothing yet"
    for phases in (2, 6, 12, 20):
        write_state(session, session.problem.lengths.outputs.sample(
            3000, np.random.default_rng(phases)).tolist(), phases=phases)
        assert own.update() is False
    assert not own.decisions and load_change_order(session.job.output) is None
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
    own = follow(session, schedule, num_queries=1000)
    write_state(session, outputs_of(45))  # 960 of them admitted
    assert own.update() is False and not own.decisions


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
    assert told.controls.group_max_active <= own.rooms[0].slots
    assert told.controls.group_kv_tokens >= own.decider.followed.longest
    assert own.update() is False, "once"
    write_state(session, outputs_of(mean, seed=2), first=960)
    assert own.update() is False, "and not again while lengths stay what they have become"


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
    session = session_of(tmp_path, schedule="policy: waa-c, encode_chunk: 0")
    schedule = plan_job(session, timing_of(session)).schedule
    own = follow(session, schedule)
    assert own.rooms[0].slots == 0
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


# What the launcher makes of steps that take other times than planned: when it plans anew, what it
# hands to the run, and what it says.
# No ranks: steps are told of as ranks tell of them, each as long as the profile says times a
# factor.


Planned = tuple[OpenedJob, Schedule]
# by policy; in chunks a plan takes ten times as long
SCHEDULES = {"rra": "policy: rra, encode_chunk: 0", "rra in chunks": "policy: rra",
             "waa-c": "policy: waa-c", "sarathi": "policy: sarathi"}


@pytest.fixture(scope="module", params=[
    # tests/xscheduler/live/test_slowed_runs.py has WAA
    "rra", *(pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULES if name != "rra")])
def paced(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xsimulator.replay.prediction.CHECKED_QUERIES", 1500)
        session = session_of(tmp_path_factory.mktemp("job"), schedule=SCHEDULES[request.param])
        yield session, plan_job(session, timing_of(session)).schedule


class Run:
    """A run of the schedule, and what its launcher makes of it."""

    def __init__(self, paced: Planned, **changes: object) -> None:
        self.session, self.schedule = paced
        self.output = self.session.job.output
        (self.output / "adjust.json").unlink(missing_ok=True)
        self.own: Rescheduler = follow(self.session, self.schedule, **changes)
        outputs = self.session.problem.lengths.outputs
        write_state(self.session, [round(outputs.mean)] * 3000, phases=4)
        self._now_s = 0.0

    def tell(self, factor: Factors, times: int = 3) -> list[bool]:
        steps = steps_of(self.session.problem, timing_of(self.session), self.schedule.estimate,
                         factor)
        if self.schedule.estimate.policy == "sarathi":  # one kind of step, which does both
            steps = {stage: [step for step in own if step.kind == "decode"]
                     for stage, own in steps.items()}
        began_s, self._now_s = self._now_s, self._now_s + times
        return tell_all(self.output, self.schedule.estimate, steps,
                        [began_s + 1 + i for i in range(times)], self.own.update)

    def latency_s(self, schedule: Schedule, factor: float) -> float:
        """Of a replay, with every step so many times as long."""
        slow = Retimed(timing_of(self.session), {
            kind: Factor(rows=rows, factor=factor)
            for kind, rows in (("encode", 500.0), ("decode", 10.0))})
        return Evaluator(self.session.problem, slow).shown(schedule.estimate).figures.latency_s


def test_steps_as_planned_change_nothing(paced):
    run = Run(paced)
    assert run.tell(lambda kind, stage: 1.0, times=6) == [False] * 6
    assert run.tell(lambda kind, stage: 1.1, times=6) == [False] * 6, "within the threshold"
    assert not run.own.decisions and load_change_order(run.output) is None


def test_a_slowed_run_is_planned_anew_and_keeps_its_bound(paced):
    run = Run(paced)
    assert run.tell(lambda kind, stage: 1.0) == [False] * 3
    looks = run.tell(lambda kind, stage: 1.4, times=5)
    assert sum(looks) >= 1, "steps are 40 % slower"
    first = run.own.decisions[0]
    assert first.record["cause"] == "step times" and first.record["choice"] == "adjust"
    assert first.record["step_times"]["decode"]["observed"] == pytest.approx(1.4, rel=0.05)
    assert "steps are slower than planned (" in first.sentence
    assert first.follow_up is not None and run.own.decisions[1].record["follows"]
    found = next(own for own in reversed(run.own.decisions) if own.schedule is not None)
    assert found.schedule is not None and first.schedule is not None
    assert run.latency_s(first.schedule, 1.4) <= found.schedule.bound.limit_s
    limit_s = run.session.problem.constraint.latency_s
    assert run.latency_s(run.schedule, 1.4) > limit_s, "else why change"
    assert run.latency_s(found.schedule, 1.4) <= limit_s
    now, old = found.schedule.estimate, run.schedule.estimate
    assert (now.deployment.stages, now.deployment.num_groups) == (
        old.deployment.stages, old.deployment.num_groups)
    told = load_change_order(run.output)
    assert told is not None and told.revision == run.own.decider.revision
    for name in ("max_in_system", "max_active"):  # within the caches there are
        if (most := getattr(old.controls, name, None)) is not None:
            assert getattr(told.controls, name) < most
    count = len(run.own.decisions)
    assert run.tell(lambda kind, stage: 1.4, times=4) == [False] * 4, "that is known now"
    # what slowed it has gone: back up, and no further than the caches of the beginning
    assert any(run.tell(lambda kind, stage: 1.0, times=20))
    back = run.own.decisions[-1]
    assert len(run.own.decisions) > count and "steps are quicker" in back.sentence
    assert back.schedule.figures.throughput_qps > found.schedule.figures.throughput_qps
    assert run.latency_s(back.schedule, 1.0) <= limit_s


def test_what_is_slowed_in_pulses_takes_as_long_as_its_mean_step(paced):
    """One step in six takes four times as long, as where a quota stops a container: the median has
    not moved."""
    run = Run(paced)
    counts: dict[tuple[str, int], int] = {}

    def pulsed(kind: str, stage: int) -> float:
        counts[kind, stage] = counts.get((kind, stage), 0) + 1
        return 4.0 if counts[kind, stage] % 6 == 3 else 1.0

    assert any(run.tell(pulsed, times=6))
    found = run.own.decisions[0]
    assert found.record["step_times"]["decode"]["observed"] == pytest.approx(1.5, rel=0.08)
    count = len(run.own.decisions)
    assert not any(run.tell(pulsed, times=8)) and len(run.own.decisions) == count


def test_switched_off(paced, tmp_path):
    schedule = paced[1]
    session = session_of(tmp_path, run="step_times: off")
    assert follow(session, schedule).decider.step_monitor is None
    for key in ("reschedule: off", "reschedule: off, step_times: 20%"):
        session = session_of(tmp_path, run=key)
        assert rescheduler_of(session, timing_of(session), schedule) is None
    session = session_of(tmp_path, run="step_times: 30%")
    pace = follow(session, schedule).decider.step_monitor
    assert pace is not None and pace._threshold == 0.3


def test_steps_are_watched_where_lengths_are_known(tmp_path):
    session = session_of(tmp_path, outputs="from_requests", request=', "forced_tokens": 30')
    schedule = plan_job(session, timing_of(session)).schedule
    own = follow(session, schedule)
    assert own.decider.followed.threshold is None and own.decider.step_monitor is not None
    write_state(session, [30] * 3000, phases=6)
    assert own.update() is False, "nothing to say of lengths"
