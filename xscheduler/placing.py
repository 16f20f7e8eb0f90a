"""The schedule of a model that its devices cannot hold: weights, entries and hidden states lie
partly on their host or on disk, and blocks of requests are worked layer by layer (FlexGen,
arXiv:2303.06865; docs/offload.md).

The linear programs of all blocks of `ft` and `rra` are ordered (xscheduler.block_program). The best
ones are rounded to whole tensors and requests, and replayed. The schedule of the highest throughput
that keeps the limits is chosen; a short job takes the shortest makespan."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from xgpt.core.errors import InfeasibleError, InputError, wrong
from xgpt.core.placement import PLACED_POLICIES
from xgpt.core.policies import able_policies
from xgpt.core.problem import Problem
from xgpt.core.schedule import NOT_SURE, Estimate, Proof, Rejected, Schedule, Status
from xgpt.core.units import format_seconds, seconds_up
from xprofiler.timing import TimingSource
from xscheduler.block_program import Choice, best_blocks
from xscheduler.evaluator import Evaluator
from xscheduler.makespan import is_short, words_of
from xscheduler.margin import MarginParts, Margins
from xscheduler.placed_figures import lacking, placed_figures
from xscheduler.placed_programs import Layout, Programs
from xscheduler.placements import in_whole, options_of
from xscheduler.prospects import keeps_pace_limits
from xscheduler.replicas import replica_problems
from xsimulator.placed_memory import PlacedMemory
from xsimulator.plans import PlanCache
from xsimulator.rough.workload import Workload

REPLAYED = 10  # chosen: best programs of a policy that are replayed
ROUNDS = 5  # chosen: searches for a limit, since the margin is known only of a schedule
CLOSER = 1.1  # chosen: least factor by which the limit of the next one is closer
NEAR = 0.05  # chosen: share of the best program's throughput within which others are replayed
WORTH = 0.1  # chosen: programs that are worse than a replayed one by this share are left out
PHASES = (1, 2, 4)  # chosen: phases of RRA of the request that the limit is for
_CLOSED = 1e-9  # a gap below it is rounding


def is_placed(problem: Problem, fits: Callable[[], bool]) -> bool:
    """Whether a schedule needs a placement. fits: whether the devices hold the model and the
    longest request under some policy."""
    fixed = problem.fixed
    if fixed.placement is not None:
        return True
    may = (problem.offload == "auto" and problem.cluster.tiers and problem.most_stages is None
           and not problem.model.is_encoder_decoder and (fixed.tp_degree or 1) == 1
           and (not fixed.policies or {*fixed.policies} & {*PLACED_POLICIES}))
    return bool(may) and not fits()


class Trial(NamedTuple):
    """A block's schedule as replayed. `bound_qps`: by its program, of all replicas."""

    programs: Programs
    choice: Choice
    estimate: Estimate
    margin: MarginParts
    bound_qps: float


class Placing:
    """The search for one problem."""

    def __init__(self, problem: Problem, timing: TimingSource, *, has_margin: bool,
                 tell: Callable[[str], None], is_steady: bool = False) -> None:
        """has_margin: limits hold with the constraint's confidence. tell: takes notes for the user.
        is_steady: a short job, too, gets the highest throughput, not its shortest makespan.
        Raises InputError for chunks, which no placed step has."""
        if problem.fixed.encode_chunk:
            raise wrong("schedule", "schedule.encode_chunk", problem.fixed.encode_chunk,
                        "0, or left out, for a model that its devices cannot hold")
        if problem.queries is not None:  # a placed cache shares no prefixes
            problem = replace(problem, queries=replace(problem.queries, prefixes=None))
        self.problem, self._timing, self._is_steady = problem, timing, is_steady
        self._evaluator = Evaluator(problem, timing)
        self._margins = Margins(problem, self._evaluator) if has_margin else None
        self._plans, self._tried = PlanCache(timing), 0
        most, block = problem.num_queries, problem.fixed.encode_batch
        if most is not None and block is not None and block > most:
            tell(f"note: a block of {block} requests is more than the job has: it has {most}")

    def best(self) -> Schedule:
        """The schedule of the highest throughput. Raises InfeasibleError."""
        began = time.monotonic()
        trials, kept = list[Trial](), list[Trial]()
        for layout in self._layouts:
            for is_rra in (False, True):
                found = self._within(layout, is_rra, (1 - WORTH) * max(
                    (one.bound_qps for one in kept), default=0.0))
                trials += found
                kept += filter(self._is_kept, found)
        smallest = [] if kept else self._smallest()
        kept += filter(self._is_kept, smallest)
        if not kept:
            raise self._refusal(trials + smallest)
        return self._schedule(kept, trials + smallest, time.monotonic() - began)

    @cached_property
    def _layouts(self) -> list[Layout]:
        """The devices as equal replicas, each a pipeline: problem and stages of one."""
        found = []
        for part in replica_problems(self.problem):
            with suppress(InputError):  # more devices than layers
                own = self._plans.of(part).both(1, 0)
                found.append(Layout(part, own, PlacedMemory(part, own.stages), Workload(part)))
        return found

    def _within(self, layout: Layout, is_rra: bool, least_qps: float) -> list[Trial]:
        """Replays of the best blocks of a policy whose programs have `least_qps`. Their limit is
        closer where a replay with its margin takes longer than its program."""
        trials, limit_s = list[Trial](), self.problem.constraint.latency_s
        factor = 1.0 if self._margins is None else self._margins.least_factor
        for _ in range(ROUNDS):
            found: list[tuple[Programs, Choice]] = []
            for programs in self._programs(layout, is_rra, limit_s / factor):
                best_qps = max((own.solution.qps for _, own in found), default=0.0)
                blocks, wanted_qps = programs.all(), least_qps / programs.part.copies
                self._tried += 0 if trials else sum(map(len, blocks.values()))
                found += [(programs, own) for own in best_blocks(
                    blocks, REPLAYED, max((1 - NEAR) * best_qps, wanted_qps))]
            found.sort(key=lambda one: -one[1].solution.qps)
            own = [one for each in found[:REPLAYED] if (one := self._trial(*each)) is not None]
            trials += own
            if any(map(self._is_kept, own)) or not own:
                break
            factor = max(CLOSER * factor, min(self._needed_s(one) / one.choice.program.period_s(
                one.choice.solution.shares, is_watched=True) for one in own))
        return trials

    def _is_kept(self, trial: Trial) -> bool:
        return self._needed_s(trial) <= self.problem.constraint.latency_s and (
            self._margins is None or keeps_pace_limits(self._margins, trial.estimate))

    def _needed_s(self, trial: Trial) -> float:
        return trial.estimate.figures.latency_s * trial.margin.factor

    def _programs(self, layout: Layout, is_rra: bool,
                  limit_s: float) -> Iterator[Programs]:
        """The programs of a policy on one replica, for each way to compute attention; of RRA for
        each number of iterations of a phase."""
        fixed, part = self.problem.fixed, layout.part
        names = [row.name for row in able_policies(replace(
            fixed, policies=fixed.policies or PLACED_POLICIES))]
        if ("rra" if is_rra else "ft") not in names:
            return
        seen = max(part.lengths.outputs.quantile(part.constraint.quantile) - 1, 1)
        given = fixed.decode_iterations
        phases = {math.ceil(seen / own) for own in PHASES} if given is None else {given}
        for options in options_of(part):
            for iterations in sorted(phases) if is_rra else [0]:
                yield Programs(layout, options, iterations, limit_s)

    def _trial(self, programs: Programs, choice: Choice) -> Trial | None:
        """The replay of a block, rounded; None if nothing fits then, or without a steady state."""
        rounded = in_whole(programs, choice)
        if rounded is None:
            return None
        bound_qps = choice.solution.qps * programs.part.copies  # with all memory
        choice, placement = rounded
        estimate = programs.estimate(self._timing, self._plans, choice, placement)
        shown = self._evaluator.shown(estimate)
        if shown == estimate:  # no steady state
            return None
        margin = MarginParts(factor=1.0, sentence="planned without a margin") if (
            self._margins is None) else self._margins.margin(shown)
        return Trial(programs, choice, shown, margin, bound_qps)

    def _schedule(self, kept: list[Trial], trials: list[Trial], seconds: float) -> Schedule:
        """The schedule of the best trial of those that keep the limit."""
        kept = sorted(kept, key=lambda one: -one.estimate.figures.throughput_qps)[:REPLAYED]
        schedule = self._of_trial(kept[0], trials, seconds)
        if not self._is_steady and is_short(self.problem, schedule):
            jobs = [(one, self._evaluator.job(one.estimate, 1)) for one in kept]
            wall_s, best = min(((job.wall_s, one) for one, job in jobs if job is not None),
                               default=(math.inf, kept[0]), key=lambda pair: pair[0])
            schedule = self._of_trial(best, trials, seconds)
            if math.isfinite(wall_s):
                schedule = schedule.changed(status=Status.JOB, explanation=(
                    f"Estimated run time {format_seconds(wall_s)} for this job's "
                    f"{self.problem.num_queries} requests, the shortest of {len(kept)} simulated "
                    "schedules.",))
        return schedule

    def _of_trial(self, trial: Trial, trials: list[Trial], seconds: float) -> Schedule:
        qps = trial.estimate.figures.throughput_qps
        most_qps = max(qps, *(one.bound_qps for one in trials))
        gap = most_qps / qps - 1
        return Schedule(
            estimate=trial.estimate, bounds=(self.problem.constraint.latency,),
            fingerprint=self.problem.fingerprint, margin=trial.margin.kept(),
            proof=Proof(status=Status.OPTIMAL if gap <= _CLOSED else Status.WITHIN_GAP,
                        bound_qps=most_qps, gap=gap, nodes=self._tried, seconds=seconds),
            rejected=tuple(self._beside(trial, trials)),
            placed=placed_figures(self.problem, self._timing, trial.programs, trial.choice,
                                  trial.estimate, self._tried))

    def _beside(self, chosen: Trial, trials: list[Trial]) -> Iterator[Rejected]:
        """A row for the best schedule of the other policy, if its programs are near enough."""
        best = max((one for one in trials if one.estimate.policy != chosen.estimate.policy),
                   key=lambda one: (self._is_kept(one), one.bound_qps), default=None)
        if best is None:
            return
        figures, qps = best.estimate.figures, chosen.estimate.figures.throughput_qps
        yield Rejected(
            kind="policy", subject=best.estimate.policy, words=words_of(best.estimate),
            throughput_qps=figures.throughput_qps, latency_s=figures.latency_s,
            reason=f"{1 - figures.throughput_qps / qps:.0%} less throughput"
            if self._is_kept(best) else NOT_SURE)

    def _smallest(self) -> list[Trial]:
        """Replays of the smallest block of each policy and number of replicas."""
        found = []
        for programs in self._unlimited():
            batch, own = next(iter(programs.all().items()))
            least = dict(sorted(own.items())[:1])
            found += [trial for choice in best_blocks({batch: least})
                      if (trial := self._trial(programs, choice)) is not None]
        return found

    def _unlimited(self) -> Iterator[Programs]:
        for layout in self._layouts:
            for is_rra in (False, True):
                yield from self._programs(layout, is_rra, math.inf)

    def _refusal(self, trials: list[Trial]) -> InfeasibleError:
        """The error for no block within the limits: the quickest latency, or bytes lacking."""
        if trials:
            least_s = seconds_up(min(map(self._needed_s, trials)))
            return InfeasibleError(
                "no schedule keeps the limits (latency "
                f"{format_seconds(self.problem.constraint.latency_s)}): weights and KV cache lie "
                f"partly on host or disk, and the quickest block takes {least_s} s",
                float(least_s))
        programs = next(self._unlimited(), None)
        return InfeasibleError("no schedule: there is too little memory. " + (
            "No policy has the values that the job fixes" if programs is None else
            f"{self.problem.model.name} {lacking(programs)}"))
