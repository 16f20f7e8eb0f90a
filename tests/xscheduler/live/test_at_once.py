"""A change that is found at once where steps have become slower: smaller batches, by a few replays,
before all is planned."""

from typing import NamedTuple

import pytest
from problems import timing_of
from watched_jobs import session_of

from xgpt.app.opened import OpenedJob
from xgpt.app.plan import plan_job
from xgpt.core.controls import max_in_system
from xgpt.core.schedule import Schedule
from xprofiler.retimed import Factor, Retimed
from xscheduler.evaluator import Evaluator
from xscheduler.live.allowance import Kept, KeptLook
from xscheduler.live.at_once import WholeLook
from xscheduler.live.decisions import Decider, Followed
from xscheduler.live.pace import PaceDrift
from xscheduler.live.slowed import StepLook


class Planned(NamedTuple):
    session: OpenedJob
    schedule: Schedule

    def decider(self) -> Decider:
        return Decider(Followed(
            problem=self.session.problem, schedule=self.schedule, threshold=None,
            is_observing=False, slots=400, longest=200, step_threshold=0.15),
            timing_of(self.session))

    def latency_s(self, schedule: Schedule, factor: float) -> float:
        slow = Retimed(timing_of(self.session), _factors(factor))
        return Evaluator(self.session.problem, slow).shown(schedule.estimate).figures.latency_s


@pytest.fixture(scope="module", params=[
    "rra, encode_chunk: 0", *(pytest.param(name, marks=pytest.mark.slow) for name in (
        "rra", "waa-c", "sarathi"))])
def planned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Planned:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("xsimulator.replay.predict.CHECKED_QUERIES", 1500)
        session = session_of(tmp_path_factory.mktemp("job"), bound="6",
                             schedule=f"policy: {request.param}")
        return Planned(session, plan_job(session, timing_of(session)).schedule)


def _factors(factor: float) -> dict[str, Factor]:
    return {"encode": Factor(500.0, factor), "decode": Factor(10.0, factor)}


def _slower(factor: float, before: float = 1.0) -> StepLook:
    factors = _factors(factor)
    return StepLook(done=500, left=2500, drift=PaceDrift(
        before=dict.fromkeys(factors, before), now=factors, planned=factors,
        stages=dict.fromkeys(factors, 0), steps=16))


def test_smaller_batches_keep_the_bound(planned: Planned) -> None:
    decider, look = planned.decider(), _slower(1.4)
    limit_s = planned.session.problem.constraint.latency_s
    assert planned.latency_s(planned.schedule, 1.4) > limit_s, "else there is nothing to do"
    decision = decider.decide_at_once(look)
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
    assert "at once, of a few schedules that were simulated" in decision.sentence
    assert decider.take(look, decision) and decider.running is decision.schedule
    follow_up = decision.follow_up
    assert isinstance(follow_up, WholeLook) and decider.decide_at_once(follow_up) is None
    whole = decider.decide(follow_up)
    assert whole.record["follows"] == "a change at once" and whole.follow_up is None
    assert whole.record["cause"] == "step times"
    assert decider.take(follow_up, whole)
    assert decider.revision == 1 + (whole.schedule is not None)
    assert planned.latency_s(decider.running, 1.4) <= limit_s


def test_where_nothing_presses_there_is_no_change_at_once(planned: Planned) -> None:
    decider = planned.decider()
    assert decider.decide_at_once(_slower(0.7)) is None, "quicker: that can wait for a plan"
    assert decider.decide_at_once(_slower(1.0)) is None, "what runs keeps the bound"


def test_what_is_over_the_bound_leads_to_one_too(planned: Planned) -> None:
    """After the change that slower steps led to, more is over the bound than was planned for."""
    decider, look = planned.decider(), _slower(1.4)
    decision = decider.decide_at_once(look)
    assert decision is not None and decider.take(look, decision)
    lost = KeptLook(kept=Kept(0, 600, 5), left=2400, share=0.01, planned=0.01, is_lost=True)
    assert decider.decide_at_once(lost) is None, "no less may be over it than was planned for"
