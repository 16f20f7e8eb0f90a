"""Re-planning a run whose copies have several shapes, each with a schedule of its own.

    lengths, late queries   observed over all copies: every shape is planned again
    step times              observed per shape: only that shape is planned again

Each shape gets its share of the remaining queries by its throughput; all have the same limit. The
sizes of the copies stay, since others would need other layers on every rank. Equal copies are the
case of one shape."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol

from xgpt.core.controls import max_in_system
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xprofiler.profile_timing import Factor
from xprofiler.timing import TimingSource
from xscheduler.live.given_stages import Way
from xscheduler.live.pace import Pace, PaceDrift, Step
from xscheduler.live.reschedule import Revised
from xscheduler.room import mean_present, with_room_for


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Cache sizes of a shape's copies: slots of a group; kv_tokens: tokens in blocks of a group (0:
    the planned number, or rows)."""

    slots: int
    kv_tokens: int = 0


class Follows(Protocol):
    """An observer of the step times of a run."""

    def hear(self, rank: int, stage: int, told_s: float, steps: Iterable[Step]) -> None: ...
    def drift(self) -> PaceDrift | None: ...
    def take(self, drift: PaceDrift) -> None: ...
    def factors_of(self, shape: int) -> dict[str, Factor]: ...


class PaceOfShapes:
    """Step times of copies of several shapes, each observed by itself, since kinds of steps differ
    between shapes."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate, *,
                 threshold: float, longest: int) -> None:
        """See Pace."""
        self._shapes = estimate.shapes
        self._paces = [Pace(problem, timing, shape, threshold=threshold, longest=longest)
                       for shape in self._shapes]
        counts = [shape.deployment.replicas * len(shape.deployment.stages)
                  for shape in self._shapes]
        self._firsts = [0, *accumulate(counts)]  # stages, counted over all copies

    def hear(self, rank: int, stage: int, told_s: float, steps: Iterable[Step]) -> None:
        """See Pace."""
        shape = max(k for k, first in enumerate(self._firsts[:-1]) if first <= stage)
        self._paces[shape].hear(rank, stage - self._firsts[shape], told_s, steps)

    def drift(self) -> PaceDrift | None:
        """The drift of the shape that slowed down most, or if none did, that sped up most."""
        found = [replace(drift, shape=shape, where=f" of the copies on {_on(self._shapes[shape])}",
                         stages={kind: self._firsts[shape] + stage
                                 for kind, stage in drift.stages.items()})
                 for shape, pace in enumerate(self._paces)
                 if (drift := pace.drift()) is not None]
        return max(found, default=None, key=lambda drift: (
            drift.slowed if drift.slowed > 1 else 1 / drift.slowed - 1e9))

    def take(self, drift: PaceDrift) -> None:
        """See Pace."""
        self._paces[drift.shape].take(drift)

    def factors_of(self, shape: int) -> dict[str, Factor]:
        """See Pace."""
        return self._paces[shape].factors


def pace_of(problem: Problem, timing: TimingSource, estimate: Estimate, *, threshold: float,
            longest: int) -> Follows:
    """An observer of the step times of a run of `estimate`."""
    kind = PaceOfShapes if estimate.others else Pace
    return kind(problem, timing, estimate, threshold=threshold, longest=longest)


def can_change_lengths(estimate: Estimate) -> bool:
    """Whether some shape of a run can adjust to output lengths."""
    return any(policy(shape.policy).is_changeable for shape in estimate.shapes)


def most_at_work(estimate: Estimate) -> float:
    """Most queries in the system over all copies, by their control variables."""
    return sum(shape.deployment.replicas * max_in_system(shape.controls)
               for shape in estimate.shapes)


def most_planned(estimate: Estimate) -> float:
    """Most queries in the system over all copies, as planned."""
    return sum(shape.deployment.replicas * shape.most_in_system for shape in estimate.shapes)


def revise_shapes(running: Schedule, shapes: Sequence[int], problem: Problem, began: Estimate,
                  rooms: Sequence[Room], revise: Callable[..., Revised | None]) -> Revised | None:
    """The revision of the given shapes of a running schedule; None if `revise` has none for any.
    began: the first schedule of the run, which the caches were made for. rooms: of each shape.
    revise(shape, schedule of its copies, problem with its share of the queries, began=,
    most_present=): see reschedule.revise."""
    all_qps = running.figures.throughput_qps
    found: list[Revised | None] = [None] * len(running.estimate.shapes)
    for shape in shapes:
        own, first = running.estimate.shapes[shape], began.shapes[shape]
        share = own.figures.throughput_qps / all_qps if running.estimate.others else 1.0
        count = problem.num_queries
        part = problem if count is None or share == 1 else replace(
            problem, num_queries=max(round(share * count), 1))
        is_rra = policy(first.policy).is_changeable
        most = first.deployment.num_groups * mean_present(rooms[shape].slots) if is_rra else (
            max_in_system(first.controls) or None)
        found[shape] = revise(shape, replace(running, estimate=own), part,
                              began=None if is_rra else first, most_present=most)
    return _together(running.estimate, found)


def _together(now: Estimate, found: Sequence[Revised | None]) -> Revised | None:
    """The revisions of all shapes as one. None stands for a shape that stays as it is."""
    if len(found) == 1 or all(one is None for one in found):
        return found[0]
    pairs = list(zip(now.shapes, found, strict=True))
    known = [(shape, one) for shape, one in pairs if one is not None]
    serving = [shape if one is None else one.keep.estimate for shape, one in pairs
               if one is None or one.keep.qps]
    kept = [one for one in serving if one is not None]
    reasons = [one.keep.reason for _, one in known if one.keep.reason]
    after = [shape if one is None or one.estimate is None else one.estimate for shape, one in pairs]
    is_changed = any(one.estimate is not None for _, one in known)
    return Revised(
        keep=Way(estimate=kept[0].beside(tuple(kept[1:])) if kept else None,
                 reason=None if kept else "; ".join(reasons)),
        estimate=after[0].beside(tuple(after[1:])) if is_changed else None,
        reason="; ".join(f"on {_on(shape)}: {one.reason}" for shape, one in known),
        is_kept=all(one.is_kept for _, one in known))


def differ(old: Estimate, new: Estimate) -> bool:
    """Whether two estimates execute something different."""
    return (old.controls, old.deployment) != (new.controls, new.deployment)


def roomy(running: Schedule, changed: Estimate, problem: Problem, longest: int) -> Schedule | None:
    """The running schedule with `changed` put in and, for RRA, caches for the longest request; None
    if there is no room for it."""
    shapes = []
    for old, new in zip(running.estimate.shapes, changed.shapes, strict=True):
        if differ(old, new) and policy(new.policy).is_changeable:
            new = with_room_for(replace(running, estimate=new), problem, longest).estimate
            if new.deployment.kv_tokens // new.deployment.num_groups < longest:
                return None
        shapes.append(new)
    return replace(running, estimate=shapes[0].beside(tuple(shapes[1:])))


def variables_of(estimate: Estimate) -> dict[str, int]:
    """{name: value} of the variables that may change in a run; with several shapes, each name says
    on how many devices."""
    if not estimate.others:
        return _variables(estimate)
    return {f"{name} on {_on(shape)}": value for shape in estimate.shapes
            for name, value in _variables(shape).items()}


def _variables(estimate: Estimate) -> dict[str, int]:
    own = {"encode_batch": estimate.figures.encode_batch,
           "decode_iterations": estimate.figures.decode_iterations,
           "decode_micro_batches": estimate.deployment.num_groups}
    names = ("decode_micro_batches", *policy(estimate.policy).variable_names)
    known = {**estimate.variables, **own}
    return {name: known[name] for name in names if isinstance(known.get(name), int)}


def _on(shape: Estimate) -> str:
    devices = shape.deployment.devices_per_replica
    return f"{devices} device{'s' * (devices != 1)}"
