"""A job of a few queries by a schedule that is fixed for many is planned, and says so."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from problems import timing_of

from xgpt.app.opened import OpenedJob, open_file
from xgpt.app.plan import executable, plan_job
from xgpt.cli.schedule import schedule
from xgpt.cli.terminal import Terminal
from xgpt.core.errors import InfeasibleError
from xgpt.core.problem import Problem
from xscheduler.planner import plan_with_enough

NOTE = "batches will not fill"


def opened(folder: Path, schedule: str, count: int, more: str = "") -> OpenedJob:
    (folder / "job.yaml").write_text(
        f"model: opt-13b\ncluster: a40-4\nworkload: {{requests: {{count: {count}}}, task: S}}\n"
        f"schedule: {{{schedule}}}\n{more}")
    return executable(open_file(folder / "job.yaml", (), Terminal()))


@pytest.mark.parametrize(("schedule", "count"), [
    ("policy: rra, encode_batch: 8, decode_iterations: 4", 1),
    ("policy: rra, encode_batch: 8, decode_iterations: 4", 6),
    ("policy: waa-c, encode_batch: 4", 2), ("policy: orca, max_active: 7", 5),
    ("policy: ft, encode_batch: 16", 3),
    ("policy: sarathi, max_active: 9, token_budget: 64", 4)])
def test_what_only_the_number_of_queries_forbids_is_planned(
        tmp_path: Path, schedule: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    session = opened(tmp_path, schedule, count)
    few = plan_job(session, timing_of(session)).schedule.estimate
    assert f"the job has {count} quer" in (said := capsys.readouterr().err) and NOTE in said
    session = opened(tmp_path, schedule, 5000)
    many = plan_job(session, timing_of(session)).schedule.estimate
    assert NOTE not in capsys.readouterr().err
    for name in ("policy", "encode_batch", "decode_iterations", "max_active", "token_budget"):
        if f"{name}: " in schedule:
            assert few.variables[name] == many.variables[name], name


def test_nothing_changes_where_nothing_is_fixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    session = opened(tmp_path, "policy: rra", 3)
    found = plan_job(session, timing_of(session)).schedule.estimate
    assert found.figures.encode_batch <= 3 and NOTE not in capsys.readouterr().err

    def refuse(problem: Problem) -> None:
        assert problem.num_queries == 3, "planned again"
        raise InfeasibleError("no")

    with pytest.raises(InfeasibleError):
        plan_with_enough(session.problem, refuse, print)  # type: ignore[arg-type]


def test_what_more_queries_would_not_help_is_refused_as_before(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = opened(tmp_path, "policy: rra, encode_batch: 8, decode_iterations: 4", 6,
                     "constraint: {latency_s: 0.001}\n")
    with pytest.raises(InfeasibleError):
        plan_job(session, timing_of(session))
    assert NOTE not in capsys.readouterr().err


def test_the_schedule_command_says_the_same(tmp_path: Path) -> None:
    fixed = "policy: rra, encode_batch: 8, decode_iterations: 4, tp_degree: 1"
    opened(tmp_path, fixed, 6)
    shown = CliRunner().invoke(schedule, [str(tmp_path / "job.yaml"), "--json"])
    assert shown.exit_code == 0 and NOTE in shown.output
