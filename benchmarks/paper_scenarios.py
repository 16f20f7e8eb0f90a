"""The scenarios of the paper's evaluation (its section 7.1): models, clusters, tasks, and latency
bounds chosen from FasterTransformer's latencies.

The twenty scenarios are the pairs of model and task: four small to mid-sized models with S, T and
C1 (7.3), three large ones with G, C1 and C2 (7.4), of which GPT-3 101B with C1 belongs to both.
GPT-3 175B was run on two clusters, which makes 23 rows. The paper counts twenty and does not list
them: this reading is ours.

Bounds: FT's latencies at batches of 4, 8, 12 ... up to memory's limit, one micro-batch a stage, for
a sequence of the 99th percentile; the 10th, 30th and 70th percentile of these latencies, and none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import FixedSchedule
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xscheduler.replays import Replays
from xsimulator.memory import capacity_bytes
from xsimulator.rough.formulas import Formulas

SMALL = (("t5-11b", "a40-8"), ("opt-13b", "a40-4"), ("gpt3-39b", "a40-16"),
         ("gpt3-101b", "a100-16"))
LARGE = (("gpt3-101b", "a100-16"), ("gpt3-175b", "a40-32"), ("gpt3-175b", "a100-16"),
         ("gpt3-341b", "a40-48"))
SMALL_TASKS, LARGE_TASKS = ("S", "T", "C1"), ("G", "C1", "C2")
PERCENTILES = (10, 30, 70)  # of FT's latencies; the fourth bound is infinite
BATCH_STEP = 4
QUANTILE = 0.99
STAGED = "pcie4-x16"  # copies go through the host's memory
LEAST_BATCHES = 12  # chosen: of a replay
_MOST_BATCHES = 4096  # steps of FT's batch that are looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """`has_peer_access`: PCIe cards copy to each other, instead of through the host's memory."""

    model: str
    cluster: str
    task: str
    has_peer_access: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}/{self.cluster}/{self.task}"

    @property
    def is_small(self) -> bool:
        return (self.model, self.cluster) in SMALL and self.task in SMALL_TASKS

    @property
    def is_large(self) -> bool:
        return (self.model, self.cluster) in LARGE and self.task in LARGE_TASKS

    @property
    def has_pcie(self) -> bool:
        return catalog.cluster(self.cluster).intra_link.has_peer_access

    def problem(self, latency_s: float = math.inf, quantile: float = QUANTILE) -> Problem:
        lengths = catalog.task(self.task)
        return Problem(
            model=catalog.model(self.model), cluster=self._cluster(), lengths=lengths,
            dtype="float16", num_queries=None, fixed=FixedSchedule(),
            constraint=latency_constraint(latency_s=latency_s, quantile=quantile),
            default_max_tokens=lengths.outputs.max)

    def timing(self) -> Roofline:
        problem = self.problem()
        return Roofline(problem.model, problem.cluster.device, problem.dtype)

    def _cluster(self) -> Cluster:
        """The catalog's, or the same without peer access between its PCIe cards."""
        cluster = catalog.cluster(self.cluster)
        if self.has_peer_access or not self.has_pcie:
            return cluster
        return replace(cluster, intra_link=catalog.link(STAGED))


def scenarios(*, has_peer_access: bool = False) -> list[Scenario]:
    """All 23, each once."""
    found = [Scenario(model=model, cluster=cluster, task=task, has_peer_access=has_peer_access)
             for rows, tasks in ((SMALL, SMALL_TASKS), (LARGE, LARGE_TASKS))
             for model, cluster in rows for task in tasks]
    return list(dict.fromkeys(found))


def ft_plan(cluster: Cluster) -> tuple[int, int]:
    """(tp_degree, tp_gpus) of the paper's FT: tensor parallelism over a machine's GPUs, the
    machines as a pipeline."""
    return cluster.devices_per_node, cluster.num_devices


def ft_latencies(problem: Problem, timing: TimingSource) -> FloatArray:
    """[batches] seconds at 4, 8, 12 ... queries, as far as memory reaches, by replay."""
    degree, gpus = ft_plan(problem.cluster)
    batches = BATCH_STEP * np.arange(1, _MOST_BATCHES)
    form, replays = Formulas(problem, timing).of("ft"), Replays(problem, timing)
    points = np.stack([batches, np.full(len(batches), gpus // degree)], axis=1)
    fits = form.rough((degree, gpus), points).memory_bytes <= capacity_bytes(
        problem.cluster.device)
    return np.array([replays.of(form.estimate((degree, gpus), (batch, groups)),
                                LEAST_BATCHES * batch).latency_s
                     for batch, groups in points[fits].tolist()])


def bounds_of(problem: Problem, timing: TimingSource) -> tuple[float, ...]:
    """The four latency bounds, seconds."""
    return (*np.percentile(ft_latencies(problem, timing), PERCENTILES).tolist(), math.inf)
