"""Seconds of one layer for one encode (prefill) or decode micro-batch, from a TimingSource.

Encoder-decoder models: keys and values of the cross-attention are projected once, when a request is
encoded. The context of a decode step is input plus output so far. Cross-attention reads the mean
input, self-attention the rest."""

from __future__ import annotations

from copy import copy
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.cluster import Link
from xgpt.core.errors import XgptError
from xgpt.core.lengths import FloatArray, Lengths
from xgpt.core.model import ModelSpec, active_layer_params, input_projection_params
from xgpt.core.problem import Problem
from xgpt.core.units import DTYPE_BYTES
from xprofiler.timing import MessageKind, Operator, TimingSource
from xrunner.rules.batch_sizer import MOST_CAPTURED
from xsimulator.size_cache import SizeCache

ALL_REDUCES_PER_LAYER = 2  # after attention and after the MLP; a cross-attention adds one
# chosen: requests of an encode micro-batch for which the attention of one is tabulated
TOGETHER = (1, 2, 4, 8, 16, 32, 64, 128)
_TOGETHER = np.array(TOGETHER, float)


class LayerTimes:
    """Seconds of one layer by the degree of its tensor-parallel group and, for all-reduces, by the
    link (None: the node's). inputs: distribution of the requests' input lengths."""

    def __init__(self, model: ModelSpec, timing: TimingSource, link: Link, dtype: str,
                 inputs: Lengths, head_rows: float = 1.0, *, has_head: bool = True) -> None:
        """link: within a node. head_rows: rows of each input that pass the end of the last layer
        and the head. has_head: False for models without a head."""
        self.model, self.timing, self.head_rows = model, timing, head_rows
        self.has_head = has_head
        self.row_bytes = model.hidden_size * DTYPE_BYTES[dtype]
        self._link, self._inputs, self._mean_input = link, inputs, inputs.mean
        self._captured_degrees, self._is_least = timing.facts.captured_degrees, False
        # (weights, kept alive by this; mean attention at TOGETHER) by degree and id of the weights
        self._mean_attention: dict[tuple[int, int], tuple[FloatArray | None, FloatArray]] = {}
        self._kept = SizeCache()  # many plans' tables ask for the same sizes

    @classmethod
    def of(cls, problem: Problem, timing: TimingSource) -> LayerTimes:
        """The layer times of the problem's model on its cluster."""
        return cls(problem.model, timing, problem.cluster.intra_link, problem.dtype,
                   problem.lengths.inputs, problem.head_rows, has_head=problem.has_head)

    @cached_property
    def least_times(self) -> LayerTimes:
        """Lower bounds on these times. Every row takes the shorter of its times in encode and in
        decode steps; where both are equal, this object itself is returned."""
        if not self._captured_degrees:
            return self
        least = copy(self)
        least._is_least, least._kept = True, SizeCache()
        return least

    @property
    def cross_context(self) -> float:
        """Context tokens of a decode step that only cross-attention reads; 0 without it."""
        return self._mean_input if self.model.is_encoder_decoder else 0.0

    @property
    def after_attention(self) -> float:
        """Share of a decoder-only layer's parameters that lie after its attention."""
        model = self.model
        return 1 - input_projection_params(model) / active_layer_params(model)

    def encode_rest_s(self, tokens: ArrayLike, degree: int,
                      link: Link | None = None) -> FloatArray:
        """Seconds to encode `tokens` in a layer without attention: in an encoder layer if the model
        has them, else in a decoder layer."""
        operator = Operator.ENCODER_REST if self.model.is_encoder_decoder else Operator.LAYER_REST
        return self._rest_s(operator, tokens, degree, ALL_REDUCES_PER_LAYER, link)

    def encode_attention_s(self, lengths: ArrayLike, together: ArrayLike,
                           degree: int) -> FloatArray:
        """Seconds of attention of one request of each length, in a batch of `together`."""
        return self.timing.operator_s(Operator.ENCODE_ATTENTION, lengths, together,
                                      tp_degree=degree)

    def mean_attention_s(self, queries: ArrayLike, degree: int,
                         attended: FloatArray | None = None) -> FloatArray:
        """Mean seconds of attention of one request in a batch of `queries` requests. attended:
        [tokens] mean number of inputs of each length (None: as distributed); those whose
        attention is already computed count less than nothing."""
        key = degree, id(attended)
        if key not in self._mean_attention:
            weights = self._inputs.pmf if attended is None else attended
            self._mean_attention[key] = attended, weights @ self.encode_attention_s(
                np.arange(1, len(weights) + 1)[:, None], _TOGETHER, degree)
        return np.asarray(np.interp(np.asarray(queries, float), _TOGETHER,
                                    self._mean_attention[key][1]))

    def cross_kv_s(self, tokens: ArrayLike, degree: int) -> FloatArray:
        """Seconds of a decoder layer to project encoder output to keys and values."""
        return self.timing.operator_s(Operator.CROSS_KV, tokens, tp_degree=degree)

    def decode_rest_s(self, rows: ArrayLike, degree: int, link: Link | None = None) -> FloatArray:
        """Seconds of a decode iteration of `rows` in a layer without self-attention."""
        if not self.model.is_encoder_decoder:
            if degree not in self._captured_degrees:
                return self._rest_s(Operator.LAYER_REST, rows, degree, ALL_REDUCES_PER_LAYER, link)
            rest_s = self._rest_s(Operator.DECODE_REST, rows, degree, ALL_REDUCES_PER_LAYER, link)
            if np.max(rows, initial=0) <= MOST_CAPTURED:
                return rest_s
            launched_s = self._rest_s(Operator.LAYER_REST, rows, degree, ALL_REDUCES_PER_LAYER,
                                      link)
            return np.where(np.asarray(rows) > MOST_CAPTURED, launched_s, rest_s)
        cross_s = self.timing.operator_s(Operator.CROSS_ATTENTION, rows, self._mean_input,
                                         tp_degree=degree)
        rest_s = self._rest_s(Operator.LAYER_REST, rows, degree, ALL_REDUCES_PER_LAYER + 1, link)
        return rest_s + cross_s

    def decode_attention_s(self, queries: ArrayLike, context: ArrayLike, degree: int) -> FloatArray:
        """Seconds of a layer's self-attention in a decode iteration of `queries` requests."""
        if self.model.is_encoder_decoder:
            context = np.maximum(np.asarray(context, float) - self.cross_context, 0.0)
        return self.timing.operator_s(Operator.DECODE_ATTENTION, queries, context, tp_degree=degree)

    def compaction_s(self, rows: ArrayLike, context: ArrayLike, degree: int) -> FloatArray:
        """Seconds to move `rows` of the KV cache with `context` tokens each; 0 if not measured."""
        if not is_compaction_timed(self.timing, degree):
            return np.zeros(np.broadcast_shapes(np.shape(rows), np.shape(context)))
        return self.timing.operator_s(Operator.KV_COMPACTION, rows, context, tp_degree=degree)

    def head_s(self, queries: ArrayLike, degree: int) -> FloatArray:
        """Seconds of the output head for `queries` tokens; 0 for a model without a head."""
        if not self.has_head:
            return np.zeros(np.shape(queries))
        return self._kept.of((Operator.HEAD, degree), queries, lambda: self.timing.operator_s(
            Operator.HEAD, queries, tp_degree=degree))

    def _rest_s(self, operator: Operator, rows: ArrayLike, degree: int, all_reduces: int,
                link: Link | None) -> FloatArray:
        return self._kept.of((operator, degree, all_reduces, link), rows, lambda: self._rest_of(
            operator, rows, degree, all_reduces, link))

    def _rest_of(self, operator: Operator, rows: ArrayLike, degree: int, all_reduces: int,
                 link: Link | None) -> FloatArray:
        rest_s = self.timing.operator_s(operator, rows, tp_degree=degree)
        if self._is_least and degree in self._captured_degrees:
            other = {Operator.LAYER_REST: Operator.DECODE_REST}.get(operator, Operator.LAYER_REST)
            rest_s = np.minimum(rest_s, self.timing.operator_s(other, rows, tp_degree=degree))
        if degree == 1:
            return rest_s
        rows = np.asarray(rows, float)
        reduce_s = self.timing.message_s(MessageKind.ALL_REDUCE, rows * self.row_bytes,
                                         link or self._link, tp_degree=degree)
        return np.asarray(rest_s + all_reduces * np.where(rows > 0, reduce_s, 0.0))


def is_compaction_timed(timing: TimingSource, degree: int) -> bool:
    """Whether the timing source knows times of compaction for this tensor-parallel degree."""
    try:
        timing.reach(Operator.KV_COMPACTION, degree)
    except XgptError:
        return False
    return True


def embed_s(layers: LayerTimes, rows: ArrayLike, degree: int) -> FloatArray:
    """Seconds of the embedding of `rows` tokens."""
    return layers._kept.of((Operator.EMBED, degree), rows, lambda: layers.timing.operator_s(
        Operator.EMBED, rows, tp_degree=degree))


def onward_s(layers: LayerTimes, rows: ArrayLike, row_bytes: int, link: Link) -> FloatArray:
    """Seconds of a message of `rows`, of `row_bytes` each, to the next stage."""
    return layers._kept.of((MessageKind.TRANSFER, row_bytes, link), rows, lambda: (
        layers.timing.message_s(MessageKind.TRANSFER, np.asarray(rows, float) * row_bytes, link)))
