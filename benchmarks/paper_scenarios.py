"""The scenarios of the paper's evaluation (its section 7.1), their latency limits, and the best
schedule of some policies for one of them.

The twenty scenarios are the pairs of model and task: four small to mid-sized models with S, T and
C1 (7.3), three large ones with G, C1 and C2 (7.4), of which GPT-3 101B with C1 belongs to both.
GPT-3 175B was run on two clusters, which makes 23 rows. The paper counts twenty and does not list
them: this reading is ours. Times are the roofline's, of the catalog's clusters.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import InfeasibleError
from xgpt.core.lengths import JointLengths
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.roofline import Roofline
from xprofiler.timing import TimingSource
from xscheduler.ft_latency import ft_latency_s
from xscheduler.search_planner import SearchPlanner

SMALL = (("t5-11b", "a40-8"), ("opt-13b", "a40-4"), ("gpt3-39b", "a40-16"),
         ("gpt3-101b", "a100-16"))
LARGE = (("gpt3-101b", "a100-16"), ("gpt3-175b", "a40-32"), ("gpt3-175b", "a100-16"),
         ("gpt3-341b", "a40-48"))
SMALL_TASKS, LARGE_TASKS = ("S", "T", "C1"), ("G", "C1", "C2")
BOUNDS = {"ft10": 10, "ft30": 30, "ft70": 70, "inf": None}  # percentiles of FT's latencies
QUANTILE = 0.99
PAPERS = ("rra", "waa-c", "waa-m")


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A model on a cluster with a task of the paper, or with `lengths` under the task's name."""

    model: str
    cluster: str
    task: str
    lengths: JointLengths | None = None

    @property
    def name(self) -> str:
        return f"{self.model}/{self.cluster}/{self.task}"

    def problem(self, latency_s: float = math.inf, quantile: float = QUANTILE) -> Problem:
        """`quantile`: of the output lengths, whose sequence keeps to the limit."""
        lengths = self.lengths or catalog.task(self.task)
        return Problem(
            model=catalog.model(self.model), cluster=catalog.cluster(self.cluster),
            lengths=lengths, dtype="float16", num_queries=None, fixed=FixedSchedule(),
            constraint=latency_constraint(latency_s=latency_s, quantile=quantile),
            default_max_tokens=lengths.outputs.max)

    def timing(self) -> Roofline:
        problem = self.problem()
        return Roofline(problem.model, problem.cluster.device, problem.dtype)

    def bounds(self) -> dict[str, float]:
        """{name: seconds} of the four latency limits."""
        return {name: math.inf if percent is None else ft_latency_s(
            self.problem(), self.timing(), percent) for name, percent in BOUNDS.items()}


def scenarios() -> list[Scenario]:
    """All 23, each once."""
    found = [Scenario(model=model, cluster=cluster, task=task)
             for rows, tasks in ((SMALL, SMALL_TASKS), (LARGE, LARGE_TASKS))
             for model, cluster in rows for task in tasks]
    return list(dict.fromkeys(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search. `estimate` None: nothing keeps the limit."""

    estimate: Estimate | None
    seconds: float

    @property
    def throughput_qps(self) -> float | None:
        return None if self.estimate is None else self.estimate.figures.throughput_qps


def best_schedule(problem: Problem, timing: TimingSource, policies: tuple[str, ...],
                  plan: tuple[int, int] | None = None, *, has_chunks: bool = True,
                  replicas: int | None = 1) -> Found:
    """The best schedule by these policies without a safety margin. `plan`: its (tp_degree,
    tp_gpus); `has_chunks`: RRA and WAA may encode beside decoding; `replicas` None: any number."""
    degree, gpus = plan or (None, None)
    fixed = replace(problem.fixed, policies=policies, replicas=replicas, tp_degree=degree,
                    tp_gpus=gpus, encode_chunk=None if has_chunks else 0)
    began = time.process_time()
    planner = SearchPlanner(replace(problem, fixed=fixed), timing, is_brief=True)
    try:
        estimate = planner.best(problem.constraint.latency_s, has_margin=False).estimate
    except InfeasibleError:
        estimate = None
    return Found(estimate=estimate, seconds=time.process_time() - began)
