"""Figures of working below the devices, measured beside predicted ones."""

from types import SimpleNamespace

import pytest

from xgpt.core.placement import PlacedFigures, Placement, StepTerms
from xgpt.report.offload_words import offload_rows, offload_words
from xrunner.offload.report import offload_figures

NONE = {"up_s": 0.0, "down_s": 0.0, "write_s": 0.0, "up_bytes": 0, "down_bytes": 0,
        "write_bytes": 0}
FIGURES = PlacedFigures(tiers=(), block=8, program_qps=1.0, any_order_qps=2.0, steps=(
    StepTerms(kind="encode", count=1, seconds=5.0, read_s=2.0, compute_s=4.0, read_bytes=200,
              **NONE),
    StepTerms(kind="decode", count=31, seconds=2.5, read_s=2.0, compute_s=1.0, read_bytes=200,
              **NONE)))
POOL = SimpleNamespace(num_groups=2, stages=(0, 1), placement=Placement(
    weights=(0, 0, 1), kv=(1, 0, 0), hidden=(1, 0, 0), device_batch=4,
    budgets=((100, 0, 600), (96, 0, 640))))
SCHEDULE = SimpleNamespace(placed=FIGURES, estimate=SimpleNamespace(all_pools=(POOL, POOL)),
                           deployment=SimpleNamespace(replicas=2),
                           controls=SimpleNamespace(encode_batch=8))
RANK = {"offload": {
    "seconds": {"read": 60.0, "compute": 30.0}, "num_bytes": {"read": 6000},
    "peaks": {"device": 90, "disk": 500}, "waited_s": 9.0, "io": "past the page cache"}}


def measured(**changes):
    return {"state": "done", "queries_before": 0, "queries": 32, "changes": [],
            "ranks": [RANK] * 4, **changes}


def test_ranks_add_up_beside_what_was_predicted_of_all_their_periods():
    """Two replicas of two stages take the steps of two blocks each."""
    found = offload_figures(measured(), SCHEDULE)["offload"]
    of = {row["term"]: row for row in found["terms"]}
    assert of["read"] == {"term": "read", "measured_s": 240.0, "predicted_s": 8 * 32 * 2.0,
                          "measured_bytes": 24000, "predicted_bytes": 8 * 32 * 200}
    assert of["compute"]["predicted_s"] == 8 * (4 + 31)
    assert found["tiers"][0] == {"tier": "device", "peak_bytes": 90, "planned_bytes": 100}
    assert found["tiers"][2] == {"tier": "disk", "peak_bytes": 500, "planned_bytes": 640}
    assert (found["waited_s"], found["io"]) == (36.0, "past the page cache")
    assert offload_rows({"offload": found})[2] == {
        "term": "read", "time": "4 min / 8 min 32 s", "bytes": "23.4 KiB / 50 KiB"}
    assert offload_words({"offload": found}) == (
        "read 4 min / 8 min 32 s, compute 2 min / 4 min 40 s (measured / predicted); peaks: device "
        "90 B of 100 B, disk 500 B of 640 B; past the page cache")


@pytest.mark.parametrize("changes", [{"state": "stopped"}, {"queries_before": 3},
                                     {"changes": [{"rank": 0}]}])
def test_a_part_of_a_job_or_a_changed_schedule_has_no_prediction(changes):
    found = offload_figures(measured(**changes), SCHEDULE)["offload"]
    assert {row["predicted_s"] for row in found["terms"]} == {None}
    assert "predicted" not in offload_words({"offload": found})
    assert offload_figures(measured(), None)["offload"]["tiers"][0]["planned_bytes"] == 0


def test_a_run_in_memory_has_none():
    assert offload_figures(measured(ranks=[{}]), SCHEDULE) == {}
    assert offload_words({}) == "" and offload_rows({}) == []
