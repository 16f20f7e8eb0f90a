"""The best division of devices against every possible division; the fewest or cheapest devices."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fake_run import fake_schedule
from problems import toy_problem

from xgpt.app.opened_job import open_file
from xgpt.app.schedule import JobPlanner
from xgpt.core import catalog
from xgpt.core.constraint import Bound, latency_constraint
from xgpt.core.controls import FixedSchedule
from xgpt.core.errors import InfeasibleError, InputError, XgptError
from xgpt.core.schedule import Schedule, devices_sum
from xgpt.job.job import Job
from xgpt.job.job_file import load_job
from xscheduler.cluster_sizes import SizeCost, SizeSearch, size_cost
from xscheduler.evaluator import Evaluator
from xscheduler.partition import best_division, division_of
from xscheduler.replicas import replica_sizes


def divisions(devices: int, most: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every multiset of sizes of at most `devices`, the largest first."""
    yield ()
    for size in range(min(devices, most or devices), 0, -1):
        for rest in divisions(devices - size, size):
            yield (size, *rest)


@pytest.mark.parametrize("parts", [None, 1, 2, 3, 5])
def test_no_division_is_better_than_the_best(parts):
    rng = np.random.default_rng(7)
    for devices in range(1, 10):
        worth = {size: float(rng.uniform(0, size) * (rng.random() < 0.7))
                 for size in range(1, devices + 1)}
        every = [sizes for sizes in divisions(devices)
                 if (parts is None or len(sizes) == parts) and all(worth[one] for one in sizes)]
        found = best_division(worth, devices, parts)
        if not every:
            assert found is None
            continue
        assert found is not None and found.sizes in every
        assert found.throughput_qps == pytest.approx(sum(worth[one] for one in found.sizes))
        assert found.throughput_qps == pytest.approx(max(
            sum(worth[one] for one in sizes) for sizes in every))


def test_of_equals_the_fewest_parts_are_taken():
    found = best_division({1: 1.0, 2: 2.0, 4: 4.0}, 6)
    assert found is not None and found.sizes == (4, 2)


def test_sizes_read_as_a_sum():
    assert devices_sum((4, 3)) == "4 + 3" and devices_sum((1, 5, 1, 1)) == "5 + 3 x 1"


def over_nodes(nodes: int, each: int) -> Iterator[tuple[int, ...]]:
    """Every division of nodes into replicas within one node or over whole ones."""
    if nodes == 0:
        yield ()
    for count in range(1, nodes + 1):
        own = divisions(each) if count == 1 else [(count * each,)]
        for sizes in own:
            for rest in over_nodes(nodes - count, each):
                yield (*sizes, *rest)


@pytest.mark.parametrize("copies", [None, 1, 2, 3, 5])
def test_nodes_are_divided_into_the_number_of_replicas_that_the_job_fixes(copies):
    rng = np.random.default_rng(3)
    for nodes, each in ((1, 3), (1, 5), (2, 2), (2, 4), (3, 2)):
        problem = toy_problem(nodes=nodes, per_node=each, fixed=FixedSchedule(replicas=copies))
        worth = {size: float(rng.uniform(0, size) * (rng.random() < 0.8)) for size in (
            *range(1, each), *range(each, nodes * each + 1, each))}
        able = [sizes for sizes in over_nodes(nodes, each) if copies in (None, len(sizes))
                and all(worth[one] for one in sizes)]
        found = division_of(problem, worth)
        if not able:
            assert found is None
            continue
        assert found is not None and copies in (None, len(found.sizes))
        assert found.throughput_qps == pytest.approx(sum(worth[one] for one in found.sizes))
        assert found.throughput_qps == pytest.approx(max(
            sum(worth[one] for one in sizes) for sizes in able))


# --- the fewest devices, and the least price --------------------------------------------------


pytestmark = pytest.mark.usefixtures("short_replays")

LINK = "{bandwidth_bytes_per_s: 50 GB, latency_s: 5 us}"
CLUSTER = ("{num_nodes: 2, devices_per_node: 2, intra_link: %s, inter_link: %s, device: "
           "{name: toy, memory_bytes: %s, bandwidth_bytes_per_s: 4e11, price_per_hour: 2, "
           "flops_per_s: {float32: 1e13, float16: 5e13}}}")


def job_text(count: int, *, memory: str = "6 GB", outputs: int = 20, policy: str = "",
             **bounds: object) -> str:
    lengths = f"{{mean: {outputs / 2}, std: {outputs / 5}, max: {outputs}}}"
    limits = ", ".join(f"{key}: {value}" for key, value in bounds.items())
    return (f"model: opt-1.3b\ncluster: {CLUSTER % (LINK, LINK, memory)}\n"
            f"workload: {{requests: {{count: {count}}}, input_tokens: {{mean: 60, std: 20, max: "
            f"120}}, output_tokens: {lengths}}}\nconstraint: {{{limits}}}\n"
            + (f"schedule: {{policy: {policy}}}\n" if policy else
               "schedule: {policy: rra, tp_degree: 1, decode_iterations: 5, encode_chunk: 0}\n"))


JOBS = [(text, objective) for text in (
    job_text(300, makespan_s=9), job_text(300, makespan_s=16, latency_s=4),
    job_text(300, makespan_s=40, ttft_s=0.2), job_text(200, memory="2.4 GB", latency_s=60),
    job_text(400, outputs=60, makespan_s=25, tpot_s=0.05),
    job_text(300, makespan_s=2.4, policy="ft"), job_text(300, ttft_s=0.4, policy="[ft, dsi]"),
    job_text(300, makespan_s=2, latency_s=2, policy="[rra, ft]"),
) for objective in ("devices", "cost")]


def planned_by_size(path: Path) -> dict[int, SizeCost]:
    """{size: device time} of every size of the cluster that has a schedule, each as a job of its
    own."""
    found = {}
    for size in replica_sizes(open_file(path).problem.cluster):
        opened = open_file(path, [f"run.ranks={size}", "objective=throughput"])
        try:
            plan = JobPlanner(opened).plan()
        except XgptError:
            continue
        problem = plan.opened.problem
        found[size] = size_cost(problem, plan.schedule, Evaluator(problem, plan.timing))
    return found


@pytest.mark.parametrize("case", [case if case in (0, 6, 10) else pytest.param(
    case, marks=pytest.mark.slow) for case in range(len(JOBS))])
def test_jobs_agree_with_enumeration(tmp_path, case):
    text, objective = JOBS[case]
    path = tmp_path / "job.yaml"
    path.write_text(text + f"objective: {objective}\n")
    by_size = planned_by_size(path)
    if not by_size:
        with pytest.raises(InfeasibleError):
            JobPlanner(open_file(path)).plan()
        return
    plan = JobPlanner(open_file(path)).plan()
    taken = plan.opened.problem.cluster.num_devices
    assert taken == plan.schedule.deployment.num_devices == plan.opened.job.run.ranks or taken == 4
    if objective == "devices":
        assert taken == min(by_size)
    else:
        least = min(one.price for one in by_size.values())
        assert by_size[taken].price == pytest.approx(least)
    assert plan.opened.problem.fingerprint == plan.schedule.fingerprint
    smaller = [row for row in plan.schedule.sizes if row.devices < taken]
    assert objective != "devices" or all(row.reason for row in smaller)
    assert not any(row.is_impossible for row in smaller if row.devices in by_size)
    shown = str(plan)
    impossible = {row.devices for row in smaller if row.is_impossible}
    may_do = taken > max(impossible, default=0) + 1
    assert objective != "devices" or ("not proved" in " ".join(shown.split())) is may_do
    assert "yes, chosen" in shown or len(plan.schedule.sizes) == 1


def test_sizes_are_parts_of_a_node_or_whole_nodes():
    assert replica_sizes(catalog.cluster("a40-4")) == [1, 2, 3, 4]
    assert replica_sizes(catalog.cluster("a100-16")) == [*range(1, 9), 16]


@pytest.mark.parametrize(("more", "key"), [
    ("cluster: a40-4\nobjective: cost\n", "price_per_hour"),
    ("cluster: local\nobjective: devices\nrun: {ranks: 2}\n", "objective")])
def test_what_cannot_be_sized(tmp_path, more, key):
    path = tmp_path / "job.yaml"
    path.write_text(f"model: gpt2\nworkload: {{task: S}}\n{more}")
    with pytest.raises(InputError) as error:
        JobPlanner(open_file(path))
    assert error.value.mistakes[0].key == key


def test_a_price_is_of_a_million_queries_where_the_job_has_no_number(tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text("model: opt-1.3b\ncluster: h100-8\nworkload: {task: S}\n"
                    "constraint: {max_gpus: 2}\nobjective: cost\nschedule: {policy: rra}\n")
    plan = JobPlanner(open_file(path)).plan()
    figures, job = plan.schedule.figures, load_job(path)
    assert isinstance(job, Job)
    own = size_cost(plan.opened.problem, plan.schedule, Evaluator(plan.opened.problem, plan.timing))
    hours = 1e6 / figures.throughput_qps / 3600
    assert own.price == pytest.approx(6.88 * own.devices * hours) and math.isfinite(own.price)
    assert "of a million requests" in " ".join(str(plan).split())


def test_a_size_that_was_planned_without_a_margin_alone_is_judged_with_it():
    """Two devices take 100 s, 190 s with a margin: the search begins at four, and three fail."""
    makespan = latency_constraint(math.inf, further=(Bound(metric="makespan", limit_s=100.0),))
    problem = replace(toy_problem(num_queries=10), constraint=makespan)

    def planned(size: int, has_margin: bool) -> Schedule:
        if 200 / size * (1.9 if has_margin else 1.0) > 100:
            raise InfeasibleError("too long")
        return fake_schedule()

    search = SizeSearch(plan=planned, problem=lambda _: problem, cost_of=lambda size, _: SizeCost(
        devices=size, seconds=200 / size, with_margin_s=380 / size, price=1.0))
    best = search.choose("devices", range(1, 9))
    rows = {row.devices: row for row in search.schedule_of(best).sizes}
    assert best == 4 and {2, 3, 4} <= rows.keys() and "with its margin" in rows[2].reason
    assert all(bool(row.reason) == ((row.with_margin_s or math.inf) > 100) for row in rows.values())
