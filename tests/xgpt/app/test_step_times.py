"""What the launcher makes of steps that take other times than planned: when it plans anew, what it
hands to the run, and what it says. No ranks: steps are told of as ranks tell of them, each as long
as the profile says times a factor."""

import pytest
from problems import timing_of
from watched_jobs import Factors, follow, session_of, steps_of, tell_all, write_state

from xgpt.app.opened import OpenedJob
from xgpt.app.running.follow import Rescheduler, rescheduler_of
from xgpt.app.schedule import plan_job
from xgpt.core.schedule import Schedule
from xprofiler.profile_timing import Factor, Retimed
from xrunner.files.launcher_link import load_change_order
from xscheduler.evaluator import Evaluator

Planned = tuple[OpenedJob, Schedule]
# by policy; in chunks a plan takes ten times as long
SCHEDULES = {"rra": "policy: rra, encode_chunk: 0", "rra in chunks": "policy: rra",
             "waa-c": "policy: waa-c", "sarathi": "policy: sarathi"}


@pytest.fixture(scope="module", params=[
    # tests/xscheduler/live/test_slowed_runs.py has WAA
    "rra", *(pytest.param(name, marks=pytest.mark.slow) for name in SCHEDULES if name != "rra")])
def planned(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xsimulator.replay.predict.CHECKED_QUERIES", 1500)
        session = session_of(tmp_path_factory.mktemp("job"), schedule=SCHEDULES[request.param])
        yield session, plan_job(session, timing_of(session)).schedule


class Run:
    """A run of the schedule, and what its launcher makes of it."""

    def __init__(self, planned: Planned, **changes: object) -> None:
        self.session, self.schedule = planned
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


def test_as_planned_nothing_happens(planned):
    run = Run(planned)
    assert run.tell(lambda kind, stage: 1.0, times=6) == [False] * 6
    assert run.tell(lambda kind, stage: 1.1, times=6) == [False] * 6, "within the threshold"
    assert not run.own.decisions and load_change_order(run.output) is None


def test_a_slowed_run_is_planned_anew_and_keeps_its_bound(planned):
    run = Run(planned)
    assert run.tell(lambda kind, stage: 1.0) == [False] * 3
    looks = run.tell(lambda kind, stage: 1.4, times=5)
    assert sum(looks) >= 1, "steps are 40 % slower"
    first = run.own.decisions[0]
    assert first.record["cause"] == "step times" and first.record["choice"] == "adjust"
    assert first.record["step_times"]["decode"]["observed"] == pytest.approx(1.4, rel=0.05)
    assert "steps are slower than planned with: " in first.sentence
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


def test_what_is_slowed_in_pulses_takes_as_long_as_its_mean_step(planned):
    """One step in six takes four times as long, as where a quota stops a container: the median has
    not moved."""
    run = Run(planned)
    counts: dict[tuple[str, int], int] = {}

    def pulsed(kind: str, stage: int) -> float:
        counts[kind, stage] = counts.get((kind, stage), 0) + 1
        return 4.0 if counts[kind, stage] % 6 == 3 else 1.0

    assert any(run.tell(pulsed, times=6))
    found = run.own.decisions[0]
    assert found.record["step_times"]["decode"]["observed"] == pytest.approx(1.5, rel=0.08)
    count = len(run.own.decisions)
    assert not any(run.tell(pulsed, times=8)) and len(run.own.decisions) == count


def test_switched_off(planned, tmp_path):
    schedule = planned[1]
    session = session_of(tmp_path, run="step_times: off")
    assert follow(session, schedule).decider.pace is None
    for key in ("reschedule: off", "reschedule: off, step_times: 20%"):
        session = session_of(tmp_path, run=key)
        assert rescheduler_of(session, timing_of(session), schedule) is None
    session = session_of(tmp_path, run="step_times: 30%")
    pace = follow(session, schedule).decider.pace
    assert pace is not None and pace._threshold == 0.3


def test_steps_are_watched_where_lengths_are_known(tmp_path):
    session = session_of(tmp_path, outputs="from_requests", request=', "forced_tokens": 30')
    schedule = plan_job(session, timing_of(session)).schedule
    own = follow(session, schedule)
    assert own.decider.followed.threshold is None and own.decider.pace is not None
    write_state(session, [30] * 3000, phases=6)
    assert own.update() is False, "nothing to say of lengths"
