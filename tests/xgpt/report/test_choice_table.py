"""Why a schedule was chosen: sentences, alternatives, margin and proof in the terminal's words."""

from __future__ import annotations

import math

import pytest
from fake_run import fake_schedule

from xgpt.core.schedule import Margin, Rejected, Status
from xgpt.report.table import WIDTH, choice_table, schedule_table
from xgpt.report.words import margin_words, pruned_words
from xscheduler.shown import why_not


def joined(text: str) -> str:
    return " ".join(text.split())


def rejected(label: str, qps: float | None, latency_s: float | None = 3.0) -> str:
    row = Rejected(label=label, throughput_qps=qps, latency_s=latency_s, reason="the reason")
    return joined(choice_table(fake_schedule(rejected=(row,), explanation=())))


def test_sentences_and_alternatives_fit_eighty_columns() -> None:
    text = choice_table(fake_schedule(explanation=("word " * 60, "second", "third")))
    assert text.isascii() and max(map(len, text.splitlines())) <= WIDTH
    assert text.startswith("why          word") and text.count("why ") == 1
    assert "best waa-c   2.04 queries/s, 11.7 % less, latency 25.3 s: encode_batch 2," in text
    assert "best waa-m   no admissible schedule" in text


@pytest.mark.parametrize(("label", "qps", "expected"), [
    ("tp_degree 2: encode_batch 4, tp_degree 2, tp_gpus 4", 1.155,
     "tp degree 2 1.16 queries/s, 50.0 % less, latency 3.00 s: encode_batch 4, tp_degree 2, "
     "tp_gpus 4"),
    ("policy rra: encode_batch 4, tp_degree 1, tp_gpus 0", 2.31,
     "best rra 2.31 queries/s, as many, latency 3.00 s: encode_batch 4"),
    ("without a latency bound: rra, encode_batch 9", 4.62,
     "no bound 4.62 queries/s, 100.0 % more, latency 3.00 s: rra, encode_batch 9"),
    ("without a margin: waa-m", 3.0, "no margin 3.00 queries/s, 29.9 % more, latency 3.00 s: "
     "waa-m"),
    ("encode 64", None, "instead the reason (encode 64)"),
])
def test_an_alternative_says_what_it_would_lose(label: str, qps: float, expected: str) -> None:
    assert rejected(label, qps) == expected


def test_what_was_not_searched_to_its_best_says_how_much_there_may_be() -> None:
    row = Rejected(label="policy rra: encode_batch 4", throughput_qps=2.0, latency_s=3.0, reason="")
    schedule = fake_schedule(rejected=(row,), explanation=(), policy_bounds=(("rra", 2.3),))
    assert joined(choice_table(schedule)).startswith("seen rra 2.00 queries/s")
    assert "latency 3.00 s, and no more than 2.30: encode_batch 4" in joined(choice_table(schedule))


def test_a_quicker_one_says_why_it_was_not_chosen() -> None:
    """Its figures alone looked as if the best had not been."""
    row = Rejected(label="policy rra: encode_batch 4", throughput_qps=3.0, latency_s=3.0,
                   reason=why_not(3.0, 2.31))
    assert joined(choice_table(fake_schedule(rejected=(row,), explanation=()))) == (
        "best rra 3.00 queries/s, 29.9 % more, latency 3.00 s, but not sure enough to keep the "
        "bound: encode_batch 4")


def test_a_latency_that_is_not_known_is_not_shown() -> None:
    assert "latency" not in rejected("policy rra: encode_batch 4", 2.0, None)


def test_without_alternatives_or_sentences_there_is_nothing_to_show() -> None:
    assert choice_table(fake_schedule(rejected=(), explanation=())) == ""


def test_the_margin_and_its_cost_are_shown() -> None:
    assert margin_words(fake_schedule()).endswith("; the margin costs 4.1 % of the throughput")
    assert "costs nothing" in margin_words(fake_schedule(margin_cost=0.0))
    of_job = fake_schedule(margin_cost=0.0, status=Status.JOB)
    assert margin_words(of_job) == of_job.margin.note, "by its time, which is not compared"
    note = "no margin: lengths are given and taken as true"
    assert margin_words(fake_schedule(margin=1.0, margin_note=note)) == note
    assert "margin       planned for 28.2 s" in schedule_table(fake_schedule())
    assert "\nmargin" not in schedule_table(fake_schedule(margin_note=""))


def test_boxes_given_up_are_counted_by_reason_over_policies() -> None:
    assert pruned_words(fake_schedule()) == (
        "1,212 groups of configurations: 1,200 expected to be no better, 12 without room")
    assert pruned_words(fake_schedule(pruned=(("so it is", 1),))) == (
        "1 group of configurations: 1 so it is")
    assert "ruled out" not in schedule_table(fake_schedule(pruned=()))


@pytest.mark.parametrize(("changes", "expected"), [
    ({}, "optimal, gap 1.30 %, 214 configurations in 380 ms"),
    ({"status": "within gap", "margin": Margin(factor=1.065)},
     "within gap 1.30 %, 214 configurations"),
    ({"status": "within gap"}, "within gap 1.30 % (to schedules with no margin of their own), 214"),
    ({"status": "within gap", "gap": 1.2, "bound_qps": 33.0, "bare_qps": 30.0},
     "within gap 120.00 % (to schedules with no margin of their own: the best seen of those has "
     "30.0 queries/s, which leaves 10.00 % open; the rest is the margin), 214"),
    ({"status": "stopped at its limit"}, "stopped at its limit, gap 1.30 %, 214"),
    ({"status": "stopped at its limit", "gap": math.inf}, "limit, no gap proved, 214"),
])
def test_the_status_and_the_gap_are_one_statement(changes: dict[str, object],
                                                  expected: str) -> None:
    assert expected in joined(schedule_table(fake_schedule().changed(**changes)))


def test_a_query_s_own_times_are_shown_where_they_are_known() -> None:
    shown = joined(schedule_table(fake_schedule().changed(ttft_s=1.5, tpot_s=0.02)))
    assert "one query first token 1.50 s after its encoding begins, then a token every" in shown
    alone = joined(schedule_table(fake_schedule().changed(ttft_s=1.5, tpot_s=0.0)))
    assert "begins (of the output length that 99 % keep to)" in alone
    assert "one query" not in schedule_table(fake_schedule().changed(ttft_s=None))
