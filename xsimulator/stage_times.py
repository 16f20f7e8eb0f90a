"""Seconds that each stage needs for one encode or decode micro-batch, from a TimingSource.

Shared by the closed forms and the replay: both sum the same operators, over expected sizes there
and over a real step's sizes here. Arrays broadcast; the last axis of every result is the stage.

Encoder-decoder models: the cross-attention's keys and values are projected once, when a query is
encoded. A decode step's context is the input and the output so far together; cross-attention reads
the mean input of it, self-attention what is left. The encoder's output goes back through the head
to every stage: one transfer each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from xgpt.cluster import Cluster, Link
from xgpt.lengths import FloatArray, Lengths
from xgpt.model import ModelSpec
from xgpt.schedule import StageAssignment
from xgpt.units import DTYPE_BYTES
from xprofiler.timing import Operator, TimingSource

TOKEN_BYTES = 8  # a token id on its way back from the last stage to the first
ALL_REDUCES_PER_LAYER = 2  # after attention and after the MLP; a cross-attention adds one
_TOGETHER = (1, 2, 4, 8, 16, 32, 64, 128)  # queries of a micro-batch; shares settle long before
PerDegree = Mapping[int, FloatArray]  # tp_degree -> seconds


class LayerTimes:
    """One layer's seconds at each degree; a group lies within a node."""

    def __init__(self, model: ModelSpec, timing: TimingSource, link: Link, dtype: str) -> None:
        self.model, self.timing = model, timing
        self._link = link
        self.row_bytes = model.hidden_size * DTYPE_BYTES[dtype]

    def rest_s(self, tokens: ArrayLike, degree: int, *, all_reduces: int,
               is_encoder: bool = False) -> FloatArray:
        """LAYER_REST (ENCODER_REST) of `tokens` with its collectives."""
        operator = Operator.ENCODER_REST if is_encoder else Operator.LAYER_REST
        rest = self.timing.operator_s(operator, tokens, tp_degree=degree)
        if degree == 1:
            return rest
        tokens = np.asarray(tokens, float)
        reduce_s = self.timing.all_reduce_s(tokens * self.row_bytes, degree, self._link)
        total: FloatArray = rest + all_reduces * np.where(tokens > 0, reduce_s, 0.0)
        return total

    def encode_layer_s(self, tokens: ArrayLike, attention_s: ArrayLike, degree: int) -> FloatArray:
        """One layer's encoding: an encoder layer where the model has them, else a decoder layer."""
        rest = self.rest_s(tokens, degree, all_reduces=ALL_REDUCES_PER_LAYER,
                           is_encoder=self.model.is_encoder_decoder)
        total: FloatArray = rest + np.asarray(attention_s, float)
        return total

    def cross_kv_s(self, tokens: ArrayLike, degree: int) -> FloatArray:
        """One decoder layer's projection of the encoder's output to keys and values."""
        return self.timing.operator_s(Operator.CROSS_KV, tokens, tp_degree=degree)

    def decode_layer_s(self, queries: ArrayLike, context: ArrayLike, degree: int,
                       encoder_tokens: float = 0.0) -> FloatArray:
        """One layer's decode iteration of `queries` at `context` tokens each, of which
        `encoder_tokens` are an encoder-decoder model's input."""
        attention_s, timing = np.zeros(()), self.timing
        reduces = ALL_REDUCES_PER_LAYER
        if self.model.is_encoder_decoder:
            reduces += 1
            cross = np.minimum(np.asarray(context, float), encoder_tokens)
            context = np.asarray(context, float) - cross
            attention_s = timing.operator_s(Operator.CROSS_ATTENTION, queries, cross,
                                            tp_degree=degree)
        attention_s = attention_s + timing.operator_s(Operator.DECODE_ATTENTION, queries, context,
                                                      tp_degree=degree)
        return self.rest_s(queries, degree, all_reduces=reduces) + attention_s

    def encode_attention_s(self, lengths: ArrayLike, together: ArrayLike,
                           degree: int) -> FloatArray:
        """One layer's attention of single queries of these lengths, each encoded in a batch of
        `together` queries."""
        return self.timing.operator_s(Operator.ENCODE_ATTENTION, lengths, together,
                                      tp_degree=degree)


class StageTimes:
    """Seconds per stage, for one allocation of layers."""

    def __init__(self, model: ModelSpec, cluster: Cluster, timing: TimingSource, dtype: str,
                 stages: Sequence[StageAssignment], *, mean_input: float) -> None:
        """`mean_input`: mean input tokens of the queries, for encoder-decoder models."""
        self._layers = LayerTimes(model, timing, cluster.intra_link, dtype)
        self._mean_input = mean_input
        self._model, self._timing, self._cluster = model, timing, cluster
        self.stages = tuple(stages)
        self._attention: dict[int, FloatArray] = {}  # by degree, at _TOGETHER queries

    def mean_attention_s(self, inputs: Lengths, queries: ArrayLike) -> PerDegree:
        """Expected ENCODE_ATTENTION of one query in one layer, per degree, in micro-batches of
        `queries`."""
        sizes = np.asarray(_TOGETHER, float)
        of_degree = {}
        for degree in self.degrees:
            if degree not in self._attention:
                table = self._layers.encode_attention_s(inputs.support[:, None], sizes, degree)
                self._attention[degree] = inputs.pmf @ table
            of_degree[degree] = np.interp(np.asarray(queries, float), sizes,
                                          self._attention[degree])
        return of_degree

    def attention_s(self, lengths: ArrayLike, together: ArrayLike) -> PerDegree:
        """ENCODE_ATTENTION of each of these queries in one layer, per degree; `together`: queries
        in each one's micro-batch."""
        return {d: self._layers.encode_attention_s(lengths, together, d) for d in self.degrees}

    def encode_s(self, tokens: ArrayLike, queries: ArrayLike, attention_s: PerDegree) -> FloatArray:
        """[..., stages] for micro-batches of `queries` with `tokens` in all; `attention_s` is the
        sum over a micro-batch's queries in one layer, per degree."""
        model = self._model
        work = self._per_layer(
            lambda d: self._layers.encode_layer_s(tokens, attention_s[d], d),
            self._encoder_layers if model.is_encoder_decoder else self._decoder_layers)
        moved = np.asarray(tokens, float) * self._layers.row_bytes
        work = work + self._onward_s(moved)
        work[..., 0] += self._operator_s(Operator.EMBED, tokens, 0)
        if model.is_encoder_decoder:
            work = work + self._per_layer(
                lambda d: self._layers.cross_kv_s(tokens, d), self._decoder_layers)
            if len(self.stages) > 1:
                work[..., -1] += self._timing.transfer_s(moved, self._links[-1]) * (
                    len(self.stages) - 1)
        else:
            work[..., -1] += self._first_tokens_s(queries)
        return work + self._timing.step_overhead_s()

    def decode_s(self, queries: ArrayLike, context: ArrayLike) -> FloatArray:
        """[..., stages] for micro-batches of `queries` whose attention is charged `context` tokens
        a query."""
        work = self._per_layer(
            lambda d: self._layers.decode_layer_s(queries, context, d, self._mean_input),
            self._decoder_layers)
        work = work + self._onward_s(np.asarray(queries, float) * self._layers.row_bytes)
        work[..., 0] += self._operator_s(Operator.EMBED, queries, 0)
        work[..., -1] += self._first_tokens_s(queries)
        return work + self._timing.step_overhead_s()

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        return tuple(sorted({stage.tp_degree for stage in self.stages}))

    @cached_property
    def _decoder_layers(self) -> FloatArray:
        return np.array([stage.num_layers for stage in self.stages], float)

    @cached_property
    def _encoder_layers(self) -> FloatArray:
        return np.array([stage.num_encoder_layers for stage in self.stages], float)

    @cached_property
    def _links(self) -> tuple[Link, ...]:
        """From each stage to the next; the last back to the first."""
        ends = [(stage.ranks[-1], following.ranks[0]) for stage, following in zip(
            self.stages, (*self.stages[1:], self.stages[0]), strict=True)]
        return tuple(self._cluster.link_between(a, b) for a, b in ends)

    def _per_layer(self, seconds: Callable[[int], FloatArray], layers: FloatArray) -> FloatArray:
        of_degree = {degree: seconds(degree) for degree in self.degrees}
        columns = [of_degree[stage.tp_degree] * count
                   for stage, count in zip(self.stages, layers, strict=True)]
        return np.stack(columns, axis=-1)

    def _onward_s(self, moved_bytes: FloatArray) -> FloatArray:
        """Each stage's message to the next; the last sends none."""
        columns = [self._timing.transfer_s(moved_bytes, link) for link in self._links[:-1]]
        return np.stack([*columns, np.zeros_like(moved_bytes)], axis=-1)

    def _operator_s(self, operator: Operator, size: ArrayLike, stage: int) -> FloatArray:
        return self._timing.operator_s(operator, size, tp_degree=self.stages[stage].tp_degree)

    def _first_tokens_s(self, queries: ArrayLike) -> FloatArray:
        """The last stage's head, and the tokens' way back."""
        head = self._operator_s(Operator.HEAD, queries, -1)
        if len(self.stages) == 1:
            return head
        back = np.asarray(queries, float) * TOKEN_BYTES
        return head + self._timing.transfer_s(back, self._links[-1])
