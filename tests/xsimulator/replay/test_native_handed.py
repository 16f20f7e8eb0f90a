"""Replays of WAA's two pools by csrc/replay/replay.cpp are those of the event kernel and the
rules themselves, to the bit."""

from __future__ import annotations

from collections import Counter
from functools import partial

import numpy as np
import pytest
from problems import TakenAsTrue, problem_of
from replayed_both_ways import assert_names_one_that_never_fits, same_both_ways

from xgpt.core.errors import XgptError
from xgpt.core.job import FixedSchedule
from xgpt.core.lengths import joint_empirical
from xgpt.core.queries import QueryLengths
from xprofiler.timing import Operator, TimingFacts
from xrunner.rules.batch_sizer import BatchSizer
from xrunner.rules.steps import StepKind
from xrunner.rules.taken import DecodeAim
from xrunner.rules.waa import WaaDecodeRule, WaaEncodeRule
from xsimulator import native
from xsimulator.replay import native_replay
from xsimulator.replay.job import Replayer, replay_job
from xsimulator.rough.forms import fixed_estimate

LONGEST = 320  # tokens of a query with its output
PLANS = {"opt-13b": ("a40-4", [(1, 0), (2, 4)]), "t5-11b": ("a40-8", [(1, 0), (2, 4), (4, 8)]),
         "gpt3-39b": ("a40-16", [(1, 0), (2, 8)])}

pytestmark = pytest.mark.skipif(native.native() is None, reason="there is no compiler")


class Times(TakenAsTrue):
    """The roofline's, in whole units of `unit` (0: as they are), so that events of both pools come
    at one time; infinite beyond `most` rows, and refused beyond `refused`."""

    unit, most, refused = 0.0, np.inf, np.inf

    def operator_s(self, operator, x, y=0.0, *, tp_degree=1):
        if operator is Operator.DECODE_ATTENTION and np.max(x) > self.refused:
            raise XgptError("nobody knows")
        seconds = self._whole(super().operator_s(operator, x, y, tp_degree=tp_degree))
        return np.where(np.asarray(x) > self.most, np.inf, seconds)

    def message_s(self, kind, num_bytes, link, *, tp_degree=1):
        return self._whole(super().message_s(kind, num_bytes, link, tp_degree=tp_degree))

    def _whole(self, seconds):
        return np.ceil(seconds / self.unit) * self.unit if self.unit else seconds


def job_of(rng, model):
    """(problem, timing, estimate, queries) of a job of few queries, or of some."""
    cluster, plans = PLANS[model]
    size = int(rng.integers(1, 12) if rng.random() < 0.2 else rng.integers(20, 160))
    inputs, outputs = rng.integers(1, 200, size), rng.integers(1, LONGEST - 200, size)
    outputs[rng.random(size) < rng.choice([0.0, 0.2, 0.9])] = 1
    problem = problem_of(model, cluster, joint_empirical(np.stack([inputs, outputs], axis=1)))
    timing = Times(problem.model, problem.cluster.device, problem.dtype)
    timing.facts = TimingFacts(step_overhead_s=rng.choice([0.0, 2.0**-10]),
                               is_padded=bool(rng.random() < 0.3))
    timing.unit = rng.choice([0.0, 2.0**-9])
    degree, gpus = plans[rng.integers(len(plans))]
    estimate = fixed_estimate(str(rng.choice(["waa-c", "waa-m"])), problem, timing, FixedSchedule(
        encode_batch=int(rng.integers(1, 20)), decode_micro_batches=int(rng.integers(1, 3)),
        tp_degree=degree, tp_gpus=gpus))
    return problem, timing, estimate, QueryLengths(inputs=inputs, outputs=outputs,
                                                   most_outputs=outputs)


def rules_of(rng, mean_input, *, has_chunks):
    """Makes the same pair again and again: with much room or hardly any, and all aims."""
    batch, groups, in_system = (int(rng.integers(1, most)) for most in (25, 6, 120))
    kv_tokens, encode_kv = (int(rng.integers(LONGEST, most)) for most in (9000, 3000))
    sizer = BatchSizer(mean_input=mean_input, adjustment=rng.choice([0.0, 0.05, 0.2]))
    planned = int(rng.integers(1, 60)) * has_chunks
    aim = DecodeAim(target_active=float(rng.choice([0.0, rng.uniform(0.5, 40.0)])),
                    planned_active=planned, stock_tokens=int(rng.integers(1, 900)) * has_chunks)
    under_way, chunk = int(rng.integers(1, 4)), int(rng.integers(1, 300)) * has_chunks
    begins = int(rng.choice([0, planned]))
    return lambda: [
        WaaEncodeRule(encode_batch=batch, num_groups=under_way, max_in_system=in_system,
                      kv_tokens=kv_tokens, encode_kv_tokens=encode_kv, sizer=sizer, aim=aim),
        WaaDecodeRule(num_groups=groups, group_max_active=-(-in_system // groups),
                      kv_tokens=kv_tokens, encode_chunk=chunk, planned_active=begins)]


@pytest.mark.parametrize("has_chunks", [False, True], ids=["whole", "chunks"])
@pytest.mark.parametrize("model", list(PLANS))
def test_a_replay_is_that_of_the_rules(monkeypatch, model, has_chunks):
    kinds: Counter[StepKind] = Counter()
    for seed in range(16):
        rng = np.random.default_rng(seed)
        problem, timing, estimate, queries = job_of(rng, model)
        rules = rules_of(rng, float(queries.inputs.mean()), has_chunks=has_chunks)
        arrival_s = rng.choice([0.0, 2.0**-7, 0.5]) * rng.integers(0, 9, len(queries.inputs))
        replayed = partial(Replayer(problem, timing, estimate).run, queries, arrival_s=arrival_s)
        quick = same_both_ways(monkeypatch, lambda replayed=replayed, rules=rules:
                               replayed(rules=rules()))
        kinds.update(step.kind for step in quick.pools[1].steps)
    assert len(kinds) == (3 if has_chunks else 1) and min(kinds.values()) > 10, kinds


def test_a_job_is_replayed_the_same_by_an_estimates_own_rules(monkeypatch):
    for seed in range(12):
        given = job_of(np.random.default_rng(seed), ("opt-13b", "t5-11b")[seed % 2])
        same_both_ways(monkeypatch, lambda given=given: replay_job(*given),)


def test_sizes_beyond_the_dense_rows_take_the_same(monkeypatch):
    rng = np.random.default_rng(3)
    problem, timing, estimate, _ = job_of(rng, "opt-13b")
    size = 400
    queries = QueryLengths(inputs=rng.integers(1, 200, size), outputs=rng.integers(2, 99, size),
                           most_outputs=np.full(size, 99))
    quick = same_both_ways(monkeypatch, lambda: replay_job(
        problem, timing, estimate, queries, rules=[
            WaaEncodeRule(encode_batch=70, num_groups=1, max_in_system=size, kv_tokens=10**6,
                          encode_kv_tokens=10**6, sizer=BatchSizer(mean_input=100.0)),
            WaaDecodeRule(num_groups=1, group_max_active=size, kv_tokens=10**6)]))
    assert quick.pools[0].tokens.max() > 4096


def test_what_is_larger_than_any_that_was_timed_never_ends_either_way(monkeypatch):
    problem, timing, estimate, queries = job_of(np.random.default_rng(0), "opt-13b")
    timing.most = 5.0
    replayed = replay_job(problem, timing, estimate, queries)
    monkeypatch.setattr(native_replay, "native", lambda: None)
    by_rule = replay_job(problem, timing, estimate, queries)
    assert not replayed.is_timed and not by_rule.is_timed
    np.testing.assert_array_equal(replayed.times.last_token_s, by_rule.times.last_token_s)


def test_what_a_table_refuses_is_refused_in_its_words():
    problem, timing, estimate, queries = job_of(np.random.default_rng(0), "opt-13b")
    timing.refused = 0.0
    with pytest.raises(XgptError, match="nobody knows"):
        replay_job(problem, timing, estimate, queries)


def test_a_query_that_never_fits_is_named(monkeypatch):
    job = job_of(np.random.default_rng(5), "opt-13b")
    assert_names_one_that_never_fits(monkeypatch, job)
