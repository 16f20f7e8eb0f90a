"""Bytes per rank (design.md section 3.5): weights, KV reserved at admission, activations.

The runner reserves (input + most output tokens) of a query when it admits it, so KV is sized from
what is *reserved*, at a high quantile over the queries present, group by group: each decode
micro-batch has an equal share of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.cluster import Device
from xgpt.core.lengths import FloatArray, Lengths
from xgpt.core.model import ModelSpec
from xgpt.core.schedule import StageAssignment
from xgpt.core.units import DTYPE_BYTES

# Share of a device's memory that may be planned: the rest is the runtime's context, kernels,
# communication buffers and the allocator's fragmentation (vLLM plans 0.9 too).
USABLE_SHARE = 0.9
# A phase in a thousand may want more than is reserved; admission then waits, nothing breaks.
KV_QUANTILE_Z = 3.09  # 0.999 of the normal distribution
ACTIVATION_QUANTILE_Z = 5.0  # nothing waits when an encode batch is longer: it would not fit
LOGIT_BYTES = 4  # logits are float32 whatever the model's dtype
LIVE_HIDDEN_COPIES = 4  # residual, norm, attention output, message buffer
LIVE_MLP_COPIES = 2  # fused up (gate) projection and its activation


class Reserves(Protocol):
    """Tokens reserved per query encoded in each phase, of one N_D (xsimulator.occupancy) or, as
    arrays, of each configuration's."""

    @property
    def mean_reserved(self) -> ArrayLike: ...
    @property
    def variance_reserved(self) -> ArrayLike: ...
    @property
    def max_present(self) -> ArrayLike: ...


def capacity_bytes(device: Device) -> int:
    """The bytes of a device's memory that may be planned."""
    return int(device.memory_bytes * USABLE_SHARE)


def reserved_tokens(occupancy: Reserves, group_batch: ArrayLike, groups: ArrayLike,
                    max_reserve: int, num_queries: int | None) -> FloatArray:
    """KV tokens over all groups, each encoding `group_batch` queries a phase.

    Cohorts are independent, so mean and variance of a group's sum are those of one query's stay
    times `group_batch`. Never less than the longest query in every group, never more than every
    query that can be there at its longest.
    """
    batch, count = np.asarray(group_batch, float), np.asarray(groups, float)
    mean = batch * np.asarray(occupancy.mean_reserved)
    # one longest query more: the odd queries of an uneven split rotate, so at times a group
    # encodes one more than its share, and few queries are not normally distributed
    wanted = mean + KV_QUANTILE_Z * np.sqrt(
        batch * np.asarray(occupancy.variance_reserved)) + max_reserve
    most = np.ceil(batch) * np.asarray(occupancy.max_present)
    if num_queries is not None:
        most = np.minimum(most, np.ceil(num_queries / np.minimum(count, num_queries)))
    group_tokens = np.clip(wanted, max_reserve, np.maximum(most, 1) * max_reserve)
    reserved: FloatArray = np.ceil(group_tokens) * count
    return reserved


def weight_bytes(model: ModelSpec, stages: Sequence[StageAssignment], dtype: str) -> FloatArray:
    """[stages] bytes of weights on each rank of a stage. The embedding lies whole on every rank of
    the first stage; layers and the head are sharded."""
    elements = np.array([
        (s.num_layers * model.decoder_layer_params
         + s.num_encoder_layers * model.encoder_layer_params) / s.tp_degree for s in stages])
    elements[0] += model.embedding_params
    elements[-1] += model.head_params / stages[-1].tp_degree
    return elements * DTYPE_BYTES[dtype]


def kv_bytes(model: ModelSpec, stages: Sequence[StageAssignment], dtype: str,
             kv_tokens: ArrayLike) -> FloatArray:
    """[..., stages] bytes of KV cache on each rank. In an encoder-decoder model a query's input
    lies in the cross-attention's cache and its output in the self-attention's: as much together."""
    per_token = model.kv_elements_per_token_layer * DTYPE_BYTES[dtype]
    share = np.array([s.num_layers / s.tp_degree for s in stages])
    held: FloatArray = np.asarray(kv_tokens, float)[..., None] * share * per_token
    return held


def activation_bytes(model: ModelSpec, stages: Sequence[StageAssignment], dtype: str, *,
                     inputs: Lengths, encode_batch: ArrayLike, decode_batch: ArrayLike,
                     is_cpu: bool) -> FloatArray:
    """[..., stages] bytes of the largest micro-batch at work, encoded or decoded, sized so that a
    longer one is next to impossible."""
    encode, decode = np.ceil(np.asarray(encode_batch, float)), np.asarray(decode_batch, float)
    rows = np.maximum(largest_rows(inputs, encode), decode)
    return step_bytes(model, stages, dtype, rows=rows, heads=np.maximum(encode, decode),
                      longest_input=inputs.max, is_cpu=is_cpu)


def largest_rows(inputs: Lengths, encode: FloatArray) -> FloatArray:
    """Tokens of an encode step of that many queries that more are next to impossible."""
    tokens = encode * inputs.mean + ACTIVATION_QUANTILE_Z * inputs.std * np.sqrt(encode)
    return np.asarray(np.minimum(tokens, encode * inputs.max))


def step_bytes(model: ModelSpec, stages: Sequence[StageAssignment], dtype: str, *,
               rows: ArrayLike, heads: ArrayLike, longest_input: int, is_cpu: bool) -> FloatArray:
    """[..., stages] bytes of one step: its rows through a layer, the logits of `heads` of them on
    the last stage, and where attention is not fused (CPU) the scores of the longest input."""
    degrees = np.array([stage.tp_degree for stage in stages], float)
    width = (LIVE_HIDDEN_COPIES * model.hidden_size
             + (LIVE_MLP_COPIES * model.intermediate_size * (2 if model.is_gated_mlp else 1)
                + (model.num_heads + 2 * model.kv_heads) * model.head_dim) / degrees)
    scores = model.num_heads / degrees * longest_input**2 * 4 if is_cpu else np.zeros(len(stages))
    held: FloatArray = np.asarray(rows, float)[..., None] * (width * DTYPE_BYTES[dtype]) + scores
    held[..., -1] += (np.asarray(heads, float) * model.vocab_size
                      / stages[-1].tp_degree * LOGIT_BYTES)
    return held
