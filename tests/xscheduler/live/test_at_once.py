"""Quick changes after steps have become slower: smaller batches, by a few replays, before a full
plan."""

import math
from typing import Any, NamedTuple

import pytest
from problems import estimate_of, roofline_of, schedule_of, timing_of, toy_problem
from watched_jobs import session_of

from xgpt.app.opened_job import OpenedJob
from xgpt.app.schedule import plan_job
from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import max_in_system
from xgpt.core.schedule import Estimate, Schedule
from xprofiler.profile_timing import Factor, Retimed
from xscheduler.evaluator import Evaluator
from xscheduler.live.allowance import LEAST, Allowance, AllowanceEvidence, LatencyCounts
from xscheduler.live.decisions import Decider, FollowedRun
from xscheduler.live.evidence import StepTimeEvidence
from xscheduler.live.observations import LEAST_QUERIES
from xscheduler.live.quick_change import FollowUpEvidence, revise_quickly
from xscheduler.live.reschedule import revise
from xscheduler.live.step_monitor import StepDrift


class Planned(NamedTuple):
    session: OpenedJob
    schedule: Schedule

    def decider(self) -> Decider:
        return Decider(FollowedRun(
            problem=self.session.problem, schedule=self.schedule, threshold=None,
            is_observing=False, slots=400, longest=200, step_threshold=0.15),
            timing_of(self.session))

    def latency_s(self, schedule: Schedule, factor: float) -> float:
        slow = Retimed(timing_of(self.session), _factors(factor))
        return Evaluator(self.session.problem, slow).shown(schedule.estimate).figures.latency_s


@pytest.fixture(scope="module", params=[
    "rra, encode_chunk: 0", *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "rra", "waa-c", "sarathi"))])
def planned(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xsimulator.replay.prediction.CHECKED_QUERIES", 1500)
        session = session_of(tmp_path_factory.mktemp("job"), bound="6",
                             schedule=f"policy: {request.param}")
        return Planned(session, plan_job(session, timing_of(session)).schedule)


def _factors(factor: float) -> dict[str, Factor]:
    return {"encode": Factor(500.0, factor), "decode": Factor(10.0, factor)}


def _slower(factor: float, before: float = 1.0) -> StepTimeEvidence:
    factors = _factors(factor)
    return StepTimeEvidence(done=500, left=2500, drift=StepDrift(
        before=dict.fromkeys(factors, before), now=factors, planned=factors,
        stages=dict.fromkeys(factors, 0), steps=16))


def test_smaller_batches_keep_the_bound(planned):
    decider, look = planned.decider(), _slower(1.4)
    limit_s = planned.session.problem.constraint.latency_s
    assert planned.latency_s(planned.schedule, 1.4) > limit_s, "else there is nothing to do"
    decision = decider.decide_quickly(look)
    assert decision is not None and decision.schedule is not None and decision.is_kept
    now, old = decision.schedule.estimate, planned.schedule.estimate
    assert planned.latency_s(decision.schedule, 1.4) <= limit_s / planned.schedule.margin.factor
    assert now.deployment.stages == old.deployment.stages
    assert now.figures.decode_batch < old.figures.decode_batch
    assert max_in_system(now.controls) <= max_in_system(old.controls), "within the caches"
    assert max(now.figures.memory_bytes) <= now.figures.memory_capacity_bytes
    # it is said as others are, and then all is planned
    assert decision.record["cause"] == "step times" and decision.record["choice"] == "adjust"
    assert decision.record["revision"] == 1 and decision.record["search_s"] >= 0
    assert "best of a few simulated schedules" in decision.sentence
    assert decider.carry_out(look, decision) and decider.running is decision.schedule
    follow_up = decision.follow_up
    assert isinstance(follow_up, FollowUpEvidence) and decider.decide_quickly(follow_up) is None
    whole = decider.decide(follow_up)
    assert whole.record["follows"] == "a change at once" and whole.follow_up is None
    assert whole.record["cause"] == "step times"
    assert decider.carry_out(follow_up, whole)
    assert decider.revision == 1 + (whole.schedule is not None)
    assert planned.latency_s(decider.running, 1.4) <= limit_s


def test_without_late_requests_there_is_no_quick_change(planned):
    decider = planned.decider()
    assert decider.decide_quickly(_slower(0.7)) is None, "quicker: that can wait for a plan"
    assert decider.decide_quickly(_slower(1.0)) is None, "what runs keeps the bound"


def test_late_requests_lead_to_a_quick_change(planned):
    """After the change that slower steps led to, more requests exceed the limit than planned."""
    decider, look = planned.decider(), _slower(1.4)
    decision = decider.decide_quickly(look)
    assert decision is not None and decider.carry_out(look, decision)
    lost = AllowanceEvidence(counts=LatencyCounts(0, 600, 5), left=2400, share=0.01, planned=0.01,
                             is_lost=True)
    assert decider.decide_quickly(lost) is None, "no less may be over it than was planned for"


# --- within the caches ------------------------------------------------------------------------


SHORTER = (5, 2, 12)
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "waa": ("waa-c", {"encode_batch": 4, "decode_micro_batches": 2}),
    "waa in chunks": ("waa-c", {"encode_batch": 4, "decode_micro_batches": 2, "encode_chunk": 24}),
    "orca": ("orca", {"max_active": 24}),
    "vllm": ("vllm", {"max_active": 24, "token_budget": 200}),
    "sarathi": ("sarathi", {"max_active": 24, "token_budget": 60}),
}


def began_of(name: str) -> Estimate:
    policy, variables = RUNS[name]
    return estimate_of(toy_problem(), policy, **variables)


def assert_is_within(now: Estimate, began: Estimate) -> None:
    assert now.deployment == began.deployment, "stages, groups and KV tokens"
    assert max_in_system(now.controls) <= max_in_system(began.controls)
    for name in ("encode_batch", "token_budget"):
        if (most := getattr(began.controls, name, None)) is not None:
            assert getattr(now.controls, name) <= most
    if hasattr(began.controls, "encode_chunk"):
        assert now.controls.encode_chunk == began.controls.encode_chunk  # type: ignore[union-attr]
    assert now.figures.memory_bytes == began.figures.memory_bytes


@pytest.mark.parametrize("name", RUNS)
def test_limits_only_fall(name):
    """Shorter outputs leave room that the caches were not made for."""
    began, problem = began_of(name), toy_problem(outputs=SHORTER)
    found = revise(schedule_of(problem, began), problem, roofline_of(problem), initial=began)
    if found.estimate is not None:
        assert_is_within(found.estimate, began)
    assert found.keep.estimate is not None and found.is_kept
    assert_is_within(found.keep.estimate, began)


@pytest.mark.parametrize("name", RUNS)
def test_a_tight_limit_is_kept_by_smaller_batches(name):
    began, free = began_of(name), toy_problem()
    keep = revise(schedule_of(free, began), free, roofline_of(free), initial=began).keep
    assert keep.estimate is not None
    problem = toy_problem(latency_s=0.93 * keep.estimate.figures.latency_s)
    for revised in (revise, revise_quickly):
        given: dict[str, Any] = {"most_present": None} if revised is revise_quickly else {}
        found = revised(schedule_of(problem, began), problem, roofline_of(problem), initial=began,
                        **given)
        assert found is not None and found.estimate is not None and found.keep.qps == 0
        assert found.keep.reason is not None and found.keep.reason.startswith("latency would be ")
        assert_is_within(found.estimate, began)
        assert found.estimate.figures.latency_s <= problem.constraint.latency_s
    # and back again, no further than the caches of the beginning
    back = revise(schedule_of(free, found.estimate), free, roofline_of(free), initial=began)
    assert back.estimate is not None
    assert_is_within(back.estimate, began)
    assert back.estimate.figures.throughput_qps >= 0.98 * keep.qps


@pytest.mark.parametrize("chunk", [0, 50])
def test_rra_admits_no_more_requests_than_its_caches_hold(chunk):
    problem = toy_problem(outputs=SHORTER)
    now = estimate_of(toy_problem(), encode_batch=8, decode_iterations=8, encode_chunk=chunk)
    free, held = (revise(schedule_of(problem, now), problem, roofline_of(problem),
                         most_present=most).estimate for most in (None, 60))
    assert free is not None and held is not None
    assert held.figures.decode_batch <= 60.5 < free.figures.decode_batch
    for found in (free, held):
        assert found.deployment.stages == now.deployment.stages
        assert found.deployment.num_groups == now.deployment.num_groups
        assert (found.controls.encode_chunk > 0) == (chunk > 0)  # type: ignore[union-attr]
        assert found.figures.fits


# --- what is left of a bound on a share -------------------------------------------------------


OWN = latency_constraint(10.0, kind="queries", quantile=0.95)


@pytest.mark.parametrize(("kept", "share"), [
    # what is left of what the whole job may have, and never more than was asked for
    (None, 0.05), (LatencyCounts(0, 400, 32), 18 / 600), (LatencyCounts(0, 400, 2), 0.05),
    # where nobody knows what was over it of 500 requests of an earlier run: of its own 500 alone
    (LatencyCounts(500, 100, 9), 16 / 400),
    # a plan for less is hopeless; and nothing saves a bound that is lost
    (LatencyCounts(0, 400, 49), LEAST * 0.05), (LatencyCounts(0, 400, 50), LEAST * 0.05),
    (LatencyCounts(0, 400, 51), 0.05),
    # requests that failed are none of those that may be late
    (LatencyCounts(0, 400, 22, failed=300), 13 / 300)], ids=str)
def test_the_allowance_left_is_that_of_the_whole_job(kept, share):
    own = Allowance(OWN, 1000)
    assert own.share(kept) == pytest.approx(share)
    left = own.constrained(OWN, kept)
    assert left.quantile == pytest.approx(1 - share) and left.latency_s == OWN.latency_s


def test_a_lost_limit_is_reported_once():
    own = Allowance(OWN, 1000)
    failed = own.evidence(LatencyCounts(0, 400, 36, failed=300))
    assert failed is not None and failed.is_lost and failed.left == 300
    lost = own.evidence(LatencyCounts(0, 400, 60))
    assert lost is not None and lost.is_lost
    assert lost.sentence.startswith("60 of 400 requests exceeded the latency limit: the job as a")
    own.accept(lost.counts)
    assert own.evidence(LatencyCounts(0, 900, 300)) is None


def test_evidence_comes_when_less_allowance_is_left_than_planned():
    own = Allowance(OWN, 1000)
    assert own.evidence(None) is None
    assert own.evidence(LatencyCounts(0, LEAST_QUERIES - 1, 40)) is None, "too few"
    assert own.evidence(LatencyCounts(0, 200, 15)) is None, "35 of 800 is about as much"
    found = own.evidence(LatencyCounts(0, 300, 24))
    assert found is not None and found.share == pytest.approx(26 / 700)
    assert (found.done, found.left) == (300, 700)
    assert found.sentence == ("24 of 300 requests exceeded the latency limit: 3.7% of the "
                              "remaining ones may (planned: 5.0%)")
    own.accept(found.counts)
    assert own.evidence(LatencyCounts(0, 320, 30)) is None, "it has only just been planned"
    assert own.evidence(LatencyCounts(0, 400, 28)) is None, "as planned"
    worse = own.evidence(LatencyCounts(0, 400, 33))
    assert worse is not None and worse.planned == pytest.approx(found.share)
    own = Allowance(OWN, 1000)
    own.accept(LatencyCounts(0, 400, 38))  # 2 % are left
    assert own.evidence(LatencyCounts(0, 600, 39)) is None
    back = own.evidence(LatencyCounts(0, 700, 39))
    assert back is not None and back.share == pytest.approx(11 / 300), "what came back is given"


@pytest.mark.parametrize("constraint", [
    latency_constraint(10.0, kind="sequence", quantile=0.95),
    latency_constraint(math.inf, kind="queries", quantile=0.95)])
def test_other_limits_have_no_allowance(constraint):
    own = Allowance(constraint, 1000)  # type: ignore[arg-type]
    assert own.evidence(LatencyCounts(0, 400, 300)) is None
    assert own.constrained(constraint, LatencyCounts(0, 400, 300)) is constraint  # type: ignore[arg-type]
