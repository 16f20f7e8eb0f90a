"""The search of services against every deployment by itself, and its promises under other arrivals.

    python benchmarks/service_search.py [--data ../shared/data] [--only grid|replicas]
        [--out benchmarks/results]

*Grid*: sixty deployments of Vidur's search space, Llama-2-70B on sixteen GPUs with the arXiv
lengths, without a margin on step times. The capacity of each is found by itself; `xgpt sweep
--best` may give deployments up, and must choose the same one by capacity per $. *Replicas*: three
models on four and eight GPUs. Every number of replicas is searched by itself, and then all
together. *Kept*: each deployment that was returned is replayed at 95 % of its capacity under
arrivals and lengths of a seed that no search has seen, and its limits must hold there.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from runner import about, options, table, today, write
from several_runs import XGPT

import xgpt
from xgpt.app.schedule import job_with_times
from xgpt.core.errors import InfeasibleError
from xgpt.core.served import Capacity
from xscheduler.capacity import Load
from xscheduler.labels import configuration
from xscheduler.progress import Watch
from xscheduler.service_planner import ServicePlanner

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
ARXIV = Path("vidur", "traces", "arxiv_summarization_stats_llama2_tokenizer_filtered_v2.csv")
UNSEEN, KEPT_AT = 97, 0.95
GPUS = {"16xA100-80": 2.21, "16xH100": 4.25}  # $/h, of Vidur's released search
DEGREE, COPIES = 4, (4, 2)
POLICIES = (("vllm", 4096), ("mixed", 4096), ("sarathi", 512))
SLOTS = (32, 64, 128, 256, 512)
LIMITS = {"ttft_s": {"limit_s": 2, "quantile": 0.9}, "tpot_s": {"limit_s": 0.2, "quantile": 0.99}}
MODELS = (("llama-3.1-8b", "H100"), ("llama-2-13b", "A100-80"), ("llama-3.1-70b", "H100"))
SIZES = (4, 8)
LENGTHS = {"input_tokens": {"mean": 500, "std": 200, "max": 1000},
           "output_tokens": {"mean": 100, "std": 40, "max": 250}}
SAME = 0.01  # of a capacity: the precision of its bisection
SAID = {True: "within", False: "beyond"}


class Found(NamedTuple):
    """The best deployment of a job. `is_kept`: whether its limits hold at KEPT_AT of its capacity
    under the unseen seed."""

    words: str
    copies: int
    capacity: Capacity
    is_kept: bool
    seconds: float


def found_of(job: Mapping[str, Any], *, has_margin: bool = True) -> Found | None:
    """Searches a job; None if nothing keeps its limits at any rate."""
    began_s = time.monotonic()
    opened, timing = job_with_times(xgpt.load(job))
    planner = ServicePlanner(opened.problem, timing, Watch(), has_margin=has_margin)
    best = planner.search.best()
    if best is None:
        return None
    capacity = planner.served(best).capacity
    seconds = time.monotonic() - began_s
    trials = planner.search.trials(best, load=Load(opened.problem, UNSEEN))
    kept = trials.at(KEPT_AT * capacity.qps).holds
    return Found(configuration(best.estimate), best.copies, capacity, kept,
                 seconds)


def grid_job(data: Path, **own: Any) -> dict[str, Any]:
    lengths = {"file": str(data / ARXIV)}
    return {"model": "llama-2-70b", "run": {"dtype": "float16"}, "constraint": LIMITS,
            "workload": {"arrivals": {"process": "poisson"}, "input_tokens": lengths,
                         "output_tokens": lengths}, **own}


class Point(NamedTuple):
    """A deployment of the grid."""

    cluster: str
    copies: int
    policy: str
    budget: int
    slots: int

    @property
    def words(self) -> str:
        return (f"{self.cluster}, {self.copies} replicas, {self.policy} {self.budget}, "
                f"{self.slots} slots")

    def job(self, data: Path) -> dict[str, Any]:
        return grid_job(data, cluster=self.cluster, schedule={
            "policy": self.policy, "replicas": self.copies, "max_active": self.slots,
            "token_budget": self.budget, "tp_degree": DEGREE,
            "tp_gpus": int(self.cluster.split("x")[0]) // self.copies})


def points() -> Iterator[Point]:
    for cluster in GPUS:
        for copies in COPIES:
            for policy, budget in POLICIES:
                for slots in SLOTS:
                    yield Point(cluster, copies, policy, budget, slots)


def of_grid(data: Path) -> Iterator[str]:
    began_s, found = time.monotonic(), dict[Point, Found]()
    for point in points():
        try:
            one = found_of(point.job(data), has_margin=False)
        except InfeasibleError:  # does not fit into memory
            one = None
        if one is not None:
            found[point] = one
        said(f"{point.words}: {one and round(one.capacity.qps, 3)}")
    alone_s = time.monotonic() - began_s
    began_s = time.monotonic()
    chosen, count = swept_best(data)
    swept_s = time.monotonic() - began_s
    worth = {point: one.capacity.qps / GPUS[point.cluster] for point, one in found.items()}
    best = max(worth, key=lambda point: worth[point])
    short = 1 - worth.get(chosen, 0.0) / worth[best]
    broken = [point.words for point, one in found.items() if not one.is_kept]
    yield from (
        "## Grid", "",
        f"- {len(list(points()))} deployments, of which {len(found)} keep the limits at some rate: "
        f"{alone_s:.0f} s by themselves, {swept_s:.0f} s by `xgpt sweep --best`, which gave up "
        f"{count}.",
        f"- Best by itself: {best.words}, {found[best].capacity.qps:.3f} requests/s, "
        f"{worth[best] / 16:.4f} for each $/h.",
        f"- Best of the sweep: {chosen.words}, {short:.1%} less, {SAID[short <= SAME]} the "
        "precision of a capacity.",
        f"- Kept at {KEPT_AT:.0%} under seed {UNSEEN}: {len(found) - len(broken)} of {len(found)}"
        + "".join(f"; not: {words}" for words in broken) + ".", "")


def swept_best(data: Path) -> tuple[Point, int]:
    """The deployment that `xgpt sweep --best` has as the best, and how many points it gave up."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "grid.yaml"
        cases = [{"cluster": cluster, "price": price, "policy": policy, "budget": budget}
                 for cluster, price in GPUS.items() for policy, budget in POLICIES]
        file.write_text(yaml.safe_dump({
            "name": "grid", "margin": False, "output": str(Path(folder) / "out"),
            "base": grid_job(data, cluster=next(iter(GPUS))), "cases": cases,
            "grid": {"tp": [DEGREE], "copies": [*COPIES], "slots": [*SLOTS]}}), "utf-8")
        done = subprocess.run([*XGPT, "sweep", str(file), "--best", "--cores", "1"], text=True,
                              capture_output=True, check=False)
        if done.returncode != 0:
            sys.exit(f"exit code {done.returncode}\n{done.stderr[-2000:]}")
        with (Path(folder) / "out" / "sweep.csv").open(encoding="utf-8", newline="") as lines:
            rows = list(csv.DictReader(lines))
    kept = [row for row in rows if row["status"] == "ok"]
    best = max(kept, key=lambda row: float(row["capacity_qps"]) / GPUS[row["cluster"]])
    return Point(best["cluster"], int(best["copies"]), best["policy"], int(best["budget"]),
                 int(best["slots"])), sum(row["status"] == "given up" for row in rows)


def of_replicas() -> Iterator[str]:
    yield from ("## Replicas", "", "Capacity in requests/s, with its margin: each number of "
                "replicas by itself, and all together.", "",
                *table(("model", "GPUs", "each number of replicas", "together", "chosen",
                        "short of the best", f"kept at {KEPT_AT:.0%}, seed {UNSEEN}", "seconds")))
    for model, device in MODELS:
        for size in SIZES:
            job = {"model": model, "cluster": f"{size}x{device}",
                   "workload": {**LENGTHS, "arrivals": {"process": "poisson"}},
                   "constraint": {"ttft_s": 1.0, "tpot_s": 0.1, "attainment": 0.9}}
            alone = {copies: one for copies in (1, 2, 4, 8) if copies <= size and (
                one := searched(job | {"schedule": {"replicas": copies}})) is not None}
            together = searched(job)
            assert together is not None, f"{model}, {size}: nothing keeps the limits"
            said(f"{model}, {size}: {together}")
            most = max(one.capacity.qps for one in alone.values())
            short = max(1 - together.capacity.qps / most, 0.0)
            kept = [one.is_kept for one in (*alone.values(), together)]
            each = ", ".join(f"{copies}: {one.capacity.qps:.4g}" for copies, one in alone.items())
            yield (f"| {model} | {size} x {device} | {each} | {together.capacity.qps:.4g} | "
                   f"{together.copies}: {together.words} | {short:.1%} | {sum(kept)} of "
                   f"{len(kept)} | {together.seconds:.0f} |")
    yield from ("", f"Capacities within {SAME:.0%} are the same, by the precision of a bisection.",
                "")


def searched(job: Mapping[str, Any]) -> Found | None:
    """As found_of; None also where a replica does not fit."""
    try:
        return found_of(job)
    except InfeasibleError:
        return None


def said(words: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--only", choices=("grid", "replicas"))
    arguments = parser.parse_args()
    lines = [f"# The search of services, checked, {today()}", "", about(__doc__), ""]
    if arguments.only != "replicas":
        lines += of_grid(arguments.data.absolute())
    if arguments.only != "grid":
        lines += of_replicas()
    write("service-search", "\n".join(lines), arguments.out)


if __name__ == "__main__":
    main()
