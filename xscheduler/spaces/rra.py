"""RRA's space: encode_batch x decode_iterations under every tensor plan, encoded between phases, or
beside decoding in chunks of several sizes."""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import TimingSource
from xscheduler.admissible import Limit
from xscheduler.spaces.rra_chunks import ChunkPoints
from xscheduler.spaces.rra_examiner import RraExaminer
from xscheduler.spaces.rra_family import FamilyExaminer
from xscheduler.spaces.rra_points import RraPoints
from xscheduler.spaces.space import SMALL_BATCHES, AllInBoxes, Selection, Tight
from xscheduler.spaces.tensor_plans import TensorPlan, batch_range, iteration_range, spread_sizes
from xsimulator.policies.rra.config import RraConfig

# For the tightest latency, at small batches: values of decode_iterations looked at over all plans,
# and at least of one.
LATENCY_SAMPLES, LEAST_SAMPLES = 512, 16
# Of chunks a selection has these sizes, and one in so many rungs of a ladder.
SELECTED_CHUNKS, SELECTED_RUNGS = (128, 512, 2048), 16
_EVEN_BATCHES = 8  # a selection has the batches that divide the job into up to so many


class RraSpace(AllInBoxes):
    """See xscheduler.spaces.space.Space."""

    variables = ("encode_batch", "decode_iterations", "encode_chunk")

    def __init__(self, name: str, problem: Problem, timing: TimingSource,
                 plans: Sequence[TensorPlan]) -> None:
        self.name, self.problem, self.plans = name, problem, tuple(plans)
        self.points = RraPoints(problem, timing, plans)
        self.chunks = ChunkPoints(self.points)
        self._figures = cache(self._evaluated)  # of the few that are shown, again and again

    @property
    def num_evaluated(self) -> int:
        return self.points.num_evaluated + self.chunks.num_evaluated

    def examiner(self, latency_bound_s: float, gap: float, floor_qps: float, *,
                 keeps_gap: bool = False, is_claimed: bool = True) -> FamilyExaminer:
        between = None if self.problem.fixed.encode_chunk else RraExaminer(
            self.points, latency_bound_s, gap=gap, floor_qps=floor_qps)
        return FamilyExaminer(between, self.chunks, latency_bound_s, gap=gap, floor_qps=floor_qps)

    def estimate(self, plan: int, point: tuple[int, ...]) -> Estimate:
        return self.points.rra.estimate(self.points.config(plan, point))

    def figures(self, plan: int, point: tuple[int, ...]) -> tuple[float, float]:
        return self._figures(plan, point)

    def beyond(self, tight: Tight) -> str:
        config = self.points.config(tight.plan, tight.point)
        return f" ({'; '.join(self.points.rra.beyond(config, REFUSED_BEYOND))})"

    def present(self, tight: Tight) -> float:
        config = self.points.config(tight.plan, tight.point)
        if config.encode_chunk:
            return float(self.points.rra.chunked.evaluate([config]).present[0])
        return float(self.points.rra.room([config]).present[0])

    def easiest(self) -> list[Tight]:
        problem = self.problem
        if problem.fixed.encode_chunk:
            return self._easiest_in_chunks()
        least, most = batch_range(problem.fixed, problem.num_queries)
        first, last = iteration_range(problem.fixed, self.points.rra.flow.max_iterations)
        count = max(LATENCY_SAMPLES // len(self.plans), LEAST_SAMPLES)
        samples = np.linspace(first, last, min(last - first + 1, count))
        batches = sorted({min(max(size, least), most) for size in SMALL_BATCHES})
        keys = np.array([(plan, batch, round(n)) for plan in range(len(self.plans))
                         for batch in batches for n in samples], np.int64)
        figures = self.points.evaluate(keys[:, 0], keys[:, 1], keys[:, 2])
        return [Tight(latency, Limit(code), qps, plan, (batch, n))
                for latency, code, qps, (plan, batch, n) in zip(
                    figures.latency_s.tolist(), figures.crowding.tolist(),
                    figures.throughput_qps.tolist(), keys.tolist(), strict=True)]

    def selection(self, num_queries: int) -> Selection:
        """Batches and numbers of iterations a quarter apart, and the batches that divide the job
        evenly."""
        fixed, most = self.problem.fixed, self.problem.lengths.outputs.max
        rungs = np.arange(0, len(self.chunks.ladder.batch), SELECTED_RUNGS).tolist()
        in_chunks = [self.points.config(root.plan, self.chunks.point(place, rung))
                     for place, root in enumerate(self.chunks.roots) for rung in rungs
                     if fixed.encode_chunk or root.chunk in SELECTED_CHUNKS]
        if fixed.encode_chunk:
            return Selection(closed_form=self.points.rra, configs=in_chunks)
        batches = spread_sizes(num_queries, fixed.encode_batch, {
            math.ceil(num_queries / count) for count in range(1, _EVEN_BATCHES + 1)})
        iterations = spread_sizes(most, fixed.decode_iterations, {most})
        return Selection(closed_form=self.points.rra, configs=[*in_chunks, *(
            RraConfig(encode_batch=batch, decode_iterations=every, tp_degree=plan.tp_degree,
                      tp_gpus=plan.tp_gpus, decode_micro_batches=fixed.decode_micro_batches)
            for plan in self.plans for batch in batches for every in iterations)])

    def _easiest_in_chunks(self) -> list[Tight]:
        """Where the job fixes a chunk: the lowest rates of all plans."""
        rungs = np.arange(0, len(self.chunks.ladder.batch), SELECTED_RUNGS)
        root, rung = (part.ravel() for part in np.meshgrid(
            np.arange(len(self.chunks.roots)), rungs, indexing="ij"))
        qps, latency_s, crowded = self.chunks.evaluate(root, rung)
        return [Tight(latency, Limit(code), rate, self.chunks.roots[r].plan,
                      self.chunks.point(r, k)) for latency, code, rate, r, k in zip(
                latency_s.tolist(), crowded.tolist(), qps.tolist(), root.tolist(), rung.tolist(),
                strict=True)]

    def _evaluated(self, plan: int, point: tuple[int, ...]) -> tuple[float, float]:
        figures = self.points.rra.evaluate([self.points.config(plan, point)])
        return float(figures.throughput_qps[0]), float(figures.latency_s[0])
