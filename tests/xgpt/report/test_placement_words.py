"""The screen of a schedule whose bytes lie partly below its devices (screens.txt)."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from screens import check_screen
from test_plan_screen import planned

from xgpt.core.errors import XgptError
from xgpt.core.placement import PlacedFigures, Placement, StepTerms, TierBytes
from xgpt.core.units import GIB
from xgpt.launch.exports import vllm_command
from xgpt.report.words import block_words

PLACEMENT = Placement(weights=(0.18, 0.82, 0.0), kv=(0.0, 1.0, 0.0), hidden=(0.0, 1.0, 0.0),
                      device_batch=64, host_attention=True)
DISK = replace(PLACEMENT, weights=(0.0, 0.5, 0.5), weight_bits=4, order="row", overlap=False,
               host_attention=False)
FIGURES = PlacedFigures(
    tiers=(TierBytes(name="device", weights=10 * GIB, kv=0, hidden=0, work=2 * GIB, free=GIB,
                     price=0.093),
           TierBytes(name="host", weights=46 * GIB, kv=90 * GIB, hidden=7 * GIB, work=GIB,
                     free=3 * GIB, price=0.004),
           TierBytes(name="disk", weights=0, kv=0, hidden=0, work=0, free=1500 * GIB)),
    steps=(StepTerms(kind="encode", count=1, seconds=210.0, up_s=4.2, down_s=95.1, read_s=0.0,
                     write_s=0.0, compute_s=101.0, up_bytes=53 * GIB, down_bytes=92 * GIB,
                     read_bytes=0, write_bytes=0),
           StepTerms(kind="decode", count=31, seconds=11.2, up_s=3.7, down_s=0.1, read_s=0.0,
                     write_s=0.0, compute_s=7.9, up_bytes=47 * GIB, down_bytes=GIB // 9,
                     read_bytes=0, write_bytes=0)),
    block=128, program_qps=0.231, any_order_qps=0.41, diagonal_block=137, tried=180,
    needed_bytes=57 * GIB)


def placed(placement=PLACEMENT, **figures):
    plan = planned("2xA40")
    estimate = plan.schedule.estimate
    pools = [replace(pool, placement=placement) for pool in estimate.deployment.pools]
    return replace(plan, schedule=replace(
        plan.schedule, placed=replace(FIGURES, **figures), estimate=replace(
            estimate, deployment=replace(estimate.deployment, pools=tuple(pools)))))


def test_the_screen_says_what_does_not_fit_where_it_lies_and_what_binds():
    screen = str(placed())
    facts, tables = screen[screen.index("tiers "):].split("times  ")  # times are the source's
    tables = tables[tables.index("tier "):]
    check_screen(Path(__file__).with_name("screens.txt"), "a placed plan", facts + tables)
    assert max(map(len, screen.splitlines())) <= 80
    assert "compute" in next(line for line in screen.splitlines() if line.startswith("decode"))


def test_what_a_placement_has_else_is_said():
    screen = " ".join(str(placed(DISK, diagonal_block=0, needed_bytes=0, tried=1,
                                 any_order_qps=math.inf)).split())
    for words in ("its weights lie 50 % on the host and 50 % on disk, its KV cache on the host",
                  "128 requests in device batches of 64, row by row, weights in 4 bits on host "
                  "and disk, copies not beside computing",
                  "limits 0.231 requests/s by the linear program of 1 block times"):
        assert words in screen
    assert block_words(PLACEMENT, 1).startswith("1 request in device batches of 1, ")
    assert "diagonal" not in screen and "needs" not in screen


def test_a_schedule_in_memory_has_none_of_it():
    screen = str(planned("2xA40"))
    assert "block " not in screen and "1 GiB more" not in screen


def test_vllm_has_no_flags_for_it():
    plan = placed()
    with pytest.raises(XgptError, match="has no flags for this schedule: its weights and KV cache"):
        vllm_command(plan.schedule, plan.opened.problem, model="opt-1.3b", times_of="xgpt",
                     files=None)
