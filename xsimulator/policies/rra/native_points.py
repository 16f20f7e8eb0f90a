"""RRA's figures and room by its native calls (rra.native)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xsimulator.policies.figures import EstimateArrays, per_token_s
from xsimulator.policies.measured_range import MeasuredRange, Presented
from xsimulator.policies.rra.config import RraConfigs
from xsimulator.policies.rra.native import NativeRra
from xsimulator.policies.rra.native_steps import Call
from xsimulator.policies.rra.native_tables import PlanRows, RraParts


def evaluated(rra: RraParts, native: NativeRra, measured: MeasuredRange, configs: RraConfigs,
              by_arrays: Callable[[RraConfigs], EstimateArrays]) -> EstimateArrays:
    """The figures of configurations; of those that a table of steps does not answer for by
    arrays."""
    call = native.called(configs)
    found, sizes, is_sure = native.points(call)
    period_s, latency_s, encoded_s, first_s, encode_s, timed = found
    (kv_tokens, memory_bytes, present), columns = native.held(call)
    problem, phases = rra.problem, rra.blocks.packed.single("mean_phases")[columns]
    ttft_s = first_s if problem.model.is_encoder_decoder else encoded_s
    latency_s, ttft_s, period_s, encode_s = (np.where(timed > 0, seconds, np.inf) for seconds in (
        latency_s, ttft_s, period_s, encode_s))
    figures = {
        "throughput_qps": configs.encode_batch / period_s, "latency_s": latency_s,
        "ttft_s": ttft_s, "tpot_s": per_token_s(problem, latency_s, ttft_s),
        "period_s": period_s, "encode_s": encode_s,
        "stretch": _stretches(problem, call, measured, sizes),
        "decode_batch": configs.encode_batch * phases, "present": present,
        "kv_tokens": kv_tokens, "memory_bytes": memory_bytes}
    if not is_sure.all():
        rows = np.flatnonzero(~is_sure)
        others = by_arrays(configs.take(rows))
        for name, values in figures.items():
            values[rows] = getattr(others, name)
    return EstimateArrays(**figures, fits=memory_bytes <= rra.capacity_bytes)


def presented_at(problem: Problem, tokens: FloatArray, queries: FloatArray,
                 decoding: FloatArray) -> Presented:
    """A group encodes so many tokens and queries at most, and decodes so many queries."""
    longest = float(problem.lengths.inputs.max)
    return Presented(
        tokens, queries, decoding, input_tokens=longest,
        context=longest * (not problem.model.is_encoder_decoder) + problem.lengths.outputs.max)


def _stretches(problem: Problem, call: Call, measured: MeasuredRange,
               sizes: FloatArray) -> FloatArray:
    """[configs] of `sizes` as NativeRra.points has them."""
    stretch = np.zeros(len(call.order))
    if _is_endless(measured, call.plans):
        return stretch
    for plan, part in call.plans:
        rows = call.order[part]
        stretch[rows] = measured.stretch(plan.times.degrees, presented_at(
            problem, *(own[rows] for own in sizes)))
    return stretch


def _is_endless(measured: MeasuredRange, plans: PlanRows) -> bool:
    return measured.is_endless({degree for plan, _ in plans for degree in plan.times.degrees})
