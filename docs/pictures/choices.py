"""Draws the pictures of docs/concepts.md: `python docs/pictures/choices.py`.

Each shows when one answer to the questions of a schedule wins, as the planner finds it by the data
sheets of the devices and the constants of xgpt's own runner: throughput of the best schedule of
each answer, without a margin. A picture says its data in words, and a slow test plans it anew."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import draw  # noqa: E402

import xgpt  # noqa: E402
from xgpt.app.schedule import JobPlanner  # noqa: E402
from xgpt.core.errors import InfeasibleError  # noqa: E402
from xscheduler.planner import PlanOptions  # noqa: E402

DOCUMENTS = {"input_tokens": {"mean": 1500, "std": 500, "max": 3000},
             "output_tokens": {"mean": 400, "std": 150, "max": 900}}
MAKE = "python docs/pictures/choices.py"
Data = dict[str, list[float | None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A picture. `lines`: the schedule keys that each line fixes. `across`: latency limits, in
    seconds."""

    words: str
    model: str
    cluster: object
    workload: Mapping[str, object]
    lines: Mapping[str, Mapping[str, object]]
    across: tuple[float, ...]
    has_log: bool = False  # of requests/s


def _of_policies(*names: str) -> dict[str, dict[str, object]]:
    titles = {"rra": "RRA", "waa-c": "WAA-C", "sarathi": "Sarathi"}
    return {titles[name]: {"schedule.policy": name, "schedule.replicas": 1} for name in names}


def _of_copies(*counts: int, devices: int) -> dict[str, dict[str, object]]:
    return {f"{count} replica{'s' * (count > 1)} on {devices // count} GPU"
            f"{'s' * (devices > count)}{' each' * (count > 1)}": {"schedule.replicas": count}
            for count in counts}


def _node(device: str, link: str) -> dict[str, object]:
    return {"device": device, "num_nodes": 1, "devices_per_node": 8, "intra_link": link,
            "inter_link": "ib-400g"}


CHOICES = {
    "copies": Choice(
        words="Llama-3.1-8B on eight H100, documents of 1,500 tokens, answers of 400",
        model="llama-3.1-8b", cluster=_node("H100", "nvlink4"), workload=DOCUMENTS,
        lines=_of_copies(1, 2, 4, 8, devices=8), across=(5, 6, 8, 10, 20, 40)),
    "pipelines": Choice(
        words="Llama-3.1-70B on eight A100 of 80 GB, documents of 1,500 tokens, answers of 400",
        model="llama-3.1-70b", cluster=_node("A100-80", "nvlink3"), workload=DOCUMENTS,
        lines=_of_copies(1, 2, 4, devices=8), across=(12, 16, 24, 40, 80, 160)),
    "phases": Choice(
        words="one replica of Llama-3.1-70B on eight H100, conversations: 512 input and 256 output "
              "tokens in the mean", model="llama-3.1-70b", cluster="h100-8",
        workload={"task": "C2"}, lines=_of_policies("rra", "waa-c", "sarathi"),
        across=(11, 12, 14, 18, 30, 60), has_log=True),
    "pools": Choice(
        words="one replica of GPT-3 39B on sixteen A40, summaries: 256 input and 32 output tokens "
              "in the mean", model="gpt3-39b", cluster="a40-16", workload={"task": "S"},
        lines=_of_policies("rra", "waa-c", "sarathi"), across=(5, 6, 8, 12, 20, 40)),
    "chunks": Choice(
        words="one replica of OPT-13B on four A40, summaries: 256 input and 32 output tokens in "
              "the mean", model="opt-13b", cluster="a40-4", workload={"task": "S"},
        lines=_of_policies("rra", "waa-c", "sarathi"), across=(3, 4, 6, 8, 12, 20)),
}


def data(name: str) -> Data:
    """Requests/s of each line's best schedule; None where there is none."""
    choice = CHOICES[name]
    return {label: _planned(choice, fixed) for label, fixed in choice.lines.items()}


def _planned(choice: Choice, fixed: Mapping[str, object]) -> list[float | None]:
    cluster, count = choice.cluster, int(str(fixed["schedule.replicas"]))
    if isinstance(cluster, dict):  # one of the copies, on its part of the node
        cluster = {**cluster, "devices_per_node": cluster["devices_per_node"] // count}
        fixed = {**fixed, "schedule.replicas": 1}
    job = xgpt.load(draw.TRADE_OFF_JOB, {
        "model": choice.model, "cluster": cluster, "run.ranks": None, "plan.engine": "xgpt",
        "workload": {"requests": {"count": 100_000}, **choice.workload}, **fixed})
    planner = JobPlanner(job, PlanOptions(horizon="steady", has_margin=False, is_brief=True))
    return [_throughput(planner, bound_s, count) for bound_s in choice.across]


def _throughput(planner: JobPlanner, bound_s: float, count: int) -> float | None:
    try:
        return float(f"{count * planner.plan(bound_s).schedule.figures.throughput_qps:.4g}")
    except InfeasibleError:
        return None


def words_of(name: str, found: Data) -> str:
    """The picture in words, with all its data."""
    choice = CHOICES[name]
    lines = "; ".join(f"{label}: " + ", ".join(
        f"{'none' if qps is None else f'{qps:g}'} at {at:g} s"
        for at, qps in zip(choice.across, own, strict=True)) for label, own in found.items())
    return (f"Predicted requests/s of the best schedule, by data sheets: {choice.words}. {lines}.")


def draw_choice(name: str) -> str:
    choice, found = CHOICES[name], data(name)
    figure, (axes,) = draw._figure(1, height=2.8, heights=(1,))
    for (label, own), colour in zip(found.items(), draw.LINES, strict=False):
        points = [(at, qps) for at, qps in zip(choice.across, own, strict=True) if qps]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour,
                      label=label)
    axes.set(xlabel="latency limit of a request (s)", ylabel="requests/s", xscale="log",
             xticks=choice.across, xticklabels=[f"{at:g}" for at in choice.across])
    axes.set(**{"yscale": "log"} if choice.has_log else {"ylim": (0, None)})
    axes.minorticks_off()
    axes.grid(color="#e2e4e6")
    axes.legend(frameon=False, fontsize=8)
    return draw._svg(figure, words_of(name, found), draw.digest(), MAKE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=[*CHOICES], help=", ".join(CHOICES))
    for name in parser.parse_args().names:
        text = draw_choice(name)
        (HERE / f"{name}.svg").write_text(text, encoding="utf-8")
        print(f"docs/pictures/{name}.svg ({len(text) / 1024:.0f} KiB)")


if __name__ == "__main__":
    main()
