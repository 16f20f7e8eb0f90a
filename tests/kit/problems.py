"""Problems, timing sources, configurations and schedules that tests of planning share: the paper's
models on its clusters, any model on a uniform cluster, and a toy."""

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from xgpt.core import catalog
from xgpt.core.cluster import Cluster, Device, Link
from xgpt.core.constraint import Bound, latency_constraint
from xgpt.core.controls import EvenBatches, FixedSchedule
from xgpt.core.deployment import Deployment, Pool
from xgpt.core.lengths import JointLengths, empirical, joint_empirical
from xgpt.core.lengths import truncated_normal as solved_normal
from xgpt.core.model import ModelSpec
from xgpt.core.policies import policy
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Figures, Margin, Proof, Schedule
from xprofiler.roofline import Roofline
from xprofiler.timing import MessageKind, Operator, TimingSource
from xscheduler.evaluator import Evaluator
from xscheduler.margin import Margins
from xsimulator.replay.job import planned_queries
from xsimulator.replay.prediction import num_checked_queries, with_limit_length
from xsimulator.replay.steady_replay import steady_replay
from xsimulator.replay.steady_state import SteadyFigures
from xsimulator.replay.step_clock import StepClocks
from xsimulator.rough.formulas import fixed_estimate

if TYPE_CHECKING:
    from xgpt.app.opened_job import OpenedJob

# The paper's models on its clusters (its Table 2).
PAPER = {"t5-11b": "a40-8", "opt-13b": "a40-4", "gpt3-39b": "a40-16", "gpt3-101b": "a100-16",
         "gpt3-175b": "a40-32", "gpt3-341b": "a40-48"}
TASKS = ("S", "T", "G", "C1", "C2")
TOY = ModelSpec(name="toy", family="opt", num_layers=6, hidden_size=1024, num_heads=16,
                vocab_size=8000, intermediate_size=4096, max_positions=512,
                has_learned_positions=True)
TOY_T5 = ModelSpec(name="toy-t5", family="t5", num_layers=5, num_encoder_layers=5,
                   hidden_size=1024, num_heads=16, vocab_size=8000, intermediate_size=4096,
                   max_positions=512)
LINK = Link(name="fast", bandwidth_bytes_per_s=200e9, latency_s=3e-6)
MEMORY = 600_000_000
CONFIG = {"encode_batch": 12, "decode_iterations": 6}  # of RRA on a toy problem
truncated_normal = cache(solved_normal)  # its parent takes milliseconds to solve


def problem_of(model="opt-13b", cluster=None, lengths: JointLengths | str = "S", *,
               kind="sequence", quantile=0.99, latency_s=math.inf) -> Problem:
    """A paper model on its cluster unless another is named; `lengths`: a task's name, or given."""
    joint = catalog.task(lengths) if isinstance(lengths, str) else lengths
    return Problem(
        model=catalog.model(model), cluster=catalog.cluster(cluster or PAPER[model]),
        lengths=joint, dtype="float16", num_queries=None,
        constraint=latency_constraint(latency_s=latency_s, kind=kind, quantile=quantile),
        fixed=FixedSchedule(), default_max_tokens=joint.outputs.max)


def uniform_problem(model: str, device: str, devices: int, lengths: JointLengths,
                    latency_s: float = math.inf, fixed: FixedSchedule | None = None,
                    link: str = "nvlink3", nodes: int = 1) -> Problem:
    """A model of the catalog on `nodes` nodes of as many `devices`, planned without a margin."""
    cluster = Cluster(
        name="given", device=catalog.device(device), num_nodes=nodes, devices_per_node=devices,
        intra_link=catalog.link(link), inter_link=catalog.link("ib-400g"))
    return Problem(
        model=catalog.model(model), cluster=cluster, lengths=lengths, dtype="float16",
        num_queries=None, fixed=fixed or FixedSchedule(), default_max_tokens=lengths.outputs.max,
        constraint=latency_constraint(latency_s=latency_s, confidence=0.5))


def toy_problem(*, latency_s=math.inf, memory=MEMORY, kind="gpu", nodes=1, per_node=4,
                outputs=(9, 4, 20), num_queries=None, fixed=None, pairs=None,
                model=TOY) -> Problem:
    """`kind`: of its devices. `pairs`: lengths of queries, in place of a distribution."""
    device = Device(name="toy", kind=kind, memory_bytes=int(memory), bandwidth_bytes_per_s=4e11,
                    flops_per_s=(("float32", 1e13), ("float16", 5e13)))
    cluster = Cluster(name="toy", device=device, num_nodes=nodes, devices_per_node=per_node,
                      intra_link=LINK, inter_link=LINK)
    lengths = joint_empirical(pairs) if pairs is not None else JointLengths(
        inputs=truncated_normal(40, 20, 80), outputs=truncated_normal(*outputs))
    return Problem(
        model=model, cluster=cluster, dtype="float16", num_queries=num_queries, lengths=lengths,
        constraint=latency_constraint(latency_s=latency_s), fixed=fixed or FixedSchedule(),
        default_max_tokens=lengths.outputs.max)


def observed(problem: Problem, count: int, seed: int = 0) -> Problem:
    """The problem with outputs known from so many queries."""
    outputs = empirical(problem.lengths.outputs.sample(count, np.random.default_rng(seed)))
    return replace(problem, lengths=replace(problem.lengths, outputs=outputs))


# --- times -----------------------------------------------------------------------------------


class TakenAsTrue(Roofline):
    """The roofline without its doubt: no margin is taken for it."""

    doubt: Any = None


def roofline_of(problem: Problem, *, padded=False) -> TakenAsTrue:
    """`padded`: with decode attention as of kernels that read padded caches."""
    roofline = TakenAsTrue(problem.model, problem.cluster.device, problem.dtype)
    roofline.facts = replace(roofline.facts, is_padded=padded)
    return roofline


def timing_of(session: "OpenedJob") -> TakenAsTrue:
    """The times of a job on a cluster that is not here, as xgpt.app.profile's but for their
    doubt."""
    problem = session.problem
    return TakenAsTrue(problem.model, problem.cluster.device, problem.dtype,
                       engine=session.job.plan_engine, weight_dtype=problem.weight_dtype)


class Refusing:
    """A source that refuses steps of more rows, as a profile those far beyond what it measured."""

    def __init__(self, source: TimingSource, most_rows: float) -> None:
        self._source, self._most_rows = source, most_rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def operator_s(self, operator: Operator, x: Any, y: Any = 0.0, *, tp_degree: int = 1) -> Any:
        seconds = self._source.operator_s(operator, x, y, tp_degree=tp_degree)
        return np.where(np.asarray(x) > self._most_rows, np.inf, seconds)


class Shaken:
    """`source` as on a machine that computes otherwise: each time differs in its last digits."""

    def __init__(self, source: TimingSource, seed: int) -> None:
        self.source, self._seed = source, np.uint64(0x9E3779B97F4A7C15 * (2 * seed + 1) % 2**64)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> NDArray[np.float64]:
        return self._shaken(self.source.operator_s(operator, x, y, tp_degree=tp_degree))

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Any, *,
                  tp_degree: int = 1) -> NDArray[np.float64]:
        return self._shaken(self.source.message_s(kind, num_bytes, link, tp_degree=tp_degree))

    def _shaken(self, seconds: NDArray[np.float64]) -> NDArray[np.float64]:
        """By 1 +- 1e-12, by chance, but the same time always by the same."""
        flat = np.ascontiguousarray(np.asarray(seconds, float)).reshape(-1)
        mixed = (flat.view(np.uint64) ^ self._seed) * np.uint64(0xBF58476D1CE4E5B9)
        share = (mixed >> np.uint64(40)).astype(float) / 2**23 - 1
        return (flat * (1 + 1e-12 * share)).reshape(np.shape(seconds))


# --- configurations and schedules ------------------------------------------------------------


def estimate_of(problem: Problem, policy="rra", **variables):
    return fixed_estimate(policy, problem, roofline_of(problem), FixedSchedule(**variables))


def schedule_of(problem: Problem, estimate=None, **changes) -> Schedule:
    """A schedule as a search would answer; `changes`: of the estimate's figures."""
    if estimate is None:
        estimate = estimate_of(problem, encode_batch=4, decode_iterations=4)
    estimate = estimate.changed(**changes)
    return schedule_from_flat(
        estimate=estimate, latency_bound_s=problem.constraint.latency_s,
        constraint_kind="sequence", quantile=0.99, status="optimal",
        bound_qps=estimate.figures.throughput_qps, gap=0.0, nodes=1, seconds=0.0,
        fingerprint=problem.fingerprint)


def as_given(problem: Problem, estimate: Estimate) -> Schedule:
    """A schedule of which nothing was proved."""
    return schedule_from_flat(
        estimate=estimate, latency_bound_s=math.inf, constraint_kind="sequence", quantile=0.99,
        status="given", bound_qps=math.inf, gap=0.0, nodes=1, seconds=0.0,
        fingerprint=problem.fingerprint)


def doubts_of(problem: Problem, timing: TimingSource | None = None) -> Margins:
    return Margins(problem, Evaluator(problem, timing or roofline_of(problem)))


def replay_checked(problem: Problem, timing: TimingSource, estimate: Estimate, seed: int,
                   clocks: StepClocks | None = None) -> SteadyFigures | None:
    """The steady state in a replay of sampled queries, other ones than the planner's, that checks
    the bounds' figures; None where it has none, or met a step larger than any that was timed."""
    count = num_checked_queries(problem, estimate)
    inputs, outputs = problem.lengths.sample(count, np.random.default_rng(seed))
    if problem.constraint.kind == "sequence":
        outputs = with_limit_length(outputs, problem.lengths.outputs.quantile(
            problem.constraint.quantile))
    return steady_replay(problem, timing, estimate, planned_queries(problem, inputs, outputs),
                         clocks)


def estimate_from_flat(**values: Any) -> Estimate:
    """An Estimate from the names of its parts' fields."""
    row = policy(values["policy"])
    controls = row.load("controls")
    names = _names(controls)
    own = {name: value for name, value in values.items() if name in names}
    if "even" in names:
        own["even"] = EvenBatches(
            adjustment=values.get("adjustment", 0.0),
            mean_input_tokens=values.get("mean_input_tokens", 0.0),
            target_active=values.get("steered_to", 0.0))
    if "token_budget" in names:
        own["token_budget"] = values.get("token_budget") or None
    if "encode_micro_batches" in names:
        own["encode_micro_batches"] = (values.get("encode_micro_batches")
                                       or values["decode_micro_batches"])
    return Estimate(
        controls=controls(**own), notes=tuple(values.get("notes", ())),
        deployment=Deployment(pools=_pools(row.pools, values), tp_degree=values["tp_degree"],
                              tp_gpus=values["tp_gpus"]),
        figures=Figures(**{key: values[key] for key in _names(Figures) & values.keys()}))


def schedule_from_flat(*, estimate: Estimate, **values: Any) -> Schedule:
    """A Schedule from `estimate` and what else it has by name, all in one."""
    data = dict(values)
    bound = Bound(limit_s=data.pop("latency_bound_s"), kind=data.pop("constraint_kind"),
                  quantile=data.pop("quantile"))
    margin = Margin(factor=data.pop("margin", 1.0), cost=data.pop("margin_cost", 0.0),
                    note=data.pop("margin_note", ""))
    proof = {one.name: data.pop(one.name) for one in fields(Proof) if one.name in data}
    return Schedule(estimate=estimate, bounds=(bound,), margin=margin, proof=Proof(**proof), **data)


def _names(part: Any) -> set[str]:
    return {field.name for field in fields(part)}


def _pools(roles: tuple[Any, ...], values: Mapping[str, Any]) -> tuple[Pool, ...]:
    if len(roles) == 1:
        return (Pool(name="all", role="both", stages=tuple(values["stages"]),
                     num_groups=values["decode_micro_batches"], kv_tokens=values["kv_tokens"]),)
    pools = []
    for role in roles:
        stages = tuple(stage for stage, own in zip(values["stages"], values["stage_roles"],
                                                   strict=True) if own == role)
        is_encode = role == "encode"
        # two groups more than stages: one waits for its tokens, one is handed over
        groups = len(stages) + 2 if is_encode else values["decode_micro_batches"]
        tokens = values.get("encode_kv_tokens", 0) if is_encode else values["kv_tokens"]
        pools.append(Pool(name=role, role=role, stages=stages, num_groups=groups, kv_tokens=tokens))
    return tuple(pools)
