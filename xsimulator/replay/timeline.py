"""When each step of a Trace runs on each stage, and what that makes of every query's latency."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xgpt.lengths import FloatArray, IntArray
from xsimulator.replay.trace import Trace
from xsimulator.stage_times import StageTimes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReplayResult:
    """A finite job, fill and drain included. Seconds since its start; per query unless said."""

    encode_start_s: FloatArray
    latency_s: FloatArray
    makespan_s: float
    step_start_s: FloatArray  # [steps] on the first stage
    step_end_s: FloatArray  # [steps] on the last stage
    trace: Trace


def step_seconds(times: StageTimes, steps: Trace, inputs: IntArray, *, padded: bool) -> FloatArray:
    """[steps, stages] seconds of each step from its own sizes. `padded`: see policies.rra.Rra."""
    seconds = np.zeros((len(steps.steps), len(times.stages)))
    encodes = np.flatnonzero(steps.is_encode)
    decodes = np.flatnonzero(~steps.is_encode)
    if encodes.size:
        tokens = inputs[steps.encoded]
        place = np.searchsorted(encodes, steps.encoded_step)

        def per_step(values: FloatArray) -> FloatArray:
            sums = np.bincount(place, weights=values, minlength=len(encodes))
            return np.asarray(sums, dtype=np.float64)

        together = steps.queries[encodes][place]
        attention = {d: per_step(v) for d, v in times.attention_s(tokens, together).items()}
        seconds[encodes] = times.encode_s(
            per_step(tokens.astype(float)), steps.queries[encodes], attention)
    if decodes.size:
        context = steps.context_max if padded else steps.context_mean
        seconds[decodes] = times.decode_s(steps.queries[decodes], context[decodes])
    return seconds


def timeline(steps: Trace, seconds: FloatArray) -> ReplayResult:
    """Run the trace over the pipeline. seconds: [steps, stages].

    The head takes its turns in order; each waits for the group's previous tokens, a turn without a
    step too. Every stage works its steps in order.
    """
    durations = seconds.tolist()
    free = [0.0] * seconds.shape[1]  # free[0] is the head's clock
    ready: dict[int, float] = {}  # group -> when its latest tokens reach the head
    pending: dict[int, int] = {}  # group -> step they belong to
    start_s, end_s, taken_s = (np.zeros(len(durations)) for _ in range(3))
    for group, step in steps.turns:
        now = free[0] = max(free[0], ready.get(group, 0.0))
        if group in pending:
            taken_s[pending.pop(group)] = now
        if step is None:
            continue
        start_s[step] = now
        for stage, duration in enumerate(durations[step]):
            now = free[stage] = max(now, free[stage]) + duration
        end_s[step] = ready[group] = now
        pending[group] = step
    for group, step in sorted(pending.items()):  # the last tokens of all
        taken_s[step] = free[0] = max(free[0], ready[group])
    encode_start_s = start_s[steps.first_step]
    return ReplayResult(
        encode_start_s=encode_start_s, latency_s=taken_s[steps.last_step] - encode_start_s,
        makespan_s=float(taken_s.max(initial=0.0)), step_start_s=start_s, step_end_s=end_s,
        trace=steps)
