"""Generated problems small enough for brute force, for the proof of the search: toy models on
sources with planted defects, on noisy profiles, and the paper's models on the roofline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from taken_as_true import TakenAsTrue

from xgpt.core import catalog
from xgpt.core import lengths as lengths_module
from xgpt.core.cluster import Cluster, Device, Link, uniform_cluster
from xgpt.core.constraint import latency_constraint
from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import JointLengths, joint_empirical
from xgpt.core.model import ModelSpec
from xgpt.core.problem import Problem
from xprofiler.profile import STEP_OVERHEAD, Profile, ProfileMetadata, Sample, TableKey
from xprofiler.profile_timing import ProfileTiming
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator, TimingSource
from xscheduler.tensor_plans import TensorPlan, tensor_plans
from xsimulator.envelope import SINGLES
from xsimulator.policies import make_policy
from xsimulator.policies.waa.config import WaaConfig
from xsimulator.policies.waa.plans import WaaPlans

PAPER = {"t5-11b": "a40-8", "opt-13b": "a40-4", "gpt3-39b": "a40-16", "gpt3-101b": "a100-16",
         "gpt3-175b": "a40-32", "gpt3-341b": "a40-48"}
TASKS = ("S", "T", "G", "C1", "C2")
POLICIES = ("rra", "waa-c", "waa-m")
FAST = Link(name="fast", bandwidth_bytes_per_s=200e9, latency_s=3e-6)
SLOW = Link(name="slow", bandwidth_bytes_per_s=10e9, latency_s=10e-6)
TOYS = {
    "decoder": ModelSpec(
        name="toy", family="opt", num_layers=6, hidden_size=1024, num_heads=16, vocab_size=8000,
        intermediate_size=4096, max_positions=512, has_learned_positions=True),
    "encoder-decoder": ModelSpec(
        name="toy-t5", family="t5", num_layers=5, num_encoder_layers=5, hidden_size=1024,
        num_heads=16, vocab_size=8000, intermediate_size=4096, max_positions=512)}
PLANTED = (Operator.LAYER_REST, Operator.DECODE_ATTENTION, Operator.HEAD,
           Operator.ENCODE_ATTENTION, Operator.EMBED, Operator.KV_COMPACTION,
           Operator.ENCODER_REST, Operator.CROSS_ATTENTION)
LEAST_TAIL = 1e-12
truncated_normal = cache(lengths_module.truncated_normal)  # its parent takes milliseconds to solve
OF_TWO_SIZES = (Operator.DECODE_ATTENTION, Operator.KV_COMPACTION)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """Times of sizes from `low` to `high` are `factor` times as long."""

    low: float
    high: float
    factor: float


class Planted:
    """A TimingSource whose times dip and jump at chosen sizes x of chosen operators."""

    def __init__(self, source: Roofline, defects: Mapping[Operator, tuple[Defect, ...]]) -> None:
        self._source, self._defects = source, dict(defects)

    def operator_s(self, operator, x, y=0.0, *, tp_degree=1):
        seconds = self._source.operator_s(operator, x, y, tp_degree=tp_degree)
        size = np.broadcast_to(np.asarray(x, float), seconds.shape)
        for one in self._defects.get(operator, ()):
            seconds = np.where((one.low <= size) & (size <= one.high), one.factor * seconds,
                               seconds)
        return seconds

    def __getattr__(self, name):
        return getattr(self._source, name)


def as_padded(timing: Any, is_padded: bool) -> Any:
    """The source itself, from now on with decode attention as of kernels that read padded caches,
    or each query's own."""
    timing.facts = replace(timing.facts, is_padded=is_padded)
    return timing


def captured(source: Roofline) -> Roofline:
    """The source itself, from now on of GPUs that take decode steps captured, but for groups; what
    is launched kernel by kernel takes the host as long as a large step."""
    rest = source._rows[Operator.LAYER_REST]

    def launched(rows, degree):
        return np.maximum(rest(rows, degree), 5 * rest(np.ones(()), degree))

    source._rows |= {Operator.DECODE_REST: rest, Operator.LAYER_REST: launched}
    source.facts = replace(source.facts, captured_degrees=frozenset({1}))
    return source


def planted(rng: np.random.Generator, source: Roofline, *, largest: float = 4000.0) -> Planted:
    """Dips and jumps of 5 to 40 % in all operators: at single sizes, and over ranges. Those at a
    single number of queries or rows are of up to 256 where a time depends on two sizes: bounds look
    at every count up to there (xsimulator.envelope.SINGLES)."""
    found = {}
    for operator in PLANTED:
        defects = []
        for _ in range(int(rng.integers(1, 7))):
            at = float(np.round(np.exp(rng.uniform(0, math.log(largest)))))
            factor = float(1 + rng.choice([-1, 1]) * rng.uniform(0.05, 0.4))
            width = (0.0, at * rng.uniform(0.2, 2.0))
            if rng.random() < 0.5:
                at = min(at, SINGLES) if operator in OF_TWO_SIZES else at
                width = (0.5, 0.5)
            defects.append(Defect(low=at - width[0], high=at + width[1], factor=factor))
        found[operator] = tuple(defects)
    return Planted(source, found)


def noisy_profile(rng: np.random.Generator, problem: Problem, *, noise: float) -> ProfileTiming:
    """The roofline at a few sizes, each with an error of `noise` (log-normal)."""
    truth, lengths = roofline_of(problem), problem.lengths
    queries = _sizes(rng, 1, 200)
    tokens = _sizes(rng, 8, 6000)
    contexts = _sizes(rng, 4, lengths.inputs.max + lengths.outputs.max)
    axes = {Operator.LAYER_REST: (tokens, (0,)), Operator.EMBED: (tokens, (0,)),
            Operator.HEAD: (queries, (0,)), Operator.DECODE_ATTENTION: (queries, contexts),
            Operator.ENCODE_ATTENTION: (_sizes(rng, 4, lengths.inputs.max), (1, 4)),
            Operator.KV_COMPACTION: ((1, 4, 16, 64), contexts)}
    tables = {TableKey(STEP_OVERHEAD): (Sample(x=0, samples_s=(truth.facts.step_overhead_s,)),)}
    for degree in (1, 2, 4):
        for operator, (along_x, along_y) in axes.items():
            tables[TableKey(operator.value, degree)] = tuple(
                Sample(x=x, y=y, samples_s=(float(
                    truth.operator_s(operator, x, y, tp_degree=degree)
                    * math.exp(rng.normal(0, noise))),)) for y in along_y for x in along_x)
    metadata = ProfileMetadata(model="toy", model_shape="m", device="toy", dtype="float16",
                               ranks=1, threads_per_rank=1, kernels="k", libraries="l")
    return ProfileTiming(Profile(metadata=metadata, tables=tables), fallback=truth)


def _sizes(rng: np.random.Generator, least: int, most: int) -> tuple[int, ...]:
    inner = np.exp(rng.uniform(math.log(least), math.log(most), int(rng.integers(3, 9))))
    return tuple(sorted({least, most, *np.rint(inner).astype(int).tolist()}))


def roofline_of(problem: Problem) -> Roofline:
    return TakenAsTrue(problem.model, problem.cluster.device, problem.dtype)


def toy_cluster(*, devices=4, memory=6e8, link=FAST, nodes=1) -> Cluster:
    device = Device(name="toy", kind="gpu", memory_bytes=int(memory), bandwidth_bytes_per_s=4e11,
                    flops_per_s=(("float32", 1e13), ("float16", 5e13)))
    return uniform_cluster(
        name="toy",
        device=device,
        num_nodes=nodes,
        devices_per_node=devices // nodes,
        intra_link=link,
        inter_link=SLOW,
    )


def toy_problem(*, latency_s=math.inf, fixed=None, inputs=(40, 20, 80), outputs=(9, 4, 20),
                num_queries=None, pairs=None, model="decoder", kind="sequence", quantile=0.99,
                encode_chunk=0, **cluster) -> Problem:
    """`encode_chunk`: where `fixed` has none; None: of any size, which no grid here has."""
    fixed = fixed or FixedSchedule()
    if fixed.encode_chunk is None:
        fixed = replace(fixed, encode_chunk=encode_chunk)
    lengths = joint_empirical(pairs) if pairs is not None else JointLengths(
        inputs=truncated_normal(*inputs), outputs=truncated_normal(*outputs))
    return Problem(
        model=TOYS[model], cluster=toy_cluster(**cluster), lengths=lengths, dtype="float16",
        constraint=latency_constraint(latency_s=latency_s, kind=kind, quantile=quantile),
        fixed=fixed, num_queries=num_queries,
        default_max_tokens=lengths.outputs.max)


def correlated(rng: np.random.Generator, longest: int = 20) -> np.ndarray:
    """[400, 2] pairs whose outputs follow their inputs."""
    inputs = rng.integers(5, 80, 400)
    return np.stack([inputs, np.clip(inputs * longest // 80 + rng.integers(-3, 4, 400), 1,
                                     longest)], axis=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem, to be searched under several latency bounds."""

    name: str
    problem: Problem
    timing: TimingSource
    policy: str

    def ranges(self) -> tuple[range, range | None]:
        """All encode batches and, of RRA, all decode iterations that the search may choose."""
        problem, fixed = self.problem, self.problem.fixed
        assert problem.num_queries is not None, "brute force needs an end"
        batches = range(1, problem.num_queries + 1)
        if fixed.encode_batch is not None:
            batches = range(fixed.encode_batch, fixed.encode_batch + 1)
        if self.policy != "rra":
            return batches, None
        fewer = 0 if problem.model.is_encoder_decoder else 1
        if fixed.decode_iterations is not None:
            return batches, range(fixed.decode_iterations, fixed.decode_iterations + 1)
        return batches, range(1, max(problem.lengths.outputs.max - fewer, 1) + 1)


def toy_case(seed: int, *, largest: int = 48) -> Case:
    """By its seed alone."""
    rng = np.random.default_rng([9, seed])
    policy = POLICIES[seed % 3]
    model = "encoder-decoder" if rng.random() < 0.2 else "decoder"
    longest = int(rng.choice([1, 2, 3, 8, 14, 20, 30], p=[.03, .04, .05, .18, .25, .25, .2]))
    mean = max(longest * rng.uniform(0.3, 0.6), 1.0)
    deviation = max(mean * rng.uniform(0.2, 0.6), 0.3)
    # a tail that no float of the closed form tells from none is test_search's business
    while truncated_normal(mean, deviation, longest).pmf.min() < LEAST_TAIL:
        deviation *= 1.1
    outputs = (mean, deviation, longest)
    pairs = correlated(rng, longest) if longest < 3 or rng.random() < 0.2 else None
    fixed = FixedSchedule(policies=(policy,))
    if rng.random() < 0.5:  # every tensor plan, or one
        fixed = replace(fixed, tp_degree=1)
    if rng.random() < 0.15:
        fixed = replace(fixed, decode_micro_batches=int(rng.integers(1, 10)))
    devices = int(rng.choice([1, 2, 3, 4])) if policy == "rra" else int(rng.choice([2, 3, 4]))
    problem = toy_problem(
        model=model, outputs=outputs, pairs=pairs, devices=devices, fixed=fixed,
        memory=float(rng.choice([1.6e8, 2.5e8, 6e8])) * 4 / devices,
        link=(FAST, SLOW)[int(rng.integers(2))], kind=str(rng.choice(["sequence", "batch"])),
        quantile=float(rng.choice([0.5, 0.9, 0.99])),
        num_queries=int(rng.integers(largest // 2, largest + 1)))
    if model == "decoder" and rng.random() < 0.35:
        timing: TimingSource = noisy_profile(rng, problem, noise=float(rng.choice([0.02, 0.1])))
        kind = "profile"
    else:
        timing, kind = planted(rng, roofline_of(problem)), "planted"
    return Case(name=f"toy-{seed}-{policy}-{model}-{kind}", problem=problem, policy=policy,
                timing=as_padded(timing, bool(rng.random() < 0.5)))


def paper_case(model: str, task: str, policy: str, seed: int, *, points: int = 3000,
               is_planted: bool = False) -> Case | None:
    """A paper model and task under one tensor plan; None if WAA has room under none. RRA either
    keeps few queries, or one N_D or B_E is given."""
    rng = np.random.default_rng([17, seed])
    lengths = catalog.task(task)
    problem = Problem(
        model=catalog.model(model), cluster=catalog.cluster(PAPER[model]), lengths=lengths,
        dtype="float16", num_queries=None, constraint=latency_constraint(
            latency_s=math.inf, kind=str(rng.choice(["sequence", "batch"]))),
        fixed=FixedSchedule(policies=(policy,), encode_chunk=0),
        default_max_tokens=lengths.outputs.max)
    timing: TimingSource = roofline_of(problem)
    if is_planted:
        timing = planted(rng, roofline_of(problem))
    plans = tensor_plans(problem, timing)
    fixed, way, longest = problem.fixed, int(rng.integers(3)), lengths.outputs.max
    if policy != "rra":
        # present are about as many batches as a query has tokens
        most = int(rng.uniform(4, 12) * (lengths.outputs.mean + 2))
        if way == 0 or most * 2 * problem.cluster.num_devices > 5 * points:
            fixed = replace(fixed, decode_micro_batches=int(rng.integers(1, 9)))
        plans = _with_room(policy, problem, timing, plans, fixed.decode_micro_batches or 1)
        if not plans:
            return None
    elif way == 0:  # many queries, one N_D
        fixed = replace(fixed, decode_iterations=int(rng.integers(1, longest)))
        most = points
    elif way == 1:
        most = 1000
        fixed = replace(fixed, encode_batch=int(np.exp(rng.uniform(0, 6))))
    else:
        most = max(points // longest, 8)
    plan = plans[int(rng.integers(len(plans)))]
    fixed = replace(fixed, tp_degree=plan.tp_degree, tp_gpus=plan.tp_gpus)
    problem = replace(problem, fixed=fixed, num_queries=most)
    return Case(name=f"{model}-{task}-{policy}-{seed}", problem=problem, policy=policy,
                timing=as_padded(timing, bool(rng.random() < 0.3)))


def _with_room(policy: str, problem: Problem, timing: TimingSource,
               plans: list[TensorPlan], groups: int) -> list[TensorPlan]:
    """Those under which WAA has room for batches of one query."""
    made = make_policy(policy, problem, as_padded(timing, False))
    able = [plan for plan in plans if len(
        WaaPlans(made.plans, plan.tp_degree, plan.tp_gpus).encode_devices)]
    if not able:
        return []
    found = made.evaluate([WaaConfig(encode_batch=1, decode_micro_batches=groups,
                                     tp_degree=plan.tp_degree, tp_gpus=plan.tp_gpus)
                           for plan in able])
    return [plan for plan, fits in zip(able, found.fits, strict=True) if fits]


def paper_cases(first_seed: int = 0, **options) -> Iterator[Case]:
    """Six models, five tasks, each under one policy, in turn; where WAA has no room, RRA."""
    for place in range(len(PAPER) * len(TASKS)):
        yield paper_case_at(place, first_seed, **options)


def paper_case_at(place: int, first_seed: int = 0, **options) -> Case:
    """One of `paper_cases`."""
    model, task = [(m, t) for m in PAPER for t in TASKS][place]
    seed = first_seed + place
    policy = POLICIES[(place + first_seed // 30) % 3]
    case = (paper_case(model, task, policy, seed, **options)
            or paper_case(model, task, "rra", seed, **options))
    assert case is not None
    return case


def bounds_of(grid, seed: int) -> list[float]:
    """Four latency bounds: one that nothing meets, none, and two between what is tightest and what
    the unbounded best takes."""
    rng = np.random.default_rng([23, seed])
    tightest = grid.tightest_latency_s
    if not math.isfinite(tightest):
        return [1.0, math.inf]
    config, _ = grid.best(math.inf)
    if config is None:
        return [tightest, math.inf]
    slowest = float(grid.latency_s[grid.configs.index(config)])
    ratio = max(slowest / tightest, 1.5)
    inner = sorted(tightest * ratio ** float(rng.uniform(0, 1.1)) for _ in range(2))
    return [0.999 * tightest, *inner, math.inf]
