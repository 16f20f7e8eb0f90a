"""Replays by csrc/replay/replay.cpp equal those of the event kernel and the rules to the bit: of
static batches, of rules that admit by rooms, with paged KV or without, and of WAA's two pools."""

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from both_replays import LONGEST, PAGED, PLANS, RULES, arriving, drawn, same_both_ways
from compiled import has_compiler

from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import Admission, Batches
from xgpt.core.errors import XgptError
from xgpt.core.problem import QueryLengths
from xprofiler.timing import TimingFacts
from xrunner.rules.batch_sizer import BatchSizer
from xrunner.rules.static import StaticRule
from xrunner.rules.steps import StepKind
from xrunner.rules.waa import SystemLimits, WaaDecodeRule, WaaEncodeRule
from xsimulator import native
from xsimulator.replay import native_replay
from xsimulator.replay.job import Replayer, replay_job
from xsimulator.replay.steady_replay import steady_replay
from xsimulator.replay.steady_state import steady_figures

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no compiler")


# --- one pool ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("model", ["opt-13b", "t5-11b"])
def test_static_batches(monkeypatch, model, is_padded):
    steps = batches = 0
    facts = TimingFacts(step_overhead_s=2.0**-10, is_padded=True) if is_padded else None
    for seed in range(40):
        rng = np.random.default_rng(seed)
        job = drawn(rng, model, "ft", (1, 120), of_one=rng.choice([0.1, 0.9, 1.0]), facts=facts,
                    encode_batch=4, decode_micro_batches=1)
        queries = replace(job[-1], most_outputs=np.minimum(
            job[-1].outputs + rng.integers(0, 40), LONGEST - job[-1].inputs))
        if rng.random() < 0.5:
            queries = replace(queries, forecasts=np.repeat(queries.outputs[:, None], 3, axis=1))
        arrival_s = arriving(rng, job[1], len(queries.inputs))
        if static_of(np.random.default_rng(seed)).former is not None:
            arrival_s = 2.5  # csrc forms batches of all requests at once
        quick = same_both_ways(monkeypatch, lambda job=job, queries=queries, seed=seed,
                               arrival_s=arrival_s: Replayer(*job[:3]).run(
            queries, rules=[static_of(np.random.default_rng(seed))], arrival_s=arrival_s))
        steps += len(quick.pools[0].steps)
        batches += quick.pools[0].steps[-1].phase + 1
    assert batches > 100 and steps > 20 * batches, (steps, batches)


def static_of(rng):
    """A static rule; in some cases a group's share of the cache holds few requests."""
    groups = int(rng.integers(1, 6))
    rule = StaticRule(encode_batch=int(rng.integers(1, 41)), num_groups=groups,
                      encode_micro_batches=groups * int(rng.integers(1, 7)),
                      kv_tokens=groups * int(rng.integers(LONGEST, 5000)),
                      batches=batches_of(rng) if rng.random() < 0.6 else None)
    if rule.former is not None:
        rule.former.deadlines_s = rng.uniform(1, 100, 130).tolist()
    return rule


def batches_of(rng):
    """Settings by which static batches are formed."""
    return Batches(most=int(rng.integers(1, 41)), growth=bool(rng.random() < 0.5),
                   threshold=rng.choice([np.inf, 10.0**rng.uniform(1, 4)]),
                   deadline=rng.choice([0.0, 1.0]), length=rng.uniform(0.1, 2),
                   pack=rng.choice([None, int(rng.integers(1, 2000))]))


@pytest.mark.parametrize(("name", "num_kinds"), [("rra", 2), ("chunks", 3), ("orca", 3)])
def test_rules_that_reserve(monkeypatch, name, num_kinds):
    kinds: Counter[StepKind] = Counter()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        job = drawn(rng, ("opt-13b", "t5-11b")[seed % 5 == 4], "rra", (20, 160), encode_batch=4,
                    decode_iterations=9)
        rule = RULES[name](rng, float(job[-1].inputs.mean()))
        arrival_s = arriving(rng, job[1], len(job[-1].inputs))
        quick = same_both_ways(monkeypatch, lambda job=job, rule=rule, arrival_s=arrival_s:
                               Replayer(*job[:3]).run(job[-1], rules=[rule()], arrival_s=arrival_s))
        kinds.update(step.kind for step in quick.pools[0].steps)
    assert len(kinds) == num_kinds and min(kinds.values()) > 60, kinds


def paged_of(policy, rng, model="opt-13b"):
    """A small job whose requests hardly fit."""
    problem, timing, estimate, queries = drawn(
        rng, model, policy, (30, 120), max_active=int(rng.integers(4, 60)),
        token_budget=int(rng.integers(20, 400)))
    (pool,) = estimate.deployment.pools
    kv_tokens = pool.num_groups * int(rng.integers(330, 1500))
    deployment = replace(estimate.deployment, pools=(replace(pool, kv_tokens=kv_tokens),))
    return problem, timing, replace(estimate, deployment=deployment), queries


@pytest.mark.parametrize("policy", PAGED)
def test_paged_rules(monkeypatch, policy):
    evicted = 0
    for seed in range(18):
        rng = np.random.default_rng(seed)
        job = paged_of(policy, rng, ("opt-13b", "t5-11b")[seed % 3 == 2])
        arrival_s = arriving(rng, job[1], len(job[-1].inputs))
        evicted += same_both_ways(monkeypatch, lambda job=job, arrival_s=arrival_s: Replayer(
            *job[:3]).run(job[-1], arrival_s=arrival_s)).preemptions
    assert evicted > 20 or policy == "lightllm", "else there was room for all"


# --- two pools --------------------------------------------------------------------------------


def waa_of(rng, model):
    """A job of few requests."""
    cluster = {"opt-13b": "a40-4", "t5-11b": "a40-8", "gpt3-39b": "a40-16"}[model]
    job = drawn(rng, model, str(rng.choice(["waa-c", "waa-m"])),
                (1, 12) if rng.random() < 0.2 else (20, 160), cluster=cluster,
                of_one=rng.choice([0.0, 0.2, 0.9]), facts=TimingFacts(
                    step_overhead_s=rng.choice([0.0, 2.0**-10]),
                    is_padded=bool(rng.random() < 0.3)), plans=PLANS[cluster][:2 + (
                        cluster == "a40-8")], encode_batch=int(rng.integers(1, 20)),
                decode_micro_batches=int(rng.integers(1, 3)))
    job[1].unit = rng.choice([0.0, 2.0**-9])
    return job


def waa_rules_of(rng, mean_input, *, has_chunks):
    """A function that makes the same pair of rules each time, with much memory or hardly any."""
    batch, groups, in_system = (int(rng.integers(1, most)) for most in (25, 6, 120))
    kv_tokens, encode_kv = (int(rng.integers(LONGEST, most)) for most in (9000, 3000))
    sizer = BatchSizer(mean_input=mean_input, adjustment=rng.choice([0.0, 0.05, 0.2]))
    planned = int(rng.integers(1, 60)) * has_chunks
    limits = SystemLimits(
        encode_batch=batch, max_in_system=in_system,
        target_active=float(rng.choice([0.0, rng.uniform(0.5, 40.0)])),
        planned_active=planned, stock_tokens=int(rng.integers(1, 900)) * has_chunks)
    admission = Admission(rule=str(rng.choice(["reserve", "future-peak"])))
    under_way, chunk = int(rng.integers(1, 4)), int(rng.integers(1, 300)) * has_chunks
    begins = int(rng.choice([0, planned]))
    return lambda: [
        WaaEncodeRule(limits, num_groups=under_way, kv_tokens=kv_tokens,
                      encode_kv_tokens=encode_kv, sizer=sizer, admission=admission),
        WaaDecodeRule(num_groups=groups, group_max_active=-(-in_system // groups),
                      kv_tokens=kv_tokens, encode_chunk=chunk, planned_active=begins,
                      admission=admission)]


@pytest.mark.parametrize("has_chunks", [False, True], ids=["whole", "chunks"])
@pytest.mark.parametrize("model", ["opt-13b", "t5-11b", "gpt3-39b"])
def test_two_pools(monkeypatch, model, has_chunks):
    kinds: Counter[StepKind] = Counter()
    for seed in range(16):
        rng = np.random.default_rng(seed)
        *job, queries = waa_of(rng, model)
        rules = waa_rules_of(rng, float(queries.inputs.mean()), has_chunks=has_chunks)
        arrival_s = rng.choice([0.0, 2.0**-7, 0.5]) * rng.integers(0, 9, len(queries.inputs))
        replayed = partial(Replayer(*job).run, queries, arrival_s=arrival_s)
        quick = same_both_ways(monkeypatch, lambda replayed=replayed, rules=rules:
                               replayed(rules=rules()))
        kinds.update(step.kind for step in quick.pools[1].steps)
    assert len(kinds) == (3 if has_chunks else 1) and min(kinds.values()) > 10, kinds


def test_a_job_is_replayed_the_same_by_an_estimates_own_rules(monkeypatch):
    for seed in range(12):
        job = waa_of(np.random.default_rng(seed), ("opt-13b", "t5-11b")[seed % 2])
        same_both_ways(monkeypatch, lambda job=job: replay_job(*job))


def test_sizes_beyond_the_dense_rows_take_the_same(monkeypatch):
    rng = np.random.default_rng(3)
    job, size = waa_of(rng, "opt-13b")[:3], 400
    queries = QueryLengths(inputs=rng.integers(1, 200, size), outputs=rng.integers(2, 99, size),
                           most_outputs=np.full(size, 99))
    quick = same_both_ways(monkeypatch, lambda: replay_job(*job, queries, rules=[
        WaaEncodeRule(SystemLimits(encode_batch=70, max_in_system=size), num_groups=1,
                      kv_tokens=10**6, encode_kv_tokens=10**6, sizer=BatchSizer(mean_input=100.0)),
        WaaDecodeRule(num_groups=1, group_max_active=size, kv_tokens=10**6)]))
    assert quick.pools[0].tokens.max() > 4096


# --- without steps ----------------------------------------------------------------------------

CONTROLS = {  # by policy: of a generator's sizes
    "ft": lambda size: {"encode_batch": size(20), "decode_micro_batches": size(3)},
    "rra": lambda size: {"encode_batch": size(30), "decode_iterations": size(40),
                         "encode_chunk": 0},
    "chunks": lambda size: {"encode_batch": size(30), "decode_iterations": size(40),
                            "encode_chunk": size(80) + 10},
    "orca": lambda size: {"max_active": size(60) + 3},
    "vllm": lambda size: {"max_active": size(60) + 3, "token_budget": size(300) + 320},
    "waa-c": lambda size: {"encode_batch": size(4), "decode_micro_batches": size(3)}}
CONTROLS |= {"dsi": CONTROLS["ft"], "sarathi": CONTROLS["vllm"], "waa-m": CONTROLS["waa-c"]}


def are_same(found, other):
    if found is None or other is None:
        return found is other
    return all(np.allclose(getattr(found, name), getattr(other, name), rtol=1e-9, atol=0,
                           equal_nan=True) for name in found.__dataclass_fields__)


@pytest.mark.parametrize("policy", CONTROLS)
def test_figures_without_steps_are_those_of_the_records(monkeypatch, policy):
    with_figures = 0
    for seed in range(6):
        rng, name = np.random.default_rng(seed), "rra" if policy == "chunks" else policy
        model = "t5-11b" if seed % 3 == 2 and policy not in ("orca", "vllm", "sarathi") else (
            "opt-13b")
        problem, timing, estimate, queries = drawn(
            rng, model, name, (9, 200) if seed < 2 else (200, 300),
            plans=[(1, 0)] if "waa" in policy else None,
            **CONTROLS[policy](lambda most, rng=rng: int(rng.integers(1, most + 1))))
        kind = ("sequence", "queries")[seed % 2]
        constraint = latency_constraint(np.inf, kind=kind, quantile=0.9)
        timing.facts = replace(timing.facts, sharing=(1.0, 1.0, 1.7)[seed % 3])
        result = replay_job(problem, timing, estimate, queries)
        records = steady_figures(result, constraint, problem.lengths.outputs)
        problem = replace(problem, constraint=constraint)
        for is_native in (True, False):
            with monkeypatch.context() as patched:
                if not is_native:
                    patched.setattr(native_replay, "native", lambda: None)
                figures = steady_replay(problem, timing, estimate, queries)
                bare = Replayer(problem, timing, estimate, has_steps=False).run(queries)
            assert are_same(figures, records)
            np.testing.assert_array_equal(bare.times.last_token_s, result.times.last_token_s)
            assert bare.preemptions == result.preemptions and bool(bare.pools) != is_native
        with_figures += records is not None
    assert with_figures, "else nothing is compared"


@pytest.mark.parametrize(("policy", "config"), [
    ("sarathi", {"max_active": 40, "token_budget": 64}),
    ("vllm", {"max_active": 40, "token_budget": 6000}),
    ("rra", {"encode_batch": 60, "decode_iterations": 9}),
    ("ft", {"encode_batch": 80, "decode_micro_batches": 2}),
    ("waa-m", {"encode_batch": 9, "decode_micro_batches": 1})])
def test_steps_beyond_the_timed_sizes_have_no_figures(policy, config):
    problem, timing, estimate, queries = drawn(
        np.random.default_rng(1), "opt-13b", policy, (150, 151), plans=[(1, 0)], **config)
    timing.most = 90.0
    assert Replayer(problem, timing, estimate).native(queries) is not None
    assert steady_replay(problem, timing, estimate, queries) is None


# --- what is refused --------------------------------------------------------------------------


def test_steps_beyond_the_timed_sizes_never_end(monkeypatch):
    job = waa_of(np.random.default_rng(0), "opt-13b")
    job[1].most = 5.0
    replayed = replay_job(*job)
    monkeypatch.setattr(native_replay, "native", lambda: None)
    by_rule = replay_job(*job)
    assert not replayed.is_timed and not by_rule.is_timed
    np.testing.assert_array_equal(replayed.times.last_token_s, by_rule.times.last_token_s)


def test_what_a_table_refuses_is_refused_in_its_words():
    job = waa_of(np.random.default_rng(0), "opt-13b")
    job[1].refused = 0.0
    with pytest.raises(XgptError, match="nobody knows"):
        replay_job(*job)


@pytest.mark.parametrize("policy", ["waa", "paged", "rra", "static"])
def test_a_request_that_never_fits_is_named_in_the_same_words(monkeypatch, policy):
    rng, rules = np.random.default_rng(5), None
    if policy == "static":
        job, rules = drawn(rng, "opt-13b", "ft", (9, 120), encode_batch=4,
                           decode_micro_batches=1), lambda: [static_of(np.random.default_rng(1))]
    else:
        job = {"waa": lambda: waa_of(rng, "opt-13b"), "paged": lambda: paged_of("sarathi", rng),
               "rra": lambda: drawn(rng, "opt-13b", "rra", (20, 160), encode_batch=4,
                                    decode_iterations=9)}[policy]()
    inputs, words = job[-1].inputs.copy(), []
    inputs[3] = 9000 if rules else job[2].deployment.kv_tokens + 1
    queries = replace(job[-1], inputs=inputs)
    for library in (native.native(), None):
        monkeypatch.setattr(native_replay, "native", lambda library=library: library)
        with pytest.raises(XgptError, match="request 3 reserves") as refusal:
            replay_job(*job[:3], queries, rules=rules() if rules else None)
        words.append(str(refusal.value))
    assert words[0] == words[1]
