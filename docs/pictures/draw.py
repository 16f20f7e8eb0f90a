"""Draws the pictures of the documents from the simulator: `python docs/pictures/draw.py`.

Each policy's picture is a replay of the same sixteen requests (toy.yaml) on two stages. A picture
carries a digest of what it shows, without figures: processors differ in their last digits. Its
words have the figures, or their mean. A test makes the data anew and compares."""

from __future__ import annotations

import hashlib
import html
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import xgpt
from xsimulator.replay.records import ReplayResult

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
TOY, TRADE_OFF_JOB = HERE / "toy.yaml", ROOT / "jobs" / "opt-13b-summarise.yaml"

# policy -> (its control variables, what the picture shows in words)
POLICIES: dict[str, tuple[dict[str, int], str]] = {
    "rra": ({"encode_batch": 4, "decode_iterations": 4, "decode_micro_batches": 2},
            "RRA: both stages encode four requests, then decode for four iterations, and so on. "
            "Requests that end make room at once; the next encoding fills it."),
    "waa-c": ({"encode_batch": 1},
              "WAA-C: the first GPU only encodes, the second only decodes. Requests enter the "
              "decoding batch one by one, and no decode step waits for an encoding of its own."),
    "ft": ({"encode_batch": 8, "decode_micro_batches": 2},
           "FT: eight requests are encoded, then decoded until the longest is done. All eight "
           "leave together, and short ones wait for the longest."),
    "dsi": ({"encode_batch": 8, "decode_micro_batches": 2, "encode_micro_batches": 4},
            "DSI: as FT, but the encoding is cut into four smaller parts, so that the second "
            "stage begins sooner."),
    "orca": ({"max_active": 8},
             "ORCA: after every iteration requests that are done leave and waiting ones join; an "
             "iteration encodes and decodes in one step."),
    "vllm": ({"max_active": 8, "token_budget": 2048},
             "Prefill-first: where there is room, waiting requests are encoded in a step of their "
             "own, and those that decode wait meanwhile."),
    "sarathi": ({"max_active": 8, "token_budget": 128},
                "Sarathi: inputs are cut into pieces, and each step decodes all active requests "
                "and encodes one piece beside them."),
}
TRADE_OFF_BOUNDS_S = (4.0, 5.0, 6.0, 8.0, 11.5, 16.0, 24.0)
TRADE_OFF_POLICIES = {"sarathi": "Sarathi (chunked prefill)", "rra": "RRA", "waa-c": "WAA-C",
                      "vllm": "prefill-first", "ft": "FT (static batches)"}
ENCODE, DECODE, WAIT = ("#d9822b", "#eab27c"), ("#3b6fb6", "#8db0dd"), "#d5d8dc"
LINES = ("#d9822b", "#3b6fb6", "#626a74", "#1d7d53", "#9a4fa3")
MAKE = "python docs/pictures/draw.py"


def replay(policy: str) -> ReplayResult:
    """The toy's requests under a policy."""
    job = xgpt.load(TOY, {"schedule": {"policy": policy, **POLICIES[policy][0]}})
    return xgpt.simulate(job).replay


def trade_off(policy: str, bounds_s: tuple[float, ...] = TRADE_OFF_BOUNDS_S) -> list[float | None]:
    """Requests/s of a policy's best schedule under each bound; None where none keeps it."""
    with tempfile.TemporaryDirectory() as folder:
        swept = xgpt.sweep(TRADE_OFF_JOB, bounds_s, over={"policy": [policy]}, out=folder)
    return [None if row["throughput_qps"] is None else round(row["throughput_qps"], 2)
            for row in swept.rows]


def digest(shape: object = "") -> str:
    """Hash of what is shown besides figures, and of this script: both make a picture."""
    own = Path(__file__).read_text(encoding="utf-8")
    return hashlib.sha256(f"{shape!r}\n{own}".encode()).hexdigest()[:16]


def made_of(result: ReplayResult) -> str:
    """The digest of a replay's steps, and the mean time at which its requests end."""
    steps = [[pool.name, [[str(step.kind.value), step.group] for step in pool.steps]]
             for pool in result.pools]
    return f"{digest(steps)}, {1e3 * result.times.last_token_s.mean():.4g} ms"


def words_of(policy: str) -> str:
    return POLICIES[policy][1]


def draw_policy(policy: str) -> str:
    """Draws what the stages do, and below it the life of each request."""
    result = replay(policy)
    figure, (stages, queries) = _figure(2, height=4.2, heights=(1, 2.2))
    names, row = [], 0
    for pool in result.pools:
        for column in range(len(pool.stages)):
            _boxes(stages, row, pool, column)
            role = "" if pool.role == "both" else f"\n{pool.role}s"
            names.append(f"GPU {pool.stages[column]}{role}")
            row += 1
    stages.set_yticks(range(row), names)
    stages.invert_yaxis()
    _lives(queries, result)
    stages.set_xlim(0, result.makespan_s)
    _legend(figure, "encodes", "decodes", "waits")
    return _svg(figure, words_of(policy), made_of(result))


def draw_latency() -> str:
    """Draws one request of the RRA replay, with the times that are measured."""
    result = replay("rra")
    times, query = result.times, 9
    start, first, last = (float(of[query]) for of in (
        times.start_s, times.first_token_s, times.last_token_s))
    figure, (axes,) = _figure(1, height=2.2, heights=(1,))
    for begin, end, colour in ((0, start, WAIT), (start, first, ENCODE[0]), (first, last,
                                                                             DECODE[0])):
        axes.barh(0, end - begin, left=begin, height=0.5, color=colour)
    for level, (begin, end, text) in enumerate((
            (0, first, "time to first token (TTFT)"), (start, last, "latency"),
            (first, last, "time per output token (TPOT) x tokens after the first"))):
        y = 0.55 + 0.5 * level
        axes.annotate("", (begin, y), (end, y), arrowprops={"arrowstyle": "<->", "lw": 0.8})
        axes.text((begin + end) / 2, y + 0.08, text, ha="center", va="bottom", fontsize=8)
    for at, text in ((0, "the run begins,\nthe request is there"), (start, "its encoding\nbegins"),
                     (first, "first\ntoken"), (last, "last\ntoken")):
        axes.text(at, -0.35, text, ha="center", va="top", fontsize=8)
    axes.set(ylim=(-1.0, 2.0), xlim=(-0.06 * last, 1.06 * last), yticks=[], xticks=[])
    for side in axes.spines.values():
        side.set_visible(False)
    words = ("One request's life: it waits for its turn, is encoded, gets its first token, and is "
             "decoded to its last. Latency counts from the start of its encoding to its last "
             "token; time to first token counts from the start of the run.")
    return _svg(figure, words, made_of(result))


def draw_trade_off() -> str:
    """Draws throughput against the latency limit, a line for each policy."""
    data = {policy: trade_off(policy) for policy in TRADE_OFF_POLICIES}
    figure, (axes,) = _figure(1, height=3.0, heights=(1,))
    for (policy, name), colour in zip(TRADE_OFF_POLICIES.items(), LINES, strict=True):
        points = [(b, q) for b, q in zip(TRADE_OFF_BOUNDS_S, data[policy], strict=True) if q]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=name)
    axes.set(xlabel="latency limit of a request (s)", ylabel="requests/s", ylim=(0, None),
             xlim=(0, None))
    axes.grid(color="#e2e4e6")
    axes.legend(frameon=False, fontsize=8)
    return _svg(figure, trade_off_words(data), digest())


def trade_off_words(data: Mapping[str, list[float | None]]) -> str:
    """The picture in words, with all its data."""
    return ("Predicted throughput of each policy's best schedule against the latency limit: "
            "OPT-13B, summarisation, four A40 by roofline. " + "; ".join(
                f"{name}: " + ", ".join(f"{q or 'none'} at {b:g} s" for b, q in zip(
                    TRADE_OFF_BOUNDS_S, data[policy], strict=True))
                for policy, name in TRADE_OFF_POLICIES.items()) + ".")


def _figure(rows: int, *, height: float, heights: tuple[float, ...]) -> Any:
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({"font.size": 9}):
        figure = Figure(figsize=(8, height), layout="constrained")
        axes = figure.subplots(rows, 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _boxes(axes: Any, row: int, pool: Any, column: int) -> None:
    for step, start, end in zip(pool.steps, pool.start_s[:, column], pool.end_s[:, column],
                                strict=True):
        kind, tint = str(step.kind.value), step.group % 2
        parts = {"encode": [(-0.4, 0.8, ENCODE)], "decode": [(-0.4, 0.8, DECODE)]}.get(
            kind, [(-0.4, 0.4, ENCODE), (0.0, 0.4, DECODE)])
        for bottom, height, colours in parts:
            axes.broken_barh([(start, end - start)], (row + bottom, height), color=colours[tint],
                             edgecolor="white", linewidth=0.4)


def _lives(axes: Any, result: ReplayResult) -> None:
    times, rows = result.times, np.arange(len(result.times.start_s))
    for begin, end, colour, width in ((times.arrival_s, times.start_s, WAIT, 0.25),
                                      (times.start_s, times.first_token_s, ENCODE[0], 0.7),
                                      (times.first_token_s, times.last_token_s, DECODE[0], 0.7)):
        axes.barh(rows, end - begin, left=begin, height=width, color=colour)
    axes.set(ylabel="requests", xlabel="seconds", yticks=[])
    axes.invert_yaxis()


def _legend(figure: Any, *names: str) -> None:
    from matplotlib.patches import Patch

    colours = (ENCODE[0], DECODE[0], WAIT)
    figure.legend(handles=[Patch(color=c, label=n) for c, n in zip(colours, names, strict=True)],
                  loc="outside upper right", ncols=3, frameon=False, fontsize=8)


def _svg(figure: Any, words: str, made_of: str, make: str = MAKE) -> str:
    """The SVG's text, with a title for those who cannot see it and what it was made of."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "xgpt", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    text = file.getvalue()
    begin = text.index("<svg ") + len("<svg ")
    end = text.index(">", begin)
    return (f'{text[:begin]}role="img" {text[begin:end + 1]}\n<title>{html.escape(words)}</title>\n'
            f"<!-- data {made_of}; made by: {make} -->{text[end + 1:]}")


def main() -> None:
    pictures = {**{policy: draw_policy(policy) for policy in POLICIES},
                "latency": draw_latency(), "trade-off": draw_trade_off()}
    for name, text in pictures.items():
        (HERE / f"{name}.svg").write_text(text, encoding="utf-8")
        print(f"docs/pictures/{name}.svg ({len(text) / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
