"""Figures of working below the device, measured beside predicted ones."""

from xgpt.core.placement import PlacedFigures, StepTerms
from xrunner.offload.report import OffloadReport, offload_figures

NONE = {"up_s": 0.0, "down_s": 0.0, "write_s": 0.0, "up_bytes": 0, "down_bytes": 0,
        "write_bytes": 0}
FIGURES = PlacedFigures(tiers=(), block=8, program_qps=1.0, any_order_qps=2.0, steps=(
    StepTerms(kind="encode", count=1, seconds=5.0, read_s=2.0, compute_s=4.0, read_bytes=200,
              **NONE),
    StepTerms(kind="decode", count=31, seconds=2.5, read_s=2.0, compute_s=1.0, read_bytes=200,
              **NONE)))


def report(**changes):
    return OffloadReport(**{
        "seconds": {"read": 60.0, "compute": 30.0}, "num_bytes": {"read": 6000},
        "peaks": {"device": 90, "disk": 500}, "waited_s": 9.0, "io": "past the page cache",
        **changes})


def test_ranks_add_up_beside_what_was_predicted_of_all_their_periods():
    found = offload_figures([report(), report(peaks={"device": 95}, io="past the page cache")],
                            [(100, 0, 600), (96, 0, 600)], FIGURES, periods=2.0)
    of = {row["term"]: row for row in found["terms"]}
    assert of["read"] == {"term": "read", "measured_s": 120.0, "predicted_s": 2 * 32 * 2.0,
                          "measured_bytes": 12000, "predicted_bytes": 2 * 32 * 200}
    assert of["compute"]["predicted_s"] == 2 * (4 + 31) and (
        of["compute"]["predicted_bytes"] is None)
    assert found["tiers"][0] == {"tier": "device", "peak_bytes": 95, "planned_bytes": 100}
    assert found["tiers"][2] == {"tier": "disk", "peak_bytes": 500, "planned_bytes": 600}
    assert (found["waited_s"], found["io"]) == (18.0, "past the page cache")


def test_without_a_prediction_measured_figures_stand_alone():
    found = offload_figures([report()], [], None, None)
    assert {row["predicted_s"] for row in found["terms"]} == {None}
    assert found["tiers"][0]["planned_bytes"] == 0
