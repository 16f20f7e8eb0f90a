"""The linear program of a block (FlexGen, arXiv:2303.06865, section 4.3): the nine shares of a
placement (of weights, entries and hidden states, each on device, host and disk) for the least
seconds of a period.

A period has steps of several kinds. A step is some layers, each of five terms that are linear in
the shares, and takes T = (1 - c) max(terms) + c sum(terms) a layer. So T has one row for each term,
and each memory one row for each kind of step."""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.units import GIB
from xsimulator.placed_memory import MemoryRows
from xsimulator.placed_terms import at_shares, layer_s

SHARES = 9
FREE = ((0.0, 1.0),) * (SHARES - 1) + ((0.0, 0.0),)  # hidden states never lie on disk


class Part(NamedTuple):
    """`times` equal layers of a step: their terms are `by_share` [5, 9] times the shares plus
    `fixed` [5], in seconds."""

    times: float
    by_share: FloatArray
    fixed: FloatArray


class Step(NamedTuple):
    """A kind of step: `often` of them in a period, `watched` of them in the life of the request
    that the latency limit is for. `other_s`: seconds that no share changes."""

    often: float
    watched: float
    parts: tuple[Part, ...]
    other_s: float = 0.0

    def seconds(self, shares: FloatArray, serial_share: float) -> float:
        """Seconds of one step at these shares."""
        return self.other_s + sum(part.times * float(layer_s(
            at_shares(part.by_share, shares) + part.fixed, serial_share)) for part in self.parts)


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
        return sum((step.watched if is_watched else step.often) * step.seconds(
            shares, self.serial_share) for step in self.steps)

    def qps(self, shares: FloatArray) -> float:
        """Requests/s at these shares."""
        return self.requests / self.period_s(shares)

    def most_qps(self) -> float:
        """Upper bound on the throughput: without rows of memory. Where no share off the device
        makes a term shorter, all on the device is best."""
        parts = [part.by_share for step in self.steps for part in step.parts]
        is_free = all(tuple(bound) in ((0.0, 1.0), (0.0, 0.0)) for bound in self.bounds)
        if is_free and all((own[:, [0, 0, 3, 3, 6, 6]] <= own[:, [1, 2, 4, 5, 7, 8]]).all()
                           for own in parts):
            return self.qps(np.eye(SHARES)[[0, 3, 6]].sum(axis=0))
        solution = self.solve(has_memory=False)
        return math.inf if solution is None else solution.qps

    def solve(self, *, has_memory: bool = True) -> Solution | None:
        """The shares of the highest throughput; None if none keep the limits. has_memory: with the
        rows of memory; without them the throughput is an upper bound."""
        from scipy.optimize import linprog  # imported late: most plans need no program

        parts = [(step, part) for step in self.steps for part in step.parts]
        scales = np.array([part.fixed.sum() + part.by_share.sum(axis=0).max() for _, part in parts])
        if not np.isfinite([*scales, *(step.other_s for step in self.steps)]).all() or not (
                scales > 0).all():
            return None  # sizes without known times
        rows, most = list[FloatArray](), list[float]()
        for index, (_, part) in enumerate(parts):
            c, own = self.serial_share, np.zeros((len(part.fixed), SHARES + len(parts)))
            own[:, :SHARES] = (1 - c) * part.by_share + c * part.by_share.sum(axis=0)
            own[:, :SHARES] /= scales[index]
            own[:, SHARES + index] = -1.0  # T in units of its scale
            rows += list(own)
            most += list(-((1 - c) * part.fixed + c * part.fixed.sum()) / scales[index])
        counts = np.array([[step.often, step.watched] for step, _ in parts]).T * scales * [
            part.times for _, part in parts]
        other_s, other_watched_s = np.array(
            [[step.often, step.watched] for step in self.steps]).T @ [
                step.other_s for step in self.steps]
        unit_s = counts[0].sum()
        none = np.zeros(SHARES)
        if math.isfinite(self.limit_s):
            rows.append(np.concatenate([none, counts[1] / unit_s]))
            most.append((self.limit_s - other_watched_s) / unit_s)
        first, memory = len(rows), self.memory
        if has_memory:
            unit = np.maximum(memory.capacity, 1.0)
            rows += list(np.hstack([memory.by_share, np.zeros((len(unit), len(parts)))])
                         / unit[:, None])
            most += list((memory.capacity - memory.fixed) / unit)
        found = linprog(np.concatenate([none, counts[0] / unit_s]), A_ub=np.array(rows), b_ub=most,
                        A_eq=np.hstack([np.kron(np.eye(3), np.ones(3)), np.zeros((3, len(parts)))]),
                        b_eq=np.ones(3), method="highs",
                        bounds=[*self.bounds, *[(0, None)] * len(parts)])
        if found.status != 0:
            return None
        period_s, prices = found.fun * unit_s + other_s, np.zeros(3)
        if has_memory:
            gains = -found.ineqlin.marginals[first:] / unit * unit_s / period_s * GIB
            np.add.at(prices, list(memory.tiers), np.maximum(gains, 0.0))
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
    known, hopes = dict[tuple[int, int], Program](), list[tuple[float, int, int]]()
    solved = dict[tuple[int, int], Solution | None]()

    def program_of(key: tuple[int, int]) -> Program:
        if key not in known:
            known[key] = programs[key[0]][key[1]]()
        return known[key]

    def solve(key: tuple[int, int]) -> Solution | None:
        if key not in solved:
            solved[key] = program_of(key).solve()
        return solved[key]

    for batch, own in programs.items():
        hoped = {size: program_of((batch, size)).most_qps() for size in sorted(own)}
        sizes = [size for size, hope_qps in hoped.items() if hope_qps >= least_qps]
        # what a block takes of each memory, and its seconds, rise with its requests
        fitting = bisect_left(sizes, True, key=lambda size: solve((batch, size)) is None)
        hopes += [(hoped[size], batch, size) for size in sizes[:fitting]]
    found = list[Choice]()
    for hope_qps, batch, size in sorted(hopes, reverse=True):
        if hope_qps < max(least_qps, found[most - 1].solution.qps if len(found) >= most else 0.0):
            break
        if (solution := solve((batch, size))) is not None:
            found.append(Choice(batch, size, known[batch, size], solution))
            found.sort(key=lambda choice: -choice.solution.qps)
    return found[:most]
