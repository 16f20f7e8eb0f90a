"""The screen of a plan: whose times, and comparisons of what was searched."""

import re
from functools import cache

import pytest

import xgpt
from xgpt.app.schedule import Plan


@cache
def planned(cluster: str, engine: str | None = None) -> Plan:
    """A plan of a model that one GPU holds, by one of three policies."""
    return xgpt.plan(xgpt.load({
        "model": "opt-1.3b", "cluster": cluster, "schedule": {"policy": ["rra", "sarathi", "ft"]},
        "workload": {"task": "S", "requests": {"count": 400}}, "plan": {"engine": engine}}))


@pytest.mark.parametrize(("cluster", "engine", "words"), [
    ("1xH100", None, r"vLLM on H100, by data sheets; \d+ published "
     r"runs: \d+% off in the mean"),
    ("1xH100", "xgpt", "xgpt's own runner on H100, by data sheets; never "
     "compared with a run"),
    ("1xH100", "vllm-0.32", r"vLLM 0.32 on H100, by data sheets and constants of vllm; never "
     r"compared with a run; of vllm \d+ published runs: \d+% off in the mean"),
    ("2xA40", None, "never compared with a run, and never run on several GPUs")])
def test_a_plan_says_whose_times_it_has_and_how_far_off_those_were(cluster, engine, words):
    shown = " ".join(str(planned(cluster, engine)).split())
    assert re.search(words, shown), shown


def test_other_engines_times_of_the_same_schedule_are_shown_where_they_differ():
    plan = planned("1xH100")
    shown = dict(plan.by_engine)
    assert "vLLM with fp8 weights" in str(plan) and shown
    own = plan.prediction
    assert own is not None
    assert all(abs(seconds / own.wall_s - 1) > 0.05 for seconds in shown.values())


def test_alternatives_have_a_range_and_no_percentage():
    """Their searches end once they cannot win: what was found, and an upper bound."""
    screen = str(planned("2xA40"))
    table = screen[screen.index("alternative "):]
    assert "requests/s found  upper bound" in table and "%" not in table
    for line in table.splitlines()[2:]:
        if found := re.match(r"(RRA|Sarathi|FT) +([\d.]+) +([\d.]+) ", line):
            assert float(found[2]) <= float(found[3])
