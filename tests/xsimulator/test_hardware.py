"""What the devices could do at all: by hand, and above every schedule."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from problems import TOY, TOY_T5, roofline_of, toy_problem

from xscheduler.found_schedule import SearchPlanner
from xsimulator.hardware import most_queries_per_s, work_of_a_query


def test_products_and_bytes_of_queries_of_one_length_are_those_counted_by_hand():
    problem = toy_problem(pairs=np.array([[4, 3]]))  # 4 rows encoded, then 2 iterations
    model, work = TOY, work_of_a_query(problem)
    seen = 1 + 2 + 3 + 4 + 5 + 6  # tokens that each row attends to
    flops = 2 * 6 * model.num_layers * model.decoder_layer_params + (
        4 * 1024 * model.num_layers * seen) + 2 * 3 * model.head_params
    assert work.flops == pytest.approx(flops)
    entry = model.num_layers * 2 * 1024 * 2  # bytes of a token
    assert work.kv_bytes == pytest.approx(entry * (6 + 5 + 6))


def test_weights_of_a_type_without_units_are_multiplied_at_the_runs_own_rate():
    problem = toy_problem(pairs=np.array([[400, 3]]))  # bound by products
    rates = dict(problem.cluster.device.flops_per_s)
    assert "fp8" not in rates and rates["float32"] < rates[problem.dtype]
    assert most_queries_per_s(replace(problem, weight_dtype="fp8")) == most_queries_per_s(problem)
    narrow = replace(problem, weight_dtype="int8")
    assert most_queries_per_s(narrow) == pytest.approx(
        rates.get("int8", rates[problem.dtype]) / rates[problem.dtype]
        * most_queries_per_s(problem))


@pytest.mark.parametrize("model", [TOY, TOY_T5], ids=lambda own: own.name)
def test_no_schedule_answers_more(model):
    problem = toy_problem(model=model, num_queries=100)
    found = SearchPlanner(problem, roofline_of(problem)).best(math.inf, has_margin=False)
    assert 0 < found.figures.throughput_qps < most_queries_per_s(problem)
