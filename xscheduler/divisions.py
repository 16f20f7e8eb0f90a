"""Copies of unlike sizes: where another division of the devices answers more than equal copies
under the same bound, it is taken, each copy with a schedule of its own.

    worth of a size   queries/s of the best copy on so many devices that keeps the bound
    division          sizes that fit a node's devices, the same in every node; or copies on whole
                      nodes beside divided ones
    worth, bound      the sums of the copies' own (xscheduler.partition): no division is worth more
                      than the best sum of what no copy of a size exceeds

Worth taking are LEAST_SHARE of the throughput. Sizes that no equal copies have cost a glance each:
all are looked at where something is left over, where a node's devices are not 2^k, and where the
bound costs so much that sizes differ (TIGHT): a copy on five GPUs may answer twice what one on four
does, if these just miss the bound, while without a bound no size is far better than another.
Elsewhere it takes a guess of what a size may be worth beside those next to it, and only sizes of
divisions that would win by such guesses are looked at. Where the bound costs something (LOOSE), it
is policies of two pools alone that are worth far more on such sizes: a group of 2^k that decodes
beside those that encode. Where it costs little, it is what memory brings: where a copy's devices
are mostly full of weights, one more holds more queries than its share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from xgpt.core.copies import sum_of
from xgpt.core.errors import InfeasibleError
from xgpt.core.policies import able_policies
from xgpt.core.problem import Problem
from xgpt.core.schedule import CopiesTried, Estimate, Rejected, Schedule, Status
from xgpt.core.units import format_seconds
from xscheduler.alternatives import why_not
from xscheduler.copies import has_room
from xscheduler.copies_guessed import is_scarce, like_its_neighbours
from xscheduler.copies_hoped import UNSEEN
from xscheduler.copies_shown import configuration, found_qps, tried_row
from xscheduler.copy_planner import CopyPlanner
from xscheduler.copy_sizes import CopySizes
from xscheduler.evaluator import Evaluator
from xscheduler.job_time import MOST_AGAIN, MOST_REPLAYS, WORTH, is_short, words_of
from xscheduler.over_copies import CopiesSearch
from xscheduler.partition import Division, best_division, best_unequal
from xscheduler.spaces.tensor_plans import left_out

PROVED = (Status.OPTIMAL, Status.WITHIN_GAP, Status.LIMIT, Status.JOB)
EQUAL_ALONE, ANY_SIZES = "equal copies", "copies of any sizes"  # what a bound is of
_ROUNDED = 1e-9
LEAST_SHARE = 0.003  # of all queries: for less nobody is to tell several schedules apart
TIGHT = 0.6  # of what there would be without a bound: what has less has a tight one
LOOSE = 0.85  # of it: what has less has one that policies of two pools may use better
ABOVE_OTHERS = 0.25  # share by which these were seen above sizes next to theirs, device by device
ABOVE_SCARCE = 0.04  # likewise any policy, where the size below is mostly full of weights
SHOWN = 0.9  # of the schedule's throughput: the best division that has less gets no line
MOST_SETTLED = 6  # sizes planned as they would be used, with their margins
MOST_GLANCED = 0.5  # of the configurations that the search over equal copies evaluated


def may_divide(problem: Problem, schedule: Schedule) -> bool:
    """Whether copies may be unlike. They are alike where nothing is searched or proved, where
    lengths are yet to be observed (by queries' caps nothing should be divided), where there are
    further bounds than that on latency, where links within a node differ (a part would not be like
    others), and, of a number that the job fixes, on several nodes."""
    cluster = problem.cluster
    return schedule.proof.status in PROVED and problem.copies == 1 and not (
        problem.observes or cluster.islands or len(problem.constraint.bounds) > 1
        or cluster.num_devices < 3
        or (problem.fixed.replicas is not None and cluster.num_nodes > 1))


def climbed_alone(planners: Sequence[CopyPlanner], schedule: Schedule) -> str:
    """What equal copies have at most whose configurations are climbed to and are in no box
    (Space.unproved), in words; "" where that is within the schedule's bound."""
    most_qps = max((one.problem.copies * space.most_unproved(schedule.bound.limit_s)
                    for one in planners if one.is_able for space in one.own.spaces), default=0.0)
    return "" if most_qps <= schedule.proof.bound_qps else (
        f"by WAA-C in chunks, on equal copies, {most_qps:.4g} queries/s at most (a looser bound)")


class _Taken(NamedTuple):
    """Copies that are better than equal ones; of a short job, by how much it takes less."""

    estimate: Estimate
    job: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Divider:
    """Looks for divisions of one problem's devices. search: what went over equal copies of it.
    has_margin: bounds are kept with the constraint's confidence. cuts: whether no more is to be
    looked at."""

    problem: Problem
    search: CopiesSearch
    evaluator: Evaluator
    has_margin: bool
    cuts: Callable[[], bool]

    def better(self, schedule: Schedule) -> Schedule:
        """The schedule of equal copies, or one of a division that answers more; with a line on the
        best division beside those on equal copies, where one was seen; and of which copies its
        bound is."""
        key = self.problem.constraint.latency_s, self.has_margin
        if key not in self.search.gone_over or schedule.proof.status not in PROVED:
            return schedule
        problems = [looked.planner.problem for looked, _ in self.search.gone_over[key]]
        narrower = dict.fromkeys([
            *(left_out(one) for one in problems if one.cluster.num_nodes > 1)])
        schedule = self._divided(schedule, key)
        narrower[climbed_alone([looked.planner for looked, _ in self.search.gone_over[key]],
                               schedule)] = None
        return schedule.changed(covers="; ".join(filter(None, (schedule.proof.covers, *narrower))))

    def _divided(self, schedule: Schedule, key: tuple[float, bool]) -> Schedule:
        """The better of both, and of which sizes of copies its bound is."""
        if not may_divide(self.problem, schedule):
            is_any = self.problem.cluster.num_devices > 2
            return schedule.changed(covers=EQUAL_ALONE) if is_any else schedule
        before = self.search.nodes
        sizes = CopySizes(self.problem, self.search, has_margin=self.has_margin,
                          kept=self._kept(schedule, key))
        if schedule.proof.status != Status.JOB:
            sizes.take(schedule.deployment.devices_per_replica, schedule)
        self._look(sizes, schedule)
        best = self._best(sizes, schedule)
        if best is None:
            return self._covering(schedule, sizes)
        most = self.division(sizes.most)
        row = _row(best, sizes, best.worth if most is None else max(most.worth, best.worth))
        taken = self._taken(best, sizes, schedule)
        nodes = schedule.proof.nodes + self._nodes(sizes) - before
        rows = schedule.over_copies or tuple(
            tried_row(*one) for one in self.search.gone_over[key])
        if taken is not None:
            first = sizes.schedule(best.sizes[0])
            assert first is not None, f"{best = } is planned"
            schedule = _chosen(schedule, taken, row, first, self._not_looked_at(sizes))
        elif best.worth < SHOWN * schedule.figures.throughput_qps:
            return self._covering(schedule.changed(nodes=nodes), sizes)
        return replace(self._covering(schedule.changed(nodes=nodes), sizes),
                       over_copies=(*rows, row))

    def _kept(self, schedule: Schedule, key: tuple[float, bool]) -> float:
        """Share of what was seen of the copies chosen, under what the margin of every schedule
        leaves of the bound, that they have with their own."""
        deployment = schedule.deployment
        chosen = deployment.replicas, deployment.devices_per_replica
        seen_qps = [found_qps(looked) for looked, _ in self.search.gone_over[key] if chosen == (
            looked.planner.problem.copies, looked.planner.problem.cluster.num_devices)]
        return min(schedule.figures.throughput_qps / max(max(seen_qps, default=0.0), 1e-300), 1.0)

    def _covering(self, schedule: Schedule, sizes: CopySizes) -> Schedule:
        """The schedule with a word on which divisions its bound covers: none is worth more than the
        best sum of what no copy of a size exceeds."""
        cluster, but = self.problem.cluster, _but_for(self._not_looked_at(sizes))
        each = cluster.devices_per_node
        within = {size: own for size, own in sizes.most.items() if size <= each}
        over = {size // each: own for size, own in sizes.most.items() if size > each}
        node = best_division(within, each, self.problem.fixed.replicas)
        whole = best_division({**over, 1: 0.0 if node is None else node.worth}, cluster.num_nodes)
        most_qps, bound_qps = 0.0 if whole is None else whole.worth, schedule.proof.bound_qps
        return schedule.changed(covers=f"{ANY_SIZES}{but}" if most_qps <= (1 + _ROUNDED) * bound_qps
                                else f"{EQUAL_ALONE}; unlike ones have at most {most_qps:.4g} "
                                     f"queries/s{but}")

    def division(self, worth: dict[int, float]) -> Division | None:
        """The best division of all devices into copies that are not all alike, its sizes in the
        order of their ranks; None where there is none. worth: by size."""
        cluster = self.problem.cluster
        each, nodes = cluster.devices_per_node, cluster.num_nodes
        within = {size: own for size, own in worth.items() if size <= each}
        found = []
        if (alike := best_unequal(within, each, self.problem.fixed.replicas)) is not None:
            found.append(Division(nodes * alike.worth, nodes * alike.sizes))
        node = best_division(within, each) if nodes > 1 else None
        if node is not None and sum(node.sizes) in (0, each):  # else ranks would not fill nodes
            over = {size // each: own for size, own in worth.items() if size > each}
            if (mixed := best_unequal({**over, 1: node.worth}, nodes)) is not None:
                found.append(Division(mixed.worth, tuple(
                    size for count in mixed.sizes
                    for size in (node.sizes if count == 1 else (count * each,)))))
        return max(found, default=None)

    def _not_looked_at(self, sizes: CopySizes) -> list[int]:
        """Sizes, in devices, that may have a schedule, for all that is known."""
        cluster = self.problem.cluster
        each = cluster.devices_per_node
        able = [*range(1, each), *range(each, cluster.num_devices + 1, each)]
        if self.problem.fixed.replicas is not None:  # one node: the others need a device each
            able = able[:self._largest]
        return [size for size in able if size not in sizes.most and has_room(
            self.search.on(size).problem)]

    @property
    def _largest(self) -> int:
        """Devices of a node that one of its copies has at most."""
        return self.problem.cluster.devices_per_node - (self.problem.fixed.replicas or 1) + 1

    def _look(self, sizes: CopySizes, schedule: Schedule) -> None:
        """Looks at sizes within a node that equal copies do not have."""
        each, own = self.problem.cluster.devices_per_node, schedule.deployment.devices_per_replica
        parts = self.problem.fixed.replicas
        idle = 0 if own > each else each % own if parts is None else each - parts * own
        share = 0.0 if idle or each & (each - 1) else self._share_had(schedule)
        names = _of_two_pools(self.problem)
        if share < TIGHT:
            self._glance(sizes, range(1, self._largest + 1), sizes.glance, schedule)
        elif share >= LOOSE:
            self._look_where(sizes, schedule, lambda size: ABOVE_SCARCE * is_scarce(
                self.problem, sizes.worth, size), sizes.glance)
        elif names:
            self._look_where(sizes, schedule, lambda size: ABOVE_OTHERS,
                             lambda size: sizes.glance_at_some(size, names))

    def _look_where(self, sizes: CopySizes, schedule: Schedule, above: Callable[[int], float],
                    look: Callable[[int], None]) -> None:
        """Looks at sizes as long as a division with them may bring more than equal copies do, were
        they worth a share `above` the sizes next to them; 0: a size is not looked at."""
        least_qps = (1 + LEAST_SHARE) * schedule.figures.throughput_qps
        unknown = [size for size in range(1, self._largest + 1) if size not in sizes.worth]
        while unknown:
            guessed = {size: (1 + above(size)) * like_its_neighbours(sizes.worth, size)
                       for size in unknown if above(size)}
            best = self.division({**guessed, **sizes.worth})
            left = [] if best is None or best.worth <= least_qps else [
                size for size in best.sizes if size in guessed]
            if not left:
                break
            self._glance(sizes, [min(left)], look, schedule)
            unknown.remove(min(left))

    def _glance(self, sizes: CopySizes, wanted: Sequence[int], look: Callable[[int], None],
                schedule: Schedule) -> None:
        """Looks at sizes, the smallest first, as long as that takes little beside all else."""
        before = self._nodes(sizes)
        for size in wanted:
            if self._nodes(sizes) - before > MOST_GLANCED * schedule.proof.nodes or self.cuts():
                break
            if size not in sizes.worth:
                look(size)

    def _nodes(self, sizes: CopySizes) -> int:
        return self.search.nodes + sizes.nodes

    def _share_had(self, schedule: Schedule) -> float:
        """What the schedule has of what there would be without a bound, but for its margin."""
        if math.isinf(self.problem.constraint.latency_s):
            return 1.0
        free = schedule.proof.unbounded_qps
        if free is None:
            planner = self.search.on(schedule.deployment.devices_per_replica)
            try:
                seen = planner.own.glance(math.inf, 0.0)
            except InfeasibleError:
                return 1.0
            free = seen.estimate.in_copies(
                schedule.deployment.replicas).figures.throughput_qps
        return schedule.figures.throughput_qps / ((1 - schedule.margin.cost) * free)

    def _best(self, sizes: CopySizes, schedule: Schedule) -> Division | None:
        """The best division. As long as it may be worth taking, the copies that it takes are looked
        at with their margins, the smallest first, and then planned as they are to be used, those
        that bring most first; what that leaves of them decides."""
        least_qps, settled = (1 + LEAST_SHARE) * schedule.figures.throughput_qps, 0
        while settled < MOST_SETTLED:
            hoped = sizes.hoped
            best = self.division(hoped)
            if best is None or best.worth <= (1 + _ROUNDED) * least_qps or self.cuts():
                break
            left = [size for size in set(best.sizes) if not sizes.is_settled(size)]
            if not left:
                break
            unsure = [size for size in left if not sizes.hopes.is_promised(size)]
            size = min(unsure) if unsure else max(
                left, key=lambda one: (best.sizes.count(one) * hoped[one], one))
            floor_qps = hoped[size] - (best.worth - least_qps) / best.sizes.count(size)
            if unsure:
                sizes.promise(size, floor_qps / (1 + UNSEEN))
                continue
            sizes.settle(size, floor_qps)
            settled += 1
            found = sizes.schedule(size)
            if found is not None and not takes_all(schedule.estimate, found.estimate,
                                                    self.problem):
                sizes.drop(size)
        return self.division(sizes.worth)

    def _taken(self, best: Division, sizes: CopySizes, schedule: Schedule) -> _Taken | None:
        """The copies of a division, if they are planned and answer more; of a short job, sooner."""
        count = self.problem.num_queries
        if best.worth <= (1 + LEAST_SHARE) * schedule.figures.throughput_qps or not all(
                map(sizes.is_settled, best.sizes)) or (
                count is not None and count < len(best.sizes)):
            return None
        shapes = [_copies_of(sizes, size, len(list(own))) for size, own in groupby(best.sizes)]
        estimate = shapes[0].beside(tuple(replace(one, notes=()) for one in shapes[1:]))
        if not count or not is_short(self.problem, schedule):
            return _Taken(estimate)
        replays = min(max(MOST_AGAIN // count, 1), MOST_REPLAYS)
        before, after = (self.evaluator.job(one, replays) for one in (schedule.estimate, estimate))
        if before is None or after is None or after.wall_s > (1 - WORTH) * before.wall_s:
            return None
        return _Taken(estimate, f"this job's {count} queries should take "
                                f"{format_seconds(after.wall_s)} by them, and "
                                f"{format_seconds(before.wall_s)} by these")


def _of_two_pools(problem: Problem) -> tuple[str, ...]:
    """Policies that the job allows, and that encode and decode on devices of their own."""
    return tuple(row.name for row in able_policies(problem.fixed)
                 if row.is_searched and len(row.pools) == 2)


def _copies_of(sizes: CopySizes, size: int, count: int) -> Estimate:
    schedule = sizes.schedule(size)
    assert schedule is not None, f"{size = } is planned"
    return schedule.estimate.in_copies(count)


def takes_all(own: Estimate, other: Estimate, problem: Problem) -> bool:
    """Whether the other copy takes every query of the problem that these do."""
    lengths = problem.lengths
    longest, most_input = lengths.inputs.max + lengths.outputs.max, lengths.inputs.max
    if problem.queries is not None:
        longest = int(problem.queries.reserves.max(initial=1))
        most_input = int(problem.queries.inputs.max(initial=1))
    most_encoded = other.longest_input or most_input
    return other.longest_query >= min(own.longest_query, longest) and (
        most_encoded >= min(own.longest_input or most_input, most_input))


def _row(best: Division, sizes: CopySizes, most_qps: float) -> CopiesTried:
    """The best division, as it is shown beside equal copies."""
    found = {size: one for size in sorted(set(best.sizes), reverse=True)
             if (one := sizes.schedule(size)) is not None}
    return CopiesTried(
        replicas=len(best.sizes), devices_per_replica=max(best.sizes), throughput_qps=best.worth,
        latency_s=max((one.figures.latency_s for one in found.values()), default=None),
        bound_qps=most_qps, devices=best.sizes, words="; ".join(
            f"on {size}: {configuration(one.estimate)}" for size, one in found.items()))


def _chosen(schedule: Schedule, taken: _Taken, row: CopiesTried, first: Schedule,
            unseen: Sequence[int]) -> Schedule:
    """The schedule of the division, told beside that of equal copies. first: of its first copies,
    whose margin it has. unseen: sizes that were not looked at."""
    equal, qps = schedule.estimate, taken.estimate.figures.throughput_qps
    equal_qps, deployment = equal.figures.throughput_qps, equal.deployment
    bound_qps = max(schedule.proof.bound_qps, row.bound_qps)
    words = f"{words_of(equal)} on {_counted(deployment.devices_per_replica)}" + (
        " each" if deployment.replicas > 1 else "")
    status, free_qps = schedule.proof.status, schedule.proof.unbounded_qps
    return schedule.changed(
        estimate=taken.estimate, bound_qps=bound_qps, gap=bound_qps / qps - 1,
        unbounded_qps=None if free_qps is None else max(free_qps, qps),  # seen of equal copies
        status=Status.WITHIN_GAP if status == Status.OPTIMAL else status,
        margin=first.margin,
        rejected=(Rejected(label=f"equal copies: {words}", throughput_qps=equal_qps,
                           latency_s=equal.figures.latency_s, reason=why_not(equal_qps, qps)),
                  *schedule.rejected),
        explanation=(
            f"Copies of unlike sizes, on {sum_of(row.devices)} devices, each with a schedule of "
            f"its own, answer {qps:.4g} queries/s: {qps / equal_qps - 1:.1%} more than the best "
            f"equal copies ({words}: {equal_qps:.4g}){taken.job and '; '}{taken.job}. No other "
            f"division exceeds {row.bound_qps:.4g}{_but_for(unseen)}.",))


def _but_for(unseen: Sequence[int]) -> str:
    """Of which sizes that is not proved."""
    if not unseen:
        return ""
    *others, last = map(str, unseen)
    sizes = f"{', '.join(others)} and {last}" if others else last
    return f", but for those with copies on {sizes} devices, which were not looked at"


def _counted(devices: int) -> str:
    return f"{devices} device{'s' * (devices != 1)}"
