"""A run that is slowed in the middle keeps a limit that it can keep, and exceeds it if nothing is
planned again. The run is replayed, with its launcher beside it."""

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from problems import timing_of
from slowed_replay import Replayed, Worked, in_pulses, slowed_replay, steadily

from xgpt.app.opened_job import OpenedJob, open_file
from xgpt.app.schedule import executable, plan_job
from xgpt.core.schedule import Schedule
from xscheduler.live.decisions import Decider, FollowedRun

QUERIES, SHARE = 2000, 0.05
JOB = """
model: opt-13b
cluster: {{device: A40, num_nodes: 1, devices_per_node: 2, intra_link: pcie4-x16}}
workload:
  requests: {{count: {queries}}}
  input_tokens: {{mean: 48, std: 16, max: 96}}
  output_tokens: {{mean: 20, std: 6, max: 40}}
constraint: {{latency_s: {bound}, kind: queries, quantile: 0.95}}
schedule: {{policy: {policy}, replicas: 1, tp_degree: 1{chunk}}}
output: out
"""
BOUNDS = {"rra": 6.0, "waa-c": 6.2}  # about twice the tightest, so that it can be kept
STOPPED = 0.35  # of each tenth of a second, all ranks


def opened(path: Path, policy: str, bound_s: float, *, is_chunked: bool) -> OpenedJob:
    """The job on devices of an eighth of an A40's arithmetic. With some ten requests a second, as
    on a CPU, the requests active when it is slowed are few of all."""
    path.write_text(JOB.format(queries=QUERIES, bound=bound_s, policy=policy,
                               chunk="" if is_chunked else ", encode_chunk: 0"))
    session = executable(open_file(path))
    cluster = session.problem.cluster
    device = replace(cluster.device, flops_per_s=tuple(
        (dtype, flops / 8) for dtype, flops in cluster.device.flops_per_s))
    return replace(session, problem=replace(
        session.problem, cluster=replace(cluster, device=device)))


class Seen(NamedTuple):
    """The progress of a run."""

    finished: dict[int, tuple[int, int]]
    kept: tuple[int, int, int] | None
    first: int = 0
    active: dict[int, tuple[int, int]] = {}


class Planned(NamedTuple):
    """A job's schedule, the time when a quarter of its requests is done, and the requests'
    lengths."""

    session: OpenedJob
    schedule: Schedule
    slowed_s: float
    lengths: list[np.ndarray]

    @property
    def bound_s(self) -> float:
        return self.session.problem.constraint.latency_s

    def replayed(self, worked: Worked, threshold: float | None) -> Replayed:
        return slowed_replay(self.session.problem, timing_of(self.session), self.schedule, worked,
                             self.lengths, threshold=threshold)


def plan_of(path: Path, policy: str, bound_s: float, *, is_chunked: bool = False) -> Planned:
    session = opened(path, policy, bound_s, is_chunked=is_chunked)
    schedule, rng = plan_job(session, timing_of(session)).schedule, np.random.default_rng(1)
    lengths = session.problem.lengths
    return Planned(session, schedule, QUERIES / 4 / schedule.figures.throughput_qps, [
        part.sample(QUERIES, rng) for part in (lengths.inputs, lengths.outputs)])


@pytest.fixture(scope="module", params=[pytest.param("rra", marks=pytest.mark.slow), "waa-c"])
def planned(request, tmp_path_factory):
    return plan_of(tmp_path_factory.mktemp("job") / "job.yaml", request.param,
                   BOUNDS[request.param])


def test_a_slowed_run_keeps_its_limit_if_possible(planned):
    worked, bound_s = in_pulses(STOPPED, 0.1, planned.slowed_s), planned.bound_s
    left, watched = planned.replayed(worked, None), planned.replayed(worked, 0.15)
    assert left.over(bound_s) > 5 * SHARE, "else there was nothing to do"
    assert watched.over(bound_s) <= SHARE, (
        "of all queries, those that were at work when it came among them")
    # the log of what was decided
    (decided_s, first), *_ = watched.decisions
    assert planned.slowed_s < decided_s < planned.slowed_s + 5, "looks, a plan, and no more"
    assert first.record["cause"] == "step times" and first.record["choice"] == "adjust"
    seen = [own["observed"] for own in first.record["step_times"].values()]
    assert max(seen) == pytest.approx(1 / (1 - STOPPED), rel=0.15)
    assert first.schedule is not None and first.schedule.figures.decode_batch < (
        planned.schedule.figures.decode_batch)
    (taken_s, _), *_ = watched.changes
    assert decided_s < taken_s < decided_s + 1
    assert watched.over(bound_s, taken_s) <= SHARE, "once it has changed it is kept"
    assert all("quicker" not in own.sentence for _, own in watched.decisions), "it never was"


def test_late_requests_are_made_up_for(planned):
    schedule, problem = planned.schedule, planned.session.problem
    decider = Decider(FollowedRun(
        problem=problem, schedule=schedule, threshold=None, is_observing=False, slots=200,
        longest=200, step_threshold=0.15), timing_of(planned.session))
    as_planned = Seen(dict.fromkeys(range(400), (48, 20)), (0, 400, 20))
    assert decider.late_evidence(as_planned) is None
    look = decider.late_evidence(as_planned._replace(kept=(0, 400, 60)))
    assert look is not None and look.share == pytest.approx(40 / 1600)
    decision = decider.decide(look)
    assert decision.schedule is not None and decision.is_kept
    assert decision.schedule.figures.decode_batch < schedule.figures.decode_batch
    assert decision.record["cause"] == "bound" and decision.record["over"] == 60
    assert decider.carry_out(look, decision)
    assert decider.late_evidence(as_planned._replace(kept=(0, 500, 62))) is None, "as planned now"
    nearly_done = Seen(dict.fromkeys(range(QUERIES - 5), (48, 20)), (0, QUERIES - 5, 300))
    assert decider.late_evidence(nearly_done) is None, "nobody waits whom it would concern"


@pytest.mark.slow
@pytest.mark.parametrize("slowed_by", ["another program on one core", "all cores in pulses"])
def test_a_decode_pool_that_encodes_too(tmp_path, slowed_by):
    """Its steps take twice as long and those of the encode pool stay, or all take half as much
    longer. Fewer requests must be active, and the decode pool gets fewer of them as inputs."""
    planned = plan_of(tmp_path / "job.yaml", "waa-c", 17.0, is_chunked=True)
    assert planned.schedule.controls.encode_chunk, "steps of both kinds"  # type: ignore[union-attr]
    stages = planned.schedule.deployment.stages
    is_one = slowed_by == "another program on one core"
    worked = steadily(2.0, (stages[-1].index,), planned.slowed_s) if is_one else (
        in_pulses(STOPPED, 0.1, planned.slowed_s))
    left, watched = planned.replayed(worked, None), planned.replayed(worked, 0.15)
    (taken_s, _), *_ = watched.changes
    over = left.over(planned.bound_s)
    assert over > 3 * SHARE, "else there was nothing to do"
    assert watched.over(planned.bound_s, taken_s) <= SHARE
    assert watched.over(planned.bound_s) <= over / 4, "of 200 at work when it came many are"
    assert len(watched.changes) <= 6, "at once and as a whole, three times"
    first = watched.decisions[0][1]
    assert "at once" in first.sentence
    told = first.record["step_times"]
    assert told["mixed"]["observed"] == pytest.approx(1.9 if is_one else 1.5, rel=0.1)
    assert told["encode"]["observed"] == pytest.approx(1.0 if is_one else 1.5, rel=0.05)
