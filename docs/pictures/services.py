"""Draws the pictures of docs/serving.md from the replay: `python docs/pictures/services.py`.

The first is the toy of docs/concepts.md, whose requests arrive over time. The others are lines over
the rate of arrivals: the share of the requests that keep the limits, and the time to the first
token. A picture says its data in words, and a test replays it anew."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import draw  # noqa: E402

import xgpt  # noqa: E402
from xgpt.app.schedule import job_with_times  # noqa: E402
from xgpt.core.controls import ARRIVAL_ROUTINGS, FIXED, LEAST_QUERIES  # noqa: E402
from xscheduler.capacity import Load  # noqa: E402
from xsimulator.replay.records import ReplayResult  # noqa: E402
from xsimulator.replay.service import attainment, counted, seconds_by_metric  # noqa: E402
from xsimulator.replay.service_replay import ServiceReplayer  # noqa: E402

MAKE = "python docs/pictures/services.py"
RATE = 6.0  # of the toy, requests/s
TOY_WORDS = ("Sixteen requests that arrive over time, under prefill-first on two stages. Each "
             "waits from its arrival for its prefill, is encoded, and is decoded. Stages idle "
             "where nobody is there, and requests wait where several come together.")
TTFT_S, TPOT_S, ATTAINMENT = 0.5, 0.1, 0.9
SHORT = {"input_tokens": {"mean": 256, "std": 60, "max": 512},
         "output_tokens": {"mean": 64, "std": 32, "max": 128}}
SPREAD = {"input_tokens": {"mean": 500, "std": 700, "max": 1400},
          "output_tokens": {"mean": 150, "std": 250, "max": 600}}
SCHEDULE = {"policy": "sarathi", "max_active": 64, "token_budget": 512, "tp_degree": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """A picture. `y`: name of what is shown. `lines`: title -> (arrivals, routing)."""

    words: str
    y: str
    lengths: Mapping[str, Mapping[str, int]]
    replicas: int
    lines: Mapping[str, tuple[dict[str, Any], str]]
    across: tuple[float, ...]  # requests/s
    requests: int


LINES = {
    "attainment": Lines(
        words="Share of the requests that keep TTFT 0.5 s and TPOT 0.1 s, against the rate of "
              "arrivals: OPT-13B on one A40 under Sarathi, short requests",
        y="share of requests in time", across=(0.25, 1, 2, 3, 4, 5, 5.5, 6, 6.5, 7),
        requests=4000, lengths=SHORT, replicas=1,
        lines={"even gaps": ({"process": "even"}, LEAST_QUERIES),
               "Poisson": ({"process": "poisson"}, LEAST_QUERIES),
               "gamma, CV 4": ({"process": "gamma", "cv": 4}, LEAST_QUERIES)}),
    "routing": Lines(
        words="90th percentile of the TTFT, in seconds, against the rate of Poisson arrivals, by "
              "routing rule: four replicas of OPT-13B on an A40 each under Sarathi, requests of "
              "very different lengths", y="TTFT P90 (s)", across=(2, 2.5, 3, 3.25, 3.5, 3.75),
        requests=2000, lengths=SPREAD, replicas=4,
        lines={rule: ({"process": "poisson"}, rule) for rule in ARRIVAL_ROUTINGS
               if rule != FIXED})}


def toy() -> ReplayResult:
    """The toy's requests, which arrive at RATE."""
    job = xgpt.load(draw.TOY, {"schedule": {"policy": "vllm", **draw.POLICIES["vllm"][0]}})
    opened, timing = job_with_times(job)
    replayer = ServiceReplayer(opened.problem, timing, xgpt.simulate(job).estimate)
    return replayer.run(*Load(opened.problem, 3).at(RATE, 16))


def data(name: str, across: tuple[float, ...] | None = None) -> dict[str, list[float]]:
    """Title -> a figure for each rate."""
    picture, found = LINES[name], dict[str, list[float]]()
    job = {"model": "opt-13b", "cluster": f"{picture.replicas}xA40",
           "workload": {**picture.lengths, "requests": {"count": picture.requests}},
           "schedule": {**SCHEDULE, "replicas": picture.replicas}}
    estimate = xgpt.simulate(xgpt.load(job)).estimate
    for title, (arrivals, routing) in picture.lines.items():
        opened, timing = job_with_times(xgpt.load({
            **job, "workload": {**job["workload"], "arrivals": {"rate": 1, **arrivals}},
            "schedule": {**job["schedule"], "routing": routing},
            "constraint": {"ttft_s": TTFT_S, "tpot_s": TPOT_S, "attainment": ATTAINMENT}}))
        replayer = ServiceReplayer(opened.problem, timing, estimate)
        load = Load(opened.problem, 0)
        found[title] = [figure(name, replayer, load, rate) for rate in across or picture.across]
    return found


def figure(name: str, replayer: ServiceReplayer, load: Load, rate: float) -> float:
    """Share, or seconds, that the picture shows at a rate."""
    lengths, arrival_s = load.at(rate, LINES[name].requests)
    result = replayer.run(lengths, arrival_s, has_steps=False)
    rows = counted(arrival_s)
    seconds = {metric: every[rows] for metric, every in seconds_by_metric(
        result.times, result.output_tokens).items()}
    if name == "routing":
        return round(float(np.quantile(seconds["ttft"], 0.9)), 3)
    share = attainment(seconds, replayer.problem.constraint)
    assert share is not None
    return round(share, 3)


def words_of(name: str, found: Mapping[str, list[float]]) -> str:
    """The picture in words, with all its data."""
    picture = LINES[name]
    return f"{picture.words}. " + "; ".join(
        f"{title}: " + ", ".join(f"{value:g} at {rate:g}/s" for rate, value in zip(
            picture.across, values, strict=True)) for title, values in found.items()) + "."


def draw_toy() -> str:
    """Draws the stages of the toy, and the life of each request from its arrival."""
    result = toy()
    chart, (stages, requests) = draw._figure(2, height=4.2, heights=(1, 2.2))
    (pool,) = result.pools
    for column, stage in enumerate(pool.stages):
        draw._boxes(stages, column, pool, column)
        assert stage == column
    stages.set_yticks(range(len(pool.stages)), [f"GPU {stage}" for stage in pool.stages])
    stages.invert_yaxis()
    draw._lives(requests, result)
    stages.set_xlim(0, float(result.times.last_token_s.max()))
    draw._legend(chart, "encodes", "decodes", "waits")
    return str(draw._svg(chart, TOY_WORDS, draw.made_of(result), MAKE))


def draw_lines(name: str) -> str:
    """Draws a line for each title over the rate."""
    picture, found = LINES[name], data(name)
    chart, (axes,) = draw._figure(1, height=3.0, heights=(1,))
    for (title, values), colour in zip(found.items(), draw.LINES, strict=False):
        axes.plot(picture.across, values, marker="o", markersize=4, color=colour, label=title)
    axes.set(xlabel="requests/s", ylabel=picture.y)
    axes.set(**{"yscale": "log"} if name == "routing" else {"ylim": (0, None)})
    if name == "attainment":
        axes.axhline(ATTAINMENT, color="#9aa0a6", linewidth=0.8, linestyle="--")
    axes.grid(color="#e2e4e6")
    axes.legend(frameon=False, fontsize=8)
    return str(draw._svg(chart, words_of(name, found), draw.digest(), MAKE))


def main() -> None:
    for name, text in {"arrivals": draw_toy(), **{name: draw_lines(name) for name in LINES}
                       }.items():
        (HERE / f"{name}.svg").write_text(text, encoding="utf-8")
        print(f"docs/pictures/{name}.svg ({len(text) / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
