"""The rough formulas of one problem, by policy."""

from functools import cache
from typing import Any

from xgpt.core.controls import Admission, FixedSchedule
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator.plans import PlanSource, StagePlans
from xsimulator.rough.figures import Formula, fixed_point
from xsimulator.rough.one_pool import Continuous
from xsimulator.rough.workload import Workload


class AsPrefillFirst(Continuous):
    """Stands in for the formula of a policy that has none: memory, and the order of its points, are
    those of prefill-first."""

    ratio = 2.0


def fixed_estimate(name: str, problem: Problem, timing: TimingSource,
                   fixed: FixedSchedule) -> Estimate:
    """The Estimate, by the rough formula, of a policy whose control variables are all fixed, on all
    devices of the problem. Raises InputError for a (tp_degree, tp_gpus) that is impossible."""
    point, missing = fixed_point(name, fixed)
    assert not missing, f"{missing = }"
    return Formulas(problem, timing).of(name).estimate(
        (fixed.tp_degree or 1, fixed.tp_gpus or 0), point)


class Formulas:
    """The rough formulas of one problem. They share stage plans and length statistics.
    `of(policy, admission)` returns a policy's Formula under an admission rule (None: the simplest
    that the job allows), made once."""

    def __init__(self, problem: Problem, timing: TimingSource, workload: Workload | None = None,
                 plans: PlanSource | None = None) -> None:
        self.problem, self._timing = problem, timing
        self._workload = workload or Workload(problem)  # its rule of admission does not count
        self._plans = plans or StagePlans(problem, timing)
        self.of = cache(self._make)

    def _make(self, name: str, admission: Admission | None = None) -> Formula:
        row = policy(name)
        make: Any = row.load("formula") or AsPrefillFirst
        rule = row.admissions(admission or self.problem.adjustment.admission)[0]
        work = self._workload.by(rule, shares=row.shares_prefixes)
        found: Formula = make(name, self.problem, self._timing, self._plans, work)
        return found
