"""A run goes on with all that is done: what was held back, and what a killed command left. The
ranks work in this process."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")

from begun_runs import COUNT, POLICIES, RUN, WORKLOAD, lines, opened, roofline  # noqa: E402

from xgpt.app.running import run as execution  # noqa: E402
from xgpt.app.running.resume import (  # noqa: E402
    ADOPTED,  # noqa: E402
    KEEPS_SCHEDULE,
    keep_begun_schedule,
)
from xgpt.app.running.run import open_to_run  # noqa: E402
from xgpt.app.schedule import Plan, plan_job  # noqa: E402
from xgpt.cli.terminal import Terminal  # noqa: E402
from xgpt.core.errors import InputError, StoppedEarly, XgptError  # noqa: E402
from xgpt.job.job_file import load_job  # noqa: E402
from xgpt.launch.launcher import RankProgram  # noqa: E402
from xgpt.launch.process import run_watched  # noqa: E402
from xrunner.files.order_file import ORDER_FILE  # noqa: E402
from xrunner.files.results import HELD_FILE  # noqa: E402


def test_a_stopped_run_goes_on_without_what_it_held_back(folder, run):
    out, done = folder / "out", dict[int, str]()
    for stop_after in (6, 5, 3):
        with pytest.raises(StoppedEarly, match="wait in held.jsonl") as stop:
            run(stop_after)
        written, held = lines(out / "results.jsonl"), lines(out / HELD_FILE)
        assert held and not written.keys() & held.keys()
        now = written | held
        assert now.items() >= done.items() and len(now) >= len(done) + stop_after
        told = stop.value.details
        assert told["queries"] == len(now) and told["queries_before"] == len(done)
        assert told["queries_held"] == len(held) and told["queries_total"] == COUNT
        done = now
    metrics = run()
    final = lines(out / "results.jsonl")
    assert list(final) == list(range(COUNT)) and final.items() >= done.items()
    assert (metrics["queries"], metrics["queries_before"]) == (COUNT, len(done))
    assert metrics["queries_held"] == 0 and not (out / HELD_FILE).exists()
    progress = json.loads((out / "progress.json").read_text())
    assert (progress["done"], progress["done_before"]) == (COUNT, len(done))


def test_a_run_goes_on_with_the_weights_that_it_was_begun_with(folder, run, monkeypatch):
    """What `auto` takes depends on the memory that is free."""
    monkeypatch.setitem(RUN, "dtype", "dtype: bfloat16, weight_dtype: float32")
    with pytest.raises(StoppedEarly):
        run(6)
    monkeypatch.setitem(RUN, "dtype", "dtype: bfloat16")
    for module in ("xgpt.job.resolve", "xgpt.app.schedule"):
        monkeypatch.setattr(f"{module}.resolve_weight_dtype", lambda job, dtype, *_: (
            dtype if job.run.weight_dtype == "auto" else job.run.weight_dtype))
    assert opened(folder).problem.weight_dtype == "bfloat16", "as where there is little memory"
    session = open_to_run(load_job(folder / "job.yaml", ()), Terminal())
    plan = plan_job(session, roofline(session))
    assert plan.opened.problem.weight_dtype == session.problem.weight_dtype == "float32"
    assert run(plan=plan)["queries_before"] >= 6
    session = open_to_run(load_job(folder / "job.yaml", ()), Terminal())
    assert session.problem.weight_dtype == "bfloat16", "of a job that is done nothing is kept"


@pytest.mark.parametrize("requests", [
    WORKLOAD["requests"], "requests: {count: 24}, input_tokens: {mean: 5, std: 2, max: 9}"])
def test_another_schedule_goes_on_with_what_is_held(folder, run, monkeypatch, requests):
    """What a schedule holds of made requests changes with every plan, and none is longer."""
    monkeypatch.setitem(WORKLOAD, "requests", requests)
    with pytest.raises(StoppedEarly):
        run(6)
    out = folder / "out"
    done = lines(out / "results.jsonl") | lines(out / HELD_FILE)
    monkeypatch.setitem(POLICIES, "rra", "encode_batch: 2, decode_iterations: 9")
    metrics = run()
    assert (metrics["queries"], metrics["queries_before"]) == (COUNT, len(done))
    final = lines(out / "results.jsonl")
    assert list(final) == list(range(COUNT)) and final.items() >= done.items()
    assert not list(out.glob("results-*"))


def in_order(answers: dict[int, str], order: list[int]) -> bool:
    """Whether the requests were begun in this order."""
    begun_s = [json.loads(answers[index])["encode_start_s"] for index in order if index in answers]
    return begun_s == sorted(begun_s)


def test_a_run_goes_on_in_the_order_that_it_began_with(folder, run, monkeypatch):
    out, long = folder / "out", [index for index in range(COUNT) if index % 5 == 2]
    order = [*long, *(index for index in range(COUNT) if index not in long)]
    monkeypatch.setitem(POLICIES, "rra", "encode_batch: 3, decode_iterations: 4, adjustment: 0, "
                        "order: longest-output, window: job")
    with pytest.raises(StoppedEarly, match="wait in held.jsonl"):
        run(8)
    done = lines(out / "results.jsonl") | lines(out / HELD_FILE)
    assert in_order(done, order)
    monkeypatch.setitem(POLICIES, "rra", "encode_batch: 2, decode_iterations: 9, adjustment: 0, "
                        "order: random")
    run()
    assert np.load(out / ORDER_FILE).tolist() == order
    final = lines(out / "results.jsonl")
    assert list(final) == list(range(COUNT)) and final.items() >= done.items()
    assert in_order({index: line for index, line in final.items() if index not in done}, order)


def by_kv_tokens(folder: Path, tokens: int) -> Plan:
    """The job with one long request more, by a schedule of so many."""
    requests = (folder / "requests.jsonl").read_text()
    if "long" not in requests:
        long = json.dumps({"id": "long", "tokens": [7, 8, 9], "forced_tokens": 80})
        (folder / "requests.jsonl").write_text(f"{long}\n{requests}")
    session = opened(folder)
    plan = plan_job(session, roofline(session))
    groups = plan.schedule.estimate.deployment.num_groups
    return replace(plan, schedule=plan.schedule.changed(kv_tokens=tokens * groups))


@pytest.mark.parametrize("first", [60, 400])
def test_a_run_goes_on_with_the_requests_that_it_was_begun_with(
        folder, run, first, capsys, monkeypatch):
    out, second = folder / "out", 460 - first
    plan = by_kv_tokens(folder, first)
    monkeypatch.setattr("xgpt.app.schedule.timing_of", roofline)  # as the command by data sheets
    with pytest.raises(StoppedEarly):
        run(6, plan=plan)
    done = lines(out / "results.jsonl") | lines(out / HELD_FILE)
    errors = (out / "errors.jsonl").read_bytes() if first == 60 else b""
    total = COUNT + (first == 400)
    replanned = by_kv_tokens(folder, second)
    if second == 60:
        asked = (out / "run.json").read_bytes()
        with pytest.raises(InputError, match="the longest request that the schedule holds"):
            run(plan=replanned, ranks_work=False)
        assert (out / "run.json").read_bytes() == asked, "nothing is touched"
    capsys.readouterr()
    chosen = keep_begun_schedule(opened(folder), replanned)
    said = " ".join(capsys.readouterr().err.split())
    assert (KEEPS_SCHEDULE in said) == (second == 60) == (chosen is not replanned)
    metrics = run(plan=chosen)
    assert (metrics["queries"], metrics["queries_before"]) == (total, len(done))
    assert metrics["errors"] == COUNT + 1 - total
    final = lines(out / "results.jsonl")
    assert list(final) == list(range(total)) and final.items() >= done.items()
    assert not list(out.glob("results-*"))
    if errors:
        assert (out / "errors.jsonl").read_bytes() == errors


def test_what_a_killed_command_left_is_taken_over(folder, run, capsys):
    out, first = folder / "out", run()
    results = (out / "results.jsonl").read_bytes()
    (out / "metrics.json").unlink()
    (out / "report.html").unlink()
    capsys.readouterr()
    metrics = run(ranks_work=False)
    assert ADOPTED in " ".join(capsys.readouterr().err.split())
    assert (out / "results.jsonl").read_bytes() == results and (out / "report.html").is_file()
    assert not list(out.glob("results-*"))
    differ = {key for key in metrics if metrics[key] != first[key]}
    assert differ <= {"date", "others_cpu_share"}, "figures, predictions and their explanation"
    (out / "metrics.json").write_text('{"status": "stopped"}')  # at its last query
    assert run(ranks_work=False)["status"] == "done"
    # killed before the ranks wrote their account, and as the last results were put in order
    for name in ("metrics.json", "measured.json", "steps.jsonl"):
        (out / name).unlink()
    head, tail = results.splitlines(keepends=True)[:-4], results.splitlines(keepends=True)[-4:]
    (out / "results.jsonl").write_bytes(b"".join(head) + tail[0][:20])
    (out / HELD_FILE).write_bytes(b"".join(tail))
    metrics = run(ranks_work=False)
    assert (out / "results.jsonl").read_bytes() == results and not (out / HELD_FILE).exists()
    assert (metrics["status"], metrics["queries"], metrics["errors"]) == ("done", COUNT, 0)
    assert metrics["wall_s"] == {"measured": None, "predicted": None}
    assert metrics["latency_p50_s"]["measured"] == pytest.approx(
        first["latency_p50_s"]["measured"], rel=1e-3)
    assert json.loads((out / "metrics.json").read_text())["load_bytes_per_s"] is None
    assert "<html" in (out / "report.html").read_text()


def test_a_job_that_is_done_runs_anew_and_no_results_are_written_over(folder, run):
    out = folder / "out"
    for count in range(2):
        run()
        os.utime(out / "results.jsonl", (1e9, 1e9))
        assert len(list(out.glob("results-*.jsonl"))) == count
    (out / HELD_FILE).write_text('{"index": 3}\n')  # of another job: its fingerprint differs
    (folder / "requests.jsonl").write_text('{"id": "a", "tokens": [7], "forced_tokens": 2}\n')
    assert run()["queries"] == 1
    kept = sorted(path for path in out.glob("results-*.jsonl"))
    assert [len(lines(path)) for path in kept] == [COUNT] * 2
    assert len(list(out.glob("held-*.jsonl"))) == 1


def test_the_end_tells_cut_answers_the_bound_and_the_first_error(folder, run, monkeypatch, capsys):
    run()
    assert "truncated" not in capsys.readouterr().err, "the lengths were wished for"
    (folder / "requests.jsonl").write_text('{"tokens": [7, 8]}\n{"tokens": [9]}\nno JSON\n')
    monkeypatch.setitem(POLICIES, "rra", "encode_batch: 2, decode_iterations: 4}\n"
                        "constraint: {latency_s: 600")
    run()
    said = " ".join(capsys.readouterr().err.split())
    assert "2 of 2 answers were truncated at" in said
    assert re.search(r"limit .{1,12} met", said)
    assert "the first error, in line 3 of the requests: not JSON" in said


def test_ranks_that_die_are_told_with_what_is_kept(folder, run, monkeypatch):
    with pytest.raises(StoppedEarly):
        run(6)
    done = len(lines(folder / "out" / "results.jsonl") | lines(folder / "out" / HELD_FILE))
    session = opened(folder)
    plan = plan_job(session, roofline(session))
    for ends, told in (("kill -9 $$", "Signal 9 ended a rank"), ("exit 9", "Signal 9 ended a rank"),
                       ("kill -BUS $$", "A bus error ended a rank"),
                       ("echo no such device; exit 4", "no such device")):
        class Dying:
            is_here = True

            def run(self, ranks: RankProgram, ends: str = ends, **watched: Any) -> None:
                run_watched(["sh", "-c", ends], **watched)

        monkeypatch.setattr(execution, "launcher_of", lambda job, problem, own=Dying: own())
        with pytest.raises(XgptError) as failed:
            execution.execute(plan)
        said = " ".join(str(failed.value).split())
        assert f"{done} answers are kept; the same command goes on" in said and told in said
        assert ("when memory runs out" in said) == ("9" in ends)


def test_entries_that_cannot_be_used_are_told_before_anything_is_planned(folder, capsys):
    with (folder / "requests.jsonl").open("a") as file:
        file.write("no JSON\n")
    opened(folder)
    said = " ".join(capsys.readouterr().err.split())
    assert f"1 of {COUNT + 1} entries cannot be used, the first in line {COUNT + 1}: not JSON" in (
        said)


def test_other_files_than_the_results_do_not_decide_whether_a_job_is_done(folder, run):
    run()
    out = folder / "out"
    results = (out / "results.jsonl").read_bytes()
    all_others = ("metrics.json", "steps.jsonl", "schedule.json", "measured.json", "progress.json",
                  "job.json", "report.html", HELD_FILE)
    for lost in (("metrics.json", "steps.jsonl", "progress.json"), all_others[::2], all_others):
        for content in (None, b"\0\xff{]\n"):
            for name in lost:
                (out / name).unlink(missing_ok=True)
                if content is not None:
                    (out / name).write_bytes(content)
            metrics = run(ranks_work=False)
            assert metrics["status"] == "done" and metrics["queries"] == COUNT
            assert (out / "results.jsonl").read_bytes() == results, lost
            assert not list(out.glob("results-*"))


def test_requests_of_which_none_can_run_are_refused_before_anything_is_measured(folder):
    (folder / "requests.jsonl").write_text(
        '{"tokens": [97]}\n{"tokens": [1], "forced_tokens": 999}\n{"id": "x"}\n')
    with pytest.raises(InputError, match="holds no request that can run") as refused:
        opened(folder)
    said = str(refused.value)
    assert "line 1: token 97" in said and "line 2: forced_tokens 999" in said and "line 3" in said
    assert not list((folder / "out").iterdir())
