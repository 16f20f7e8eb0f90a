"""What the launcher makes of a run by copies of unlike sizes, each with a schedule of its own: of
what is seen of all of them together it makes other control variables for each. No ranks: states of
heads and steps are told of as they tell of them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np
import pytest
from problems import timing_of
from watched_jobs import follow, outputs_of, session_of, steps_of, write_state

from xgpt.app.opened_job import OpenedJob, open_file
from xgpt.app.running.follow import Rescheduler, decisions_with_phases
from xgpt.app.running.prepare import plan_for_ranks
from xgpt.app.schedule import job_with_times
from xgpt.app.simulate import simulate_job
from xgpt.core.controls import FixedSchedule
from xgpt.core.lengths import JointLengths, empirical
from xgpt.core.schedule import Estimate, Schedule
from xprofiler.profile_timing import Factor, Retimed
from xrunner.checkpoint.source import ModelFiles
from xrunner.files.heartbeat import HEARTBEATS, RankState
from xrunner.files.launcher_link import load_change_order
from xrunner.plan import load_plan
from xrunner.rank.world import replicas_of
from xrunner.rules.changes import ChangesByShape
from xrunner.rules.iteration import StepLimits
from xrunner.rules.rra import PhaseControls
from xscheduler.evaluator import Evaluator
from xscheduler.live.decisions import NOT_RRA
from xscheduler.live.shapes import differ
from xscheduler.planner import Planner, PlanOptions
from xscheduler.replicas import problem_of_replica, problem_on
from xsimulator.rough.formulas import fixed_estimate

DEVICES = (2, 1)  # of a copy of each shape; of the second there are two


def unlike(session: OpenedJob, *policies: str) -> Schedule:
    """A copy on two devices beside two copies on one, each planned by itself."""
    found = []
    for devices, name in zip(DEVICES, policies, strict=True):
        problem = replace(problem_on(session.problem, devices), queries=None, num_queries=None,
                          fixed=FixedSchedule(policies=(name,), replicas=1, encode_chunk=0),
                          copies=1)
        found.append(Planner(problem, timing_of(session), PlanOptions(
            horizon="steady", is_brief=True)).plan())
    two, one = found
    return replace(two, fingerprint=session.problem.fingerprint, estimate=two.estimate.one_copy
                   .beside((one.estimate.in_copies(2),)))


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xsimulator.replay.prediction.CHECKED_QUERIES", 1500)
        session = session_of(tmp_path_factory.mktemp("job"))
        return session, unlike(session, "rra", "rra")


class Run:
    """A run, and what its launcher makes of it."""

    def __init__(self, session: OpenedJob, schedule: Schedule) -> None:
        self.session, self.schedule, self.output = session, schedule, session.job.output
        (self.output / "adjust.json").unlink(missing_ok=True)
        shutil.rmtree(self.output / HEARTBEATS, ignore_errors=True)
        self.own: Rescheduler = follow(session, schedule)
        self._now_s = 0.0

    def tell(self, factor: Callable[[int], float], times: int = 4) -> list[bool]:
        """As the ranks would, were the steps of each shape so many times as long as planned."""
        (self.output / HEARTBEATS).mkdir(exist_ok=True)
        looks = []
        told = [steps_of(self.session.problem, timing_of(self.session), shape,
                         lambda kind, stage, of=place: factor(of))
                for place, shape in enumerate(self.schedule.estimate.shapes)]
        for _ in range(times):
            self._now_s += 1
            for replica in replicas_of(self.schedule.estimate):
                steps = told[replica.shape]
                for stage in replica.own.stages:
                    state = RankState(
                        rank=stage.ranks[0], stage=replica.first_stage + stage.index, pool="all",
                        elapsed_s=self._now_s, busy_s=self._now_s, recent_share=1.0, queries=1,
                        steps=tuple(steps[stage.index]), replica=replica.number)
                    (self.output / HEARTBEATS / f"{state.rank}.json").write_text(
                        json.dumps(asdict(state)))
            looks.append(self.own.update())
        return looks

    @property
    def told(self) -> tuple[object, ...]:
        order = load_change_order(self.output)
        assert order is not None and isinstance(order.controls, ChangesByShape)
        assert order.revision == self.own.decider.revision
        return order.controls.own


def latencies_s(run: Run, schedule: Schedule, mean: int = 0, factor: float = 1.0) -> list[float]:
    """Of a copy of each shape, replayed: with outputs of this length, or slowed steps."""
    problem, timing = run.session.problem, timing_of(run.session)
    if mean:
        problem = replace(problem, lengths=JointLengths(
            inputs=problem.lengths.inputs, outputs=empirical(outputs_of(mean))))
    timing = Retimed(timing, {kind: Factor(rows=rows, factor=factor) for kind, rows in (
        ("encode", 500.0), ("decode", 10.0))})
    return [Evaluator(problem_of_replica(problem, shape), timing).shown(
        shape.one_copy).figures.latency_s for shape in schedule.estimate.shapes]


class Drifted(NamedTuple):
    """A run whose outputs turn out to be of 45 tokens, and what it is told."""

    run: Run
    looks: list[bool]  # as planned; of other lengths; once more
    told: tuple[object, ...]


@pytest.fixture(scope="module")
def drifted(planned):
    run, looks = Run(*planned), []
    as_planned = run.session.problem.lengths.outputs.sample(
        3000, np.random.default_rng(16)).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xsimulator.replay.prediction.CHECKED_QUERIES", 1500)
        for lengths in (as_planned, outputs_of(45), outputs_of(45)):
            write_state(run.session, lengths)
            looks.append(run.own.update())
    return Drifted(run, looks, run.told)


def test_other_lengths_change_every_shape_within_its_caches(drifted):
    run = drifted.run
    assert drifted.looks == [False, True, False], "once, where they are not as planned"
    (found,) = run.own.decisions
    assert found.schedule is not None and found.record["choice"] == "adjust"
    assert found.record["cause"] == "drift" and "on 2 devices: " in found.record["reason"]
    now, old = found.schedule.estimate.shapes, run.schedule.estimate.shapes
    for after, before in zip(now, old, strict=True):
        assert after.controls != before.controls
        assert (after.deployment.stages, after.deployment.replicas) == (
            before.deployment.stages, before.deployment.replicas)
    assert found.schedule.figures.throughput_qps == pytest.approx(
        sum(shape.figures.throughput_qps for shape in now))
    assert found.record["throughput_qps"]["after"] == found.schedule.figures.throughput_qps
    limit_s = run.session.problem.constraint.latency_s
    assert max(latencies_s(run, run.schedule, 45)) > limit_s, "else why change"
    assert max(latencies_s(run, found.schedule, 45)) <= 1.02 * limit_s
    names = {f"encode_batch on {text}" for text in ("2 devices", "1 device")}
    assert names <= found.record["to"].keys() and "encode_batch on 1 device " in found.sentence
    for told, shape, room in zip(drifted.told, now, run.own.decider.followed.rooms, strict=True):
        assert isinstance(told, PhaseControls)
        assert told.encode_batch == shape.figures.encode_batch
        assert told.group_max_active <= room.slots
        assert told.group_kv_tokens >= run.own.decider.followed.longest


def test_slowed_steps_of_one_shape_change_its_schedule_alone(planned):
    run = Run(*planned)
    write_state(run.session, [30] * 3000, phases=4)
    assert run.tell(lambda shape: 1.0) == [False] * 4
    assert any(run.tell(lambda shape: 1.5 if shape else 1.0, times=6))
    first = run.own.decisions[0]
    assert first.record["cause"] == "step times" and first.record["choice"] == "adjust"
    assert first.record["of"] == "of replicas on 1 device"
    assert "steps of replicas on 1 device are slower than planned (" in first.sentence
    seen = first.record["step_times"]["decode"]
    assert seen["observed"] == pytest.approx(1.5, rel=0.05)
    assert seen["stage"] in range(len(run.schedule.deployment.stages), 4), "over all copies"
    found = run.own.decider.running
    limit_s = run.session.problem.constraint.latency_s
    assert latencies_s(run, run.schedule, factor=1.5)[1] > limit_s, "else why change"
    assert latencies_s(run, found, factor=1.5)[1] <= limit_s
    assert not differ(found.estimate.shapes[0], run.schedule.estimate.shapes[0])
    assert run.told[0] is None and isinstance(run.told[1], PhaseControls)
    # then the others are slowed, too: an order has both, for it may take the place of one unseen
    before = run.told[1]
    assert any(run.tell(lambda shape: 1.5, times=6))
    assert isinstance(run.told[0], PhaseControls) and run.told[1] == before
    assert run.own.decisions[-1].record["of"] == "of replicas on 2 devices"
    count = len(run.own.decisions)
    assert not any(run.tell(lambda shape: 1.5, times=4)) and len(run.own.decisions) == count


def test_lengths_change_no_shape_but_rra_s(planned):
    session, schedule = planned
    sarathi = unlike(session, "rra", "sarathi")
    run = Run(session, sarathi)
    write_state(session, outputs_of(45))
    assert run.own.update() is True
    assert isinstance(run.told[0], PhaseControls) and run.told[1] is None
    run = Run(session, sarathi)
    write_state(session, [30] * 3000, phases=4)
    run.tell(lambda shape: 1.0)
    assert any(run.tell(lambda shape: 1.4 if shape else 1.0, times=6))
    assert isinstance(run.told[1], StepLimits) and run.told[0] is None, "steps do"
    continuous = schedule.changed(estimate=sarathi.estimate.shapes[1].beside(
        (sarathi.estimate.shapes[1],)))
    run = Run(session, continuous)
    write_state(session, outputs_of(45))
    assert run.own.update() is True
    (found,) = run.own.decisions
    assert found.schedule is None and found.sentence.endswith(NOT_RRA)
    assert found.record["choice"] == "keep" and load_change_order(run.output) is None


def test_every_shape_has_room_for_its_own_changes(planned, tmp_path):
    session, schedule = planned
    own, requests = follow(session, schedule), session.requests
    first, other = own.rooms
    assert first.slots > 0 and other.slots > 0 and first.slots != other.slots
    assert requests is not None
    session = replace(session, job=replace(session.job, output=tmp_path), files=ModelFiles(
        directory=tmp_path, spec=session.problem.model, served_by="test"))
    rooms = ((other.slots, other.kv_tokens),)
    plan = replace(plan_for_ranks(session, schedule, requests), other_rooms=rooms)
    assert load_plan(plan.save()).other_rooms == rooms
    assert plan.fingerprint == replace(plan, other_rooms=()).fingerprint, "it decides no answer"


def test_a_decision_has_the_phase_of_the_first_copy_that_took_it_up(drifted):
    run = drifted.run
    taken = [{"revision": 1, "replica": 2, "phase": 9, "elapsed_s": 3.0},
             {"revision": 1, "replica": 1, "phase": 7, "elapsed_s": 2.0}]
    (row,) = decisions_with_phases(run.own.decisions, taken)
    assert (row["phase"], row["elapsed_s"]) == (7, 2.0)
    (row,) = decisions_with_phases(run.own.decisions, [
        *taken, {"revision": 1, "phase": 4, "elapsed_s": 2.5}])
    assert row["phase"] == 4


@pytest.fixture(scope="module")
def large_and_small(tmp_path_factory):
    """A large batch on two devices, of three quarters of the queries, beside a small one on one."""
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    path.write_text("model: opt-13b\nworkload: {task: S}\nconstraint: {latency_s: inf}\n"
                    "cluster: {num_nodes: 1, devices_per_node: 3, device: A40, "
                    "intra_link: pcie4-x16-p2p}\n")
    opened, timing = job_with_times(open_file(path))

    def on(devices: int, batch: int) -> Estimate:
        part = problem_on(opened.problem, devices)
        return Evaluator(part, timing).shown(fixed_estimate("rra", part, timing, FixedSchedule(
            encode_batch=batch, decode_iterations=8)).one_copy)

    return opened, timing, on(2, 24).beside((on(1, 4),))


@pytest.fixture(scope="module")
def simulated(large_and_small):
    return simulate_job(*large_and_small)


def test_all_copies_are_replayed_and_each_is_compared_with_its_own_formula(
        large_and_small, simulated):
    _, _, given = large_and_small
    figures, shapes = simulated.figures, given.shapes
    total_qps = sum(shape.figures.throughput_qps for shape in shapes)
    assert shapes[0].figures.throughput_qps < 0.9 * total_qps, "one kind alone would be told apart"
    assert figures.steady_throughput_qps == pytest.approx(total_qps, rel=0.05)
    assert figures.estimated_latency_s == pytest.approx(max(
        shape.figures.latency_s for shape in shapes), rel=0.02)
    assert figures.steady_latency_s == pytest.approx(figures.estimated_latency_s, rel=0.05)
    assert len(figures.utilisation) == 3 and min(figures.utilisation) > 0.5
    assert figures.kv_peak_tokens <= figures.kv_tokens
    assert simulated.to_dict()["replay"].estimated_latency_s == figures.estimated_latency_s
    words = " ".join(simulated.details.split())
    assert "in steady state (formula: " in words
