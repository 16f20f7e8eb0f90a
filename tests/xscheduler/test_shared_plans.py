"""Plans of jobs whose requests share prefixes: Llama-3.1-8B on H100 by the roofline."""

import math
from dataclasses import replace

import numpy as np
import pytest
from problems import roofline_of, uniform_problem

from xgpt.core.controls import Adjustment, FixedSchedule
from xgpt.core.lengths import joint_empirical
from xgpt.core.prefixes import Prefixes
from xgpt.core.problem import Problem, QueryLengths
from xrunner.rules.rra import most_active
from xscheduler.cache_sizing import kv_tokens_for
from xscheduler.drift import drift_rows
from xscheduler.evaluator import predict
from xscheduler.planner import PlanOptions
from xscheduler.planner import plan as planned
from xscheduler.replays import Replays
from xsimulator.bound import UpperBound
from xsimulator.memory import capacity_bytes
from xsimulator.replay.prediction import num_checked_queries
from xsimulator.roofline_limit import num_surely_late
from xsimulator.rough.formulas import Formulas
from xsimulator.sharing import repeated

SCATTER = 1.01  # of a replay's throughput over seeds
SHARING = ("rra", "orca", "vllm", "sarathi")


def problem_of(prefixes, own, outputs, *, policies=(), order="input", devices=1,
               head_rows=1.0) -> Problem:
    """`own`: tokens of each input behind its prefix. `outputs`: of each request, all known."""
    inputs = prefixes.shared + np.asarray(own)
    outputs = np.broadcast_to(outputs, inputs.shape).astype(int)
    problem = uniform_problem(
        "llama-3.1-8b", "H100", devices, joint_empirical(np.stack([inputs, outputs], axis=1)),
        fixed=FixedSchedule(policies=policies))
    return replace(problem, num_queries=len(inputs), adjustment=Adjustment(order=order),
                   head_rows=head_rows, queries=QueryLengths(
                       inputs=inputs, most_outputs=outputs, outputs=outputs, prefixes=prefixes))


def grouped(ends, each) -> Prefixes:
    """`each` requests of every prefix, one prefix after the other."""
    ends = np.asarray(ends)
    return Prefixes(parents=np.full(len(ends), -1), ends=ends, block_tokens=16,
                    nodes=np.repeat(np.arange(len(ends)), each))


def drawn_forest(rng, most_tokens=400) -> Prefixes:
    nodes, count = int(rng.integers(1, 60)), int(rng.integers(50, 3000))
    parents = np.array([-1, *(rng.integers(-1, node) for node in range(1, nodes))])
    ends = rng.integers(20, most_tokens, nodes)
    for node in np.flatnonzero(parents >= 0):
        ends[node] += ends[parents[node]]
    return Prefixes(parents=parents, ends=ends, nodes=rng.integers(-1, nodes, count),
                    block_tokens=16)


def job(name, **kwargs) -> Problem:
    """A job of the issue's table."""
    rng = np.random.default_rng(1)

    def around(mean, count):
        return np.maximum(rng.normal(mean, 0.2 * mean, count), 1).round().astype(int)

    documents = grouped([3000] * 50, 20)
    if name == "few-shot":
        return problem_of(grouped([1200], 2000), 40, 8, **kwargs)
    if name == "documents":
        return problem_of(documents, 30, 60, **kwargs)
    if name == "shuffled documents":
        return problem_of(documents[rng.permutation(1000)], 30, 60, **kwargs)
    if name == "chat":
        return problem_of(grouped([400], 5000), around(150, 5000), around(250, 5000), **kwargs)
    if name == "samples":  # the last token of each is encoded
        return problem_of(grouped(around(400, 500) - 1, 8), 1, around(200, 4000), **kwargs)
    assert name == "score"
    questions = Prefixes(parents=np.array([-1] + 500 * [0]), ends=np.array([600] + 500 * [700]),
                         nodes=1 + np.repeat(np.arange(500), 4), block_tokens=16)
    return problem_of(questions, 10, 1, head_rows=10.0, **kwargs)


def plan(problem):
    return planned(problem, roofline_of(problem), PlanOptions(is_brief=True))


def without(problem) -> Problem:
    return replace(problem, queries=replace(problem.queries, prefixes=None))


@pytest.mark.parametrize("name, gain", [
    pytest.param("few-shot", 16, marks=pytest.mark.slow), ("shuffled documents", 5),
    pytest.param("documents", 5, marks=pytest.mark.slow),
    pytest.param("chat", 1.4, marks=pytest.mark.slow),
    pytest.param("samples", 1.6, marks=pytest.mark.slow),
    pytest.param("score", 14, marks=pytest.mark.slow)])
def test_planned_as_the_jobs_own_forest_is_replayed_and_never_above_the_bound(name, gain):
    problem = job(name)
    schedule = plan(problem)
    qps = schedule.figures.throughput_qps
    own = predict(problem, roofline_of(problem), schedule.estimate)
    assert own.throughput_qps == pytest.approx(qps, rel=0.05)
    assert own.encoded_tokens == pytest.approx(problem.queries.encoded.sum(), rel=0.3)
    assert qps <= schedule.proof.bound_qps <= schedule.proof.hardware_qps
    assert qps > gain * plan(without(problem)).figures.throughput_qps


def test_no_replay_of_a_random_forest_exceeds_the_bound():
    for seed in range(6):
        rng = np.random.default_rng(seed)
        prefixes = drawn_forest(rng)
        count = len(prefixes.nodes)
        problem = problem_of(prefixes, rng.integers(1, 200, count), rng.integers(1, 300, count),
                             policies=SHARING)
        timing = roofline_of(problem)
        bound_qps = UpperBound(problem, timing).of_plan((1, 0), "one pool", math.inf)
        formulas, replays = Formulas(problem, timing), Replays(problem, timing)
        for name in SHARING:
            formula = formulas.of(name)
            points = formula.points((1, 0))
            rough = formula.rough((1, 0), points)
            fits = np.flatnonzero((rough.throughput_qps > 0) & (rough.present <= count) & (
                rough.memory_bytes <= capacity_bytes(problem.cluster.device)))
            best = fits[np.argmax(rough.throughput_qps[fits])]
            for row in (best, rng.choice(fits)):
                estimate = formula.estimate((1, 0), tuple(points[row].tolist()))
                found = replays.of(estimate, num_checked_queries(problem, estimate))
                assert found.throughput_qps <= SCATTER * bound_qps, f"{seed} {estimate.variables}"
            best = formula.estimate((1, 0), tuple(points[best].tolist()))
            found = replays.of(best, num_checked_queries(problem, best))
            assert best.figures.throughput_qps == pytest.approx(found.throughput_qps, rel=0.15)


def test_prefixes_are_encoded_once_a_job_and_evenly_where_it_is_run_again():
    rng = np.random.default_rng(5)
    for _ in range(40):
        prefixes = drawn_forest(rng)
        inputs = prefixes.shared + rng.integers(1, 100, len(prefixes.nodes))
        queries = QueryLengths(inputs=inputs, most_outputs=inputs, prefixes=prefixes)
        seen, encoded = set[int](), list[int]()
        for node, tokens in zip(prefixes.nodes.tolist(), inputs.tolist(), strict=True):
            new = [own for own in prefixes.chain(node) if own not in seen]
            encoded.append(tokens - prefixes.shared[len(encoded)] + prefixes.own_tokens[new].sum())
            seen.update(new)
        assert queries.encoded.tolist() == encoded
    again = repeated(queries, 40 * len(inputs), rng)
    assert again.encoded.sum() == pytest.approx(40 * sum(encoded), rel=0.05)
    assert (again.inputs >= again.encoded).all() and len(again.inputs) == 40 * len(inputs)


def test_the_steady_state_of_a_long_job_shares_as_the_whole_job_does():
    """1,000 shuffled documents of 1,000 tokens, beside memory for half of them."""
    rng = np.random.default_rng(2)
    prefixes = grouped([1000] * 1000, 20)[rng.permutation(20_000)]
    problem = problem_of(prefixes, 30, 50, policies=("sarathi",))
    timing = roofline_of(problem)
    estimate = Formulas(problem, timing).of("sarathi").estimate((1, 0), (800, 4096))
    whole = predict(problem, timing, estimate)
    steady = Replays(problem, timing).of(estimate, 5000)
    assert whole.encoded_tokens > 2 * problem.queries.encoded.sum(), "memory lacks"
    assert steady.throughput_qps == pytest.approx(whole.throughput_qps, rel=0.05)


def test_policies_that_do_not_share_are_planned_as_without_prefixes():
    problem = job("few-shot", policies=("ft", "dsi"))
    own, usual = plan(problem), plan(without(problem))
    assert own.estimate == usual.estimate and own.proof.bound_qps == usual.proof.bound_qps


def test_an_order_that_shares_more_is_searched_in_and_copies_get_whole_prefixes():
    """Shuffled documents of 750,000 tokens, beside memory for 450,000 a device."""
    rng = np.random.default_rng(0)
    prefixes = grouped([3000] * 250, 8)[rng.permutation(2000)]
    free, given = (plan(problem_of(prefixes, 30, 60, policies=("sarathi",), order=order))
                   for order in ("auto", "prefix"))
    assert free.order == "prefix" and free.estimate == given.estimate
    assert given.figures.throughput_qps > 1.5 * plan(problem_of(
        prefixes, 30, 60, policies=("sarathi",))).figures.throughput_qps
    two = plan(problem_of(prefixes, 30, 60, policies=("sarathi",), order="prefix", devices=2))
    assert two.figures.throughput_qps > 1.9 * given.figures.throughput_qps
    problem = problem_of(prefixes, 30, 60, policies=("sarathi",), order="prefix")
    rows = drift_rows(problem, roofline_of(problem), given.estimate,
                      search=lambda changed: given.estimate)
    assert next(row for row in rows if row.change == 1).kept.throughput_qps == pytest.approx(
        given.figures.throughput_qps, rel=0.1)


def test_requests_that_find_their_prefix_encoded_can_be_in_time():
    problem = job("few-shot")
    due_s = np.full(2000, 4.0)  # whole prompts take some 40 s
    late = [num_surely_late(replace(own, queries=replace(own.queries, deadlines_s=due_s)))
            for own in (problem, without(problem))]
    assert late[0] == 0 < late[1]


def test_a_running_job_may_grow_within_memory_where_blocks_are_not_full():
    problem = job("few-shot", policies=("rra",))
    estimate = plan(problem).estimate
    slots = 2 * most_active(estimate)
    shared, alone = (kv_tokens_for(estimate, own, 10**9, slots)
                     for own in (problem, without(problem)))
    assert alone - shared == 2 * 16 * most_active(estimate)
