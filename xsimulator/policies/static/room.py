"""Which static batches may fit into memory, by less than what their closed form asks for."""

from __future__ import annotations

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray
from xsimulator import memory
from xsimulator.plans import StagePlan
from xsimulator.policies.static.boxes import StaticBoxes
from xsimulator.policies.static.closed_form import Static

MOST = 1 << 20  # queries of a batch that are thought of


def may_fit(form: Static, plan: StagePlan, of: StaticBoxes) -> BoolArray:
    """Whether the smallest batch of each box may."""
    rows, inputs = of.least, form.problem.lengths.inputs
    spread = memory.KV_QUANTILE_Z * inputs.std * np.sqrt(rows)
    most = np.minimum(rows * inputs.mean + spread, rows * inputs.max)
    tokens = of.fewest * (np.maximum(most, inputs.max) + rows * _longest_output(form))
    held = plan.weight_bytes + memory.activation_bytes(
        form.problem, plan.stages, encode_batch=np.maximum(rows / of.most_parts, 1.0),
        decode_batch=rows)
    room = ((form.capacity_bytes - held) / _token_bytes(form, plan)).min(axis=-1)
    return np.asarray(tokens <= room)


def most_queries(form: Static, plan: StagePlan) -> int:
    """No larger batch fits into memory."""
    room = ((form.capacity_bytes - plan.weight_bytes) / _token_bytes(form, plan)).min()
    return max(int(min(room / _longest_output(form), MOST)), 1)


def _longest_output(form: Static) -> int:
    return max(form.problem.lengths.outputs.max, form.problem.default_max_tokens)


def _token_bytes(form: Static, plan: StagePlan) -> FloatArray:
    """[stages] of a token's KV entries, on each rank."""
    return np.maximum(memory.kv_bytes(form.problem, plan.stages, 1.0), 1e-300)
