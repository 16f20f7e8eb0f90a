"""DistServe's fits come out of a profile's sums again.

Tests of the files themselves read `shared/data` beside the checkout and skip where it is absent.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from imported import A100, DATA, again, faults, needs_data

from xgpt.core import catalog
from xgpt.core.errors import InputError
from xprofiler.importers import distserve, import_folder
from xprofiler.profile import Profile
from xprofiler.profile_timing import ProfileTiming
from xprofiler.timing import MessageKind, Operator

FITS = {"prefill": [10.0, 0.1, 1e-5], "decoding_smallbs": [12.0, 1e-3, 0.05],
        "decoding_largebs": [8.0, 9e-4, 0.1], "decoding_large_small_bs_threshold": 95}


def fits_file(folder: Path, of_degree: Mapping[str, object], model: str = "facebook/opt-13b",
              ) -> Path:
    path = folder / "profiler-a100-80g.distserve.json"
    path.write_text(json.dumps({model: of_degree}))
    return path


def encode_s(profile: Profile, lengths: Sequence[int], degree: int) -> float:
    """As xsimulator.stage_times sums a whole model on one stage."""
    timing, layers = ProfileTiming(profile), catalog.model(profile.metadata.model).num_layers
    rest = timing.operator_s(Operator.LAYER_REST, sum(lengths), tp_degree=degree)
    attention = timing.operator_s(Operator.ENCODE_ATTENTION, lengths, len(lengths),
                                  tp_degree=degree).sum()
    ends = (timing.operator_s(Operator.EMBED, sum(lengths), tp_degree=degree)
            + timing.operator_s(Operator.HEAD, len(lengths), tp_degree=degree))
    return float(layers * (rest + attention) + ends + timing.facts.step_overhead_s)


def decode_s(profile: Profile, queries: float, context: float, degree: int) -> float:
    timing, layers = ProfileTiming(profile), catalog.model(profile.metadata.model).num_layers
    rest = timing.operator_s(Operator.LAYER_REST, queries, tp_degree=degree)
    attention = timing.operator_s(Operator.DECODE_ATTENTION, queries, context, tp_degree=degree)
    ends = (timing.operator_s(Operator.EMBED, queries, tp_degree=degree)
            + timing.operator_s(Operator.HEAD, queries, tp_degree=degree))
    reduce_s = timing.message_s(MessageKind.ALL_REDUCE, queries * 10240, catalog.link("nvlink3"),
                                tp_degree=degree)
    return float(layers * (rest + attention + 2 * reduce_s) + ends + timing.facts.step_overhead_s)


def test_distserve_formulas_come_out_of_the_sums(tmp_path: Path) -> None:
    fits_file(tmp_path, {"1": FITS, "2": FITS})
    profile = again(import_folder("distserve", tmp_path, catalog.model("opt-13b"), A100,
                                  "float16"), tmp_path)
    for lengths in ([1], [100], [64] * 16, [2048, 5, 700]):
        expected = 10e-3 + 0.1e-3 * sum(lengths) + 1e-8 * sum(n * n for n in lengths)
        assert encode_s(profile, lengths, 2) == pytest.approx(expected, rel=2e-3)
    for queries, context in ((1, 0), (1, 500), (40, 3), (94, 700), (130, 10), (300, 900)):
        a, b, c = FITS["decoding_smallbs" if queries < 95 else "decoding_largebs"]
        expected = (a + b * queries * context + c * queries) / 1e3
        assert decode_s(profile, queries, context, 2) == pytest.approx(expected, rel=2e-3)


def test_a_short_prefill_falls_below_where_decode_is_cheaper(tmp_path: Path) -> None:
    fits_file(tmp_path, {"1": {**FITS, "prefill": [13.0, 0.1, 0.0]}})
    profile = import_folder("distserve", tmp_path, catalog.model("opt-13b"), A100, "float16")
    # decode without context reaches 13 ms at 20 queries: below, the rows are charged as decode
    assert encode_s(profile, [10], 1) == pytest.approx((12.0 + 0.05 * 10 + 1.0) / 1e3, rel=1e-3)
    assert encode_s(profile, [20], 1) == pytest.approx((13.0 + 2.0) / 1e3, rel=1e-3)
    assert decode_s(profile, 10, 0, 1) == pytest.approx((12.0 + 0.5) / 1e3, rel=1e-3)


def test_a_fit_that_falls_with_work_refuses_its_degree_alone(tmp_path: Path) -> None:
    falling = {**FITS, "prefill": [10.0, 0.1, -1e-5]}
    fits_file(tmp_path, {"1": FITS, "2": falling})
    profile = import_folder("distserve", tmp_path, catalog.model("opt-13b"), A100, "float16")
    assert "negative" in profile.refused[2] and not profile.table("layer_rest", 2)
    fits_file(tmp_path, {"2": falling})
    with pytest.raises(InputError, match="negative"):
        import_folder("distserve", tmp_path, catalog.model("opt-13b"), A100, "float16")


def test_faults_of_a_fit_are_named_together(tmp_path: Path) -> None:
    path = fits_file(tmp_path, {"1": {"prefill": [1, "x", 2], "decoding": [1, 2, 3]}, "two": FITS})
    with pytest.raises(InputError) as error:
        distserve.read_coefficients(path)
    assert {key.removeprefix("facebook/opt-13b.") for _, key in faults(error)} == {
        "1.prefill", "1.decoding", "1.decoding_smallbs", "1.decoding_largebs",
        "1.decoding_large_small_bs_threshold", "two"}


def test_models_and_devices_without_fits_are_named(tmp_path: Path) -> None:
    fits_file(tmp_path, {"1": FITS})
    with pytest.raises(InputError, match="facebook/opt-13b"):
        import_folder("distserve", tmp_path, catalog.model("opt-66b"), A100, "float16")
    with pytest.raises(InputError, match="A100-80"):
        import_folder("distserve", tmp_path, catalog.model("opt-13b"), catalog.device("A40"),
                      "float16")
    with pytest.raises(InputError, match="none"):
        import_folder("distserve", tmp_path / "none", catalog.model("opt-13b"), A100, "float16")


@needs_data
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_opt_13b_of_distserve(tmp_path: Path, degree: int) -> None:
    profile = again(import_folder("distserve", DATA / "distserve", catalog.model("opt-13b"), A100,
                                  "float16"), tmp_path)
    fit = distserve.read_coefficients(
        DATA / "distserve/profiler-a100-80g.distserve.json")["facebook/opt-13b"][degree]
    for lengths in ([100], [512, 37, 1000], [128] * 32):
        a, b, c = fit.prefill
        assert encode_s(profile, lengths, degree) == pytest.approx(
            a + b * sum(lengths) + c * sum(n * n for n in lengths), rel=2e-3)
    for queries, context in ((1, 100), (16, 10), (64, 500), (94, 1000), (128, 300), (256, 1000)):
        assert decode_s(profile, queries, context, degree) == pytest.approx(
            fit.decode_s(queries, context), rel=2e-3)
    # just above the batch at which the fits change, times are held at the one below
    held = decode_s(profile, 95, 1000, degree) / fit.decode_s(95, 1000)
    assert 1.0 <= held < 1.08
