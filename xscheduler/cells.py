"""The cells of a problem: every policy under every tensor plan, on every number of devices that a
replica may have."""

from collections.abc import Iterator
from dataclasses import replace

from xgpt.core.errors import InputError
from xgpt.core.policies import able_policies
from xgpt.core.problem import Problem
from xprofiler.timing import TimingSource
from xscheduler.admission_choice import rules_of
from xscheduler.replays import Replays
from xscheduler.replicas import (
    equal_parts,
    max_replicas,
    problem_on,
    replica_sizes,
    weights_fit,
)
from xscheduler.space import CHUNK, Cell, chunk_column
from xscheduler.tensor_plans import MANY_NODES, tensor_plans
from xsimulator.plans import PlanCache
from xsimulator.rough.formulas import Formulas
from xsimulator.rough.workload import Workload


def cells_of(problem: Problem, timing: TimingSource,
             shared: PlanCache | None = None) -> Iterator[tuple[Cell, Replays]]:
    """Yields (cell, replays of its part of the cluster). shared: stage plans of other problems."""
    shared = shared or PlanCache(timing)
    workload = Workload(problem)
    names = names_of(problem)
    for part in parts_of(problem):
        try:
            plans = tensor_plans(part, timing)
        except InputError:
            continue
        formulas = Formulas(part, timing, workload, shared.of(part))
        replays = Replays(part, timing)
        for name in names:
            (simplest, _), *others = rules_of(name, problem, workload)
            formula = formulas.of(name, simplest)
            for plan in plans:
                if formula.can_allocate(plan):
                    for is_chunked in _kinds(name, problem):
                        further = [Cell(part, formulas.of(name, rule), plan, is_chunked, room)
                                   for rule, room in others]
                        yield Cell(part, formula, plan, is_chunked,
                                   further=further[0] if further else None), replays


def _kinds(name: str, problem: Problem) -> tuple[bool | None, ...]:
    """Values of `Cell.is_chunked`. A policy has one cell, or one with chunks and one without."""
    is_one = chunk_column(name) is None or problem.model.is_encoder_decoder or (
        problem.fixed.value_of(CHUNK) is not None)
    return (None,) if is_one else (False, True)


def names_of(problem: Problem) -> list[str]:
    """Names of the policies that are searched."""
    return [row.name for row in able_policies(problem.fixed) if not (
        problem.model.is_encoder_decoder and row.is_decoder_only)]


def parts_of(problem: Problem, *, is_any: bool = False) -> list[Problem]:
    """The problems of one replica, one for every number of devices that it may have: part of a
    node, or whole nodes. Beyond MANY_NODES nodes, each number of replicas takes as many nodes as it
    can. is_any: include numbers of devices that are too few for the weights."""
    cluster, wanted, found = problem.cluster, problem.fixed.replicas, []
    if problem.most_stages is not None:
        return [part for part in equal_parts(problem) if is_any or weights_fit(part)]
    nodes, each = cluster.num_nodes, cluster.devices_per_node
    whole = {each * (nodes // copies) for copies in range(1, nodes + 1)}
    for devices in replica_sizes(cluster):
        if devices > each and devices not in whole and nodes > MANY_NODES:
            continue
        if devices + (wanted or 1) - 1 > cluster.num_devices:
            continue
        copies = max_replicas(cluster, devices)
        part = problem_on(problem, devices)
        if wanted is not None and copies != wanted:
            share = None if problem.num_queries is None else -(-problem.num_queries // wanted)
            part = replace(part, copies=min(copies, wanted), num_queries=share)
        if problem.num_queries is not None and part.copies > problem.num_queries:
            continue
        if is_any or weights_fit(part):
            found.append(part)
    return found
