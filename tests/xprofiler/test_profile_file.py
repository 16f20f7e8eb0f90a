"""The profile: a diffable file, interpolation exact at its points, monotone, linear beyond."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from xgpt.errors import InputError, XgptError
from xprofiler.cache import cached_profile_path, find_cached
from xprofiler.profile import (
    Profile,
    ProfileMetadata,
    ProfileTiming,
    Sample,
    load_profile,
    save_profile,
)
from xprofiler.timing import Operator

METADATA = ProfileMetadata(model_shape="m", device="cpu", dtype="float32", ranks=2,
                           threads_per_rank=1, torch_version="2", kernels="k", date="2026-11-21")


def points(*triples: tuple[float, float, float]) -> tuple[Sample, ...]:
    return tuple(Sample(x=x, y=y, samples_s=(s, s, s)) for x, y, s in triples)


def profile() -> Profile:
    line = points((1, 0, 1.0), (4, 0, 4.0), (8, 0, 6.0))
    grid = points((1, 10, 1.0), (4, 10, 3.0), (1, 20, 2.0), (4, 20, 7.0))
    return Profile(metadata=METADATA, tables={
        "layer_rest": line, "encode_attention": line, "embed": line, "head": line,
        "decode_attention": grid, "transfer": points((100, 0, 0.5), (1100, 0, 1.5)),
        "step_overhead": points((0, 0, 0.25))})


def test_values_are_exact_at_the_points_and_linear_between_and_beyond() -> None:
    timing = ProfileTiming(profile())
    got = timing.operator_s(Operator.LAYER_REST, np.array([0, 0.5, 1, 2.5, 4, 8, 16]))
    assert got.tolist() == [0, 0.5, 1, 2.5, 4, 6, 10]


def test_two_dimensions_are_exact_at_the_points_and_bilinear_between() -> None:
    timing = ProfileTiming(profile())
    queries, contexts = np.array([1, 4, 1, 4, 2.5, 4, 0]), np.array([10, 10, 20, 20, 15, 30, 15])
    got = timing.operator_s(Operator.DECODE_ATTENTION, queries, contexts)
    assert got.tolist() == [1, 3, 2, 7, (2 + 4.5) / 2, 11, 0]
    below = timing.operator_s(Operator.DECODE_ATTENTION, 4, np.array([0, 5]))
    assert (below == 3).all(), "below the shortest measured context it costs what that costs"


def test_more_work_never_takes_less_time_even_if_it_was_measured_so() -> None:
    tables = dict(profile().tables)
    tables["head"] = points((1, 0, 2.0), (2, 0, 1.0), (4, 0, 3.0))
    timing = ProfileTiming(Profile(metadata=METADATA, tables=tables))
    got = timing.operator_s(Operator.HEAD, np.linspace(0, 6, 50))
    assert (np.diff(got) >= 0).all()


def test_messages_cost_their_latency_and_the_host_its_share() -> None:
    from xgpt import catalog

    timing = ProfileTiming(profile())
    link = catalog.link("pcie4-x16")
    assert timing.transfer_s(np.array([100, 600, 2100]), link).tolist() == [0.5, 1.0, 2.5]
    assert timing.step_overhead_s() == 0.25
    with pytest.raises(XgptError, match="degree 2"):
        timing.operator_s(Operator.HEAD, 1, tp_degree=2)


def test_a_file_keeps_everything_and_has_one_point_a_line(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save_profile(profile(), path)
    assert load_profile(path) == profile()
    lines = path.read_text().splitlines()
    assert sum(line.strip().startswith("[") for line in lines) == 4 * 3 + 4 + 2 + 1
    assert json.loads(path.read_text())["metadata"]["ranks"] == 2


@pytest.mark.parametrize("text", [
    "", "[]", "{}", '{"version": 99}', '{"version": 1, "tables": {}}'])
def test_a_file_that_is_no_profile_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(InputError, match=r"p\.json"):
        load_profile(path)


def test_the_verdict_counts_points_whose_samples_disagree() -> None:
    assert profile().verdict().startswith("good: 19 of 19")
    noisy = tuple(Sample(x=p.x, y=p.y, samples_s=(1.0, 2.0, 3.0)) for p in profile().tables["head"])
    tables = {**profile().tables, "head": noisy, "embed": noisy}
    assert Profile(metadata=METADATA, tables=tables).verdict().startswith("noisy: 6 of 19")


@pytest.mark.parametrize("change", [
    {"ranks": 3}, {"dtype": "bfloat16"}, {"device": "other"}, {"kernels": "new"},
    {"torch_version": "3"}, {"threads_per_rank": 2}, {"model_shape": "n"}])
def test_the_cache_has_a_profile_for_this_metadata_alone(
        tmp_path: Path, change: dict[str, object]) -> None:
    from dataclasses import replace

    save_profile(profile(), cached_profile_path(tmp_path, METADATA))
    assert find_cached(tmp_path, replace(METADATA, date="2027-01-01")) == profile()
    assert find_cached(tmp_path, replace(METADATA, **change)) is None  # type: ignore[arg-type]
