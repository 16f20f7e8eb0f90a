"""Words and figures on shared prefixes: on the screens of a plan and of a run, and of a report."""

from dataclasses import replace

import numpy as np
import pytest
from problems import estimate_of, roofline_of, schedule_of, uniform_problem

from xgpt.core.lengths import joint_empirical
from xgpt.core.prefixes import Prefixes
from xgpt.core.problem import QueryLengths
from xgpt.core.schedule import Reordered
from xgpt.report.figures import comparisons
from xgpt.report.plan_screen import PlanTimes, plan_screen
from xgpt.report.prefix_words import prefix_figures, prefix_lines
from xscheduler.evaluator import predict

DOCUMENTS, QUESTIONS, TOKENS, OWN = 10, 20, 1500, 30


def problem_with(nodes):
    """Questions on documents of `nodes`, one a question; 8 tokens each are answered."""
    inputs, outputs = np.full(len(nodes), TOKENS + OWN), np.full(len(nodes), 8)
    prefixes = Prefixes(parents=np.full(DOCUMENTS, -1), ends=np.full(DOCUMENTS, TOKENS),
                        nodes=np.asarray(nodes), block_tokens=16)
    known = QueryLengths(inputs=inputs, most_outputs=outputs, outputs=outputs, prefixes=prefixes)
    of = uniform_problem("llama-3.1-8b", "H100", 1, joint_empirical(
        np.stack([inputs, outputs], axis=1)))
    return replace(of, num_queries=len(nodes), queries=known)


ONE_BY_ONE = np.repeat(np.arange(DOCUMENTS), QUESTIONS)


def lines_of(of, order="input", reordered=None, policy="rra", **kv):
    """Lines on a schedule that encodes ten requests together."""
    more = {"decode_iterations": 8} if policy == "rra" else {"decode_micro_batches": 1}
    estimate = estimate_of(of, policy, encode_batch=10, **more).changed(**kv)
    schedule = replace(schedule_of(of, estimate), order=order, reordered=reordered)
    return prefix_lines(of, schedule, predict(of, roofline_of(of), estimate), roofline_of(of))


def test_what_is_shared_and_what_it_saves():
    (line,) = lines_of(problem_with(ONE_BY_ONE))
    start = ("93 % of 306,000 input tokens are shared: 10 prefixes of 1,500 tokens, each encoded "
             "once; ")
    assert line.startswith(start)
    gain, *words = line.removeprefix(start).split()
    assert 2 < float(gain) < 15 and " ".join(words) == "x as fast as this schedule without sharing"
    (line,) = lines_of(replace(problem_with(ONE_BY_ONE), num_queries=None))
    assert line == "93 % of the input tokens are shared: 10 prefixes of 1,500 tokens"


def test_documents_that_the_cache_cannot_keep_are_encoded_again():
    turns = problem_with(np.tile(np.arange(DOCUMENTS), QUESTIONS))
    assert "are encoded again" in lines_of(turns, kv_tokens=4 * TOKENS)[0]
    cost = Reordered(first_s=40.0, input_first_s=2.0, input_saved=0.45)
    sharing, order = lines_of(problem_with(ONE_BY_ONE), order="prefix", reordered=cost)
    assert "each encoded once" in sharing
    assert order == ("order prefix, window job: first results after 40.0 s (2.00 s in the input's "
                     "order, which would save 45 %)")
    assert lines_of(turns, order="blend")[1] == "order blend, window job"
    plan = replace(schedule_of(turns), order="prefix")
    shown = plan_screen(plan, turns, PlanTimes(source="", expected=None, sharing=(sharing, order)),
                        "job.yaml", is_here=True)
    assert "\nprefixes     93 % of" in shown and "order prefix, window job: first" in shown
    assert "\norder" not in shown, "it is said once"


@pytest.mark.parametrize("policy", ["ft", "rra"])
def test_there_are_no_words_where_nothing_is_shared(policy):
    of = problem_with(ONE_BY_ONE)
    known = of.queries if policy == "ft" else replace(of.queries, prefixes=None)
    assert lines_of(replace(of, queries=known), policy=policy) == []


def test_a_run_tells_its_tokens_beside_those_that_were_expected():
    of, own = problem_with(ONE_BY_ONE), {
        "prefixes": 10, "input_tokens": 306_000, "encoded_tokens": 22_000,
        "shared_tokens": 285_000, "encoded_again_tokens": 1_000}
    expected = predict(of, roofline_of(of), estimate_of(of, encode_batch=2, decode_iterations=8))
    whole = {"state": "done", "queries_before": 0, "prefixes": own}
    found = prefix_figures(of, whole, expected)["prefixes"]
    assert found["prefixes"] == 10 and found["shared_tokens"] == {
        "measured": 285_000, "predicted": 285_000}
    once = found["encoded_tokens"]["predicted"] - found["encoded_again_tokens"]["predicted"]
    assert once == 21_000, "10 documents and 200 questions"
    rows = {row.label: row for row in comparisons({"prefixes": found})}
    assert rows["Input tokens encoded"].measured == "22,000 tokens"
    assert rows["Input tokens shared"].predicted == "285,000 tokens"
    rest = prefix_figures(of, {**whole, "queries_before": 3}, expected)["prefixes"]
    assert rest["encoded_tokens"] == {"measured": 22_000, "predicted": None}
    assert prefix_figures(of, {**whole, "prefixes": None}, expected) == {}
