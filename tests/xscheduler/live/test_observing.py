"""`output_tokens: observe` under a limit that the caps exceed: the first schedule of a job, and its
later ones. No ranks: a replay stands for them."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from problems import timing_of
from watched_jobs import follow, outputs_of, session_of, write_state

import xgpt.cli.schedule as command
from xgpt.app.opened_job import OpenedJob
from xgpt.app.running.follow import Rescheduler, rescheduler_of
from xgpt.app.schedule import plan_job
from xgpt.core.errors import InfeasibleError
from xgpt.core.lengths import JointLengths, empirical
from xgpt.core.problem import QueryLengths
from xgpt.core.schedule import Schedule, Status
from xgpt.core.schedule_file import load_schedule, save_schedule
from xgpt.report.table import schedule_table
from xrunner.files.launcher_link import OBSERVED_FILE, load_change_order
from xrunner.rules.rra import most_active, phase_controls, rra_rule
from xscheduler.cache_sizing import slots_for
from xscheduler.fallback import FIRST_QUERIES, NEAR, hint, initial_reason, initial_schedule
from xscheduler.live.decisions import CAUTION
from xscheduler.live.fixed_stages import FixedStages
from xscheduler.live.reschedule import Revision, revise
from xsimulator.replay.job import replay_job
from xsimulator.replay.records import ReplayResult

BOUND_S, COUNT = 4.0, 600  # at the caps of 200 tokens it takes 10 s at least


def observing(folder: Path, **given: Any) -> OpenedJob:
    """A job on stages of single devices, unless it asks for groups: those could keep the limit."""
    given = {"outputs": "observe", "bound": "4", "count": COUNT,
             "schedule": "policy: rra, encode_chunk: 0"} | given
    if "tp_degree" not in given["schedule"]:
        given["schedule"] += ", tp_degree: 1"
    return session_of(folder, **given)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    session = observing(tmp_path_factory.mktemp("job"))
    return session, plan_job(session, timing_of(session)).schedule


def test_a_job_starts_with_the_least_latency_if_its_caps_exceed_the_limit(begun, tmp_path):
    session, schedule = begun
    estimate = schedule.estimate
    assert schedule.proof.status == Status.BEGINNING and schedule.bound.limit_s == BOUND_S
    said = initial_reason(schedule)
    assert said == ("No schedule keeps the limit of 4 s if every request runs to its cap of 200 "
                    "tokens; the job starts with the least latency, until lengths are observed")
    assert estimate.figures.decode_iterations == 199, "no query is interrupted"
    with pytest.raises(InfeasibleError, match="no schedule was found that keeps") as refusal:
        plan_job(replace(session, problem=replace(session.problem, is_revised=False)),
             timing_of(session))
    least_s = float(str(refusal.value).split("tightest that can be met is ")[1].split(" s")[0])
    assert least_s < estimate.figures.latency_s <= 1.001 * (1 + NEAR) * least_s
    assert estimate.figures.encode_batch > 8, "as large a batch as that allows"
    assert estimate.deployment.group_kv_tokens >= 259, "the longest request"
    assert max(estimate.figures.memory_bytes) <= estimate.figures.memory_capacity_bytes
    save_schedule(schedule, tmp_path / "s.json")
    assert initial_reason(load_schedule(tmp_path / "s.json")) == said, "`xgpt run` says it too"
    table = schedule_table(schedule)
    assert "OVER the limit of 4.00 s" in " ".join(table.split()) and Status.BEGINNING in table


def test_caps_that_differ_and_a_limit_exceeded_only_with_the_margin(begun):
    session, problem = begun[0], begun[0].problem
    caps = replace(problem, lengths=JointLengths(inputs=problem.lengths.inputs,
                                                 outputs=empirical([80] * 99 + [120] * 9)))
    kept = replace(problem, constraint=problem.constraint.with_latency(limit_s=10.1))
    for other, words in ((caps, "4 s if every request runs to its cap (120 tokens at most); "),
                         (kept,
                          "10.1 s with a confidence of 95% if every request runs to its cap")):
        found = initial_schedule(other, timing_of(session))
        assert found is not None and words in str(initial_reason(found))


@pytest.mark.parametrize("given", [
    {"schedule": "policy: rra, encode_batch: 8, decode_iterations: 40"},
    {"schedule": "policy: waa-c"}, {"schedule": "policy: orca"}, {"run": "reschedule: off"},
    {"count": FIRST_QUERIES}, {"outputs": "{mean: 199, std: 1, max: 200}"}], ids=str)
def test_a_job_that_cannot_be_planned_again_is_refused(tmp_path, given):
    session = observing(tmp_path, **given)
    with pytest.raises(InfeasibleError):
        plan_job(session, timing_of(session))
    assert hint(session.problem, timing_of(session)) == ""


def test_a_limit_that_no_length_keeps_is_refused(tmp_path):
    session = observing(tmp_path, bound="0.001")
    with pytest.raises(InfeasibleError, match=r"\. An answer of a single token takes .* at least"):
        plan_job(session, timing_of(session))
    assert hint(session.problem, timing_of(session)) == ""


def test_the_limit_is_not_blamed_if_memory_binds(tmp_path):
    session = observing(tmp_path)
    session = replace(session, problem=replace(session.problem, cluster=(
        replace(session.problem.cluster, device=replace(
            session.problem.cluster.device, memory_bytes=2**32)))))
    with pytest.raises(InfeasibleError, match="too little memory"):
        plan_job(session, timing_of(session))
    assert hint(session.problem, timing_of(session)) == ""


@pytest.mark.parametrize(("schedule", "fixed"), [
    ("policy: rra, decode_iterations: 50", {"decode_iterations": 50}),
    ("policy: rra, encode_batch: 2", {"encode_batch": 2, "decode_iterations": 199})])
def test_values_that_the_job_fixes_stay(tmp_path, schedule, fixed):
    session = observing(tmp_path, schedule=schedule)
    found = plan_job(session, timing_of(session)).schedule
    assert initial_reason(found) is not None
    assert {key: found.estimate.variables[key] for key in fixed} == fixed


def refused(folder: Path) -> str:
    done = CliRunner().invoke(command.schedule, [str(folder / "job.yaml"), "--horizon=steady"])
    assert isinstance(done.exception, InfeasibleError), done.output
    return str(done.exception)


def test_xgpt_schedule_refuses_and_says_what_submit_would_do(tmp_path):
    observing(tmp_path, schedule="policy: rra, tp_degree: 1")
    message = refused(tmp_path)
    assert "The tightest that can be met is" in message
    assert message.endswith("`xgpt submit` would start with the schedule of least latency, and "
                            "plan again once output lengths have been observed")


def test_caches_are_sized_for_short_outputs_and_not_by_the_beginning(begun):
    session, schedule = begun
    in_rows = replace(session, job=replace(session.job, run=replace(
        session.job.run, kv_layout="rows")))
    small = followed_by(in_rows, schedule, encode_batch=1).rooms[0].slots
    assert small > 8 * most_active(schedule.estimate.changed(encode_batch=1, decode_batch=1.0))
    estimate = schedule.estimate
    per_token = 2 * 5120 * 2 * max(stage.num_layers for stage in estimate.deployment.stages)
    weights = max(estimate.figures.memory_bytes) - estimate.deployment.kv_tokens * per_token
    held = small * estimate.deployment.num_groups * 259 * per_token
    assert weights + held <= 1.001 * estimate.figures.memory_capacity_bytes
    assert slots_for(estimate, session.problem, 259, math.inf) >= small
    # in blocks, as on GPUs, slots cost nothing, and the tokens are what there is memory for
    in_blocks = followed_by(session, schedule, encode_batch=1).rooms[0]
    assert in_blocks.slots >= small
    tokens = in_blocks.kv_tokens * estimate.deployment.num_groups
    assert tokens >= estimate.deployment.kv_tokens
    assert weights + tokens * per_token <= 1.001 * estimate.figures.memory_capacity_bytes


def followed_by(session: OpenedJob, schedule: Schedule, **changes: Any) -> Rescheduler:
    tiny = replace(schedule, estimate=schedule.estimate.changed(decode_batch=1.0, **changes))
    made = rescheduler_of(session, timing_of(session), tiny)
    assert made is not None
    return made


# --- how it settles ---------------------------------------------------------------------------


class Followed:
    """A job whose phases are replayed one after the other, as a Rescheduler receives them."""

    def __init__(self, session: OpenedJob, schedule: Schedule, lengths: list[int]) -> None:
        self.session, self.estimate, self.lengths = session, schedule.estimate, np.array(lengths)
        self.own = follow(session, schedule)
        self.changes: list[Any] = []
        self.changed_s: list[float] = []
        self.result = self.replayed()
        self.without = self.result

    def replayed(self) -> ReplayResult:
        rule = rra_rule(self.estimate)
        rule.make_room(self.own.rooms[0].slots)
        for phase, controls in self.changes:
            rule.change(controls, phase=phase)
        known = self.session.problem.queries
        assert known is not None
        return replay_job(self.session.problem, timing_of(self.session), self.estimate,
                          QueryLengths(inputs=known.inputs, outputs=self.lengths,
                                       most_outputs=np.full(len(self.lengths), 200)), rules=[rule])

    def run(self) -> None:
        phase = 1
        while (now_s := self.begin_s(phase)) is not None:
            self.write(now_s)
            if self.own.update() and (found := self.own.decisions[-1].schedule) is not None:
                self.changes.append(
                    (phase + 1, phase_controls(found.estimate, slots=self.own.rooms[0].slots)))
                self.changed_s.append(now_s)
                self.result = self.replayed()
            phase += 1

    def begin_s(self, phase: int) -> float | None:
        pool = self.result.pools[0]
        return next((float(pool.start_s[k, 0]) for k, step in enumerate(pool.steps)
                     if step.phase == phase), None)

    def write(self, now_s: float) -> None:
        begin_s, took_s = self.result.times.start_s, self.result.latency_s
        finished, active = [], []
        for query in np.flatnonzero(begin_s <= now_s).tolist():
            share = min((now_s - begin_s[query]) / took_s[query], 1.0)
            written = max(int(self.lengths[query] * share), 1)
            (finished if share == 1 else active).append((query, 20 + query % 40, written))
        (self.session.job.output / OBSERVED_FILE).write_text(json.dumps(
            {"first": 0, "finished": finished, "active": active}))


def test_a_job_settles_early_and_keeps_the_bound(begun):
    session, schedule = begun
    drawn = np.random.default_rng(1).lognormal(math.log(16), 0.4, COUNT)
    job = Followed(session, schedule, np.clip(np.rint(drawn), 1, 200).astype(int).tolist())
    job.run()
    first = job.own.decisions[0]
    assert first.record["cause"] == "observe" and first.schedule is not None
    assert FIRST_QUERIES <= first.record["after_queries"] < 0.15 * COUNT
    assert first.record["mean_output_tokens"]["planned"] == 200
    assert "mean 200 -> " in first.sentence
    assert job.changed_s[0] < 0.4 * job.result.makespan_s, "the beginning is not the job"
    assert job.result.makespan_s < 0.35 * job.without.makespan_s
    assert np.quantile(job.result.latency_s, 0.98) <= BOUND_S
    assert not job.own.decider.is_observing, "settled, and watching for drift"
    told = load_change_order(session.job.output)
    assert told is not None and told.revision == len(job.changes) >= 1
    assert all(controls.group_max_active <= job.own.rooms[0].slots for _, controls in job.changes)


def at(own: Rescheduler, lengths: list[int]) -> bool:
    """Whether a decision is due once these requests are done, and none is active."""
    (own._output / OBSERVED_FILE).write_text(json.dumps({
        "first": 0, "active": [],
        "finished": [(i, 20 + i % 40, n) for i, n in enumerate(lengths)]}))
    return own.update()


def fresh(begun: tuple[OpenedJob, Schedule], folder: Path, **changes: Any) -> Rescheduler:
    session, schedule = begun
    output = folder / "out"
    output.mkdir()
    session = replace(session, job=replace(session.job, output=output))
    return follow(session, schedule, **changes)


def test_few_requests_are_planned_for_half_the_limit(begun, tmp_path):
    own = fresh(begun, tmp_path)
    assert at(own, outputs_of(20, 4, 19)) is False, "too few"
    assert at(own, outputs_of(20, 4, 20)) is True
    (found,) = own.decisions
    assert found.schedule is not None
    assert found.schedule.estimate.figures.latency_s <= CAUTION * BOUND_S
    assert at(own, outputs_of(20, 4, 49)) is False, "looked at again from 50 on"
    assert at(own, outputs_of(20, 4, 60)) is True
    later = own.decisions[1].schedule
    assert later is not None and CAUTION * BOUND_S < later.estimate.figures.latency_s <= BOUND_S
    assert later.estimate.figures.throughput_qps > found.schedule.estimate.figures.throughput_qps
    assert not own.decider.is_observing


def test_a_run_returns_to_its_first_schedule_if_none_keeps_the_limit(begun, tmp_path):
    start = begun[1].estimate
    own = fresh(begun, tmp_path, needed=50, running=begun[1].changed(  # as 24 short ones had it
        encode_batch=60, decode_iterations=20))
    assert at(own, outputs_of(20, 4, 24) + [200] * 30) is True
    (back,) = own.decisions
    assert back.schedule is not None and back.schedule.estimate == start
    assert back.record["choice"] == "adjust" and back.record["revision"] == 1
    assert "back to the first schedule, encode_batch" in back.sentence
    told = load_change_order(own._output)
    assert told is not None and told.revision == 1
    assert (told.controls.encode_batch, told.controls.decode_iterations) == (
        start.figures.encode_batch, start.figures.decode_iterations)
    assert own.decider.is_observing, "it looks again"


def test_an_impossible_limit_is_reported_once_and_the_run_goes_on(begun, tmp_path):
    own = fresh(begun, tmp_path)
    long = [150, 200] * 150
    assert at(own, long[:30]) is False, "too early to tell"
    assert at(own, long[:80]) is True
    (found,) = own.decisions
    assert found.schedule is None and found.record["choice"] == "keep"
    assert ("the schedule stays: no other batch sizes keep the limit: the smallest latency"
            in found.sentence)
    assert at(own, long[:150]) is False, "until as many again are done"
    assert at(own, long[:200]) is False, "which is nothing new"
    assert own.decider.needed == 400 and len(own.decisions) == 1
    assert load_change_order(own._output) is None


def test_an_active_request_longer_than_all_others_is_waited_for(begun, tmp_path):
    """If it ran to its cap, it would be the limit's quantile, and no schedule would keep the
    limit."""
    own = fresh(begun, tmp_path)
    rows = [(i, 20, n) for i, n in enumerate(outputs_of(16, 3, 70))]
    path = own._output / OBSERVED_FILE
    path.write_text(json.dumps({"first": 0, "finished": rows, "active": [(70, 20, 40)]}))
    assert own.update() is False
    path.write_text(json.dumps({"first": 0, "finished": [*rows, (70, 20, 41)], "active": []}))
    assert own.update() is True and own.decisions[0].schedule is not None


def test_caution_does_not_change_a_schedule_that_keeps_the_limit(begun):
    """Planned for a quarter of the limit, a change would be slower than the running schedule."""
    session, schedule = begun
    problem = replace(session.problem, lengths=JointLengths(
        inputs=session.problem.lengths.inputs, outputs=empirical([16, 16, 20])))
    found = revise(schedule, problem, timing_of(session), caution=0.26)
    assert found.estimate is None and found.is_kept and found.keep.qps > 0


def test_keeping_the_limit_without_margin_is_better_than_exceeding_it(begun):
    session, schedule = begun
    timing = timing_of(session)
    lengths = JointLengths(inputs=session.problem.lengths.inputs, outputs=empirical([60, 80]))

    def revised(limit_s: float) -> Revision:
        constraint = session.problem.constraint.with_latency(limit_s=limit_s)
        return revise(schedule, replace(session.problem, lengths=lengths, constraint=replace(
            constraint, drift=0.2)), timing)

    stages = FixedStages(schedule.estimate, replace(session.problem, lengths=lengths), timing)
    tightest = stages.best(session.problem.constraint.with_latency(limit_s=1e-9),
                           has_margin=False).estimate
    assert tightest is not None
    tightest_s = tightest.figures.latency_s
    near, none = revised(1.05 * tightest_s), revised(0.95 * tightest_s)
    assert near.keep.qps == 0 and not near.is_kept
    assert near.estimate is not None and "though not with a confidence of" in near.reason
    assert near.estimate.figures.latency_s <= 1.05 * tightest_s
    assert none.estimate is None and none.reason.startswith("no other batch sizes keep the limit")


def test_short_requests_alone_decide_nothing(begun, tmp_path):
    own = fresh(begun, tmp_path)
    session = replace(begun[0], job=replace(begun[0].job, output=own._output))
    write_state(session, outputs_of(30), phases=2)
    assert own.update() is False, "the short ones are done, the others at work"
