"""Re-planning of a run whose replicas have several shapes, each with a schedule of its own.

    lengths, late requests  observed over all replicas: every shape is planned again
    step times              observed per shape: only that shape is planned again

Each shape gets a share of the remaining requests by its throughput, and all have the same limit.
The sizes of the replicas stay, since others would need other layers on every rank. Equal replicas
are the case of one shape."""

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
from xscheduler.cache_sizing import mean_present, with_room_for
from xscheduler.live.fixed_stages import Option
from xscheduler.live.reschedule import Revision
from xscheduler.live.step_monitor import Step, StepDrift, StepMonitor


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """Cache sizes of a shape's replicas. slots: of a group. kv_tokens: tokens in blocks of a group
    (0: the planned number, or rows)."""

    slots: int
    kv_tokens: int = 0


class StepObserver(Protocol):
    """An observer of the step times of a run. Its methods are those of StepMonitor."""

    def add_report(self, rank: int, stage: int, reported_s: float,
                   steps: Iterable[Step]) -> None: ...
    def drift(self) -> StepDrift | None: ...
    def accept(self, drift: StepDrift) -> None: ...
    def factors_of(self, shape: int) -> dict[str, Factor]: ...


class ShapesMonitor:
    """Step times of replicas of several shapes. Each shape has its own monitor, since kinds of
    steps differ between shapes."""

    def __init__(self, problem: Problem, timing: TimingSource, estimate: Estimate, *,
                 threshold: float, longest: int) -> None:
        self._shapes = estimate.shapes
        self._paces = [StepMonitor(problem, timing, shape, threshold=threshold, longest=longest)
                       for shape in self._shapes]
        counts = [shape.deployment.replicas * len(shape.deployment.stages)
                  for shape in self._shapes]
        self._firsts = [0, *accumulate(counts)]  # stages, counted over all replicas

    def add_report(self, rank: int, stage: int, reported_s: float, steps: Iterable[Step]) -> None:
        shape = max(k for k, first in enumerate(self._firsts[:-1]) if first <= stage)
        self._paces[shape].add_report(rank, stage - self._firsts[shape], reported_s, steps)

    def drift(self) -> StepDrift | None:
        """The drift of the shape that slowed down most, else of the one that sped up most."""
        found = [replace(drift, shape=shape, where=f" of replicas on {_on(self._shapes[shape])}",
                         stages={kind: self._firsts[shape] + stage
                                 for kind, stage in drift.stages.items()})
                 for shape, pace in enumerate(self._paces)
                 if (drift := pace.drift()) is not None]
        return max(found, default=None, key=lambda drift: (
            drift.slowed if drift.slowed > 1 else 1 / drift.slowed - 1e9))

    def accept(self, drift: StepDrift) -> None:
        self._paces[drift.shape].accept(drift)

    def factors_of(self, shape: int) -> dict[str, Factor]:
        return self._paces[shape].factors


def make_monitor(problem: Problem, timing: TimingSource, estimate: Estimate, *, threshold: float,
            longest: int) -> StepObserver:
    """An observer of the step times of a run of `estimate`."""
    kind = ShapesMonitor if estimate.others else StepMonitor
    return kind(problem, timing, estimate, threshold=threshold, longest=longest)


def can_change_lengths(estimate: Estimate) -> bool:
    """Whether some shape of a run can adjust to output lengths."""
    return any(policy(shape.policy).is_changeable for shape in estimate.shapes)


def most_allowed(estimate: Estimate) -> float:
    """Most requests in the system over all replicas that the control variables allow."""
    return sum(shape.deployment.replicas * max_in_system(shape.controls)
               for shape in estimate.shapes)


def most_planned(estimate: Estimate) -> float:
    """Most requests in the system over all replicas, as planned."""
    return sum(shape.deployment.replicas * shape.most_in_system for shape in estimate.shapes)


def revise_shapes(running: Schedule, shapes: Sequence[int], problem: Problem, initial: Estimate,
                  rooms: Sequence[CacheSizes],
                  revise: Callable[..., Revision | None]) -> Revision | None:
    """The revision of these shapes of a running schedule; None if `revise` returns none for any.

    `initial`: the first schedule of the run, which the caches were made for. `rooms`: cache sizes
    of each shape. `revise(shape, schedule of its replicas, problem with its share of the requests,
    initial=, most_present=)`: see reschedule.revise."""
    all_qps = running.figures.throughput_qps
    found: list[Revision | None] = [None] * len(running.estimate.shapes)
    for shape in shapes:
        own, first = running.estimate.shapes[shape], initial.shapes[shape]
        share = own.figures.throughput_qps / all_qps if running.estimate.others else 1.0
        count = problem.num_queries
        part = problem if count is None or share == 1 else replace(
            problem, num_queries=max(round(share * count), 1))
        is_rra = policy(first.policy).is_changeable
        most = first.deployment.num_groups * mean_present(rooms[shape].slots) if is_rra else (
            max_in_system(first.controls) or None)
        found[shape] = revise(shape, replace(running, estimate=own), part,
                              initial=None if is_rra else first, most_present=most)
    return _together(running.estimate, found)


def _together(now: Estimate, found: Sequence[Revision | None]) -> Revision | None:
    """The revisions of all shapes as one. None stands for a shape that does not change."""
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
    return Revision(
        keep=Option(estimate=kept[0].beside(tuple(kept[1:])) if kept else None,
                 reason=None if kept else "; ".join(reasons)),
        estimate=after[0].beside(tuple(after[1:])) if is_changed else None,
        reason="; ".join(f"on {_on(shape)}: {one.reason}" for shape, one in known),
        is_kept=all(one.is_kept for _, one in known))


def differ(old: Estimate, new: Estimate) -> bool:
    """Whether two estimates execute something different."""
    return (old.controls, old.deployment) != (new.controls, new.deployment)


def with_caches(running: Schedule, changed: Estimate, problem: Problem,
                longest: int) -> Schedule | None:
    """The running schedule with `changed` put in and, for RRA, caches large enough for the longest
    request; None if they do not fit."""
    shapes = []
    for old, new in zip(running.estimate.shapes, changed.shapes, strict=True):
        if differ(old, new) and policy(new.policy).is_changeable:
            new = with_room_for(replace(running, estimate=new), problem, longest).estimate
            if new.deployment.kv_tokens // new.deployment.num_groups < longest:
                return None
        shapes.append(new)
    return replace(running, estimate=shapes[0].beside(tuple(shapes[1:])))


def variables_of(estimate: Estimate) -> dict[str, int]:
    """{name: value} of variables that may change in a run; names say the devices of each shape."""
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
