"""What a patient person finds of a problem without the planner, for best_by_hand.py: any policy at
its best, and configurations drawn at random."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from xscheduler.search import Scheduler
from xscheduler.spaces.grid import MOST_QUERIES, QuicklyBounded, best
from xscheduler.spaces.remembered import RememberedPolicy

from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.job import FixedSchedule
from xgpt.core.policies import policies, policy
from xgpt.core.problem import Problem
from xgpt.report.policy_words import controls_cell
from xprofiler.roofline import Roofline
from xscheduler.admissible import Limits, admissible
from xscheduler.tensor_plans import all_tensor_plans
from xsimulator.policies import make_policy
from xsimulator.policies.continuous.config import ContinuousConfig
from xsimulator.policies.figures import EstimateArrays
from xsimulator.policies.rra.config import RraConfig
from xsimulator.policies.static.config import StaticConfig
from xsimulator.policies.waa.config import WaaConfig

DRAWN = 2000
SMALL = 4  # devices of a copy, of which every tensor plan is tried by grid
SEARCHED = ("rra", "waa-c", "waa-m")  # by hand, too: their grids are the search
CONTINUOUS, STATIC = ("orca", "vllm", "sarathi"), ("ft", "dsi")


class Found(NamedTuple):
    """A way to run a problem: queries/s of all copies together, and what it is."""

    throughput_qps: float
    words: str


NOTHING = Found(0.0, "nothing keeps the bound")


class ByHand:
    """One copy of so many, under any bound: the best of each policy. Keeps what was evaluated."""

    def __init__(self, count: int, problem: Problem, timing: Roofline) -> None:
        self.count, self.problem = count, problem
        self._searches: dict[str, Scheduler] = {}
        self._grids: dict[str, _Remembering] = {}
        for row in policies():
            if row.is_decoder_only and problem.model.is_encoder_decoder:
                continue
            if row.name in SEARCHED:
                try:
                    self._searches[row.name] = Scheduler(replace(
                        problem, fixed=FixedSchedule(policies=(row.name,))), timing)
                except InputError:  # too few devices for two pools
                    continue
            elif row.name in (*CONTINUOUS, *STATIC):
                self._grids[row.name] = _Remembering(row.name, problem, timing)
        self.plans = all_tensor_plans(problem, timing)
        devices = problem.cluster.num_devices
        # of many devices those that treat all alike: as a person would
        self.usual = self.plans if devices <= SMALL else [
            plan for plan in self.plans if plan.tp_gpus in (0, devices)]

    def best(self, bound_s: float) -> Found:
        """The best of any policy."""
        return max([NOTHING, *self._all(bound_s)])

    def _all(self, bound_s: float) -> Iterator[Found]:
        for search in self._searches.values():
            try:
                estimate = search.find(bound_s, compares=False).estimate
            except InfeasibleError:
                continue
            yield self.found(estimate)
        for form in self._grids.values():
            estimate = best(form, bound_s, plans=self.usual)
            if estimate is not None:
                yield self.found(estimate)

    def found(self, estimate: Any) -> Found:
        one = f"{policy(estimate.policy).title}: {controls_cell(estimate)}"
        return Found(self.count * estimate.figures.throughput_qps,
                     one if self.count == 1 else f"{self.count} copies of {one}")


class _Remembering:
    """A closed form with its grid, for several bounds in turn."""

    def __init__(self, name: str, problem: Problem, timing: Roofline) -> None:
        self.problem, self.timing = problem, timing
        self._form: Any = make_policy(name, problem, timing)
        self._known = RememberedPolicy(self._form.evaluate, self._form.limits if isinstance(
            self._form, QuicklyBounded) else None)
        self._grid: list[Any] | None = None
        self.evaluate, self.limits = self._known.evaluate, self._known.limits

    def grid(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> list[Any]:
        if self._grid is None:
            self._grid = list(self._form.grid(max_queries, plans))
        return self._grid

    def estimate(self, config: Any) -> Any:
        return self._form.estimate(config)


class Drawn:
    """Configurations of all policies and numbers of copies, drawn at random, and their figures."""

    def __init__(self, parts: Sequence[ByHand], timing: Roofline, rng: np.random.Generator) -> None:
        self._of: list[tuple[ByHand, Any, list[Any], EstimateArrays]] = []
        names = [row.name for row in policies() if not (
            row.is_decoder_only and parts[0].problem.model.is_encoder_decoder)]
        groups: dict[tuple[int, str], int] = {}
        for _ in range(DRAWN):
            key = int(rng.integers(len(parts))), str(rng.choice(names))
            groups[key] = groups.get(key, 0) + 1
        for (place, name), count in sorted(groups.items()):
            part = parts[place]
            configs = [config for config in (
                draw(name, part, rng) for _ in range(count)) if config is not None]
            try:
                form = make_policy(name, part.problem, timing)
                self._of.append((part, form, configs, form.evaluate(configs)))
            except InputError:  # no two pools on these devices
                continue

    def best(self, bound_s: float) -> Found:
        found = [NOTHING]
        limits = Limits(queries=MOST_QUERIES, latency_s=bound_s)
        for part, form, configs, figures in self._of:
            if not configs:
                continue
            qps = np.where(admissible(figures, limits), figures.throughput_qps, 0.0)
            if (row := int(qps.argmax())) >= 0 and qps[row] > 0:
                found.append(part.found(form.estimate(configs[row])))
        return max(found)


def draw(name: str, part: ByHand, rng: np.random.Generator) -> Any:
    """A configuration; None where the part has no tensor plan at all."""
    if not part.plans:
        return None
    degree, gpus = part.plans[rng.integers(len(part.plans))]
    plan: dict[str, Any] = {"tp_degree": int(degree), "tp_gpus": int(gpus)}
    stages = part.problem.cluster.num_devices - gpus + gpus // degree
    batch, groups = _size(rng, 2048), int(rng.integers(1, 2 * stages + 1))
    if name == "rra":
        return RraConfig(
            encode_batch=batch, decode_iterations=_size(rng, part.problem.lengths.outputs.max),
            decode_micro_batches=None if rng.random() < 0.5 else groups,
            encode_chunk=0 if rng.random() < 0.5 else _size(rng, 8192, 64), **plan)
    if name in STATIC:
        parts = int(rng.integers(1, 9)) if name == "dsi" else None
        return StaticConfig(encode_batch=max(batch, groups), decode_micro_batches=groups,
                            encode_parts=parts, **plan)
    if name in CONTINUOUS:
        budget = 0 if name == "orca" else _size(rng, 8192, 32)
        return ContinuousConfig(max_active=batch, token_budget=budget, **plan)
    return WaaConfig(encode_batch=_size(rng, 256), decode_micro_batches=groups, **plan)


def _size(rng: np.random.Generator, most: int, least: int = 1) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))
