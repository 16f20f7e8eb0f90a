"""Programs of the blocks of a policy (xscheduler.block_program): how often each kind of step comes
in a period, with which rows and entries.

`ft`: one encode step and the decode steps of the block's longest request. `rra`: one encode step of
B_E requests, and the N_D iterations of a phase with fewer and fewer rows. In a pipeline a block has
several groups, FlexGen's inner blocks, which follow one another through the stages."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.placement import DEVICE, AskedPlacement, Placement
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xscheduler.block_program import FREE, Choice, Program, Step
from xsimulator.placed import PlacedSteps
from xsimulator.placed_memory import PlacedMemory
from xsimulator.placed_terms import PlacedStep
from xsimulator.plans import PlanCache, StagePlan
from xsimulator.replay.placed_times import PlacedTimes
from xsimulator.rough.formulas import Formulas
from xsimulator.rough.ranges import grid_of
from xsimulator.rough.workload import Workload

DEVICE_BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512)  # chosen
EVEN = 8  # chosen: also blocks that divide a short job evenly, up to so many


class Kind(NamedTuple):
    """A kind of step of each of some blocks, all [blocks]: requests of a group that it encodes, or
    decodes at a mean `context`; how often it comes in a period, and in a request's life."""

    is_encode: bool
    requests: FloatArray
    context: FloatArray
    often: FloatArray
    watched: FloatArray


class Layout(NamedTuple):
    """The problem of one replica, and its stages with their memory."""

    part: Problem
    plan: StagePlan
    memory: PlacedMemory
    work: Workload


class Programs:
    """Programs of one policy on the stages of one replica, by device batch and slots of a group.
    `iterations`: N_D of `rra`; 0: of `ft`. `limit_s`: on the latency."""

    def __init__(self, layout: Layout, options: Placement, iterations: int,
                 limit_s: float) -> None:
        self.part, self.plan, self.memory, self.work = layout
        self.options, self.iterations, self._limit_s = options, iterations, limit_s
        part, stages = self.part, self.plan.stages
        self.groups = part.fixed.value_of("decode_micro_batches") or len(stages)
        # all steps are taken for as long as those of the stage with most layers, the last of them
        self._slowest = max(range(len(stages)), key=lambda own: (stages[own].num_layers, own))
        known = part.queries
        self.capacity = max(self.work.longest, 0 if known is None else int(known.reserves.max()))
        if not iterations:  # a row grows with its block's longest output, and one superfluous step
            self.capacity = 1 + max(self.work.longest, 0 if known is None else int(
                known.inputs.max() + known.most_outputs.max()))

    @property
    def bounds(self) -> list[tuple[float, float]]:
        """Least and most of each share: as the job fixes them, and 0 where there is no tier."""
        asked, room = self.part.fixed.placement or AskedPlacement(), self.memory.room
        found = [bound if room[at % 3] else (0.0, 0.0) for at, bound in enumerate(FREE)]
        for first, shares in ((0, asked.weights), (3, asked.kv), (6, asked.hidden)):
            if shares is not None:
                found[first:first + 3] = [(own, own) for own in shares]
        return found

    def all(self) -> dict[int, dict[int, Callable[[], Program]]]:
        """{device batch: {slots of a group: its program}} of all blocks that the job allows."""
        most = self._most_slots()
        given = (self.part.fixed.placement or AskedPlacement()).device_batch
        batches = sorted({min(own, most) for own in DEVICE_BATCHES}) if given is None else [
            min(given, most)]
        return {batch: dict(self._of_batch(batch, most)) for batch in batches}

    def encode_batch(self, slots: FloatArray) -> FloatArray:
        """Requests that a period encodes, of all groups, [blocks]; below 1 where a group has too
        few slots."""
        if not self.iterations:
            return np.asarray(slots * self.groups)
        if (given := self.part.fixed.value_of("encode_batch")) is not None:
            return np.full_like(slots, given)
        stay = self.work.phase(self.iterations).mean_phases
        more = 1 + 1 / stay
        mean = ((np.sqrt(9 + 4 * more * slots) - 3) / (2 * more)) ** 2
        found = np.floor(mean / stay * self.groups)
        found = found - (self._slots_of(found) > slots)
        is_all = slots >= (self.part.num_queries or math.inf)  # the job has no more requests
        return np.asarray(np.where(is_all, np.maximum(found, 1.0), found))

    def _slots_of(self, batch: FloatArray) -> FloatArray:
        """Slots of a group for `batch` requests a period, [blocks]. Of `rra` three deviations above
        the mean number at work and a phase's new ones fill them (xrunner.rules.rra)."""
        if not self.iterations:
            return np.asarray(np.ceil(batch / self.groups))
        mean = batch * self.work.phase(self.iterations).mean_phases / self.groups
        return np.asarray(np.ceil(mean + 3 * np.sqrt(mean)) + np.ceil(batch / self.groups))

    def kinds(self, choice: Choice) -> list[tuple[Kind, PlacedStep]]:
        """The kinds of steps of one block, [1] each, and their terms."""
        return self._taken(self._steps(choice.device_batch), np.array([float(choice.requests)]))

    def held_bytes(self, placement: Placement, slots: int) -> FloatArray:
        """[stages, tiers, 4] bytes of weights, entries, hidden states and work, of whole tensors
        and requests."""
        return self.memory.held(placement, slots, self.capacity, self.groups)

    def exact_s(self, placement: Placement, choice: Choice) -> float:
        """Seconds of a period with whole tensors and requests on the tiers."""
        times = PlacedTimes(self.part, self.plan.times.layers, self.plan.stages, placement,
                            choice.requests)
        total = 0.0
        for kind in self._kinds(np.array([float(choice.requests)])):
            if kind.is_encode:
                each = times.encode_rows_s(kind.requests * self.work.inputs.mean)
                each[..., -1] += times.ends_s(kind.requests)
            else:
                each = times.decode_s(kind.requests, kind.context)
            total += float(kind.often[0]) * float(each.max())
        return total

    def estimate(self, timing: TimingSource, plans: PlanCache, choice: Choice,
                 placement: Placement) -> Estimate:
        """The Estimate of a block on all replicas, with figures by its program."""
        batch = int(self.encode_batch(np.array(choice.requests)))
        point = (batch, self.iterations, self.groups, 0) if self.iterations else (
            min(batch, self.part.num_queries or batch), self.groups)
        formula = Formulas(self.part, timing, self.work, plans.of(self.part)).of(
            "rra" if self.iterations else "ft")
        program, shares = choice.program, shares_of(placement)
        encode, *decode = program.steps
        encode_s = float(encode.placed.seconds(shares, program.serial_share))
        period_s = program.period_s(shares)
        # batches of other sizes than planned would need more slots
        as_planned: dict[str, float] = dict.fromkeys(
            ("adjustment", "mean_input_tokens", "target_active"), 0.0) if self.iterations else {}
        return formula.estimate((1, 0), point).changed(
            placement=placement, kv_tokens=choice.requests * self.capacity * self.groups,
            period_s=period_s, latency_s=program.period_s(shares, is_watched=True), fits=True,
            memory_bytes=tuple(budget[DEVICE] for budget in placement.budgets),
            encode_s=encode_s * self.groups,
            decode_iteration_s=(period_s - encode.often * encode_s) * self.groups / max(
                sum(step.often for step in decode), 1e-9),
            **as_planned).in_copies(self.part.copies)

    def _most_slots(self) -> int:
        """Slots of a group that the job's requests fill, and whose entries all tiers hold."""
        most = self.memory.most_slots(self.options, self.capacity) // self.groups
        if (queries := self.part.num_queries) is not None:
            most = min(most, queries if self.iterations else -(-queries // self.groups))
        return max(most, 1)

    def _of_batch(self, batch: int, most: int) -> Iterator[tuple[int, Callable[[], Program]]]:
        given, queries = self.part.fixed.value_of("encode_batch"), self.part.num_queries
        sizes = {batch * count for count in grid_of(most // batch, None, 1.25)}
        if queries is not None:
            even = (-(-queries // (self.groups * count)) for count in range(1, EVEN + 1))
            sizes |= {own for own in even if batch <= own <= most}
        if given is not None:
            sizes = {min(int(self._slots_of(np.array(float(given)))), most)}
        slots = np.array(sorted(sizes), float)
        slots = slots[self.encode_batch(slots) >= 1]
        # as many as the rule takes, since they decide whose entries lie where
        slots = np.unique(np.minimum(self._slots_of(self.encode_batch(slots)), most))
        steps = self._steps(batch)
        taken = self._taken(steps, slots)
        rows = self.memory.rows(steps.placement, slots, self.capacity, self.groups)

        def program(index: int) -> Program:
            return Program(
                requests=float(self.encode_batch(slots[index])), serial_share=steps.serial_share,
                limit_s=self._limit_s, bounds=self.bounds,
                memory=rows._replace(by_share=rows.by_share[index], fixed=rows.fixed[index]),
                steps=tuple(Step(float(kind.often[index]), float(kind.watched[index]), step.of(
                    index)) for kind, step in taken if kind.often[index]))

        for index, own in enumerate(slots.astype(int).tolist()):
            yield own, cache(partial(program, index))

    def _steps(self, batch: int) -> PlacedSteps:
        return PlacedSteps(self.part, self.plan.times.layers, self.plan.stages, replace(
            self.options, device_batch=batch))

    def _taken(self, steps: PlacedSteps, slots: FloatArray) -> list[tuple[Kind, PlacedStep]]:
        return [(kind, steps.encode_step(self._slowest, kind.requests) if kind.is_encode else
                 steps.decode_step(self._slowest, kind.requests, kind.context))
                for kind in self._kinds(slots)]

    def _kinds(self, slots: FloatArray) -> Iterator[Kind]:
        """The kinds of steps of blocks with so many slots in each group."""
        work, batch, none = self.work, self.encode_batch(slots), np.zeros_like(slots)
        cycle = max(self.groups, len(self.plan.stages))  # steps of a group, in steps of a stage
        encodes = none + self.groups + len(self.plan.stages) - 1
        is_one = self.part.constraint.kind == "sequence"
        if not self.iterations:
            rounds = work.rounds(batch)
            watched = work.rounds(batch, work.watched) if is_one else rounds
            yield Kind(True, slots, none, encodes, encodes)
            yield Kind(False, slots, work.inputs.mean + 1 + rounds / 2, rounds * cycle,
                       watched * cycle)
            return
        phase, seen = work.phase(self.iterations), max(work.watched, 1)
        before = math.ceil(seen / self.iterations) - 1
        begins = np.cumsum(phase.widths) - phase.widths
        inside = np.clip(seen - before * self.iterations - begins, 0.0, phase.widths)
        yield Kind(True, batch / self.groups, none, encodes, encodes * (before + 1))
        # in three parts: the first quarter of a phase, the second and the others
        starts = np.unique(np.searchsorted(begins, [0.0, 0.25 * self.iterations,
                                                    0.5 * self.iterations])[:len(begins)])
        widths, inside, mean = (np.add.reduceat(own, starts) for own in (
            phase.widths, inside, phase.widths * phase.active))
        for width, last, active in zip(widths, inside, mean / widths, strict=True):
            rows = batch / self.groups * active
            share = np.minimum(rows, 1.0)  # an empty group takes no step
            yield Kind(False, np.maximum(rows, 1.0), none + work.context, width * share * cycle,
                       (before * width * share + last) * cycle)


def shares_of(placement: Placement) -> FloatArray:
    """The nine shares of a placement."""
    return np.array([*placement.weights, *placement.kv, *placement.hidden], float)
