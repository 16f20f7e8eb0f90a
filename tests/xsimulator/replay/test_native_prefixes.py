"""Native replays share prefixes as the rules do, to the bit."""

from dataclasses import replace

import numpy as np
import pytest
from both_replays import LONGEST, PAGED, RULES, drawn, same_both_ways, tight_of
from compiled import has_compiler

from xgpt.core.controls import ADMISSION_RULES, Admission, Forecasting
from xgpt.core.errors import XgptError
from xgpt.core.prefixes import Prefixes
from xrunner.rules.forecast import forecaster_of
from xrunner.rules.paged import ENCODINGS, PagedRule
from xrunner.rules.prefixes import set_prefixes
from xrunner.rules.steps import set_forecaster
from xsimulator import native
from xsimulator.replay import native_replay
from xsimulator.replay.job import Replayer

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no compiler")

FORECASTS = (Forecasting(), Forecasting(kind="known"), Forecasting(kind="mean", bins=3),
             Forecasting(kind="distribution", use="least"))


def forest_of(rng, size):
    """A forest of up to four levels, whose requests come mostly in runs, as in a sorted job."""
    parents, ends, levels = [], [], []
    for node in range(int(rng.integers(1, 30))):
        parent = int(rng.integers(node)) if node and rng.random() < 0.6 else -1
        if parent >= 0 and (levels[parent] > 2 or ends[parent] > 140):
            parent = -1
        parents.append(parent)
        levels.append(levels[parent] + 1 if parent >= 0 else 0)
        ends.append((ends[parent] if parent >= 0 else 0) + int(rng.integers(1, 60)))
    nodes = rng.integers(-1, len(ends), size)
    if rng.random() < 0.7:
        nodes.sort()
        some = rng.random(size) < 0.2
        nodes[some] = rng.permutation(nodes[some])
    return Prefixes(parents=np.array(parents), ends=np.array(ends), nodes=nodes,
                    block_tokens=int(rng.choice([1, 16, 128])), is_whole=bool(rng.random() < 0.2))


def with_prefixes(rng, queries):
    """Requests with prefixes and short parts of their own."""
    size = len(queries.inputs)
    prefixes = forest_of(rng, size)
    inputs = prefixes.shared + rng.integers(1, 60, size)
    outputs = np.minimum(queries.outputs, LONGEST - inputs)
    most = np.minimum(outputs + rng.integers(0, 40), LONGEST - inputs)
    return replace(queries, inputs=inputs, outputs=outputs, most_outputs=most, prefixes=prefixes)


def sharing(seed, name, admission):
    """(problem, timing, estimate, lengths), and a function that makes the rule of a job with shared
    prefixes."""
    rng = np.random.default_rng(seed)
    problem, timing, estimate, queries = drawn(
        rng, "opt-13b", "rra", (20, 160), encode_batch=4, decode_iterations=9)
    queries = with_prefixes(rng, queries)
    estimate = replace(estimate, controls=replace(estimate.controls, admission=admission))

    def make():
        rule = tight_of(name, np.random.default_rng(seed), queries.inputs.mean(), admission)
        set_forecaster(rule, forecaster_of(problem, admission.forecast))
        set_prefixes(rule, queries.prefixes)
        return rule

    return (problem, timing, estimate), queries, make


@pytest.mark.parametrize("rule_name", ADMISSION_RULES)
@pytest.mark.parametrize("name", [*RULES, *PAGED])
def test_prefixes_are_shared_the_same_both_ways(monkeypatch, name, rule_name):
    evicted, seen = 0, set()
    for seed in range(12):
        admission = Admission(rule=rule_name, forecast=FORECASTS[seed % len(FORECASTS)],
                              after_free=bool(seed % 2))
        job, queries, make = sharing(seed, name, admission)
        quick = same_both_ways(monkeypatch, lambda job=job, queries=queries, make=make: Replayer(
            *job).run(queries, rules=[make()]))
        assert quick.pools[0].memory_tokens.max() <= make().rooms.budget.tokens
        assert not np.isnan(quick.times.last_token_s).any()
        evicted += quick.preemptions
        seen |= what_happened(quick.pools[0].steps, queries)
    assert evicted or rule_name in ("reserve", "reserve-static")
    # ORCA begins one request a step
    wanted = {"in a block", "written again", *["within the step"] * (name != "orca")}
    assert seen == wanted, seen


def what_happened(steps, queries):
    """Which of the rarer things happen in these steps."""
    seen, written = set(), set()
    ends, size = queries.prefixes.ends, queries.prefixes.block_tokens
    for step in steps:
        now = {node for start in step.starts for node, _ in start.writes}
        if now & written:
            seen.add("written again")
        written |= now
        for start in step.starts:
            if start.node in now:
                seen.add("within the step")
            elif start.node >= 0 and start.first == ends[start.node] and start.first % size:
                seen.add("in a block")
    return seen


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_requests_that_fit_only_without_their_prefixes_share_none(monkeypatch, encoding):
    job, queries, _ = sharing(5, "vllm", Admission())
    queries = replace(queries, most_outputs=np.where(
        np.arange(len(queries.inputs)) % 2, queries.most_outputs, LONGEST - queries.inputs))

    def replayed():
        rule = PagedRule(encoding=encoding, num_groups=1, max_active=9, kv_tokens=LONGEST,
                         token_budget=400)
        set_prefixes(rule, queries.prefixes)
        return Replayer(*job).run(queries, rules=[rule])

    steps = same_both_ways(monkeypatch, replayed).pools[0].steps
    begun = np.unique([start.query for step in steps for start in step.starts])
    assert 0 < len(begun) < (queries.prefixes.nodes >= 0).sum()


@pytest.mark.parametrize(("policy", "controls"), [
    ("rra", {"encode_batch": 9, "decode_iterations": 5, "encode_chunk": 0}),
    ("rra", {"encode_batch": 9, "decode_iterations": 5, "encode_chunk": 40}),
    ("orca", {"max_active": 30}), ("vllm", {"max_active": 30, "token_budget": 400}),
    ("sarathi", {"max_active": 30, "token_budget": 64})])
def test_times_without_steps_are_those_with_steps(policy, controls):
    for seed in range(3):
        rng = np.random.default_rng(seed)
        *job, queries = drawn(rng, "opt-13b", policy, (60, 160), **controls)
        queries = with_prefixes(rng, queries)
        result = Replayer(*job).run(queries)
        bare = Replayer(*job, has_steps=False).run(queries)
        assert not bare.pools and any(step.starts for step in result.pools[0].steps)
        np.testing.assert_array_equal(bare.times.last_token_s, result.times.last_token_s)
        apart = Replayer(*job).run(replace(queries, prefixes=None))
        assert result.pools[0].tokens.sum() < apart.pools[0].tokens.sum()


def test_a_request_whose_own_part_never_fits_is_named_in_the_same_words(monkeypatch):
    job, queries, make = sharing(3, "orca", Admission())
    queries.inputs[5] = make().rooms.budget.tokens
    words = []
    for library in (native.native(), None):
        monkeypatch.setattr(native_replay, "native", lambda library=library: library)
        with pytest.raises(XgptError, match="request 5 reserves") as refusal:
            Replayer(*job).run(queries, rules=[make()])
        words.append(str(refusal.value))
    assert words[0] == words[1]
