"""planned.py puts a job's plan beside the published run that is nearest to it."""

import math
from dataclasses import replace

import pytest
from planned import LARGEST, NONE_PUBLISHED, WEIGHTS, Job, Planned, jobs, line_of, ratios, summary
from published.offline import OfflineRow

ROW = OfflineRow(model="llama-3.1-70b", gpu="H100", weights="fp8", tp=4, input_tokens=1000,
                 output_tokens=1000, requests=3000, output_tokens_per_s=0.0)


def planned(weights: str, rate: float, published: float | None) -> Planned:
    row = replace(ROW, weights=weights)
    return Planned(
        job=Job(row=row, gpus=4), words="w", job_rate=rate, steady_rate=1.1 * rate, doubt="far",
        choice="Memory binds", stages=1 + (weights == "fp8"), there=0.9 * (published or math.nan),
        published=None if published is None else replace(row, tp=2, output_tokens_per_s=published))


def test_the_published_run_of_a_job_is_that_of_the_highest_degree_on_its_gpus():
    rows = [replace(ROW, tp=tp, output_tokens_per_s=1.0) for tp in (1, 2, 8)]
    others = [replace(ROW, tp=4, output_tokens_per_s=1.0, **other) for other in (
        {"gpu": "H200"}, {"weights": "16-bit"}, {"output_tokens": 999}, {"model": "mixtral-8x7b"})]
    job = Job(row=ROW, gpus=4)
    assert job.published([*rows, *others]) is rows[1]
    assert job.published(others) is None
    largest = [one for one in jobs() if one.published([LARGEST]) is LARGEST]
    assert [one.name for one in largest] == ["llama-3.1-405b, 8 x H200, 3,000 x 1000 / 1000"]


def test_every_job_is_planned_in_both_number_types():
    names = [job.name for job in jobs()]
    assert names[::2] == names[1::2]
    assert [job.row.weights for job in jobs()] == [*WEIGHTS] * (len(names) // 2)


def test_a_line_has_the_published_run_and_its_own_prediction_or_says_that_there_is_none():
    assert "| 100 (TP 2 on 2 of 4 GPUs) | 90 (-10%) |" in line_of(planned("fp8", 210.0, 100.0))
    assert f"| 210 | 231 | {NONE_PUBLISHED} |  |" in line_of(planned("fp8", 210.0, None))


def test_the_summary_counts_what_is_published_and_compares_number_types():
    found = [planned("16-bit", 100.0, 80.0), planned("fp8", 150.0, 120.0)]
    assert ratios(found, "planned") == pytest.approx([1.5])
    assert ratios([found[0], planned("fp8", 150.0, None)], "published") == []
    text = " ".join(summary(found))
    assert "2 jobs, of which 2 have a published run" in text
    assert "10% off in the mean, -10% on balance" in text
    assert "stages are chosen for 1 of 2 jobs" in text
