"""WAA-C and WAA-M in closed form (paper sections 4.1 and 6; docs/design.md).

Symbols: B_E = encode_batch, G = decode_micro_batches, S = output tokens of a query, D = its decode
iterations, lambda = queries a second, B_D = decode_batch, T_E = time between two encode steps (the
encode pool's slowest stage, or the handover, and what uneven batches of three queries or fewer add:
xsimulator.policies.waa.unevenness), T_iter(B_D) = time between two tokens of a query. The
decode batch is meant to be B_E E[S] (one encode batch for each iteration, as in the paper) and is
never more. Where the encode pool is too slow for that, it is what Little's law gives:

    lambda = B_E / T_E,  B_D = lambda E[D] T_iter(B_D)      if that B_D <= B_E E[S]
    B_D = B_E E[S],  lambda = B_D / (E[D] T_iter(B_D))      else: the encode pool is throttled
    latency(d) = L_E + T_handover + (d + wait) T_iter(B_D)

L_E is a batch's time through the encode pool, `wait` the part of an iteration until its group's
turn comes, uniform over one. L_E is charged for a batch at the upper threshold of the workload
adjustment (the paper's buffer, section 5.2): a schedule holds its bound for such batches too.

Where the encode pool is too slow and the decode pool takes chunks of inputs (encode_chunk):
xsimulator.policies.waa.chunk_rates. The latency is then that of both ways of encoding by their
shares: the mean of a `sequence`, and of all `queries` the quantile of what both are together. What
is searched keeps a bound by the slower way, too (`evaluate_either_way`).

T_iter(B) = max(G slowest stage, all stages in turn) for groups of B / G queries; where many groups
have few queries each, G are those that hold any (xsimulator.policies.waa.few_each). The devices are
divided by the time that encoding and decoding of a query take at these batch sizes (WAA-C), or so
that the fullest device is as empty as can be (WAA-M)."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from xgpt.core.controls import EvenBatches, WaaControls
from xgpt.core.deployment import Deployment, Pool
from xgpt.core.errors import wrong
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xrunner.rules.batch_sizer import share_of
from xsimulator.occupancy import flow_of
from xsimulator.plans import PlanSource, shared_plans
from xsimulator.policies import geometric, group_counts
from xsimulator.policies.figures import (
    Assembler,
    EstimateArrays,
    by_plan,
    extrapolation,
    per_token_s,
)
from xsimulator.policies.waa.chunk_rates import ChunkedPools
from xsimulator.policies.waa.config import WaaConfig, WaaConfigs
from xsimulator.policies.waa.divided import Divided
from xsimulator.policies.waa.divisions import Division, DivisionByMemory, DivisionByTime
from xsimulator.policies.waa.memory import WaaMemory
from xsimulator.policies.waa.plans import WaaPlan, WaaPlans
from xsimulator.policies.waa.pool_times import PoolTimes, pool_rates, shared_times
from xsimulator.policies.waa.stretch import Stretch
from xsimulator.policies.waa.waits import Waits

_Sizes = TypeVar("_Sizes", float, FloatArray)


class Waa:
    """This closed form evaluates configurations of one problem, and keeps what they share."""

    def __init__(self, name: str, problem: Problem, timing: TimingSource,
                 division: Callable[[PoolTimes, WaaMemory], Division], *,
                 adjustment: float | None = None, plans: PlanSource | None = None) -> None:
        """`division` makes, of the pools' times and memory, the way in which the devices are
        divided. `adjustment` and `plans` are as for xsimulator.policies.rra.closed_form.Rra."""
        self.name, self.problem, self.timing = name, problem, timing
        self.adjustment = share_of(problem.adjustment) if adjustment is None else adjustment
        self.flow = flow_of(problem)
        self.waits = Waits(problem, self.flow)
        self.plans: PlanSource = plans or shared_plans(problem, timing)
        self.times = (PoolTimes if plans else shared_times)(
            problem, timing, self.plans, self.flow, self.adjustment)
        self.chunked = ChunkedPools(problem, self.times, self.flow,
                                    padded=timing.facts.is_padded)
        if "memory" not in self.times.kept:
            self.times.kept["memory"] = WaaMemory(problem, self.flow, self.plans, self.adjustment)
        self.memory: WaaMemory = self.times.kept["memory"]
        self.division = division(self.times, self.memory)
        self.stretch = Stretch(problem, timing, self.adjustment)
        self._mean_lengths = problem.lengths.inputs.mean, problem.lengths.outputs.mean
        self._assembler = Assembler(problem, timing)
        self.capacity_bytes = self._assembler.capacity_bytes

    def grid(self, max_queries: int, plans: Sequence[tuple[int, int]]) -> list[WaaConfig]:
        """The grid has every (tp_degree, tp_gpus) of `plans` that both pools can be laid out for,
        with decode groups up to twice the stages and batches 10 % apart as far as queries reach."""
        configs = []
        for tp_degree, tp_gpus in plans:
            split = WaaPlans(self.plans, tp_degree, tp_gpus)
            if not len(split.encode_devices):
                continue
            most = max(int(max_queries / self.times.mean_iterations), 1)  # the rest is decoding
            stages = self.problem.cluster.num_devices - tp_gpus + tp_gpus // tp_degree - 1
            configs += [WaaConfig(encode_batch=batch, decode_micro_batches=groups,
                                  tp_degree=tp_degree, tp_gpus=tp_gpus)
                        for groups in group_counts(max(stages, 1)) for batch in geometric(most)]
        return configs

    def evaluate(self, configs: Sequence[WaaConfig]) -> EstimateArrays:
        """The figures of every configuration are worked out together."""
        return self.evaluate_either_way(configs)[0]

    def evaluate_either_way(self, configs: Sequence[WaaConfig],
                            ) -> tuple[EstimateArrays, FloatArray]:
        """The same, and seconds [configs] of the latency by the slower way of encoding."""
        divided, rows = self._divided(configs)
        back = np.argsort(rows)
        columns = {name: values[back] for name, values in self._figures(divided).items()}
        del columns["stock_tokens"]  # of an estimate's controls alone
        slower_s = columns.pop("slower_s")
        return EstimateArrays(
            **columns, fits=columns["memory_bytes"] <= self.capacity_bytes), slower_s

    def estimate(self, config: WaaConfig) -> Estimate:
        """The Estimate says of one configuration what is shown, and what is executed."""
        divided, _ = self._divided([config])
        (plan,), arrays = divided.plans, self._figures(divided)
        figures = {name: float(values[0]) for name, values in arrays.items()}
        figures |= {"decode_iteration_s": figures["period_s"], "decode_iterations": 1,
                    "encode_batch": config.encode_batch}
        # the pools' own pace decides, and room where it does not: leading back is left to those who
        # ask for it, since what is encoded together then depends on the clock
        target = figures["decode_batch"] if self.problem.adjustment.steers else 0.0
        controls = WaaControls(
            policy=self.name, encode_batch=config.encode_batch,
            decode_micro_batches=config.decode_micro_batches,
            max_in_system=max(int(round(figures["present"])), 1),
            **self._chunk_controls(config, figures["stock_tokens"]),
            even=EvenBatches(adjustment=self.adjustment, target_active=target,
                             mean_input_tokens=self.problem.lengths.inputs.mean))
        deployment = self._deployment(config, plan, figures["kv_tokens"])
        encoding, decoding = (pool.num_devices for pool in deployment.pools)
        division = f"{encoding} devices encode, {decoding} decode"
        return self._assembler.estimate(
            controls, deployment, figures, notes=[division, *extrapolation(figures["stretch"])],
            held_bytes=self.memory.by_stage(plan, divided.configs, arrays["present"])[0])

    def _chunk_controls(self, config: WaaConfig, stock_tokens: float) -> dict[str, int]:
        if not config.encode_chunk:
            return {}
        # where the encode pool is not behind, it would wait while the other encodes
        planned = config.encode_batch * self.problem.lengths.outputs.mean if stock_tokens > 1 else 1
        return {"encode_chunk": config.encode_chunk, "stock_tokens": int(stock_tokens),
                "planned_active": math.ceil(planned)}

    def _deployment(self, config: WaaConfig, plan: WaaPlan, kv_tokens: float) -> Deployment:
        stages = plan.encode.stages
        encode_tokens = self.memory.encode_kv_tokens(np.array([float(config.encode_batch)]),
                                                     len(stages))
        # two groups more than stages: one waits for its tokens, one is handed over
        encode = Pool(name="encode", role="encode", stages=stages, num_groups=len(stages) + 2,
                      kv_tokens=int(encode_tokens[0]))
        decode = Pool(name="decode", role="decode", stages=plan.decode.stages,
                      num_groups=config.decode_micro_batches, kv_tokens=int(kv_tokens))
        return Deployment(pools=(encode, decode), tp_degree=config.tp_degree,
                          tp_gpus=config.tp_gpus)

    def split(self, tp_degree: int, tp_gpus: int) -> WaaPlans:
        """These divisions can be. Raises InputError where there is none."""
        split = self.times.split(tp_degree, tp_gpus)
        if not len(split.encode_devices):
            raise wrong("schedule", "tp_degree, tp_gpus", (tp_degree, tp_gpus), (
                f"groups within one node and one pool, and no more stages in a pool "
                f"than layers; {self.problem.cluster.num_devices} devices, "
                f"{self.problem.model.num_layers} layers"))
        return split

    @property
    def iterations_waited(self) -> float:
        """See Waits.iterations."""
        return self.waits.iterations

    def _divided(self, configs: Sequence[WaaConfig]) -> tuple[Divided, IntArray]:
        """Configurations by their division, and their rows. Raises InputError for chunks of a
        model that can take none."""
        chunk = max((one.encode_chunk for one in configs), default=0)
        if chunk and self.problem.model.is_encoder_decoder:
            raise wrong("schedule", "encode_chunk", chunk, "0 for an encoder-decoder model: its "
                        "encoder and its decoder share no layers that chunks could go through")
        every = WaaConfigs(batch=np.array([c.encode_batch for c in configs], float),
                           groups=np.array([c.decode_micro_batches for c in configs], float),
                           chunk=np.array([c.encode_chunk for c in configs], float))
        plans, order = list[WaaPlan](), list[IntArray]()
        for key, rows in by_plan(configs).items():
            split = self.split(*key)
            devices = self.division.divide(split, every.take(rows))
            for count in np.unique(devices).tolist():
                plans.append(split.plan(count))
                order.append(rows[devices == count])
        rows = np.concatenate(order)
        which = np.repeat(np.arange(len(plans)), [len(own) for own in order])
        return Divided(plans=plans, which=which, configs=every.take(rows)), rows

    def _figures(self, divided: Divided) -> dict[str, FloatArray]:
        configs = divided.configs
        found = self.chunked.with_chunks(divided, pool_rates(
            self.times, divided, self.problem.lengths.outputs.mean))
        rates = found.rates
        rows = np.maximum(rates.decode_batch / configs.groups, 1.0)
        buffer, stretch = divided.gathered(lambda plan, own: (
            self._buffer_s(plan, configs.batch[own]),
            self.stretch.of(plan, configs.take(own), rows[own])))
        with np.errstate(invalid="ignore"):  # refused sizes are infinite
            ttft = rates.encode_s + buffer
            latency = (ttft + rates.handover_s + self.iterations_waited * rates.iteration_s)
            if self.problem.model.is_encoder_decoder:  # the first token is decoded
                ttft = ttft + rates.handover_s + 1.5 * rates.iteration_s
            latency, slower = self.waits.either_way(found, latency)
            ttft = np.maximum(ttft, found.taken_s)
        latency, slower, ttft = (np.where(rates.throughput_qps > 0, seconds, np.inf)
                                 for seconds in (latency, slower, ttft))
        return {
            "throughput_qps": rates.throughput_qps, "decode_batch": rates.decode_batch,
            "period_s": rates.iteration_s, "encode_s": rates.encode_s, "present": rates.present,
            "latency_s": latency, "slower_s": slower, "ttft_s": ttft,
            "tpot_s": per_token_s(self.problem, slower, ttft),
            "kv_tokens": self.memory.kv_tokens(rates.present),
            "stock_tokens": found.stock_tokens,
            "memory_bytes": self.memory.fullest_of_pairs(
                divided.plans, divided.which, self.memory.sizes(configs, rates.present)),
            "stretch": stretch}

    def _buffer_s(self, plan: WaaPlan, batch: FloatArray) -> FloatArray:
        """What the latency is longer for the workload adjustment's threshold [configs]."""
        with np.errstate(invalid="ignore"):  # refused sizes are infinite
            return np.asarray((self.times.encode_steps(plan, batch, 1 + self.adjustment)
                               - self.times.encode_steps(plan, batch)).sum(axis=1))


# The closed forms of the policies (problem, timing): devices are divided by time, or such that
# memory is even.
waa_c = partial(Waa, "waa-c", division=lambda times, _: DivisionByTime(times))
waa_m = partial(Waa, "waa-m", division=lambda _, memory: DivisionByMemory(memory))
