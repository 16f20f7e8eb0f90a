"""The problems of best_by_hand.py: models from 1B to 405B on 1 to 64 GPUs of five types, five
distributions of lengths, four latency bounds each.

Bounds are 1.5, 3 and 10 times the least latency that any tensor plan gives one query alone, and
none; where an issue or a paper names a bound, that one stands in place of the nearest."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import FixedSchedule
from xgpt.core.lengths import JointLengths, truncated_normal
from xgpt.core.problem import Problem
from xprofiler.roofline import Roofline
from xscheduler.replays import Replays
from xscheduler.tensor_plans import tensor_plans
from xsimulator.rough.formulas import Formulas

TIMES = (1.5, 3.0, 10.0)  # the least latency of one query alone
FEW_QUERIES = 400  # chosen: of the replay that tells it
LINKS = {"A40": "pcie4-x16", "L4": "pcie4-x16", "A100-80": "nvlink3", "H100": "nvlink4",
         "H200": "nvlink4"}
DOCUMENTS = "D"  # 1,500 input and 400 output tokens in the mean: no task of the paper


@dataclass(frozen=True, slots=True, kw_only=True)
class HandScenario:
    """A model on `nodes` x `per_node` GPUs of a type, for lengths. `bounds_s`: some that are named
    elsewhere."""

    model: str
    device: str
    nodes: int
    per_node: int
    task: str
    bounds_s: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.model}/{self.nodes}x{self.per_node} {self.device}/{self.task}"

    @property
    def cluster(self) -> Cluster:
        return Cluster(
            name=f"{self.nodes}x{self.per_node} {self.device}", device=catalog.device(self.device),
            num_nodes=self.nodes, devices_per_node=self.per_node,
            intra_link=catalog.link(LINKS[self.device]), inter_link=catalog.link("ib-400g"))

    def problem(self, latency_s: float = math.inf) -> Problem:
        lengths = lengths_of(self.task)
        return Problem(
            model=catalog.model(self.model), cluster=self.cluster, lengths=lengths,
            dtype="float16", num_queries=None, fixed=FixedSchedule(),
            constraint=latency_constraint(latency_s=latency_s),
            default_max_tokens=lengths.outputs.max)

    def timing(self) -> Roofline:
        problem = self.problem()
        return Roofline(problem.model, problem.cluster.device, problem.dtype)

    def bounds(self) -> tuple[float, ...]:
        """Four latency bounds, seconds."""
        least_s = least_latency_s(self.problem(), self.timing())
        found = [float(f"{times * least_s:.3g}") for times in TIMES]
        for named in self.bounds_s:
            found[int(np.argmin([abs(math.log(one / named)) for one in found]))] = named
        return (*sorted(found), math.inf)


SCENARIOS = (
    HandScenario(model="opt-1.3b", device="L4", nodes=1, per_node=1, task="S"),
    HandScenario(model="opt-1.3b", device="A40", nodes=1, per_node=8, task="C2"),
    HandScenario(model="llama-3.1-8b", device="H100", nodes=1, per_node=8, task=DOCUMENTS,
                 bounds_s=(30.0,)),
    HandScenario(model="llama-3.1-8b", device="A40", nodes=1, per_node=2, task="T"),
    HandScenario(model="llama-3.1-8b", device="L4", nodes=2, per_node=4, task="G"),
    HandScenario(model="opt-13b", device="A40", nodes=1, per_node=4, task="S", bounds_s=(11.5,)),
    HandScenario(model="opt-13b", device="A100-80", nodes=1, per_node=8, task="C2"),
    HandScenario(model="llama-3.1-70b", device="H100", nodes=2, per_node=8, task=DOCUMENTS,
                 bounds_s=(30.0,)),
    HandScenario(model="llama-3.1-70b", device="A100-80", nodes=8, per_node=8, task="T"),
    HandScenario(model="gpt3-175b", device="A40", nodes=4, per_node=8, task="G"),
    HandScenario(model="llama-3.1-405b", device="H200", nodes=2, per_node=8, task="S"),
    HandScenario(model="llama-3.1-405b", device="H100", nodes=8, per_node=8, task=DOCUMENTS),
)

# whose groups of all their GPUs exceed the KV heads: two, and four
COPIED_HEADS = (
    HandScenario(model="qwen2.5-3b", device="L4", nodes=1, per_node=4, task="S"),
    HandScenario(model="qwen3-235b-a22b", device="H200", nodes=1, per_node=8, task=DOCUMENTS),
)


def lengths_of(task: str) -> JointLengths:
    if task != DOCUMENTS:
        return catalog.task(task)
    return JointLengths(inputs=truncated_normal(1500, 500, 3000),
                        outputs=truncated_normal(400, 150, 900))


def least_latency_s(problem: Problem, timing: Roofline) -> float:
    """Of one query alone, by the tensor plan that is quickest for it."""
    form = Formulas(problem, timing).of("rra")
    iterations = problem.lengths.outputs.quantile(problem.constraint.quantile) - (
        not problem.model.is_encoder_decoder)
    replays, found = Replays(problem, timing), []
    for plan in tensor_plans(problem, timing):
        alone = form.estimate(plan, (1, max(iterations, 1), 0, 0))
        if alone.figures.fits:
            found.append(replays.of(alone, FEW_QUERIES).latency_s)
    return min(found)
