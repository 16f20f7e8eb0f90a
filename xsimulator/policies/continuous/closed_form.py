"""ORCA, vLLM and Sarathi in closed form: continuous batching with a queue that never runs empty.

    throughput = groups * (queries encoded per step) / (time between a group's steps)
    latency(d) = (from the start of the encoding to its token) + d * (time between tokens)

Symbols: d = decode iterations of a query. How many queries are present follows from `max_active`,
or from the KV budget where that binds (continuous.filling, continuous.load); how long steps hold
each other up in a pipeline from continuous.in_flight. A longer output never has a shorter latency,
so both kinds of bound come to the latency of the output length at the bound's quantile."""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import NamedTuple

import numpy as np

from xgpt.core.controls import ContinuousControls
from xgpt.core.lengths import BoolArray, FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xsimulator.occupancy import QueryFlow, flow_of
from xsimulator.plans import StagePlan, shared_plans
from xsimulator.policies import geometric
from xsimulator.policies.continuous.cohorts import at_quantile
from xsimulator.policies.continuous.config import ContinuousConfig, ContinuousMemory, Groups
from xsimulator.policies.continuous.filling import Filling, OrcaFilling, SarathiFilling, VllmFilling
from xsimulator.policies.continuous.in_flight import (
    InStep,
    Intervals,
    intervals,
    intervals_in_step,
    least_intervals,
)
from xsimulator.policies.continuous.load import Load, LoadTimes, Steps
from xsimulator.policies.continuous.query_sizes import QuerySizes
from xsimulator.policies.figures import (
    Assembler,
    EstimateArrays,
    by_plan,
    extrapolation,
    gathered,
    one_pool,
    per_token_s,
)
from xsimulator.policies.measured_range import MeasuredRange

LEAST_LATENCY = 0.97  # of the latency without waiting, which holds for the mean step alone
_MOST_LOADS = 512  # kept, of single configurations


class _OfPlan(NamedTuple):
    """Configurations of one plan hold this, [configs]; `load` is that of one group of each."""

    key: tuple[int, int]  # tp_degree, tp_gpus
    rows: IntArray  # among all configurations
    groups: Groups
    kv_tokens: FloatArray
    fits: BoolArray
    load: Load


class _Filled(NamedTuple):
    """How a policy fills its steps with queries, which no timing source changes. `load_of` keeps
    what it is asked of one configuration: a schedule's margin asks again under other times."""

    queries: QuerySizes
    filling: Filling
    load_of: Callable[[float, float, float, float], Load]  # as Filling.load, of one each


def _filled(filling: Callable[[QuerySizes], Filling], flow: QueryFlow,
            problem: Problem) -> _Filled:
    """All closed forms of a policy and a flow of queries share it."""
    if filling not in flow.tables:
        queries = QuerySizes(
            flow.lengths, is_encoder_decoder=problem.model.is_encoder_decoder,
            reserved_outputs=flow.max_reserve_tokens - flow.lengths.inputs.max)
        made = filling(queries)
        flow.tables[filling] = _Filled(queries, made, lru_cache(_MOST_LOADS)(
            lambda *held: made.load(*(np.array([value]) for value in held))))
    found: _Filled = flow.tables[filling]
    return found


class Continuous:
    """This closed form evaluates configurations of one problem, and keeps what they share."""

    def __init__(self, filling: Callable[[QuerySizes], Filling], problem: Problem,
                 timing: TimingSource) -> None:
        """`filling` makes of the queries that there are the way in which steps are filled."""
        self.problem, self.timing = problem, timing
        self.plans = shared_plans(problem, timing)
        self.flow = flow_of(problem)
        self.queries, self.filling, self._load_of = _filled(filling, self.flow, problem)
        self.name = self.filling.name
        self.memory = ContinuousMemory(problem, self.flow.max_reserve_tokens)
        self._range = MeasuredRange(problem, timing)
        self._assembler = Assembler(problem, timing)
        self._times = cache(lambda key: LoadTimes(
            self.plans.both(*key), problem.lengths.inputs,
            partial(self.flow.charged_context, padded=timing.facts.is_padded), self._range))

    def grid(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> list[ContinuousConfig]:
        """The grid has every plan with numbers of queries a tenth apart, as far as memory holds
        them."""
        configs = [ContinuousConfig(max_active=count, tp_degree=tp_degree, tp_gpus=tp_gpus,
                                    token_budget=budget)
                   for tp_degree, tp_gpus in plans for count in geometric(max_queries)
                   for budget in self.filling.budgets]
        useful = []  # those that fit, with no more queries than memory ever holds
        for key, rows in by_plan(configs).items():
            own, plan = [configs[row] for row in rows], self.plans.both(*key)
            kv_tokens, fits = self.memory.kv_tokens(plan, self._groups(plan, own))
            least = kv_tokens / (self.problem.lengths.inputs.support[0] + 1)
            # where outputs are of one token nobody decodes, and no context is held
            context = max(self.queries.present.context, 1.0)
            most = np.minimum(least, 1.5 * kv_tokens / context + 8)
            useful += [config for config, is_held, count in zip(own, fits, most, strict=True)
                       if is_held and config.max_active <= count]
        return useful

    def evaluate(self, configs: Sequence[ContinuousConfig]) -> EstimateArrays:
        """The figures of every configuration are worked out together for those of one plan."""
        columns = self._figures(configs)
        fits = columns.pop("fits") > 0
        return EstimateArrays(fits=fits, **{name: columns[name] for name in (
            "throughput_qps", "latency_s", "ttft_s", "tpot_s", "period_s", "encode_s",
            "decode_batch", "present", "kv_tokens", "memory_bytes", "stretch")})

    def limits(self, configs: Sequence[ContinuousConfig]) -> tuple[FloatArray, FloatArray]:
        """The (throughput_qps, latency_s) that `evaluate` does not better are those of steps that
        never wait for each other. They are found much quicker where pipelines are long."""
        qps, latency_s = np.zeros(len(configs)), np.full(len(configs), np.inf)
        for held in self._held(configs):
            load, number, steps = held.load, held.groups.number, self._times(held.key)(held.load)
            least = least_intervals(steps.plain_s, steps.encode_s, load.share, number,
                                    steps.kind_of)
            is_timed = steps.is_timed & held.fits
            qps[held.rows] = np.where(is_timed, number * load.per_step / least.any_s, 0.0)
            latency_s[held.rows] = np.where(is_timed, LEAST_LATENCY * self._latency(load, least),
                                            np.inf)
        return qps, latency_s

    def estimate(self, config: ContinuousConfig) -> Estimate:
        """The Estimate says of one configuration what is shown, and what is executed."""
        plan = self.plans.both(config.tp_degree, config.tp_gpus)
        figures = {name: float(values[0]) for name, values in self._figures([config]).items()}
        groups, kv_tokens = self._groups(plan, [config]), figures["kv_tokens"]
        budget = self.filling.budget_of(config.token_budget) or None
        return self._assembler.estimate(
            ContinuousControls(policy=self.name, max_active=config.max_active, token_budget=budget),
            one_pool(config, plan.stages, int(groups.number[0]), kv_tokens),
            figures | {"decode_iterations": 1}, notes=extrapolation(figures["stretch"]),
            held_bytes=self.memory.by_stage(plan, groups, np.array([kv_tokens]))[0])

    def _groups(self, plan: StagePlan, configs: Sequence[ContinuousConfig]) -> Groups:
        active = np.array([c.max_active for c in configs], float)
        count = np.minimum(len(plan.stages), active).astype(np.int64)
        slots = active / count
        return Groups(count, slots, self.filling.step_tokens(np.ceil(slots),
                                                              self._budgets(configs)))

    def _budgets(self, configs: Sequence[ContinuousConfig]) -> FloatArray:
        return np.array([self.filling.budget_of(c.token_budget) for c in configs], float)

    def _held(self, configs: Sequence[ContinuousConfig]) -> list[_OfPlan]:
        """All plans are asked for at once: a walk costs the same for many configurations."""
        slots, group_tokens, number = (np.zeros(len(configs)) for _ in range(3))
        parts = []
        for key, rows in by_plan(configs).items():
            plan = self.plans.both(*key)
            groups = self._groups(plan, [configs[row] for row in rows])
            kv_tokens, fits = self.memory.kv_tokens(plan, groups)
            slots[rows], number[rows] = groups.slots, groups.number
            group_tokens[rows] = np.floor(kv_tokens / groups.number)
            parts.append((key, rows, groups, kv_tokens, fits))
        held = slots, group_tokens, self._budgets(configs), number
        load = (self._load_of(*(float(values[0]) for values in held)) if len(configs) == 1 else
                self.filling.load(*held))
        if len(parts) == 1:  # which has them all in their order
            return [_OfPlan(*parts[0], load)]
        return [_OfPlan(*part, load.take(part[1])) for part in parts]

    def _figures(self, configs: Sequence[ContinuousConfig]) -> dict[str, FloatArray]:
        return gathered(len(configs), (
            (held.rows, self._plan_figures(held)) for held in self._held(configs)))

    def _plan_figures(self, held: _OfPlan) -> dict[str, FloatArray]:
        load, number, steps = held.load, held.groups.number, self._times(held.key)(held.load)
        between = self._intervals(load, steps, number)
        qps = number * load.per_step / between.any_s
        latency_s, ttft_s = self._latency(load, between), load.encode_steps * between.encode_s
        seconds = {
            "latency_s": latency_s, "ttft_s": ttft_s,
            "tpot_s": per_token_s(self.problem, latency_s, ttft_s), "period_s": between.any_s,
            "decode_iteration_s": between.plain_s,
            "encode_s": steps.encode_s[:, :, steps.kind_of].sum(axis=2).mean(axis=1)}
        return {
            **{name: np.where(steps.is_timed, own, np.inf) for name, own in seconds.items()},
            "throughput_qps": np.where(steps.is_timed, qps, 0.0), "stretch": steps.stretch,
            "decode_batch": number * load.decoding, "present": number * load.present,
            "encode_batch": load.encoded.mean(axis=1), "kv_tokens": held.kv_tokens,
            "fits": held.fits.astype(float),
            "memory_bytes": self.memory.by_stage(
                self.plans.both(*held.key), held.groups, held.kv_tokens).max(axis=1)}

    def _intervals(self, load: Load, steps: Steps, number: IntArray) -> Intervals:
        if not load.in_step.any():
            return self._out_of_step(load, steps, number)
        # all end in the order in which they began, in every group alike
        cycle = self.queries.present.iterations + load.encode_steps + 2 * load.after
        rounds = load.share * load.apart * cycle
        together = load.share * load.together * cycle
        if self.filling.encodes_one:  # as many as the group of most queries has
            rounds = together = np.minimum(np.ceil(rounds - 1e-6), cycle)
        falls = np.where(load.falls > 0, load.falls * cycle, np.minimum(cycle - rounds, 1.0))
        of_cycle = intervals_in_step(
            steps.plain_s, steps.encode_s, load.share,
            InStep(rounds, together, cycle, falls, load.filled), number, steps.kind_of)
        if (load.in_step == 1).all():
            return of_cycle
        others = self._out_of_step(load, steps, number)
        return Intervals(*(load.in_step * own + (1 - load.in_step) * other
                           for own, other in zip(of_cycle, others, strict=True)))

    def _out_of_step(self, load: Load, steps: Steps, number: IntArray) -> Intervals:
        return intervals(steps.plain_s, steps.encode_s, load.share, number, steps.kind_of,
                         alternates=self.filling.alternates)

    def _latency(self, load: Load, between: Intervals) -> FloatArray:
        bound = self.problem.constraint
        longest = self.problem.lengths.outputs.quantile(bound.quantile)
        if bound.kind == "queries" and self.queries.are_equal:
            load = at_quantile(load, bound.quantile)
        return load.encode_steps * between.encode_s + self.filling.decode_latency(
            self.flow.iterations_of(longest), load, between)


# The closed forms of the policies (problem, timing); each filling says how its engine works.
orca = partial(Continuous, OrcaFilling)
vllm = partial(Continuous, VllmFilling)
sarathi = partial(Continuous, SarathiFilling)
