"""Screens and pages of a run whose requests arrive over time, measured beside predicted."""

import json

import pytest
from fake_run import write_fake_run
from screens import check_screen
from served import SERVED, served_schedule
from test_service_screens import SCREENS

from xgpt.core.schedule_file import save_schedule
from xgpt.report.figures import check_bounds, comparisons, kept_facts
from xgpt.report.output import ends_since_first, read_output
from xgpt.report.page import write_report
from xgpt.report.run_charts import service
from xgpt.report.run_screen import end_screen
from xgpt.report.service_run import service_facts

COUNT, LATE = 40, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Forty requests, one each half a second; each waits 0.1 s, the last ten wait 0.5 s."""
    out = write_fake_run(tmp_path_factory.mktemp("service") / "out", COUNT)
    save_schedule(served_schedule(), out / "schedule.json")
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    for place, row in enumerate(rows):
        waits_s = 0.5 if place >= COUNT - LATE else 0.1
        row |= {"arrival_s": 3 + 0.5 * place, "encode_start_s": 3 + 0.5 * place + waits_s,
                "ttft_s": waits_s + 0.1, "tpot_s": 0.05, "latency_s": 2.0, "output_tokens": 30}
    (out / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    read = read_output(out)
    metrics = {**read.metrics, "throughput_qps": {"measured": 1.9, "predicted": 4.0},
               **service_facts(read.queries, read.schedule)}
    (out / "metrics.json").write_text(json.dumps(metrics))
    return out


def test_figures_count_from_the_arrival_and_leave_out_both_ends(folder):
    facts = read_output(folder).metrics["served"]
    assert facts["rate"]["measured"] == pytest.approx(2.0)
    # of the 32 in the middle six are late, by 0.6 s against 0.4 s
    assert facts["attainment"] == {"measured": 1 - 6 / 32, "predicted": SERVED.attainment}
    assert facts["ttft_p50_s"]["measured"] == pytest.approx(0.2)
    assert facts["queueing_p99_s"]["measured"] == pytest.approx(0.5)
    assert ends_since_first(read_output(folder).queries)[[0, -1]] == pytest.approx([2.0, 21.5])


def test_a_joint_attainment_is_judged_alone(folder):
    left = read_output(folder)
    (check,) = check_bounds(left)
    assert check.sentence == (
        "attainment of 90 % missed: 81.2 % of the requests kept all limits")
    found = kept_facts([check])
    assert found["bound_kept"] is False and found["bounds"][0]["metric"] == "attainment"


def test_a_load_test_is_not_slow_for_the_rate_of_its_arrivals(folder):
    left = read_output(folder)
    rates = {row.label: row for row in comparisons(left.metrics)}
    assert rates["Throughput"].ratio is None and rates["TTFT P50"].ratio is not None
    screen = end_screen(left.metrics, check_bounds(left), [], {"report": "report.html"})
    check_screen(SCREENS, "end of a load test", screen)


def test_its_page_has_attainment_and_waiting_requests_over_time(folder):
    attainment, waiting = service(read_output(folder))
    assert attainment.series[0].y == [1.0, 1.0, 1.0, 0.0]  # of ten requests each
    assert max(waiting.series[0].y) == 1 and min(waiting.series[0].y) == 0
    pytest.importorskip("jinja2", reason="the report needs jinja2 (extra: run)")
    page = write_report(folder).read_text(encoding="utf-8")
    assert "of the requests kept all limits" in page and 'data-chart="waiting"' in page
    assert "seconds from the arrival to a request" in page and "slower" not in page
    assert "--over rate=" in page and "--price" not in page
