"""Mixtures of experts in the analytic roofline."""

import itertools

import numpy as np
import pytest

from xgpt.core import catalog
from xgpt.core.units import FP8, INT8
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator

MODELS = ("mixtral-8x7b", "qwen3-235b-a22b", "gpt-oss-120b")
ENGINES = ("xgpt", "vllm", "sglang", "tensorrt-llm")
TOKENS = np.geomspace(2.0**-14, 2.0**20, 300)


def rest_s(model, gpu, engine, weights, degree):
    source = Roofline(catalog.model(model), catalog.device(gpu), "bfloat16", engine=engine,
                      weight_dtype=weights)
    return source.operator_s(Operator.LAYER_REST, TOKENS, tp_degree=degree)


@pytest.mark.parametrize(("model", "engine"), list(itertools.product(MODELS, ENGINES)))
@pytest.mark.parametrize("gpu", ["A100-80", "H100"])
@pytest.mark.parametrize("weights", ["", FP8, INT8])
def test_times_of_a_layer_grow_and_times_of_a_token_fall_at_every_degree(
        model, engine, gpu, weights):
    for degree in (1, 4, 8):
        seconds = rest_s(model, gpu, engine, weights, degree)
        assert seconds[0] > 0
        of_token = seconds / TOKENS
        assert (seconds[1:] >= seconds[:-1] * (1 - 1e-9)).all()
        assert (of_token[1:] <= of_token[:-1] * (1 + 1e-9)).all()
