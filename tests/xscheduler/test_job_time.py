"""The schedule of a short job is what answers it soonest, within the same bound."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from problems import timing_of

from xgpt.app.opened import OpenedJob, open_file
from xgpt.app.plan import executable, plan_job
from xgpt.core.schedule import Schedule, Status
from xgpt.core.schedule_file import load_schedule, save_schedule
from xgpt.report.table import schedule_table
from xscheduler.evaluator import Evaluator, predict
from xscheduler.found_schedule import SearchPlanner
from xscheduler.job_time import SHORT, WORTH, _taken, for_the_job
from xscheduler.planner import Planner, PlanOptions
from xscheduler.uncertainty import Doubts, MarginParts

pytestmark = pytest.mark.usefixtures("short_replays")


def session_of(folder: Path, count: int, bound: str = "12",
               schedule: str = "policy: rra, encode_chunk: 0") -> OpenedJob:
    path = folder / "job.yaml"
    path.write_text(f"model: opt-13b\ncluster: a40-4\nworkload: {{requests: {{count: {count}}}, "
                    f"task: S}}\nconstraint: {{latency_s: {bound}}}\n"
                    f"schedule: {{{schedule}, tp_degree: 1}}\n")
    return executable(open_file(path))


def steady_of(session: OpenedJob) -> Schedule:
    return Planner(session.problem, timing_of(session), PlanOptions(horizon="steady")).plan()


def wall_s(session: OpenedJob, schedule: Schedule) -> float:
    found = predict(session.problem, timing_of(session), schedule.estimate)
    assert found is not None
    return found.wall_s


@pytest.mark.parametrize(("bound", "schedule"), [
    pytest.param("12", "policy: rra", marks=pytest.mark.slow), ("inf", "policy: waa-c"),
    ("12", "policy: ft")])
def test_a_short_job_is_done_sooner_within_the_same_bound(tmp_path: Path, bound: str,
                                                          schedule: str) -> None:
    session = session_of(tmp_path, 100, bound, schedule)
    timing = timing_of(session)
    steady, found = steady_of(session), plan_job(session, timing).schedule
    assert wall_s(session, found) <= wall_s(session, steady)
    own = Doubts(session.problem, Evaluator(session.problem, timing)).margin(found.estimate)
    assert found.figures.fits and found.figures.latency_s * own.factor <= found.bound.limit_s
    assert found.bound.limit_s == steady.bound.limit_s
    if found.estimate != steady.estimate:
        assert wall_s(session, found) <= (1 - WORTH) * wall_s(session, steady)
        assert found.figures.throughput_qps * (1 + found.proof.gap) == pytest.approx(
            found.proof.bound_qps)
        assert "this job's 100 queries" in found.explanation[0]
        assert found.rejected[0].throughput_qps == steady.estimate.figures.throughput_qps


def test_what_is_chosen_is_shown_and_kept_in_the_file(tmp_path: Path) -> None:
    session = session_of(tmp_path, 60, schedule="policy: rra, encode_chunk: 0, replicas: 1")
    found = plan_job(session, timing_of(session)).schedule
    assert found.proof.status == Status.JOB, "a job of few queries is mostly ramp and drain"
    assert Status.JOB in schedule_table(found)
    save_schedule(found, tmp_path / "schedule.json")
    assert load_schedule(tmp_path / "schedule.json") == found


def test_the_longer_of_two_jobs_keeps_the_steady_state(tmp_path: Path) -> None:
    session = session_of(tmp_path, 60)
    steady = steady_of(session)
    present = steady.estimate.figures.decode_batch + steady.estimate.figures.encode_batch
    long = replace(session, problem=replace(session.problem,
                                            num_queries=math.ceil(
        SHORT * present * steady.deployment.replicas)))
    assert for_the_job(long.problem, Evaluator(long.problem, timing_of(session)), steady,
                       []) is steady


def test_variables_that_the_job_fixes_stay(tmp_path: Path) -> None:
    fixed = "policy: rra, encode_batch: 10"
    session = session_of(tmp_path, 60, "inf", fixed)
    assert plan_job(session, timing_of(session)).schedule.estimate.figures.encode_batch == 10
    cells = SearchPlanner(session.problem, timing_of(session)).all_cells
    assert {batch for cell in cells for batch in cell.points[:, 0].tolist()} == {10}
    whole = session_of(tmp_path, 60, "inf",
                       f"{fixed}, decode_iterations: 8, encode_chunk: 0")
    cells = SearchPlanner(whole.problem, timing_of(whole)).all_cells
    assert {tuple(point) for cell in cells for point in cell.points.tolist()} == {
        (10, 8, groups, 0) for groups in {int(own) for cell in cells for own in cell.points[:, 2]}}


def test_lengths_to_be_observed_tell_nothing_of_the_jobs_time(tmp_path: Path) -> None:
    session = session_of(tmp_path, 60)
    steady = steady_of(session)
    observing = replace(session.problem, observes=True)
    evaluator = Evaluator(observing, timing_of(session))
    assert for_the_job(observing, evaluator, steady, []) is steady


def test_quicker_ones_that_break_the_bound_take_no_place(tmp_path: Path) -> None:
    session = session_of(tmp_path, 60, "5, drift: 20%", "policy: rra")
    found = plan_job(session, timing_of(session)).schedule
    own = Doubts(session.problem, Evaluator(session.problem, timing_of(session)))
    assert found.figures.latency_s * own.margin(found.estimate).factor <= 5


def test_a_steady_best_that_no_time_is_known_of_is_not_said_to_take_for_ever(
        tmp_path: Path) -> None:
    session = session_of(tmp_path, 60, "inf")
    steady = steady_of(session)
    taken = _taken(steady, steady.estimate, MarginParts(
        factor=1.0, sentence="none"), 60, 5.0, math.inf, 3)
    said = f"{taken.explanation[0]} {taken.rejected[0].reason}"
    assert "comes, with them, to sizes that the times say nothing of" in said
    assert "inf" not in said.replace("infinite", "")
