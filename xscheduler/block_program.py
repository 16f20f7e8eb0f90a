"""The linear program of a block (FlexGen, arXiv:2303.06865, section 4.3): the nine shares of a
placement (of weights, entries and hidden states, each on device, host and disk) for the least
seconds of a period.

A period has steps of several kinds. A step is some layers, each of five terms that are linear in
the shares, and takes T = (1 - c) max(terms) + c sum(terms) a layer. So T has one row for each term,
and each memory one row for each kind of step."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.units import GIB
from xsimulator.placed_memory import MemoryRows
from xsimulator.placed_terms import PlacedStep, Terms

SHARES = 9
FREE = ((0.0, 1.0),) * (SHARES - 1) + ((0.0, 0.0),)  # hidden states never lie on disk


class Step(NamedTuple):
    """A kind of step: `often` of them in a period, `watched` of them in the life of the request
    that the latency limit is for."""

    often: float
    watched: float
    placed: PlacedStep


class Solution(NamedTuple):
    """Shares [9] of the least period. prices: [3] by tier, share of throughput that one GiB more
    would bring."""

    shares: FloatArray
    qps: float
    prices: FloatArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Program:
    """The program of one block. `requests`: that end in a period. `limit_s`: of the latency.
    `bounds`: least and most of each share."""

    requests: float
    steps: tuple[Step, ...]
    memory: MemoryRows
    serial_share: float
    limit_s: float = math.inf
    bounds: Sequence[tuple[float, float]] = FREE

    def period_s(self, shares: FloatArray, *, is_watched: bool = False) -> float:
        """Seconds of a period at these shares, or of the latency that is limited."""
        return sum((step.watched if is_watched else step.often) * float(step.placed.seconds(
            shares, self.serial_share)) for step in self.steps)

    def qps(self, shares: FloatArray) -> float:
        """Requests/s at these shares."""
        return self.requests / self.period_s(shares)

    @property
    def _parts(self) -> list[tuple[Terms, FloatArray, float]]:
        """Terms of each part; how many such layers a period and the watched request have; and the
        scale of their seconds."""
        return [(terms, times * np.array([step.often, step.watched]),
                 float(terms.fixed.sum() + terms.by_share.sum(axis=0).max()))
                for step in self.steps for times, terms in step.placed.parts]

    @property
    def _has_times(self) -> bool:
        return all(map(math.isfinite, (*(scale for _, _, scale in self._parts),
                                       *(float(step.placed.other_s) for step in self.steps))))

    def most_qps(self) -> float:
        """Upper bound on the throughput: without rows of memory; 0 where a time is unknown. Where
        no share off the device makes a term shorter, all on the device is best."""
        if not self._has_times:
            return 0.0
        is_free = all(tuple(bound) in ((0.0, 1.0), (0.0, 0.0)) for bound in self.bounds)
        if is_free and all((own.by_share[:, [0, 0, 3, 3, 6, 6]] <= own.by_share[
                :, [1, 2, 4, 5, 7, 8]]).all() for own, _, _ in self._parts):
            return self.qps(np.eye(SHARES)[[0, 3, 6]].sum(axis=0))
        none = MemoryRows(np.zeros((0, SHARES)), np.zeros(0), np.zeros(0), ())
        solution = replace(self, memory=none).solve()
        return math.inf if solution is None else solution.qps

    def solve(self) -> Solution | None:
        """The shares of the highest throughput; None if none keep the limits, or a time is
        unknown."""
        from scipy.optimize import linprog  # imported late: most plans need no program

        parts, c, memory = self._parts, self.serial_share, self.memory
        scales = np.array([scale for _, _, scale in parts])
        if not self._has_times or not (scales > 0).all():
            return None
        often, watched = np.array([count for _, count, _ in parts]).T * scales
        other_s, other_watched_s = np.array(
            [[step.often, step.watched] for step in self.steps]).T @ [
                float(step.placed.other_s) for step in self.steps]
        rows, most, no_times = list[FloatArray](), list[float](), np.zeros(len(parts))
        for index, (terms, _, scale) in enumerate(parts):  # T in units of its scale
            own = np.hstack([(1 - c) * terms.by_share + c * terms.by_share.sum(axis=0),
                             np.zeros((len(terms.fixed), len(parts)))]) / scale
            own[:, SHARES + index] = -1.0
            rows += list(own)
            most += list(-((1 - c) * terms.fixed + c * terms.fixed.sum()) / scale)
        unit_s = often.sum()
        if math.isfinite(self.limit_s):
            rows.append(np.concatenate([np.zeros(SHARES), watched / unit_s]))
            most.append((self.limit_s - other_watched_s) / unit_s)
        first, unit = len(rows), np.maximum(memory.capacity, 1.0)
        rows += [np.concatenate([own, no_times]) for own in memory.by_share / unit[:, None]]
        most += list((memory.capacity - memory.fixed) / unit)
        found = linprog(np.concatenate([np.zeros(SHARES), often / unit_s]), A_ub=np.array(rows),
                        A_eq=np.hstack([np.kron(np.eye(3), np.ones(3)), np.zeros((3, len(parts)))]),
                        b_ub=most, b_eq=np.ones(3), method="highs",
                        bounds=[*self.bounds, *[(0, None)] * len(parts)])
        if found.status != 0:
            return None
        period_s, prices = found.fun * unit_s + other_s, np.zeros(3)
        np.add.at(prices, np.array(memory.tiers, int), np.maximum(
            -found.ineqlin.marginals[first:] / unit * unit_s / period_s * GIB, 0.0))
        return Solution(np.clip(found.x[:SHARES], 0.0, 1.0), self.requests / period_s, prices)


class Choice(NamedTuple):
    """A block of `requests`, worked in device batches of `device_batch`; its program, solved."""

    device_batch: int
    requests: int
    program: Program
    solution: Solution


def best_blocks(programs: Mapping[int, Mapping[int, Callable[[], Program]]], most: int = 1,
                least_qps: float = 0.0) -> list[Choice]:
    """The `most` blocks of highest throughput, above `least_qps`, the best first. programs: {device
    batch: {requests of a block: its program}}. None of the others is better: a block is left out
    only where a smaller one finds no room or no time, or where its program without rows of memory
    is worse."""
    hopes, found = list[tuple[float, int, int]](), list[Choice]()
    solve = cache(lambda batch, size: programs[batch][size]().solve())
    for batch, own in programs.items():
        hoped = {size: own[size]().most_qps() for size in sorted(own)}
        sizes = [size for size, hope_qps in hoped.items() if hope_qps >= least_qps]
        # what a block takes of each memory, and its seconds, rise with its requests
        fitting = bisect_left(sizes, True, key=partial(
            lambda batch, size: solve(batch, size) is None, batch))
        hopes += [(hoped[size], batch, size) for size in sizes[:fitting]]
    for hope_qps, batch, size in sorted(hopes, reverse=True):
        if hope_qps < max(least_qps, found[most - 1].solution.qps if len(found) >= most else 0.0):
            break
        if (solution := solve(batch, size)) is not None:
            found.append(Choice(batch, size, programs[batch][size](), solution))
            found.sort(key=lambda choice: -choice.solution.qps)
    return found[:most]
