"""Records and tables of the paper's Figures 7, 9, 10 and 11 and its Table 7 (`scenarios.py`)."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from paper_scenarios import BOUNDS, PAPERS, Scenario, best_schedule
from runner import table

from xgpt.core.controls import EvenBatches, RraControls, WaaControls
from xgpt.core.errors import InfeasibleError
from xgpt.core.lengths import FloatArray, IntArray, joint_empirical
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xrunner.rules.steps import StepKind
from xscheduler.drift import drift_rows
from xscheduler.ft_latency import ft_plan
from xsimulator.memory import weight_bytes
from xsimulator.replay.job import planned_queries, replay_job
from xsimulator.replay.records import PoolRecords
from xsimulator.replay.steady_replay import steady_replay
from xsimulator.replay.steady_state import enough_queries

Record = dict[str, Any]
Tasks = dict[str, Callable[[], Record]]
OPT, GPT_39B, GPT_101B = ("opt-13b", "a40-4"), ("gpt3-39b", "a40-16"), ("gpt3-101b", "a100-16")
WAA = ("waa-c", "waa-m")
GIB = 2**30
SYSTEMS = ("ft", "dsi", "orca", "vllm")
STEADY = (0.35, 0.9)  # chosen: of the encode steps, those that begin between these quantiles count
SCATTER_QUERIES = 12_000
DATA = {"WMT": ("wmt/wmt_ende_newstest2017_token_lengths.csv", "input_tokens_en",
                "output_tokens_de"),
        "ShareGPT": ("sharegpt/sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
                     "num_prefill_tokens", "num_decode_tokens")}
MOST_TOKENS = 2048  # positions of OPT: longer requests are left out
LEAST_REPLAYED, ROUNDS, MOST_REPLAYED = 12_000, 14, 100_000  # chosen


def scenario_of(place: tuple[str, str], task: str) -> Scenario:
    return Scenario(model=place[0], cluster=place[1], task=task)


# Figure 7


def system_tasks() -> Tasks:
    return {f"{task}/{bound}": partial(_systems, task, bound)
            for task in ("S", "T", "C1") for bound in BOUNDS}


def _systems(task: str, bound: str) -> Record:
    """Requests/s of each of SYSTEMS under one limit, tensor-parallel over all cards; None: the
    limit is missed. FT and DSI must keep it with an output of maximum length."""
    scenario = scenario_of(OPT, task)
    bound_s, timing = scenario.bounds()[bound], scenario.timing()
    problems = {name: scenario.problem(bound_s, 1.0 if name in ("ft", "dsi") else 0.99)
                for name in SYSTEMS}
    return {"bound_s": bound_s} | {
        name: best_schedule(problem, timing, (name,), ft_plan(problem)).throughput_qps
        for name, problem in problems.items()}


def system_page(records: Mapping[str, Record]) -> list[str]:
    return [*table(("task, limit", "seconds", *(name.upper() for name in SYSTEMS))),
            *(f"| {key} | {float(record['bound_s']):.3g} | "
              + " | ".join(_rate(record[name]) for name in SYSTEMS) + " |"
              for key, record in records.items())]


def _rate(qps: float | None) -> str:
    return "none" if qps is None else f"{qps:.3g}"


# Table 7


def scatter_tasks() -> Tasks:
    return {f"{name}/{bound}/{setting}": partial(_scatter, policies, bound, setting)
            for name, policies in (("RRA", ("rra",)), ("WAA", WAA)) for bound in BOUNDS
            for setting in ("fixed batches", "adjusted")}


def _scatter(policies: tuple[str, ...], bound: str, setting: str) -> Record:
    """Mean seconds of a stage's encode and decode steps in a replay, and how far they scatter."""
    scenario = scenario_of(OPT, "S")
    problem, timing = scenario.problem(scenario.bounds()[bound]), scenario.timing()
    found = best_schedule(problem, timing, policies, has_chunks=False).estimate
    if found is None:
        return {}
    assert isinstance(found.controls, (RraControls, WaaControls)), f"{found.controls = }"
    even = replace(found.controls.even, adjustment=0.1, mean_input_tokens=(
        problem.lengths.inputs.mean)) if setting == "adjusted" else EvenBatches()
    estimate = replace(found, controls=replace(found.controls, even=even))
    inputs, outputs = problem.lengths.sample(SCATTER_QUERIES, np.random.default_rng(0))
    result = replay_job(problem, timing, estimate, planned_queries(problem, inputs, outputs))
    return {"policy": found.policy, "encode_batch": found.figures.encode_batch,
            "decode_iterations": found.figures.decode_iterations} | {
        kind: _spread(result.pools, kind) for kind in ("encode", "decode")}


def _spread(pools: tuple[PoolRecords, ...], kind: str) -> Record:
    """`mean_s` of steps of the steady state; `cv` and `within`, shares: 99 % of the steps are so
    near to the mean of their stage at their iteration of a phase."""
    starts = np.concatenate([pool.start_s[_is(pool, "encode"), 0] for pool in pools])
    begin_s, end_s = np.quantile(starts, STEADY)
    seconds, ratios = list[FloatArray](), list[FloatArray]()
    for pool in pools:
        iteration = np.array([step.iteration for step in pool.steps])
        for stage in range(len(pool.stages)):
            own = _is(pool, kind) & (pool.start_s[:, stage] >= begin_s) & (
                pool.start_s[:, stage] <= end_s)
            took = pool.end_s[:, stage] - pool.start_s[:, stage]
            for at in np.unique(iteration[own]):
                here = took[own & (iteration == at)]
                seconds.append(here)
                ratios.append(here / here.mean())
    ratio = np.concatenate(ratios)
    return {"mean_s": float(np.concatenate(seconds).mean()), "cv": float(ratio.std()),
            "within": float(np.quantile(np.abs(ratio - 1), 0.99))}


def _is(pool: PoolRecords, kind: str) -> FloatArray:
    return np.array([(step.kind is StepKind.ENCODE) == (kind == "encode") for step in pool.steps])


def scatter_page(records: Mapping[str, Record]) -> list[str]:
    head = ("schedule", "B_E", "N_D", "encode step", "cv", "99 % within", "decode step", "cv",
            "99 % within")
    return [*table(head), *(
        f"| {key}: {record['policy']} | {record['encode_batch']} | {record['decode_iterations']} | "
        + " | ".join(f"{record[kind]['mean_s'] * 1e3:.3g} ms | {record[kind]['cv']:.1%} "
                     f"| {record[kind]['within']:.1%}" for kind in ("encode", "decode")) + " |"
        for key, record in records.items() if record)]


# Figure 9


def memory_tasks() -> Tasks:
    return {f"{place[0]}/{task}": partial(_memory, scenario_of(place, task))
            for place in (OPT, GPT_101B) for task in ("T", "G")}


def _memory(scenario: Scenario) -> Record:
    """{FT or WAA: its pools}: devices, GiB of weights, GiB in all, and of the fullest device."""
    problem, timing = scenario.problem(), scenario.timing()
    found = {"FT": best_schedule(scenario.problem(quantile=1.0), timing, ("ft",),
                                 ft_plan(problem)),
             "WAA": best_schedule(problem, timing, WAA, has_chunks=False)}
    return {name: None if one.estimate is None else {
        "policy": one.estimate.policy, "pools": [*_pools(problem, one.estimate)]}
        for name, one in found.items()}


def _pools(problem: Problem, estimate: Estimate) -> Iterator[Record]:
    held = estimate.figures.memory_bytes
    for pool in estimate.deployment.pools:
        weights = weight_bytes(problem.model, pool.stages, problem.dtype)
        ranks = [rank for stage in pool.stages for rank in stage.ranks]
        yield {"role": pool.role, "devices": len(ranks),
               "weights_gib": sum(float(each) * len(stage.ranks) for each, stage in zip(
                   weights, pool.stages, strict=True)) / GIB,
               "all_gib": sum(held[rank] for rank in ranks) / GIB,
               "fullest_gib": max(held[rank] for rank in ranks) / GIB}


def memory_page(records: Mapping[str, Record]) -> list[str]:
    lines = table(("model, task", "policy", "pool", "devices", "weights GiB", "other GiB",
                   "fullest device GiB"))
    for key, record in records.items():
        for found in filter(None, record.values()):
            lines += [f"| {key} | {found['policy']} | {pool['role']} | {pool['devices']} "
                      f"| {pool['weights_gib']:.1f} | {pool['all_gib'] - pool['weights_gib']:.1f} "
                      f"| {pool['fullest_gib']:.1f} |" for pool in found["pools"]]
    return lines


# Figure 10


def data_set_tasks(data: Path) -> Tasks:
    return {f"{name}/{place[0]}/{bound}": partial(_on_data_set, data, name, place, bound)
            for name in DATA for place in (OPT, GPT_39B) for bound in ("ft30", "inf")}


def pairs_of(data: Path, name: str) -> IntArray:
    """[requests, 2] input and output tokens in random order, those of MOST_TOKENS at most."""
    path, *columns = DATA[name]
    with (data / path).open(encoding="utf-8") as file:
        pairs = np.array([[int(row[column]) for column in columns] for row in csv.DictReader(file)])
    return np.random.default_rng(0).permutation(pairs[pairs.sum(axis=1) <= MOST_TOKENS])


def _on_data_set(data: Path, name: str, place: tuple[str, str], bound: str) -> Record:
    """Schedules found for the lengths of a tenth, and their figures in a replay of the rest, which
    is repeated where a replay takes more requests."""
    pairs = pairs_of(data, name)
    tenth, rest = np.split(pairs, [len(pairs) // 10])
    scenario = replace(scenario_of(place, name), lengths=joint_empirical(tenth))
    bound_s, timing = scenario.bounds()[bound], scenario.timing()

    def replayed(policies: tuple[str, ...], quantile: float, **how: Any) -> Record | None:
        problem = replace(scenario.problem(bound_s, quantile),
                          default_max_tokens=int(pairs[:, 1].max()))
        estimate = best_schedule(problem, timing, policies, **how).estimate
        if estimate is None:
            return None
        count = enough_queries(estimate, least=LEAST_REPLAYED, rounds=ROUNDS, most=MOST_REPLAYED)
        figures = steady_replay(problem, timing, estimate, planned_queries(
            problem, *np.resize(rest, (count, 2)).T))
        return {"policy": estimate.policy, "planned_qps": estimate.figures.throughput_qps,
                "replayed_qps": figures.throughput_qps if figures else None,
                "latency_s": figures.latency_s if figures else None}

    return {"bound_s": bound_s, "tenth": len(tenth), "rest": len(rest),
            "ft": replayed(("ft",), 1.0, plan=ft_plan(scenario.problem())),
            "rra": replayed(("rra",), 0.99, has_chunks=False),
            "waa": replayed(WAA, 0.99, has_chunks=False),
            "with_chunks": replayed(PAPERS, 0.99)}


def data_set_page(records: Mapping[str, Record]) -> list[str]:
    names = ("ft", "rra", "waa", "with_chunks")
    lines = table(("data, model, limit", "seconds", *(
        f"{name}: planned, on the rest, latency s" for name in names), "gain"))
    for key, record in records.items():
        rates: dict[str, float | None] = {
            name: (record[name] or {}).get("replayed_qps") for name in names}
        best = max((rates["rra"] or 0.0, rates["waa"] or 0.0))
        lines.append(f"| {key} | {float(record['bound_s']):.3g} | " + " | ".join(
            "none" if (one := record[name]) is None or rates[name] is None else
            f"{one['planned_qps']:.3g}, {rates[name]:.3g}, {one['latency_s']:.3g}"
            for name in names) + f" | {best / (rates['ft'] or math.nan):.2f} |")
    return lines


# Figure 11


def drift_tasks() -> Tasks:
    return {f"{name}/{bound}": partial(_drift, policies, bound) for bound in ("ft30", "ft70")
            for name, policies in (("WAA", WAA), ("RRA", ("rra",)))}


def _drift(policies: tuple[str, ...], bound: str) -> Record:
    """The rows of xscheduler.drift for the policies' best schedule; none if no schedule keeps the
    limit."""
    scenario = scenario_of(OPT, "T")
    problem, timing = scenario.problem(scenario.bounds()[bound]), scenario.timing()

    def best(changed: Problem) -> Estimate:
        found = best_schedule(changed, timing, policies, has_chunks=False).estimate
        if found is None:
            raise InfeasibleError("no schedule keeps the limit")
        return found

    try:
        rows = drift_rows(problem, timing, best(problem), search=best, least_queries=6000)
    except InfeasibleError:
        rows = ()
    return {"bound_s": problem.constraint.latency_s, "rows": [asdict(row) for row in rows]}


def drift_page(records: Mapping[str, Record]) -> list[str]:
    lines = table(("policy", "figure", "the paper", "here"))
    for name, record in records.items():
        if not record["rows"]:
            lines.append(f"| {name} | no schedule keeps {float(record['bound_s']):.3g} s | | |")
            continue
        rows = {(row["statistic"], row["change"]): row for row in record["rows"]}
        said: list[tuple[str, str, float]] = [
            ("mean 15 % up, P99 of all requests: limit tighter by", "13 %",
             _tighter(rows["mean", 1.15]["queries_ratio"])),
            ("mean 15 % up, one length: limit tighter by", "10 %",
             _tighter(rows["mean", 1.15]["sequence_ratio"])),
            ("std 30 % up, P99 of all requests: limit tighter by", "5 %",
             _tighter(rows["std", 1.3]["queries_ratio"])),
            ("std 30 % up, one length: limit tighter by", "0 %",
             _tighter(rows["std", 1.3]["sequence_ratio"])),
            ("skewness: throughput to the best at most", "slight",
             _most(rows, ("skewness",), "throughput_qps")),
        ] if name.startswith("WAA") else [
            ("mean: throughput to the best at most", "28 %",
             _most(rows, ("mean",), "throughput_qps")),
            ("mean: P99 latency to the best at most", "12.6 %",
             _most(rows, ("mean",), "queries_s")),
            ("std, skewness: throughput to the best at most", "11 %",
             _most(rows, ("std", "skewness"), "throughput_qps")),
            ("std, skewness: P99 latency to the best at most", "17 %",
             _most(rows, ("std", "skewness"), "queries_s"))]
        lines += [f"| {name} | {what} | {paper} | {here:.1%} |" for what, paper, here in said]
    return lines


def _tighter(ratio: float) -> float:
    """Share by which to tighten the limit beforehand, for a latency that grows by `ratio`."""
    return max(1 - 1 / ratio, 0.0)


def _most(rows: Mapping[tuple[str, float], Record], statistics: tuple[str, ...],
          figure: str) -> float:
    """Largest difference, as a share, of the kept schedule's figure to that of the best one."""
    return max((abs(row["kept"][figure] / row["best"][figure] - 1)
                for (statistic, _), row in rows.items() if statistic in statistics and row["best"]),
               default=math.nan)
