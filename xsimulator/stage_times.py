"""Seconds that each stage needs for one encode or decode micro-batch, from a TimingSource.

Shared by the closed forms and the replay: both sum the same operators, over expected sizes there
and over a real step's sizes here. Arrays broadcast; the last axis of every result is the stage.

Encoder-decoder models: the cross-attention's keys and values are projected once, when a query is
encoded. A decode step's context is the input and the output so far together; cross-attention reads
the mean input, self-attention what is left of it. The encoder's output goes back through the head
to every stage: one transfer each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.cluster import Cluster, Link
from xgpt.core.errors import XgptError
from xgpt.core.lengths import FloatArray, Lengths
from xgpt.core.model import ModelSpec
from xgpt.core.schedule import StageAssignment
from xgpt.core.units import DTYPE_BYTES
from xprofiler.timing import MessageKind, Operator, TimingSource

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
        reduce_s = self.timing.message_s(MessageKind.ALL_REDUCE, tokens * self.row_bytes,
                                          self._link, tp_degree=degree)
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
        return (self.decode_rest_s(queries, degree, encoder_tokens)
                + self.decode_attention_s(queries, context, degree, encoder_tokens))

    def decode_rest_s(self, rows: ArrayLike, degree: int, encoder_tokens: float) -> FloatArray:
        """What of a layer's decode iteration depends on the number of rows alone."""
        if not self.model.is_encoder_decoder:
            return self.rest_s(rows, degree, all_reduces=ALL_REDUCES_PER_LAYER)
        cross_s = self.timing.operator_s(Operator.CROSS_ATTENTION, rows, encoder_tokens,
                                         tp_degree=degree)
        return self.rest_s(rows, degree, all_reduces=ALL_REDUCES_PER_LAYER + 1) + cross_s

    def decode_attention_s(self, queries: ArrayLike, context: ArrayLike, degree: int,
                           encoder_tokens: float) -> FloatArray:
        """Self-attention of one layer's decode iteration."""
        if self.model.is_encoder_decoder:
            context = np.maximum(np.asarray(context, float) - encoder_tokens, 0.0)
        return self.timing.operator_s(Operator.DECODE_ATTENTION, queries, context,
                                      tp_degree=degree)

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

    @property
    def together(self) -> tuple[int, ...]:
        """Queries of a micro-batch between which `mean_attention_s` is linear."""
        return _TOGETHER

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
        work = self.encode_rows_s(tokens) + self.per_stage_s(attention_s, self.encode_layers)
        if not self._model.is_encoder_decoder:
            work[..., -1] += self.first_tokens_s(queries)
        return work

    def decode_s(self, queries: ArrayLike, context: ArrayLike, *, moved: ArrayLike = 0.0,
                 ) -> FloatArray:
        """[..., stages] for micro-batches of `queries` whose attention is charged `context` tokens
        a query. `moved`: rows of the KV cache that compaction moves before it."""
        work = self.decode_rows_s(queries) + self.per_stage_s(
            self.decode_attention_s(queries, context), self.decoder_layers)
        if np.any(moved):
            work = work + self.compaction_s(moved, context)
        work[..., -1] += self.first_tokens_s(queries)
        return work

    def encode_rows_s(self, tokens: ArrayLike) -> FloatArray:
        """[..., stages] of encoding `tokens`: all but attention and head."""
        if not self._model.is_encoder_decoder:
            return self.decode_rows_s(tokens)
        work = self.per_stage_s({d: self._layers.rest_s(
            tokens, d, all_reduces=ALL_REDUCES_PER_LAYER, is_encoder=True)
            for d in self.degrees}, self.encode_layers)
        work = self._with_ends(work, tokens)
        if not self.decoder_layers.any():
            return work  # a pool that encodes alone: its output is handed over
        work = work + self.cross_kv_s(tokens)
        if len(self.stages) > 1:
            moved = np.asarray(tokens, float) * self._layers.row_bytes
            work[..., -1] += self._transfer_s(moved, self._links[-1]) * (len(self.stages) - 1)
        return work

    def cross_kv_s(self, tokens: ArrayLike) -> FloatArray:
        """[..., stages] of projecting `tokens` of the encoder's output to keys and values."""
        return self.per_stage_s({d: self._layers.cross_kv_s(tokens, d) for d in self.degrees},
                                self.decoder_layers)

    def decode_rows_s(self, rows: ArrayLike) -> FloatArray:
        """[..., stages] of `rows` through the decoder's layers: all but attention and head."""
        work = self.per_stage_s({d: self._layers.decode_rest_s(rows, d, self._mean_input)
                                 for d in self.degrees}, self.decoder_layers)
        return self._with_ends(work, rows)

    def decode_attention_s(self, queries: ArrayLike, context: ArrayLike) -> PerDegree:
        """Self-attention of one decode step in one layer, per degree."""
        return {d: self.decode_attention_layer_s(queries, context, d) for d in self.degrees}

    def decode_attention_layer_s(self, queries: ArrayLike, context: ArrayLike,
                                 degree: int) -> FloatArray:
        """The same in one layer of that degree."""
        return self._layers.decode_attention_s(queries, context, degree, self._mean_input)

    def compaction_s(self, rows: ArrayLike, context: ArrayLike) -> FloatArray:
        """[..., stages] of moving `rows` of the KV cache, `context` tokens each."""
        return self.per_stage_s({d: self.compaction_layer_s(rows, context, d)
                                 for d in self.degrees}, self.decoder_layers)

    def compaction_layer_s(self, rows: ArrayLike, context: ArrayLike, degree: int) -> FloatArray:
        """The same in one layer of that degree; free where the source has not measured it."""
        if not self.compacts[degree]:
            return np.zeros(np.broadcast_shapes(np.shape(rows), np.shape(context)))
        return self._timing.operator_s(Operator.KV_COMPACTION, rows, context, tp_degree=degree)

    @cached_property
    def compacts(self) -> dict[int, bool]:
        """Degrees, and whether the source has a table of compaction for them."""
        return {degree: has_table(self._timing, Operator.KV_COMPACTION, degree)
                for degree in self.degrees}

    def first_tokens_s(self, queries: ArrayLike) -> FloatArray:
        """The last stage's head, and the tokens' way back to the first."""
        head = self._operator_s(Operator.HEAD, queries, -1)
        if len(self.stages) == 1:
            return head
        back = np.asarray(queries, float) * TOKEN_BYTES
        return head + self._transfer_s(back, self._links[-1])

    def per_stage_s(self, of_degree: PerDegree, layers: FloatArray) -> FloatArray:
        """[..., stages]: one layer's seconds per degree, times each stage's `layers`."""
        total: FloatArray | None = None
        for degree, is_own in self._stages_of_degree.items():
            # what is refused is infinite, and none of the business of stages without a layer of it
            own_layers = layers * is_own
            with np.errstate(invalid="ignore"):
                own = np.multiply.outer(of_degree[degree], own_layers)
            if not own_layers.all():
                own[..., own_layers == 0] = 0.0
            total = own if total is None else np.add(total, own, out=total)
        assert total is not None
        return total

    @property
    def is_encoder_decoder(self) -> bool:
        return self._model.is_encoder_decoder

    @property
    def overhead_s(self) -> float:
        """The host's fixed cost that every stage's time includes."""
        return self._timing.facts.step_overhead_s

    @cached_property
    def degrees(self) -> tuple[int, ...]:
        return tuple(sorted({stage.tp_degree for stage in self.stages}))

    @cached_property
    def _stages_of_degree(self) -> dict[int, FloatArray]:
        """[stages] 1 where a stage is of that degree."""
        return {degree: np.array([float(stage.tp_degree == degree) for stage in self.stages])
                for degree in self.degrees}

    @cached_property
    def decoder_layers(self) -> FloatArray:
        return np.array([stage.num_layers for stage in self.stages], float)

    @cached_property
    def encode_layers(self) -> FloatArray:
        """Layers whose attention encoding runs through, per stage."""
        if not self._model.is_encoder_decoder:
            return self.decoder_layers
        return np.array([stage.num_encoder_layers for stage in self.stages], float)

    @cached_property
    def _links(self) -> tuple[Link, ...]:
        """From each stage to the next; the last back to the first."""
        ends = [(stage.ranks[-1], following.ranks[0]) for stage, following in zip(
            self.stages, (*self.stages[1:], self.stages[0]), strict=True)]
        return tuple(self._cluster.link_between(a, b) for a, b in ends)

    def _with_ends(self, work: FloatArray, rows: ArrayLike) -> FloatArray:
        """`work` of the layers with messages, embedding and the host's fixed cost."""
        work = work + self._onward_s(np.asarray(rows, float) * self._layers.row_bytes)
        work[..., 0] += self._operator_s(Operator.EMBED, rows, 0)
        return work + self._timing.facts.step_overhead_s

    def _onward_s(self, moved_bytes: FloatArray) -> FloatArray:
        """Each stage's message to the next; the last sends none."""
        links = dict.fromkeys(self._links[:-1])
        found = np.stack([*(self._transfer_s(moved_bytes, link) for link in links),
                          np.zeros_like(moved_bytes)], axis=-1)
        place = {link: index for index, link in enumerate(links)}
        return np.take(found, [*(place[link] for link in self._links[:-1]), -1], axis=-1)

    def _transfer_s(self, num_bytes: ArrayLike, link: Link) -> FloatArray:
        return self._timing.message_s(MessageKind.TRANSFER, num_bytes, link)

    def _operator_s(self, operator: Operator, size: ArrayLike, stage: int) -> FloatArray:
        return self._timing.operator_s(operator, size, tp_degree=self.stages[stage].tp_degree)


def has_table(timing: TimingSource, operator: Operator, degree: int) -> bool:
    """Whether a source answers for an operator at a degree."""
    try:
        timing.reach(operator, degree)
    except XgptError:
        return False
    return True
