"""Occupancy against a plain Monte Carlo of phases, for the paper's five tasks (its Table 3)."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from representative import some

from xgpt.core.lengths import JointLengths, empirical, joint_empirical, truncated_normal
from xsimulator.longest_context import expected_maximum
from xsimulator.occupancy import QueryFlow

TASKS = {"S": ((256, 252, 512), (32, 13, 80)), "T": ((128, 81, 256), (128, 68, 320)),
         "G": ((64, 23, 128), (192, 93, 480)), "C1": ((256, 115, 512), (64, 30, 160)),
         "C2": ((512, 252, 1024), (256, 134, 640))}


def lengths_of(task):
    inputs, outputs = TASKS[task]
    return JointLengths(inputs=truncated_normal(*inputs), outputs=truncated_normal(*outputs))


def simulate(inputs, iterations, n_d):
    """Cohorts of one query each, joining phase after phase: (active [N_D], context [N_D]) means."""
    order = np.argsort(-iterations)
    longest_first, summed = iterations[order], np.concatenate([[0], np.cumsum(inputs[order])])
    active, context = np.zeros(n_d), np.zeros(n_d)
    for j in range(-(-int(iterations.max()) // n_d)):
        for u in range(1, n_d + 1):
            # as many are as long or longer
            here = int(np.searchsorted(-longest_first, -(j * n_d + u), "right"))
            active[u - 1] += here
            context[u - 1] += summed[here] + here * (j * n_d + u)
    return active / len(inputs), context / len(inputs)


ITERATIONS = [4, 7, 13, 16, 32, 64]


@pytest.mark.parametrize(("task", "n_d"), some(
    product(TASKS, ITERATIONS),
    lambda case: (list(TASKS).index(case[0]) + ITERATIONS.index(case[1])) % 3 == 0))
def test_decode_batch_and_context_equal_a_monte_carlo(task, n_d):
    lengths = lengths_of(task)
    inputs, outputs = lengths.sample(200_000, np.random.default_rng(n_d))
    active, context = simulate(inputs, outputs - 1, n_d)
    found = QueryFlow(lengths, is_encoder_decoder=False).occupancy(n_d, padded=False)
    assert found.mean_phases == pytest.approx(active[0], rel=0.01)
    # 1 % of each, or of the first where next to nobody is left and sampling is coarse
    assert found.active == pytest.approx(active, rel=0.01, abs=0.01 * active[0])
    assert found.context == pytest.approx(context, rel=0.01, abs=0.01 * context[0])


@pytest.mark.parametrize("task", TASKS)
def test_phases_simulated_one_after_another_hold_encode_batch_over_decode_batch(task):
    """B_E queries join each phase, nobody knows Little's law: the mean present at u = 1."""
    lengths, n_d, batch = lengths_of(task), 13, 20
    flow = QueryFlow(lengths, is_encoder_decoder=False)
    rng, left, seen = np.random.default_rng(0), np.zeros(0, dtype=np.int64), []
    for phase in range(2500):
        joined = lengths.outputs.sample(batch, rng) - 1
        left = np.concatenate([left, joined])
        left = left[left > 0]
        if phase > 60:
            seen.append(len(left))
        left = left - n_d
        left = left[left > 0]
    found = flow.occupancy(n_d, padded=False)
    assert batch / np.mean(seen) == pytest.approx(1 / found.mean_phases, rel=0.01)
    # the paper's E[1/c] takes lengths from the arrivals and is far off
    phases = np.ceil((lengths.outputs.support - 1) / n_d)
    paper = lengths.outputs.pmf[1:] @ (1 / phases[1:])
    assert paper > 1.05 / found.mean_phases


def test_encoder_decoder_queries_need_one_iteration_more():
    outputs = empirical([3])
    lengths = JointLengths(inputs=empirical([5]), outputs=outputs)
    decoder_only = QueryFlow(lengths, is_encoder_decoder=False).occupancy(2, padded=False)
    both = QueryFlow(lengths, is_encoder_decoder=True).occupancy(2, padded=False)
    assert decoder_only.active.tolist() == [1, 1]
    assert decoder_only.context.tolist() == [6, 7]
    assert both.active.tolist() == [2, 1]
    assert both.context.tolist() == [6 + 8, 7]


def test_queries_of_one_token_never_join_decoding_but_are_there_while_encoded():
    lengths = JointLengths(inputs=empirical([4]), outputs=empirical([1, 1, 1, 3]))
    found = QueryFlow(lengths, is_encoder_decoder=False).occupancy(2, padded=True)
    assert found.mean_phases == pytest.approx(0.25)
    assert found.mean_present == pytest.approx(1.0)
    assert found.mean_reserved == pytest.approx(4 + 3)
    assert found.variance_reserved == pytest.approx(0.0)


def test_outputs_of_one_token_only_leave_decoding_empty():
    lengths = JointLengths(inputs=empirical([4, 6]), outputs=empirical([1]))
    found = QueryFlow(lengths, is_encoder_decoder=False).occupancy(3, padded=True)
    assert found.active.tolist() == [0, 0, 0]
    assert (found.log_absent == 0).all()


def correlated_pairs(count=3000):
    rng = np.random.default_rng(3)
    inputs = rng.integers(1, 200, count)
    return np.stack([inputs, np.maximum(inputs // 3 + rng.integers(-10, 11, count), 1)], axis=1)


def test_correlated_lengths_use_the_joint_distribution():
    pairs = correlated_pairs()
    lengths = joint_empirical(pairs)
    assert np.corrcoef(*lengths.pairs.T)[0, 1] > 0.9
    _, context = simulate(pairs[:, 0], pairs[:, 1] - 1, 16)
    found = QueryFlow(lengths, is_encoder_decoder=False).occupancy(16, padded=False)
    assert found.context == pytest.approx(context, rel=1e-9)
    apart = JointLengths(inputs=lengths.inputs, outputs=lengths.outputs)
    other = QueryFlow(apart, is_encoder_decoder=False).occupancy(16, padded=False)
    assert found.context[0] > 1.2 * other.context[0]


@pytest.mark.parametrize("joint", [False, True])
def test_reserved_tokens_have_the_mean_and_variance_of_sampled_phases(joint):
    lengths, n_d = joint_empirical(correlated_pairs()), 9
    if not joint:
        lengths = JointLengths(inputs=lengths.inputs, outputs=lengths.outputs)
    rng, cap = np.random.default_rng(1), lengths.outputs.max
    totals = []
    for _ in range(4000):  # one query in each cohort, cohorts j = 0, 1, ...: who is still there?
        inputs, outputs = lengths.sample(-(-cap // n_d) + 1, rng)
        age = np.arange(len(inputs))
        here = (age == 0) | (outputs - 1 > age * n_d)
        totals.append((inputs + cap)[here].sum())
    found = QueryFlow(lengths, is_encoder_decoder=False).occupancy(n_d, padded=False)
    assert found.mean_reserved == pytest.approx(np.mean(totals), rel=0.02)
    assert found.variance_reserved == pytest.approx(np.var(totals), rel=0.1)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("count", [1, 3, 8, 50])
def test_expected_longest_context_equals_sampling(joint, count):
    lengths, n_d = joint_empirical(correlated_pairs()), 16
    if not joint:
        lengths = lengths_of("S")
    flow = QueryFlow(lengths, is_encoder_decoder=False)
    table = flow.occupancy(n_d, padded=True).maximum_context
    rng = np.random.default_rng(2)
    inputs, outputs = lengths.sample(20_000, rng)
    for u in (1, 8, 16):
        contexts = np.concatenate([
            inputs[outputs - 1 >= k] + k for k in range(u, int(outputs.max()) + 1, n_d)])
        expected = rng.choice(contexts, size=(4000, count)).max(axis=1).mean()
        found = expected_maximum(table, np.full(n_d, float(count)))[u - 1]
        assert found == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("iterations", [1, 9, 66, 320])
def test_context_read_until_a_querys_end_is_that_of_each_phase(iterations):
    flow = QueryFlow(lengths_of("T"), is_encoder_decoder=False)
    read = flow.context_read_until(iterations)
    for n_d in (1, 2, 16, 17, 18, 100, len(read)):  # few short phases, and many long ones
        whole, left = divmod(iterations - 1, n_d)
        phases = [flow.context[begin:begin + n_d] for begin in range(0, len(flow.context), n_d)]
        expected = whole * flow.context.sum() + sum(own[:left + 1].sum() for own in phases)
        assert read[n_d - 1] == pytest.approx(expected, rel=1e-12), n_d
