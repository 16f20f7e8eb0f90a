"""The trace file of a replay: required by the Trace Event Format, and equal to the replay."""

import gzip
import json
import math
from collections import defaultdict

import numpy as np
import pytest

from xgpt.core.problem import QueryTimes
from xrunner.rules.steps import Step, StepKind
from xsimulator.replay.perfetto import events, write_trace
from xsimulator.replay.records import HandoverRecords, PoolRecords, ReplayResult

NAMES = ["stage 0 · encode", "stage 1 · decode", "stage 2 · decode"]
STEPS = 30
SENT_S = 0.004


def pool(name, kind, stages, start_s, length_s):
    count = len(start_s)
    starts = np.array(start_s)[:, None] + length_s * np.arange(len(stages))
    changes_s = np.sort(np.concatenate([starts[:, 0], starts[:, -1] + length_s]))
    encoded = np.full(count, 0 if kind is StepKind.DECODE else 3)
    return PoolRecords(
        name=name, role=name, stages=stages, encoded=encoded, tokens=encoded * 7, start_s=starts,
        steps=tuple(Step(kind=kind, group=i % 2, phase=i, iteration=i % 5) for i in range(count)),
        decoded=np.full(count, 0 if kind is StepKind.ENCODE else 12),
        context=np.full(count, np.nan if kind is StepKind.ENCODE else 31.25),
        end_s=starts + length_s, memory_s=changes_s, memory_tokens=np.arange(2 * count) * 10,
        kv_tokens=1000)


@pytest.fixture
def replay():
    """One encode stage and two decode stages; an encoding every 1/30 s, sent for 4 ms."""
    pace_s = 1 / 30  # no whole number of microseconds
    starts = pace_s * np.arange(STEPS)
    encode = pool("encode", StepKind.ENCODE, (0,), starts, pace_s)
    decode = pool("decode", StepKind.DECODE, (1, 2), starts + 0.05, pace_s)
    sent_s = encode.end_s[:, 0]
    return ReplayResult(
        pools=(encode, decode), output_tokens=np.ones(3, int), preemptions=0,
        times=QueryTimes(arrival_s=np.zeros(3), start_s=np.zeros(3), first_token_s=np.ones(3),
                         last_token_s=np.full(3, decode.end_s.max())),
        handovers=(HandoverRecords(source="encode", target="decode", step=np.arange(STEPS),
                                   start_s=sent_s, end_s=sent_s + SENT_S),))


def by_phase(trace):
    by_kind = defaultdict(list)
    for event in trace:
        by_kind[event["ph"]].append(event)
    return by_kind


def test_every_event_has_what_the_format_asks_for(replay):
    trace = list(events(replay, NAMES))
    json.dumps(trace, allow_nan=False)
    found = by_phase(trace)
    assert set(found) == set("MXCbesf")
    for event in trace:
        assert isinstance(event["name"], str) and event["pid"] > 0 and event["tid"] > 0
        assert event["ph"] == "M" or (isinstance(event["ts"], int) and event["ts"] >= 0)
    assert all(isinstance(event["dur"], int) and event["dur"] >= 0 for event in found["X"])
    assert all(isinstance(value, (int, float)) for event in found["C"]
               for value in event["args"].values())


def test_processes_are_pools_and_threads_are_stages(replay):
    found = by_phase(events(replay, NAMES))
    named = {(event["name"], event["tid"]): event["args"] for event in found["M"]}
    threads = {tid: args["name"] for (name, tid), args in named.items() if name == "thread_name"}
    assert list(threads.values()) == NAMES
    assert {tid for name, tid in named if name == "thread_sort_index"} == set(threads)
    pools = {e["pid"]: e["args"]["name"] for e in found["M"] if e["name"] == "process_name"}
    assert list(pools.values()) == ["encode pool", "decode pool"]
    for event in found["X"]:  # a stage belongs to one process
        assert pools[event["pid"]].split()[0] in threads[event["tid"]]


def test_each_step_is_there_on_each_stage_when_it_ran(replay):
    found = by_phase(events(replay, NAMES))
    assert len(found["X"]) == STEPS + 2 * STEPS
    on_last = [event for event in found["X"] if event["tid"] == 103]
    decode = replay.pools[1]
    assert [e["ts"] for e in on_last] == pytest.approx(decode.start_s[:, 1] * 1e6, abs=0.5)
    assert [e["dur"] for e in on_last] == pytest.approx([1e6 / 30] * STEPS, abs=1)
    assert on_last[3]["name"] == "decode 1" and on_last[3]["cat"] == "decode"
    assert on_last[3]["args"] == {"group": 1, "phase": 3, "iteration": 3, "queries": 12,
                                  "encoded": 0, "decoded": 12, "tokens": 0, "context": 31.2}
    first = found["X"][0]
    assert (first["args"]["queries"], first["args"]["tokens"]) == (3, 21)
    assert "context" not in first["args"]  # an encoding reads none


def test_steps_of_a_stage_never_overlap(replay):
    """The format forbids it, and rounding start and length separately would cause it."""
    lanes = defaultdict(list)
    for event in by_phase(events(replay, NAMES))["X"]:
        lanes[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for spans in lanes.values():
        assert all(a[1] <= b[0] for a, b in zip(spans, spans[1:], strict=False))


def test_handovers_are_spans_and_arrows_that_meet_their_steps(replay):
    found = by_phase(events(replay, NAMES))
    assert len(found["b"]) == len(found["e"]) == STEPS
    ends = {event["id"]: event["ts"] for event in found["e"]}
    assert len(ends) == STEPS
    assert all(ends[e["id"]] - e["ts"] == pytest.approx(SENT_S * 1e6, abs=1) for e in found["b"])
    slices = [(e["tid"], e["ts"], e["ts"] + e["dur"]) for e in found["X"]]

    def inside(event):
        return any(tid == event["tid"] and start <= event["ts"] < end
                   for tid, start, end in slices)

    assert found["s"] and all(inside(event) for event in found["s"] + found["f"])
    begins = {event["id"]: event for event in found["s"]}
    for end in found["f"]:
        assert end["tid"] == 102 and end["bp"] == "e"
        assert begins[end["id"]]["tid"] == 101 and begins[end["id"]]["ts"] < ends[end["id"]]
        assert ends[end["id"]] <= end["ts"]  # no step takes what has not come
    assert len(found["f"]) >= STEPS - 2  # the last ones come too late for any


def test_counters_hold_the_memory_and_its_budget(replay):
    found = by_phase(events(replay, NAMES))
    held = [e for e in found["C"] if e["name"] == "KV held" and e["pid"] == 1]
    assert [e["args"]["tokens"] for e in held] == (np.arange(2 * STEPS) * 10).tolist()
    budget = [e for e in found["C"] if e["name"] == "KV budget" and e["pid"] == 1]
    assert [e["args"]["tokens"] for e in budget] == [1000, 1000]
    assert budget[1]["ts"] == pytest.approx(replay.makespan_s * 1e6, abs=1)


def test_a_window_holds_what_overlaps_it(replay):
    start_s, end_s = 0.5, 0.7
    found = by_phase(events(replay, NAMES, start_s, end_s))
    whole = by_phase(events(replay, NAMES))
    assert found["M"] == whole["M"]
    assert found["X"] == [e for e in whole["X"]
                          if e["ts"] + e["dur"] >= 0.5e6 and e["ts"] <= 0.7e6]
    held = [e for e in found["C"] if e["name"] == "KV held" and e["pid"] == 1]
    assert held[0]["ts"] == 500_000  # what was held when it opens
    before = int((replay.pools[0].memory_s <= start_s).sum()) - 1
    assert held[0]["args"]["tokens"] == before * 10
    assert max(e["ts"] for e in held) <= 0.7e6


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
@pytest.mark.parametrize("window", [(0.0, math.inf), (0.2, 0.4), (90.0, 91.0)])
def test_the_file_holds_the_same_events(replay, tmp_path, name, window):
    path = tmp_path / name
    count = write_trace(replay, path, NAMES, *window)
    text = gzip.decompress(path.read_bytes()) if name.endswith(".gz") else path.read_bytes()
    assert json.loads(text)["traceEvents"] == list(events(replay, NAMES, *window))
    assert count == len(json.loads(text)["traceEvents"])
