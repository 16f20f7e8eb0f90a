"""What is known of a kind of stage is what each stage of each pool takes, to the bit."""

from __future__ import annotations

import numpy as np
import pytest
from problems import problem_of, roofline_of

from xsimulator.policies.waa.closed_form import waa_m
from xsimulator.policies.waa.step_columns import StepColumns, first_batches, group_sizes


@pytest.mark.parametrize("plan", [(1, 0), (2, 8), (8, 8)])
@pytest.mark.parametrize("sizes", [first_batches(40), group_sizes(30), np.array([3.0, 40.0, 1.0])])
def test_stages_take_what_they_take_alone(plan, sizes):
    problem = problem_of("gpt3-39b", "a40-16")
    waa, asked = waa_m(problem, roofline_of(problem)), []

    def ask(times, some):
        asked.append(len(some))
        return times.encode_s(some * 100, some, times.mean_attention_s(some))

    columns, split = StepColumns(ask), waa.split(*plan)
    pools = [split.plan(count).encode for count in split.encode_devices.tolist()]
    for pool in pools:
        columns.of_kinds(pool, first_batches(50))
    tabulated = len(asked)
    for pool in pools:
        found = columns.of_stages(pool, sizes)
        assert found.tolist() == pool.times.encode_s(
            sizes * 100, sizes, pool.times.mean_attention_s(sizes)).tolist()
    is_among_first = not (sizes % 1).any()
    assert (len(asked) > tabulated) != is_among_first  # which are not asked for again


def test_those_of_an_encoder_decoder_model_are_asked_for_each_time():
    problem = problem_of("t5-11b")
    waa = waa_m(problem, roofline_of(problem))
    split = waa.split(1, 0)
    for count in split.encode_devices.tolist():
        pool, columns = split.plan(count).encode, StepColumns(
            lambda times, some: times.encode_rows_s(some * 100))
        columns.of_kinds(pool, first_batches(50))
        found = columns.of_stages(pool, np.array([2.0, 7.0]))
        assert found.tolist() == pool.times.encode_rows_s(np.array([200.0, 700.0])).tolist()
