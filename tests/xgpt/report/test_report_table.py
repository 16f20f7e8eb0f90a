"""The terminal tables: 80 columns, ASCII, and the figures they promise."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from fake_run import fake_schedule

from xgpt.core.constraint import Prospect
from xgpt.core.deployment import StageAssignment
from xgpt.core.schedule import Schedule
from xgpt.report.table import WIDTH, schedule_table, stage_table, summary_table, table

METRICS = {"queries": 72, "errors": 1, "status": "done",
           "throughput_qps": {"measured": 1.8, "predicted": 2.0},
           "latency_p99_s": {"measured": 28.0, "predicted": 20.0},
           "load_s": {"measured": 1.5, "predicted": None}}


def huge_schedule() -> Schedule:
    stages = tuple(StageAssignment(index=i, ranks=tuple(range(8 * i, 8 * i + 8, 2)),
                                   first_layer=6 * i, num_layers=6, first_encoder_layer=100 * i,
                                   num_encoder_layers=100) for i in range(16))
    return fake_schedule().changed(policy="waa-m", stages=stages, tp_degree=8, tp_gpus=128,
                         memory_bytes=tuple(10**10 + i for i in range(128)),
                         encode_batch=10**6, throughput_qps=123456.7)


@pytest.mark.parametrize("text", [
    schedule_table(fake_schedule()), schedule_table(huge_schedule()),
    stage_table(fake_schedule()), stage_table(huge_schedule()), summary_table(METRICS),
    schedule_table(fake_schedule(status="stopped at the limit of nodes " * 6)),
])
def test_tables_are_ascii_and_fit_eighty_columns(text: str) -> None:
    assert text.isascii()
    assert max(len(line) for line in text.splitlines()) <= WIDTH
    assert not any(line != line.rstrip() for line in text.splitlines())


def test_the_schedule_says_what_was_chosen_and_what_the_bound_cost() -> None:
    text = " ".join(schedule_table(fake_schedule()).split())
    for fact in ("RRA: encode 16 together, then 12 decode iterations", "2.31 queries/s",
                 "27.6 s for 99 % of the output lengths, within the bound of 30.0 s",
                 "costs 15.7 % of the throughput (2.74 queries/s without it)",
                 "380 MiB to 393 MiB of 11.2 GiB per rank", "optimal, gap 1.30 %"):
        assert fact in text


def test_a_schedule_over_its_bound_or_memory_says_so_loudly() -> None:
    over = fake_schedule().changed(limit_s=20.0)
    assert "OVER the bound of 20.0 s" in schedule_table(over)
    assert "DOES NOT FIT" in schedule_table(fake_schedule().changed(fits=False))


def test_without_a_bound_there_is_none_to_cost_anything() -> None:
    text = schedule_table(fake_schedule(latency_bound_s=math.inf))
    assert "no bound" in text and "none was set\n" in text


def test_bounds_on_something_else_than_the_latency_are_not_said_to_be_none() -> None:
    free = fake_schedule(latency_bound_s=math.inf)
    bounded = replace(free, margin=replace(free.margin, note="there is no bound"), prospects=(
        Prospect(metric="tpot", limit_s=0.02, expected_s=0.003, with_margin_s=0.005),))
    text = schedule_table(bounded)
    assert "within the bound of 20 ms" in text and "none was set on the latency" in text
    assert "there is no bound" not in text


def test_the_summary_puts_predicted_beside_measured() -> None:
    lines = summary_table(METRICS).splitlines()
    assert lines[0] == "72 queries done, 1 error (errors.jsonl)"
    assert lines[3].split() == ["Throughput", "2.00", "queries/s", "1.80", "queries/s", "0.90",
                                "within", "15", "%"]
    assert lines[4].endswith("1.40  40 % more")
    assert lines[5].split() == ["Time", "to", "load", "-", "1.50", "s"]


def test_the_summary_says_how_much_was_loaded_and_what_of_it_came_from_the_disk() -> None:
    loaded = {**METRICS, "loaded_bytes": 2.7e8, "loaded_from_disk_bytes": 1.8e8}
    said = " ".join(summary_table(loaded).split())
    assert said.endswith("loaded 0.27 GB in 1.50 s: 0.18 GB/s (0.18 GB of it from the "
                         "disk)")
    warm = " ".join(summary_table({**loaded, "loaded_from_disk_bytes": 0}).split())
    assert warm.endswith("loaded 0.27 GB in 1.50 s: 0.18 GB/s (none of it from the disk: the "
                         "system had it in memory)")
    uncounted = summary_table({**loaded, "loaded_from_disk_bytes": None})
    assert uncounted.endswith("loaded 0.27 GB in 1.50 s: 0.18 GB/s")
    made = summary_table({**loaded, "weights": "random"})
    assert made.endswith("made 0.27 GB in 1.50 s: 0.18 GB/s")
    assert "loaded" not in summary_table(METRICS)


def test_the_summary_says_why_torch_s_operators_served() -> None:
    torch = "native operators: none, torch's serve: no C++ compiler (g++) is on the PATH"
    assert torch in " ".join(summary_table({**METRICS, "operators": torch}).split())
    for ours in ("native operators: avx2, as installed",
                 "CUDA operators: ours; decode steps of up to 64 queries in CUDA graphs"):
        assert summary_table({**METRICS, "operators": ours}) == summary_table(METRICS)


def test_the_summary_says_why_no_step_was_captured() -> None:
    said = "CUDA operators: ours; no CUDA graphs: experts are told by the host"
    assert said in " ".join(summary_table({**METRICS, "operators": said}).split())


def test_a_stopped_run_and_an_empty_one_have_a_summary() -> None:
    assert "stopped early" in summary_table({**METRICS, "status": "stopped"})
    assert summary_table({}) == "0 queries done"


def test_an_open_search_claims_no_gap() -> None:
    text = schedule_table(fake_schedule(gap=math.inf, bound_qps=math.inf))
    assert "no gap proved" in text and "inf" not in text


def test_a_stage_row_names_its_ranks_layers_and_memory() -> None:
    assert stage_table(fake_schedule()).splitlines()[2].split() == [
        "0", "rank", "0", "layers", "0-15", "encode,", "decode", "393", "MiB"]


def test_tables_and_page_load_without_the_extras() -> None:
    code = ("import sys, xgpt.report.table, xgpt.report.page; "
            "print({'matplotlib', 'jinja2', 'torch', 'mpi4py'} & set(sys.modules))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_narrow_table_breaks_between_words_and_heeds_columns_in_a_pipe(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    rows = [("Throughput per second", "1,234.5 queries/s", "within fifteen", "of the prediction")]
    shown = table(("quantity", "measured", "verdict", "of what"), rows, right=(1,))
    assert max(map(len, shown.splitlines())) <= 50
    assert {"Throughput", "prediction", "1,234.5"} <= set(shown.split())
