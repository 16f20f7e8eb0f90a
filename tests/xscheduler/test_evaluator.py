"""Figures of a schedule on its own stages, by formula and by replay; short jobs; cache sizes."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from problems import estimate_of, roofline_of, timing_of, toy_problem

from xgpt.app.opened_job import OpenedJob, open_file
from xgpt.app.schedule import executable, plan_job
from xgpt.core.lengths import joint_empirical, truncated_normal
from xgpt.core.problem import QueryLengths
from xgpt.core.schedule import Schedule, Status
from xgpt.core.schedule_file import load_schedule, save_schedule
from xgpt.report.table import schedule_table
from xscheduler.cache_sizing import LEAST_OBSERVING, headroom, mean_present, with_room_for
from xscheduler.evaluator import Evaluator, predict
from xscheduler.makespan import SHORT, _chosen, best_for_job
from xscheduler.margin import MarginParts, Margins
from xscheduler.planner import Planner, PlanOptions
from xscheduler.search_planner import SearchPlanner
from xscheduler.space import LEAST_GAIN
from xsimulator.memory import least_weight_bytes


def evaluator(**given) -> Evaluator:
    problem = toy_problem(**given)
    return Evaluator(problem, roofline_of(problem))


@pytest.mark.parametrize("policy", ["rra", "waa-c"])
def test_a_schedule_keeps_its_stages_under_other_lengths(policy):
    own = evaluator()
    variables = {"decode_iterations": 4} if policy == "rra" else {"decode_micro_batches": 2}
    estimate = estimate_of(own.problem, policy, encode_batch=4, **variables)
    assert own.seconds(estimate, "latency") == pytest.approx(estimate.figures.latency_s)
    assert own.seconds(estimate, "ttft") == pytest.approx(estimate.figures.ttft_s)
    assert own.seconds(estimate, "makespan") == pytest.approx(1 / estimate.figures.throughput_qps)
    longer = Evaluator(replace(own.problem, lengths=replace(
        own.problem.lengths, outputs=truncated_normal(15, 4, 20))), own.timing)
    assert longer.seconds(estimate, "latency") > own.seconds(estimate, "latency")
    before, after = own.shown(estimate), longer.shown(estimate)
    assert after.figures.latency_s > before.figures.latency_s
    for shown in (before, after):
        assert (shown.controls, shown.deployment) == (estimate.controls, estimate.deployment)
    for name in ("throughput_qps", "latency_s"):  # within the formulas' error
        assert getattr(before.figures, name) == pytest.approx(
            getattr(estimate.figures, name), rel=0.15)


def test_replicas_answer_as_many_times_the_requests_of_one():
    own = evaluator(per_node=2)
    estimate = estimate_of(own.problem, encode_batch=4, decode_iterations=4)
    one = own.shown(estimate).figures
    four = Evaluator(toy_problem(nodes=4, per_node=2), own.timing)
    shown = four.shown(estimate.in_copies(4)).figures
    assert shown.throughput_qps == pytest.approx(4 * one.throughput_qps)
    assert shown.latency_s == pytest.approx(one.latency_s)


def test_the_same_question_has_the_same_answer():
    first, second = evaluator(num_queries=30), evaluator(num_queries=30)
    estimate = estimate_of(first.problem, encode_batch=4, decode_iterations=4)
    assert first.shown(estimate) == second.shown(estimate)
    assert first.job(estimate, 2) == first.job(estimate, 2) == second.job(estimate, 2)


def test_outputs_that_are_to_be_observed_are_predicted_each_at_its_own_cap():
    """If caps were drawn at random, the one long output would be cut at another's cap."""
    caps = np.array([2] * 13 + [18])
    inputs = np.full(len(caps), 8)
    problem = toy_problem(num_queries=len(caps))
    problem = replace(problem, observes=True,
                      lengths=joint_empirical(np.stack([inputs, caps], axis=1)),
                      queries=QueryLengths(inputs=inputs, most_outputs=caps))
    estimate = estimate_of(problem, encode_batch=4, decode_iterations=4)
    predicted = predict(problem, roofline_of(problem), estimate)
    assert predicted is not None
    assert predicted.output_tokens_per_s * predicted.wall_s == pytest.approx(caps.sum())


def test_another_engines_start_and_a_nodes_reading_are_before_the_job():
    problem = toy_problem(num_queries=8)
    timing, estimate = roofline_of(problem), estimate_of(
        problem, encode_batch=4, decode_iterations=4)
    assert predict(problem, timing, estimate).load_s is None, "of our own runner"
    timing.facts = replace(timing.facts, start_s={1: 9.0})
    read_s = least_weight_bytes(problem) / problem.cluster.ssd_bytes_per_s
    assert predict(problem, timing, estimate).load_s == 9.0 + read_s > 9.0


def test_replicas_are_predicted_one_by_one_and_together_do_the_job():
    outputs = np.tile([20, 4, 12, 8], 25)
    problem = toy_problem(nodes=4, per_node=2, num_queries=100)
    problem = replace(problem, queries=QueryLengths(
        inputs=np.full(100, 10), most_outputs=outputs, outputs=outputs))
    timing, one = roofline_of(problem), estimate_of(
        toy_problem(per_node=2), encode_batch=4, decode_iterations=4)
    predicted = predict(problem, timing, one.in_copies(4))
    assert len(predicted.replicas) == 4
    assert sum(own["queries"] for own in predicted.replicas) == 100
    assert sum(own["output_tokens"] for own in predicted.replicas) == outputs.sum()
    assert max(own["wall_s"] for own in predicted.replicas) == pytest.approx(predicted.wall_s)
    own = predicted.replicas[3]
    assert own["output_tokens_per_s"] == pytest.approx(own["output_tokens"] / own["wall_s"])
    assert predict(problem, timing, one).replicas == [], "one replica is the job"


# --- short jobs -------------------------------------------------------------------------------


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
def test_a_short_job_is_done_sooner_within_the_same_bound(tmp_path, bound, schedule):
    session = session_of(tmp_path, 100, bound, schedule)
    timing = timing_of(session)
    steady, found = steady_of(session), plan_job(session, timing).schedule
    assert wall_s(session, found) <= wall_s(session, steady)
    own = Margins(session.problem, Evaluator(session.problem, timing)).margin(found.estimate)
    assert found.figures.fits and found.figures.latency_s * own.factor <= found.bound.limit_s
    assert found.bound.limit_s == steady.bound.limit_s
    if found.estimate != steady.estimate:
        assert wall_s(session, found) <= (1 - LEAST_GAIN) * wall_s(session, steady)
        assert found.figures.throughput_qps * (1 + found.proof.gap) == pytest.approx(
            found.proof.bound_qps)
        assert "this job's 100 requests" in found.explanation[0]
        assert found.rejected[0].throughput_qps == steady.estimate.figures.throughput_qps


def test_the_chosen_schedule_is_shown_and_saved(tmp_path):
    session = session_of(tmp_path, 60, schedule="policy: rra, encode_chunk: 0, replicas: 1")
    found = plan_job(session, timing_of(session)).schedule
    assert found.proof.status == Status.JOB, "a job of few queries is mostly ramp and drain"
    assert Status.JOB in schedule_table(found)
    save_schedule(found, tmp_path / "schedule.json")
    assert load_schedule(tmp_path / "schedule.json") == found


def test_the_longer_of_two_jobs_and_one_to_be_observed_keep_the_steady_state(tmp_path):
    session = session_of(tmp_path, 60)
    steady = steady_of(session)
    present = steady.estimate.figures.decode_batch + steady.estimate.figures.encode_batch
    count = math.ceil(SHORT * present * steady.deployment.replicas)
    for change in ({"num_queries": count}, {"observes": True}):
        problem = replace(session.problem, **change)
        assert best_for_job(problem, Evaluator(problem, timing_of(session)), steady, []) is steady


def test_variables_that_the_job_fixes_stay(tmp_path):
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


def test_unknown_step_times_are_named_and_not_shown_as_infinite(tmp_path):
    session = session_of(tmp_path, 60, "inf")
    steady = steady_of(session)
    taken = _chosen(steady, steady.estimate, MarginParts(
        factor=1.0, sentence="none"), 60, 5.0, math.inf, 3)
    said = f"{taken.explanation[0]} {taken.rejected[0].reason}"
    assert "would need step times of sizes that were not measured" in said
    assert "inf" not in said.replace("infinite", "")


# --- room -------------------------------------------------------------------------------------


@pytest.fixture
def session(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("model: opt-13b\ncluster: a40-4\n"
                    "workload: {requests: {count: 2000}, task: S}\n"
                    "schedule: {encode_batch: 16, decode_iterations: 8}\n")
    return open_file(path)


def test_room_is_made_in_every_group_and_counted(session):
    schedule = plan_job(session, timing_of(session)).schedule
    before = schedule.estimate
    tokens = before.deployment.kv_tokens // before.deployment.num_groups + 100
    after = with_room_for(schedule, session.problem, tokens).estimate
    assert after.deployment.kv_tokens == tokens * before.deployment.num_groups
    added = after.deployment.kv_tokens - before.deployment.kv_tokens
    for stage in before.deployment.stages:
        for rank in stage.ranks:
            grown = after.figures.memory_bytes[rank] - before.figures.memory_bytes[rank]
            assert grown == added * stage.num_layers * 2 * 5120 * 2 // stage.tp_degree
    assert with_room_for(schedule, session.problem, 10) == schedule
    assert with_room_for(schedule, session.problem, 10**7) == schedule, "what cannot fit is left"
    assert after.changed(kv_tokens=before.deployment.kv_tokens,
                         memory_bytes=before.figures.memory_bytes) == before


def test_caps_leave_more_headroom_than_is_asked_at_least_where_outputs_may_be_short():
    problem = toy_problem(outputs=(190, 5, 200), memory=2e9)
    estimate = estimate_of(problem, encode_batch=1, decode_iterations=199)
    times = headroom(estimate, problem, roofline_of(problem))
    assert LEAST_OBSERVING < times < math.inf
    at_work = estimate_of(problem, encode_batch=24, decode_iterations=199)
    assert LEAST_OBSERVING <= headroom(at_work, problem, roofline_of(problem)) < times
    tight = toy_problem(outputs=(190, 5, 200), memory=2e9, latency_s=1e-9)
    assert math.isinf(headroom(estimate, tight, roofline_of(tight))), "not even short ones tell"


@pytest.mark.parametrize("slots", [1, 8, 100, 2500])
def test_slots_hold_three_deviations_more_than_the_mean(slots):
    mean = mean_present(slots)
    assert mean == 1 or mean + 3 * math.sqrt(mean) <= slots < mean + 1 + 3 * math.sqrt(mean + 1)
