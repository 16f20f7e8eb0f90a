"""The paper's case study (section 7.8): what of it comes out, and what does not."""

from __future__ import annotations

import math

import case_study
import pytest

FT = "fastertransformer"


@pytest.fixture(scope="module", params=["xgpt", FT])
def found(request: pytest.FixtureRequest) -> tuple[str, case_study.Found]:
    return request.param, case_study.study(request.param)


def test_batches_grow_with_the_bound_and_waa_has_the_tight_ones(
        found: tuple[str, case_study.Found]) -> None:
    says = case_study.answers(found[1])
    assert says["B_E grows as the bound is relaxed"][0]
    assert found[1].best(3.1)[0].startswith("waa") and found[1].best(5.9)[0].startswith("waa")
    rates = [found[1].best(bound)[1].figures.throughput_qps for bound in case_study.BOUNDS]
    assert rates == sorted(rates) and rates[0] > 0.7 * rates[-1]


def test_with_chunks_three_of_the_papers_four_come_out() -> None:
    """By FasterTransformer's times; the fourth is that the tightest bound keeps 80 %: 63 % here,
    since chunks raise what there is without a bound."""
    says = case_study.answers(case_study.study(FT, has_chunks=True))
    assert [holds for holds, _ in says.values()] == [True, True, True, False]


def test_of_whole_batches_rra_comes_near_but_does_not_overtake(
        found: tuple[str, case_study.Found]) -> None:
    """The paper has RRA ahead from 11.5 s on; here it stays 3 to 7 % behind (the page says why)."""
    last = found[1].schedules[math.inf]
    rra, waa = (last[name].figures.throughput_qps for name in ("rra", "waa-c"))
    assert 0.9 < rra / waa < 1.0
    assert last["rra"].estimate.variables["decode_iterations"] < found[1].schedules[11.5][
        "rra"].estimate.variables["decode_iterations"]


def test_the_encode_pool_works_at_the_papers_share_of_peak_with_kernels_of_its_time() -> None:
    """The paper's figures imply about 52 %; today's kernels would reach 65 %."""
    shares = [case_study.encode_share(case_study.study(engine, (11.5,)).schedules[11.5]["waa-c"])
              for engine in (FT, "xgpt")]
    assert shares == [pytest.approx(0.51, abs=0.02), pytest.approx(0.65, abs=0.02)]
