"""WAA's space: encode_batch x decode_micro_batches under every tensor plan that leaves devices for
both pools, whose decode pool takes chunks of some sizes or none (paper section 5).

A root is a tensor plan with ranges of encode_batch and decode_micro_batches, without chunks or with
all sizes of them. A box is bounded from its corners (xsimulator.policies.waa.bounds), over every
division of the devices that its points may have; a few points are evaluated."""

from __future__ import annotations

import math
from dataclasses import replace

from xgpt.core.controls import max_in_system
from xscheduler.spaces.space import SMALL_BATCHES, Selection, Tight
from xscheduler.spaces.tensor_plans import batch_range
from xscheduler.spaces.waa_boxes import group_range, takes_climbed
from xscheduler.spaces.waa_climb import MOST_CLIMBED, climbed, most_climbed
from xscheduler.spaces.waa_examiner import WaaExaminer
from xscheduler.spaces.waa_points import WaaPoints

MOST_GROUPS = 4  # decode_micro_batches above the fewest, for the tightest latency
# Divisions that boxes with chunks are bounded for in one search, times the devices that they
# divide: what is spent on a large cluster is to be no more than on a node.
CHUNKED_WORK = 8_000
# On more devices a quarter of it: on 64 no gap was narrower for the rest of it.
MANY_DEVICES = 48
UNCLAIMED = 0.5  # share of it for searches of which nothing is claimed


class WaaSpace(WaaPoints):
    """See xscheduler.spaces.space.Space."""

    variables = ("encode_batch", "decode_micro_batches", "encode_chunk")

    def examiner(self, latency_bound_s: float, gap: float, floor_qps: float, *,
                 keeps_gap: bool = False, is_claimed: bool = True) -> WaaExaminer:
        devices = self.problem.cluster.num_devices
        self.work.grant(latency_bound_s, is_claimed=is_claimed, work=(
            math.inf if keeps_gap else CHUNKED_WORK / devices * (
                1.0 if is_claimed else UNCLAIMED) / (1 if devices <= MANY_DEVICES else 4)))
        return WaaExaminer(self, latency_bound_s, gap=gap, floor_qps=floor_qps)

    def unproved(self, latency_bound_s: float, gap: float,
                 floor_qps: float) -> tuple[float, int, tuple[int, ...]] | None:
        """See Space: the best with chunks that is climbed to, where no box has any."""
        if not takes_climbed(self.name, self.problem) or (
                self.problem.cluster.num_devices > MOST_CLIMBED):
            return None
        found = climbed(self, latency_bound_s, floor_qps, gap)
        return None if found is None else (found[0], found[1][0], found[1][1:])

    def most_unproved(self, latency_bound_s: float) -> float:
        # two devices are divided in one way, and that is bounded
        is_bounded = self.problem.cluster.num_devices == 2
        return most_climbed(self, latency_bound_s) if not is_bounded and takes_climbed(
            self.name, self.problem) else 0.0

    def beyond(self, tight: Tight) -> str:
        return ""

    def present(self, tight: Tight) -> float:
        return float(max_in_system(self.estimate(tight.plan, tight.point).controls))

    def easiest(self) -> list[Tight]:
        least, most = batch_range(self.problem.fixed, self.problem.num_queries)
        batches = sorted({min(max(size, least), most) for size in SMALL_BATCHES})
        keys = []
        for plan, split in enumerate(self.splits):
            fewest, highest = group_range(self.problem, split)
            keys += [(plan, batch, groups, self.chunks[0]) for batch in batches
                     for groups in range(fewest, min(highest, fewest + MOST_GROUPS) + 1)]
        return [Tight(latency, limit, qps, plan, tuple(point))
                for (qps, latency, limit), (plan, *point) in zip(
                    self.evaluate(keys), keys, strict=True)]

    def selection(self, num_queries: int) -> Selection:
        """The closed form's grid, moved to what the job fixes."""
        pins = {name: value for name in self.variables
                if (value := getattr(self.problem.fixed, name)) is not None}
        return Selection(closed_form=self.waa, configs=list(dict.fromkeys(
            replace(config, **pins) for config in self.waa.grid(num_queries, self.plans))))
