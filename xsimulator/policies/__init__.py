"""Closed forms of the scheduling policies: what a configuration does in steady state.

A policy's row (xgpt.core.policies) says where its closed form and its configurations are."""

from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, Protocol

from xgpt.core.job import FixedSchedule
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator.policies.figures import EstimateArrays

GRID_RATIO = 1.1


class ClosedForm(Protocol):
    """What all closed forms have in common; each is made of (problem, timing)."""

    def estimate(self, config: Any) -> Estimate:
        """The Estimate says of one configuration what is shown, and what is executed."""

    def evaluate(self, configs: Sequence[Any]) -> EstimateArrays:
        """The figures of many configurations are worked out together."""


def make_policy(name: str, problem: Problem, timing: TimingSource) -> ClosedForm:
    """The closed form of the policy of that name."""
    closed_form: ClosedForm = policy(name).load("closed_form")(problem, timing)
    return closed_form


def make_config(name: str, source: Estimate | FixedSchedule) -> tuple[Any, list[str]]:
    """The configuration that `source` describes, None where control variables of the policy are
    missing; and the names of these."""
    row, config = policy(name), policy(name).load("config")
    held = source.variables if isinstance(source, Estimate) else {}
    values = {name: held.get(name) if isinstance(source, Estimate) else source.value_of(name)
              for name in (*row.variable_names, "tp_degree", "tp_gpus")}
    given, missing = {}, []
    for field in fields(config):
        derived = field.metadata.get("derived")  # from the variables, for one that is none itself
        value = derived(values) if derived else values.get(field.name)
        if value is not None:
            given[field.name] = value
        elif field.default is MISSING:
            missing.append(field.name)
    return (None if missing else config(**given)), missing


def geometric(largest: int, *, least: int = 1, ratio: float = GRID_RATIO) -> list[int]:
    """Whole numbers from `least` to `largest`, about `ratio` apart."""
    sizes = [least]
    while sizes[-1] < largest:
        sizes.append(min(max(sizes[-1] + 1, int(sizes[-1] * ratio)), largest))
    return sizes


def group_counts(stages: int) -> list[int]:
    """One group to twice the stages, about a factor of 1.5 apart."""
    counts = {1, stages, 2 * stages}
    count = 1.0
    while count < stages:
        counts.add(round(count))
        count = max(count * 1.5, count + 1)
    return sorted(counts)
