"""The best schedule of a problem with its proof and comparisons: the upper bound and the gap, the
best of every other policy and tensor-parallel degree, the cost of the limit and of the safety
margin."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

from xgpt.core.controls import FixedSchedule
from xgpt.core.policies import able_policies, policy, policy_names
from xgpt.core.problem import Problem
from xgpt.core.schedule import (
    AlternativeKind,
    CopiesTried,
    Estimate,
    Margin,
    Proof,
    Rejected,
    Schedule,
    Status,
)
from xprofiler.timing import TimingSource
from xscheduler.admission_choice import TIE
from xscheduler.cells import cells_of, parts_of
from xscheduler.evaluator import Evaluator
from xscheduler.explanation import explain_choice
from xscheduler.feasibility import Feasibility
from xscheduler.labels import configuration, point_words, why_not
from xscheduler.margin import Margins, doubt_of_estimate
from xscheduler.partition import division_of
from xscheduler.progress import Watch
from xscheduler.refusals import check, refusal_of
from xscheduler.replicas import replica_sizes
from xscheduler.search import SURE, Found, Search, total_qps
from xscheduler.space import Cell, without_replays
from xsimulator.bound import Kind, UpperBound, kind_of
from xsimulator.plans import PlanCache

FEW_DEVICES = 8  # chosen: up to as many devices, each division into two pools has its own bound
# chosen: schedules within this share of throughput are a tie, where the safety margin is so many
# times as wide
NEAR, WIDE = 0.02, 5
_CLOSED = 1e-9  # a gap below it is rounding


class SearchPlanner:
    """Schedules of one problem under one latency limit after the other. Replays made for one limit
    are reused for the next."""

    def __init__(self, problem: Problem, timing: TimingSource, *, watch: Watch | None = None,
                 is_brief: bool = False, asked: FixedSchedule | None = None,
                 gap: float | None = None, most_replays: int | None = None) -> None:
        """`gap`: optimality gap (a share) at which the search may stop; None: it goes on to its
        end. `is_brief`: no explanation and no comparison with other policies and without the limit.
        `asked`: values that the job itself fixes, if `problem` fixes more."""
        self.problem, self._timing, self._is_brief = problem, timing, is_brief
        self._asked, self._gap = asked or problem.fixed, gap
        self._watch = watch or Watch()
        shared = PlanCache(timing)
        self._cells = list(cells_of(problem, timing, shared))
        self._most_replays, self._before = most_replays, 0
        self.search = self._anew()
        # also numbers of devices too few for the weights: that they have no schedule is proved
        self._sizes = {part.cluster.num_devices for part in parts_of(problem, is_any=True)}
        self._upper: dict[tuple[Any, ...], float] = {}  # bounds, by size, plans, kind, limit
        self._doubts = cache(lambda part, constraint: Margins(
            replace(part, constraint=constraint),
            Evaluator(replace(part, constraint=constraint), timing, shared)))
        self._bounds = cache(lambda part: UpperBound(part, timing, shared.of(part)))
        self._keeps = cache(lambda bound_s, has_margin: Feasibility(
            constraint := problem.constraint.with_latency(limit_s=bound_s),
            lambda part: self._doubts(part, constraint), has_margin=has_margin))

    @property
    def nodes(self) -> int:
        """Number of configurations evaluated so far."""
        return self._before + self.search.num_points

    def _anew(self) -> Search:
        """A search without replays, so that the result does not depend on earlier limits."""
        cells = [(without_replays(cell), replays) for cell, replays in self._cells]
        return Search(self.problem, cells, cuts=self._cuts, most_replays=self._most_replays)

    def _cuts(self) -> bool:
        self._watch.note(self.nodes, self.search.num_replays)
        return self._watch.cuts()

    def best(self, latency_bound_s: float, *, has_margin: bool) -> Schedule:
        """The schedule with the highest throughput within the latency limit (seconds). has_margin:
        the limit holds with the constraint's confidence. Raises InfeasibleError, and InputError for
        fixed values that no replica can have."""
        self._before = self.nodes
        self.search = self._anew()
        began, before = time.monotonic(), self._before
        keeps: Feasibility = self._keeps(latency_bound_s, has_margin)
        enough_qps = math.inf
        if self._gap is not None:
            enough_qps = self._upper_bound(latency_bound_s, keeps, 0.0)[0] / (1 + self._gap)
        found = self.search.best(keeps, enough_qps)
        if not found:
            check(self.problem, self._timing)
            raise refusal_of(self.problem, self._timing, self.search, keeps, latency_bound_s)
        found = _by_simplest_admission(self.search, keeps, found)
        margin = self._margin(keeps, found) if has_margin else Margin()
        best_qps, is_tied = total_qps(found), False
        is_wide = math.isinf(latency_bound_s) or margin.factor > 1 + WIDE * NEAR
        if has_margin and is_wide and (simpler := self._simpler(found, keeps)):
            found, is_tied, margin = simpler, True, self._margin(keeps, simpler)
        estimate = together(found)
        qps = estimate.figures.throughput_qps
        if is_tied:
            estimate = replace(estimate, notes=(*estimate.notes, (
                f"a simpler placement than the fastest found, for {1 - qps / best_qps:.1%} less "
                "throughput: less than the step times may be off")))
        upper_qps, by_policy = self._upper_bound(latency_bound_s, keeps, qps)
        bare_qps = free_qps = None
        rows: list[Rejected] = []
        if not self._is_brief:
            rows += self._beside(found, (qps, best_qps), keeps, by_policy)
            if not math.isinf(latency_bound_s):
                free_qps, without = self._without_limit(latency_bound_s, qps)
                rows += without
        if has_margin and margin.factor > 1:
            bare = together(self.search.best(self._keeps(latency_bound_s, False),
                                             is_compared=True))
            bare_qps = max(bare.figures.throughput_qps, qps)
            margin = replace(margin, cost=max(1 - qps / bare_qps, 0.0))
            if not self._is_brief:
                rows.append(Rejected(
                    kind="without a margin", words=bare.policy, latency_s=bare.figures.latency_s,
                    throughput_qps=bare_qps, reason="keeps the limit only if all is as expected"))
        gap = max(upper_qps / qps - 1, 0.0)
        status = Status.LIMIT if self._watch.has_cut else (
            Status.OPTIMAL if gap <= _CLOSED else Status.WITHIN_GAP)
        proof = Proof(
            status=status, bound_qps=max(upper_qps, qps), gap=gap, nodes=self.nodes - before,
            seconds=time.monotonic() - began, unbounded_qps=free_qps,
            pruned=self.search.unreplayed, policy_bounds=by_policy,
            bare_qps=bare_qps if margin.cost > 0 else None, covers=self._covers())
        bound = replace(self.problem.constraint.latency, limit_s=latency_bound_s)
        schedule = Schedule(estimate=estimate, bounds=(bound,), proof=proof, margin=margin,
                            rejected=tuple(rows), fingerprint=self.problem.fingerprint)
        if not self._is_brief:
            schedule = schedule.changed(explanation=explain_choice(
                schedule, replace(self.problem, fixed=self._asked),
                latency_limit_s=latency_bound_s / margin.factor))
        return replace(schedule, over_copies=self._over_copies(found, keeps))

    def _without_limit(self, latency_bound_s: float, qps: float) -> tuple[float, list[Rejected]]:
        """Throughput (requests/s, at least `qps`) without the latency limit, and its row if that is
        more than `qps`."""
        free = together(self.search.best(self._keeps(math.inf, False), is_compared=True))
        figures = free.figures
        if figures.throughput_qps <= qps:
            return qps, []
        return figures.throughput_qps, [Rejected(
            kind="without a latency bound", words=configuration(free),
            throughput_qps=figures.throughput_qps, latency_s=figures.latency_s,
            reason=f"latency above {latency_bound_s:g} s")]

    def _simpler(self, found: Sequence[Found], keeps: Feasibility) -> list[Found]:
        """Equal replicas that are simpler than `found` and have nearly its throughput, the simplest
        such; [] if there are none."""
        each = self.problem.cluster.devices_per_node
        kinds = {cell: (False, *_complexity(cell, each)) for cell in self.search.all_cells}
        most = (len(found) > 1, *max(_complexity(one.cell, each) for one in found))
        for kind in sorted({kind for kind in kinds.values() if kind < most}):
            least_qps = (1 - _near(self._timing, found, kind[-1])) * total_qps(found)
            if one := _as_good(self.search, keeps, {
                    cell for cell, own in kinds.items() if own == kind}.__contains__, least_qps):
                return one
        return []

    def _margin(self, keeps: Feasibility, found: Sequence[Found]) -> Margin:
        parts = [(one.replayed.latency_s * keeps.margin(one.cell, one.point).factor,
                  keeps.margin(one.cell, one.point)) for one in found]
        return max(parts, key=lambda pair: pair[0])[1].kept()

    def _upper_bound(self, latency_bound_s: float, keeps: Feasibility,
                     qps: float) -> tuple[float, tuple[tuple[str, float], ...]]:
        """Upper bounds, requests/s, on any division of the devices, and by policy, highest first:
        (bound, ((policy, bound), ...)). Every schedule has at least the least margin."""
        kinds: dict[Kind, dict[int, float]] = {"one pool": {}, "two pools": {}}
        for size, cells in self.search.cells.items():
            part = cells[0].problem
            limit_s = latency_bound_s / keeps.least_factor(part)
            for kind, bounds in kinds.items():
                plans = dict.fromkeys(cell.plan for cell in cells if kind_of(cell.policy) == kind)
                bounds[size] = self._bound_of(part, tuple(plans), kind, limit_s)
        both = {size: max(own.get(size, 0.0) for own in kinds.values())
                for size in self.search.cells}
        whole = division_of(self.problem, both)
        alone: dict[str, float] = {}
        for name in dict.fromkeys(cell.policy for cell in self.search.all_cells):
            best = division_of(self.problem, kinds[kind_of(name)])
            alone[name] = 0.0 if best is None else best.throughput_qps
        upper = max(0.0 if whole is None else whole.throughput_qps, qps)
        return upper, tuple(sorted(((name, own) for name, own in alone.items() if own > 0),
                                   key=lambda pair: -pair[1]))

    def _bound_of(self, part: Problem, plans: Sequence[tuple[int, int]], kind: Kind,
                  limit_s: float) -> float:
        """Upper bound, requests/s, on one replica on this part by any of the plans."""
        key = part.cluster.num_devices, plans, kind, limit_s
        if key not in self._upper:
            bound: UpperBound = self._bounds(part)
            most_qps = 0.0
            if kind == "two pools" and part.cluster.num_devices > FEW_DEVICES and plans:
                most_qps = bound.of_two_pools((1, *(degree for degree, _ in plans)), limit_s)
                plans = ()
            for plan in plans:
                most_qps = bound.of_plan(plan, kind, limit_s, cutoff_qps=most_qps)
            self._upper[key] = most_qps
        return self._upper[key]

    def _beside(self, found: Sequence[Found], qps: tuple[float, float], keeps: Feasibility,
                bounds: Sequence[tuple[str, float]]) -> list[Rejected]:
        """Rows for the best of each other policy, of ExeGPT's policies together, and of other
        tensor-parallel degrees. qps: throughput of the chosen replicas and of the fastest."""
        self.search.probe_policies(keeps)
        own, most = found[0].cell, dict(bounds)
        names = {cell.policy for cell in self.search.all_cells}
        best = {name: self.search.best_of(keeps, partial(_is_by, name), qps[1])
                for name in sorted(names, key=policy_names().index)}
        rows = [_row("policy", name, one, qps, most.get(name))
                for name, one in best.items() if name != own.policy]
        papers = [one for name, one in best.items() if one and policy(name).is_papers]
        if papers and not policy(own.policy).is_papers:
            top = max(papers, key=_qps_of)
            row = _row("RRA and WAA alone", "", top, qps, max(most.get(name, 0.0) for name in best
                                                 if policy(name).is_papers))
            rows.append(replace(row, words=f"{top.cell.policy}, {row.words}"))
        size = own.problem.cluster.num_devices
        degrees = {cell.plan[0] for cell in self.search.cells[size] if cell.policy == own.policy}
        for degree in sorted(degrees - {own.plan[0]}):
            rows.append(_row("tp_degree", str(degree), self.search.best_of(
                keeps, partial(_is_by, own.policy, degree=degree), qps[1]), qps, None))
        return rows + self._left_out(names)

    def _left_out(self, looked: set[str]) -> list[Rejected]:
        """Rows for the policies that were not searched, with the reason."""
        fixed, is_both = self.problem.fixed, self.problem.model.is_encoder_decoder
        able = {row.name for row in able_policies(fixed)}
        reasons: dict[str, list[str]] = {}
        for name in fixed.policies or policy_names():
            if name in looked or not policy(name).is_searched:
                continue
            why = ("the job fixes a variable that it does not have" if name not in able else
                   "for decoder-only models" if is_both and policy(name).is_decoder_only else
                   "the devices cannot be divided so for this model, or it does not fit")
            reasons.setdefault(why, []).append(name)
        return [Rejected(kind="unsearched", subject=", ".join(names), reason=f"left out: {why}")
                for why, names in reasons.items()]

    def _covers(self) -> str:
        """Numbers of devices of a replica that the bound covers, in words; "" on fewer than 3."""
        cluster = self.problem.cluster
        if cluster.num_devices < 3:
            return ""
        unseen = [size for size in replica_sizes(cluster) if size not in self._sizes]
        return "replicas on any number of devices" + (
            f" except {', '.join(map(str, unseen))}" if unseen else "")

    def _over_copies(self, found: Sequence[Found], keeps: Feasibility) -> tuple[CopiesTried, ...]:
        """A row for every number of devices of a replica, and one for replicas of unequal sizes."""
        rows, qps = [], sum(one.copies * one.replayed.throughput_qps for one in found)
        for size in sorted(self.search.cells):
            part = self.search.cells[size][0].problem
            own = self.search.cells[size].__contains__
            best = found[0] if len(found) == 1 and own(found[0].cell) else (
                self.search.best_of(keeps, own, qps))
            bound = max((value for (own, *_), value in self._upper.items() if own == size),
                        default=math.inf)
            rows.append(CopiesTried(
                replicas=part.copies, devices_per_replica=size,
                throughput_qps=None if best is None else _qps_of(best),
                latency_s=None if best is None else best.replayed.latency_s,
                bound_qps=part.copies * bound, words="nothing better was found" if best is None
                else configuration(shown(best))))
        if len(found) > 1:
            sizes = tuple(size for one in found for size in
                          [one.cell.problem.cluster.num_devices] * one.copies)
            estimate = together(found)
            rows.append(CopiesTried(
                replicas=len(sizes), devices_per_replica=max(sizes), devices=sizes,
                throughput_qps=estimate.figures.throughput_qps,
                latency_s=max(one.replayed.latency_s for one in found), bound_qps=math.inf,
                words="; ".join(f"on {one.cell.problem.cluster.num_devices}: "
                                f"{configuration(shown(one))}" for one in found)))
        return tuple(rows) if len(rows) > 1 else ()

    @property
    def all_cells(self) -> list[Cell]:
        """Every policy by every tensor plan, on every number of devices that a replica may have."""
        return self.search.all_cells


def shown(one: Found) -> Estimate:
    """All replicas of one shape, with the figures of their replay."""
    return one.replayed.shown(one.cell.problem).in_copies(one.copies)


def together(found: Sequence[Found]) -> Estimate:
    """Replicas of one shape or several, those on most devices first."""
    first, *others = (shown(one) for one in found)
    return first.beside(tuple(replace(one, notes=()) for one in others))


def _by_simplest_admission(search: Search, keeps: Feasibility,
                           found: list[Found]) -> list[Found]:
    """Replicas with the simplest admission rule if these are as good as `found`; else `found`."""
    if all(one.cell.room == 1 for one in found):
        return found
    return _as_good(search, keeps, lambda cell: cell.room == 1,
                    (1 - TIE) * total_qps(found)) or found


def _as_good(search: Search, keeps: Feasibility, is_wanted: Callable[[Cell], bool],
             least_qps: float) -> list[Found]:
    """The best point of the wanted cells, as equal replicas, if these have `least_qps` by the
    longest replay; else []."""
    one = search.best_of(keeps, is_wanted)
    if one is None or _qps_of(one) < least_qps:
        return []
    search.replay(one.cell, one.point, times=SURE)
    return [one] if keeps.is_kept(one.cell, one.point) and _qps_of(one) >= least_qps else []


def _near(timing: TimingSource, found: Sequence[Found], stages: int) -> float:
    """Share of throughput within which a placement of so many stages ties with `found`. No measured
    run had several stages, so one ties with them within the typical error of their times."""
    doubts = [doubt_of_estimate(timing, own, one.cell.problem.cluster) for one in found
              if stages == 1 < len((own := one.replayed.estimate).deployment.stages)]
    return max((doubt.typical for doubt in doubts if doubt is not None and doubt.level == "far"),
               default=NEAR)


def _is_by(name: str, cell: Cell, *, degree: int | None = None) -> bool:
    return cell.policy == name and degree in (None, cell.plan[0])


def _qps_of(one: Found) -> float:
    return one.cell.copies * one.replayed.throughput_qps


def _complexity(cell: Cell, devices_per_node: int) -> tuple[bool, int]:
    """(whether a replica spans nodes, its number of stages)."""
    devices, (degree, gpus) = cell.problem.cluster.num_devices, cell.plan
    return devices > devices_per_node, gpus // degree + devices - gpus


def _row(kind: AlternativeKind, subject: str, one: Found | None, qps: tuple[float, float],
         bound_qps: float | None) -> Rejected:
    if one is None:
        most = "" if bound_qps is None else f"; no more than {bound_qps:.4g} requests/s"
        return Rejected(kind=kind, subject=subject,
                        reason=f"none was found within the limits{most}")
    own = _qps_of(one)
    return Rejected(kind=kind, subject=subject, words=point_words(one.cell, one.point),
                    throughput_qps=own, is_unsure=own > qps[1], latency_s=one.replayed.latency_s,
                    reason=why_not(own, qps, bound_qps))
