"""Copies of unlike sizes, each with a schedule of its own: what is said of them is said of all."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from xgpt.app.opened import OpenedJob, open_file
from xgpt.app.schedule import settled
from xgpt.app.simulate import Simulation, simulate_job
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.core.job import FixedSchedule
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xprofiler.timing import TimingSource
from xscheduler.copies import problem_on
from xscheduler.drift import drift_rows
from xscheduler.evaluator import Evaluator
from xscheduler.live.reschedule import reschedule
from xsimulator.rough.forms import fixed_estimate

Unlike = tuple[OpenedJob, TimingSource, Estimate]


@pytest.fixture(scope="module")
def unlike(tmp_path_factory: pytest.TempPathFactory) -> Unlike:
    """A large batch on two devices, of three quarters of the queries, beside a small one on one."""
    path = tmp_path_factory.mktemp("job") / "job.yaml"
    path.write_text("model: opt-13b\nworkload: {task: S}\nconstraint: {latency_s: inf}\n"
                    "cluster: {num_nodes: 1, devices_per_node: 3, device: A40, "
                    "intra_link: pcie4-x16-p2p}\n")
    opened, timing = settled(open_file(path))

    def on(devices: int, batch: int) -> Estimate:
        part = problem_on(opened.problem, devices)
        return Evaluator(part, timing).shown(fixed_estimate("rra", part, timing, FixedSchedule(
            encode_batch=batch, decode_iterations=8)).one_copy)

    return opened, timing, on(2, 24).beside((on(1, 4),))


@pytest.fixture(scope="module")
def simulated(unlike: Unlike) -> Simulation:
    return simulate_job(*unlike)


def test_all_copies_are_replayed_and_each_is_compared_with_its_own_formula(
        unlike: Unlike, simulated: Simulation) -> None:
    _, _, given = unlike
    figures, shapes = simulated.figures, given.shapes
    total_qps = sum(shape.figures.throughput_qps for shape in shapes)
    assert shapes[0].figures.throughput_qps < 0.9 * total_qps, "one kind alone would be told apart"
    assert figures.steady_throughput_qps == pytest.approx(total_qps, rel=0.05)
    assert figures.estimated_latency_s == pytest.approx(max(
        shape.figures.latency_s for shape in shapes), rel=0.02)
    assert figures.steady_latency_s == pytest.approx(figures.estimated_latency_s, rel=0.05)
    assert len(figures.utilisation) == 3 and min(figures.utilisation) > 0.5
    assert figures.kv_peak_tokens <= figures.kv_tokens
    assert simulated.to_dict()["replay"]["estimated_latency_s"] == figures.estimated_latency_s
    words = " ".join(str(simulated).split())
    assert "of the slowest copy (the estimate says" in words


def test_changed_lengths_are_replayed_by_all_copies(unlike: Unlike) -> None:
    opened, timing, given = unlike

    def none(problem: Problem) -> Estimate:
        raise InfeasibleError("not asked for")

    search: Callable[[Problem], Estimate] = none
    rows = drift_rows(opened.problem, timing, given, search=search, least_queries=400)
    usual = next(row.kept for row in rows if row.change == 1.0)
    assert usual.throughput_qps == pytest.approx(given.figures.throughput_qps, rel=0.08)


def test_how_to_go_on_from_them_is_refused_by_name(unlike: Unlike) -> None:
    opened, timing, given = unlike
    with pytest.raises(InputError, match="others = 1.* copies that are alike"):
        reschedule(given, opened.problem, timing)
