"""Memory of a rank in bytes (docs/reproducing.md): weights, KV cache, activations.

The runner reserves input + most output tokens of a request when it admits it. The KV cache is sized
for a high quantile of the reserved tokens. Each decode micro-batch has an equal share of it."""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.cluster import Device
from xgpt.core.deployment import StageAssignment
from xgpt.core.lengths import FloatArray, Lengths
from xgpt.core.model import (
    ModelSpec,
    head_params_of_rank,
    kv_elements_of_rank,
    kv_heads_of_rank,
    layer_params_of_rank,
)
from xgpt.core.problem import Problem
from xgpt.core.units import DTYPE_BYTES, LOGIT_BYTES, WEIGHT_BYTES, activation_item_bytes

# chosen: share of a device's memory to plan with, as vLLM's default. The rest is for the runtime's
# context, kernels, communication buffers and fragmentation.
USABLE_SHARE = 0.9
# chosen: in one phase of a thousand more is wanted than reserved; admission then waits
KV_QUANTILE_Z = 3.09  # 0.999 of the normal distribution
ACTIVATION_QUANTILE_Z = 5.0  # chosen: a longer encode batch would not fit, and nothing can wait
LIVE_HIDDEN_COPIES = 4  # residual, norm, attention output, message buffer
LIVE_MLP_COPIES = 2  # fused up (gate) projection and its activation


def capacity_bytes(device: Device) -> int:
    """Bytes of a device's memory that a plan may use."""
    share = USABLE_SHARE if device.cache_share is None else 1.0
    return int(device.memory_bytes * share) - device.reserved_bytes


def cache_bytes(device: Device, left: FloatArray) -> FloatArray:
    """Bytes of a KV cache on a device whose weights and steps leave `left` of the capacity."""
    return left if device.cache_share is None else left * device.cache_share


def weight_bytes(model: ModelSpec, stages: Sequence[StageAssignment], dtype: str,
                 weight_dtype: str | None = None) -> FloatArray:
    """[stages] bytes of weights on each rank of a stage. The embedding lies whole, as `dtype`, on
    every rank of the first stage. Layers and head are sharded, as `weight_dtype` (None:
    `dtype`)."""
    elements = np.array([
        s.num_layers * layer_params_of_rank(model, s.tp_degree)
        + s.num_encoder_layers * model.encoder_layer_params / s.tp_degree for s in stages])
    elements[-1] += head_params_of_rank(model, stages[-1].tp_degree)
    held: FloatArray = elements * WEIGHT_BYTES[weight_dtype or dtype]
    held[0] += model.embedding_params * DTYPE_BYTES[dtype]
    return held


def least_weight_bytes(problem: Problem) -> float:
    """Bytes of the weights of one replica on a single device."""
    model = problem.model
    whole = StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=model.num_layers,
                            num_encoder_layers=model.num_encoder_layers)
    return float(weight_bytes(model, (whole,), problem.dtype, problem.weight_dtype).sum())


class StageBytes:
    """Bytes on each rank of a problem's stages beside its weights."""

    def __init__(self, problem: Problem, stages: Sequence[StageAssignment]) -> None:
        self._problem, self._stages = problem, stages

    def kv(self, tokens: ArrayLike) -> FloatArray:
        """[..., stages] bytes of KV cache for `tokens`, inputs and outputs together. In an
        encoder-decoder model they count for cross-attention and self-attention."""
        return np.asarray(np.asarray(tokens, float)[..., None] * self._of_token)

    def step(self, rows: ArrayLike, heads: ArrayLike) -> FloatArray:
        """[..., stages] bytes of one step: activations of its rows in a layer, and logits of
        `heads` of them on the last stage. If attention is not fused (CPU, windows, capped scores),
        also the scores of the longest input."""
        of_row, scores = self._of_step
        held: FloatArray = np.asarray(rows, float)[..., None] * of_row
        if scores is not None:
            held = held + scores
        held[..., -1] += (np.asarray(heads, float) * self._problem.model.vocab_size
                          / self._stages[-1].tp_degree * LOGIT_BYTES)
        return held

    @cached_property
    def _of_token(self) -> FloatArray:
        problem, degrees = self._problem, [stage.tp_degree for stage in self._stages]
        model, split = problem.model, problem.model.split  # a part has its requests' tokens alone
        elements = {degree: kv_elements_of_rank(model, split.attention_degree(degree))
                    / split.attention_dp for degree in set(degrees)}
        return np.asarray(np.array([stage.num_layers * elements[degree] for stage, degree in zip(
            self._stages, degrees, strict=True)]) * problem.kv_item_bytes)

    @cached_property
    def _of_step(self) -> tuple[FloatArray, FloatArray | None]:
        """([stages] bytes of a row, bytes of the longest input's attention scores or None)."""
        problem, model = self._problem, self._problem.model
        degrees = np.array([stage.tp_degree for stage in self._stages], float)
        width = (LIVE_HIDDEN_COPIES * model.hidden_size
                 + (LIVE_MLP_COPIES * model.mlp_columns * (2 if model.is_gated_mlp else 1)
                    + model.num_heads * model.head_dim) / degrees
                 + 2 * model.head_dim * np.array([
                     kv_heads_of_rank(model, stage.tp_degree) for stage in self._stages]))
        is_cpu = problem.cluster.device.kind == "cpu"
        scores = (model.num_heads / degrees * problem.lengths.inputs.max**2 * 4
                  if is_cpu or not model.decoder.is_native else None)
        return width * activation_item_bytes(
            problem.weight_dtype, problem.dtype, is_cpu=is_cpu), scores


def kv_bytes(problem: Problem, stages: Sequence[StageAssignment],
             kv_tokens: ArrayLike) -> FloatArray:
    """[..., stages] bytes of KV cache on each rank for `kv_tokens`."""
    return StageBytes(problem, stages).kv(kv_tokens)


def largest_rows(inputs: Lengths, encode: FloatArray) -> FloatArray:
    """Tokens of an encode step of `encode` requests, at a quantile that is hardly ever exceeded."""
    tokens = encode * inputs.mean + ACTIVATION_QUANTILE_Z * inputs.std * np.sqrt(encode)
    return np.asarray(np.minimum(tokens, encode * inputs.max))
