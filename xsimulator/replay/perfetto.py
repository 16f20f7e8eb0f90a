"""A replay as a trace file that ui.perfetto.dev and chrome://tracing open.

Trace Event Format, JSON object form: a process per pool, a thread per stage, a complete event per
step and stage, counters for the KV budget, and for each handover a span and an arrow."""

import gzip
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.replay.records import HandoverRecords, PoolRecords, ReplayResult

Event = dict[str, Any]

_FIRST_PID, _FIRST_TID = 1, 101  # 0 is the idle process; a thread with its process's id is its main
_HEAD: Event = {"displayTimeUnit": "ms", "otherData": {"source": "xgpt replay"}}


def write_trace(result: ReplayResult, path: Path, stage_names: Sequence[str], start_s: float = 0.0,
                end_s: float = math.inf) -> int:
    """Writes the events of a window to `path` (gzip if it ends in .gz). Returns their number."""
    encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
    stream, count = events(result, stage_names, start_s, end_s), 0
    with (gzip.open(path, "wt", encoding="utf-8", compresslevel=4) if path.suffix == ".gz"
          else path.open("w", encoding="utf-8")) as file:
        file.write(encode(_HEAD)[:-1] + ',"traceEvents":[')
        for event in stream:
            file.write((",\n" if count else "\n") + encode(event))
            count += 1
        file.write("\n]}\n")
    return count


def events(result: ReplayResult, stage_names: Sequence[str], start_s: float = 0.0,
           end_s: float = math.inf) -> Iterator[Event]:
    """Yields the events of a window. stage_names: indexed like the Estimate's stages."""
    window = (start_s, end_s)
    for place, pool in enumerate(result.pools):
        yield from _names(pool, _FIRST_PID + place, place, stage_names)
    for place, pool in enumerate(result.pools):
        yield from _steps(pool, _FIRST_PID + place, window)
        yield from _memory(pool, _FIRST_PID + place, window, result.makespan_s)
    first = 1
    for handovers in result.handovers:
        yield from _handovers(handovers, result.pools, first, window)
        first += len(handovers.step)


def _names(pool: PoolRecords, pid: int, place: int, stage_names: Sequence[str]) -> Iterator[Event]:
    name = "stages" if pool.role == "both" else f"{pool.name} pool"
    yield _metadata("process_name", pid, pid, name=name)
    yield _metadata("process_sort_index", pid, pid, sort_index=place)
    for stage in pool.stages:
        yield _metadata("thread_name", pid, _tid(stage), name=stage_names[stage])
        yield _metadata("thread_sort_index", pid, _tid(stage), sort_index=stage)


def _metadata(kind: str, pid: int, tid: int, **args: object) -> Event:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": args}


def _steps(pool: PoolRecords, pid: int, window: tuple[float, float]) -> Iterator[Event]:
    starts_us, ends_us = _us(pool.start_s), _us(pool.end_s)
    inside = (pool.end_s >= window[0]) & (pool.start_s <= window[1])
    for index in np.flatnonzero(inside.any(axis=1)).tolist():
        step = pool.steps[index]
        kind = step.kind.value
        name = f"{kind} {step.group}"  # viewers colour by the name without its number
        args: Event = {"group": step.group, "phase": step.phase, "iteration": step.iteration,
                "queries": int(pool.encoded[index] + pool.decoded[index]),
                "encoded": int(pool.encoded[index]), "decoded": int(pool.decoded[index]),
                "tokens": int(pool.tokens[index])}
        if pool.decoded[index]:
            args["context"] = round(float(pool.context[index]), 1)
        for column in np.flatnonzero(inside[index]).tolist():
            start_us = int(starts_us[index, column])
            yield {"name": name, "cat": kind, "ph": "X", "ts": start_us,
                   "dur": int(ends_us[index, column]) - start_us, "pid": pid,
                   "tid": _tid(pool.stages[column]), "args": args}


def _memory(pool: PoolRecords, pid: int, window: tuple[float, float],
            makespan_s: float) -> Iterator[Event]:
    """Held and budget as two counters, since two series of one counter would be stacked."""
    if not len(pool.memory_s):
        return
    start_s, end_s = window[0], min(window[1], makespan_s)
    for at_s in (start_s, end_s):
        yield _counter("KV budget", pid, round(at_s * 1e6), pool.kv_tokens)
    first = max(int(np.searchsorted(pool.memory_s, start_s, side="right")) - 1, 0)
    last = int(np.searchsorted(pool.memory_s, end_s, side="right"))
    times_us = np.maximum(_us(pool.memory_s[first:last]), round(start_s * 1e6))
    for at_us, tokens in zip(times_us.tolist(), pool.memory_tokens[first:last].tolist(),
                             strict=True):
        yield _counter("KV held", pid, at_us, tokens)


def _counter(name: str, pid: int, at_us: int, tokens: int) -> Event:
    return {"name": name, "ph": "C", "ts": at_us, "pid": pid, "tid": pid,
            "args": {"tokens": tokens}}


def _handovers(handovers: HandoverRecords, pools: Sequence[PoolRecords],
               first: int, window: tuple[float, float]) -> Iterator[Event]:
    """Each handover is a span in its source's process. An arrow leads from its encoding to the
    first step of its target that starts after it. Handovers are numbered from `first` on."""
    names = [pool.name for pool in pools]
    source, target = names.index(handovers.source), names.index(handovers.target)
    encode, decode = pools[source], pools[target]
    pid, to_pid = _FIRST_PID + source, _FIRST_PID + target
    starts_s = decode.start_s[:, 0]
    inside = (handovers.end_s >= window[0]) & (handovers.start_s <= window[1])
    for index in np.flatnonzero(inside).tolist():
        step = int(handovers.step[index])
        start_us, end_us = (round(float(at[index]) * 1e6)
                            for at in (handovers.start_s, handovers.end_s))
        span = {"name": "handover", "cat": "handover", "id": f"0x{first + index:x}", "pid": pid,
                "tid": pid}
        yield {**span, "ph": "b", "ts": start_us, "args": {
            "group": encode.steps[step].group, "queries": int(encode.encoded[step])}}
        yield {**span, "ph": "e", "ts": end_us}
        taken = int(np.searchsorted(starts_s, handovers.end_s[index]))
        if taken == len(starts_s) or starts_s[taken] > window[1]:
            continue
        # an arrow begins and ends inside the two steps' events, or it is not bound to them
        left_us = max(round(encode.end_s[step, -1] * 1e6) - 1,
                      round(encode.start_s[step, -1] * 1e6))
        arrow = {"name": "handed over", "cat": "handover", "id": f"0x{first + index:x}"}
        yield {**arrow, "ph": "s", "ts": left_us, "pid": pid, "tid": _tid(encode.stages[-1])}
        yield {**arrow, "ph": "f", "bp": "e", "ts": round(float(starts_s[taken]) * 1e6),
               "pid": to_pid, "tid": _tid(decode.stages[0])}


def _tid(stage: int) -> int:
    """Thread id of a stage, different over all pools: Perfetto names threads by this id alone."""
    return _FIRST_TID + stage


def _us(seconds: FloatArray) -> IntArray:
    """Whole microseconds. Readers would cut a fraction, and steps that follow each other would then
    overlap by a nanosecond, which the format forbids."""
    return np.asarray(np.rint(seconds * 1e6).astype(np.int64))
