"""Seconds of each stage for one encode (prefill) or decode micro-batch, and of the handover of KV
cache from WAA's encode pool to its decode pool.

The rough formulas, the upper bound and the replay build tables of these sums
(xsimulator.rough.pace, xsimulator.convex_steps, xsimulator.replay.step_clock). Arrays broadcast;
the last axis of every result is the stage.

An encoder's output goes from the last stage to every stage: one transfer each. In the runner's own
tensor-parallel groups the first rank sends each step to the others. It receives the best tokens of
their shares of the vocabulary (TimingFacts.sends_in_groups): one transfer each way."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from xgpt.core.cluster import Cluster, Link
from xgpt.core.deployment import StageAssignment
from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.model import kv_copies
from xgpt.core.problem import Problem
from xgpt.core.units import DTYPE_BYTES
from xprofiler.timing import MessageKind, TimingSource
from xsimulator import memory
from xsimulator.layer_times import LayerTimes, embed_s, onward_s

TOKEN_BYTES = 8  # a token id on its way back from the last stage to the first
BEST_BYTES = 8  # a rank's best token of a row, and its logit
PerDegree = Mapping[int, FloatArray]  # tp_degree -> seconds
_OfGroup = Callable[[ArrayLike, int, Link | None], FloatArray]  # sizes, degree, link of its sums


class StageTimes:
    """Seconds of each stage for one allocation of layers."""

    def __init__(self, layers: LayerTimes, cluster: Cluster, stages: Sequence[StageAssignment],
                 links: tuple[Link, ...] | None = None) -> None:
        """links: of each stage to the next, of the last to the first (None: the cluster's)."""
        self.layers, self._cluster, self.stages = layers, cluster, tuple(stages)
        self._given_links = links
        self._timing = layers.timing
        self.is_encoder_decoder = layers.model.is_encoder_decoder
        self.overhead_s = layers.timing.facts.step_overhead_s  # in every stage's time
        self.degrees = tuple(sorted({stage.tp_degree for stage in self.stages}))
        # {degree: [stages] 1 for stages of that degree}
        self._stages_of_degree = {degree: np.array(
            [float(stage.tp_degree == degree) for stage in self.stages]) for degree in self.degrees}
        self._groups = _Groups(cluster, self.stages)
        self.decoder_layers = np.array([stage.num_layers for stage in self.stages], float)
        # [stages] layers whose attention encoding runs through
        self.encode_layers = self.decoder_layers if not self.is_encoder_decoder else np.array(
            [stage.num_encoder_layers for stage in self.stages], float)
        # share of the last layer that encoding computes for the inputs' last tokens only
        self._narrowed = 0.0 if self.is_encoder_decoder else layers.after_attention
        self._whole_layers = self.decoder_layers.copy()
        self._whole_layers[-1] -= self._narrowed

    def mean_attention_s(self, queries: ArrayLike, attended: FloatArray | None = None) -> PerDegree:
        """{degree: mean seconds of a layer's encode attention of one of `queries` requests}.
        attended: as of LayerTimes."""
        return {d: self.layers.mean_attention_s(queries, d, attended) for d in self.degrees}

    def encode_attention_s(self, lengths: ArrayLike, together: ArrayLike) -> PerDegree:
        """{degree: seconds of a layer's encode attention of one request of each length} in
        micro-batches of `together` requests."""
        return {d: self.layers.encode_attention_s(lengths, together, d) for d in self.degrees}

    def decode_attention_s(self, queries: ArrayLike, context: ArrayLike) -> PerDegree:
        """{degree: seconds of a layer's self-attention} in one decode step."""
        return {d: self.layers.decode_attention_s(queries, context, d) for d in self.degrees}

    def encode_s(self, tokens: ArrayLike, queries: ArrayLike, attention_s: PerDegree) -> FloatArray:
        """[..., stages] seconds to encode micro-batches of `queries` requests with `tokens` in
        total. attention_s: {degree: attention of one layer, summed over the requests}."""
        work = self.encode_rows_s(tokens) + self.per_stage_s(attention_s, self.encode_layers)
        if not self.is_encoder_decoder:
            work[..., -1] += self.ends_s(queries)
        return work

    def decode_s(self, queries: ArrayLike, context: ArrayLike, *, moved: ArrayLike = 0.0,
                 ) -> FloatArray:
        """[..., stages] seconds to decode micro-batches of `queries` requests with `context` tokens
        each. moved: rows of the KV cache that compaction moves before."""
        work = self.decode_rows_s(queries) + self.per_stage_s(
            self.decode_attention_s(queries, context), self.decoder_layers)
        if np.any(moved):
            work = work + self.per_stage_s({
                d: self.layers.compaction_s(moved, context, d) for d in self.degrees},
                self.decoder_layers)
        work[..., -1] += self.first_tokens_s(queries)
        return work

    def encode_rows_s(self, tokens: ArrayLike) -> FloatArray:
        """[..., stages] seconds to encode `tokens`, without attention and without the work that is
        done for the inputs' last tokens only."""
        if not self.is_encoder_decoder:
            return self._with_ends(self._groups.seconds(
                self.layers.encode_rest_s, tokens, self._whole_layers), tokens)
        work = self._with_ends(self._groups.seconds(
            self.layers.encode_rest_s, tokens, self.encode_layers), tokens)
        if not self.decoder_layers.any():
            return work  # an encode pool hands its output over
        work = work + self.cross_kv_s(tokens)
        if len(self.stages) > 1:
            moved = np.asarray(tokens, float) * self.layers.row_bytes
            back_s = _transfer_s(self._timing, moved, self._links[-1])
            work[..., -1] += back_s * (len(self.stages) - 1)
        return work

    def cross_kv_s(self, tokens: ArrayLike) -> FloatArray:
        """[..., stages] seconds to project `tokens` of the encoder's output to keys and values."""
        return self.per_stage_s({d: self.layers.cross_kv_s(tokens, d) for d in self.degrees},
                                self.decoder_layers)

    def decode_rows_s(self, rows: ArrayLike) -> FloatArray:
        """[..., stages] seconds of `rows` in the decoder's layers, without attention and head."""
        return self._with_ends(self._groups.seconds(
            self.layers.decode_rest_s, rows, self.decoder_layers), rows)

    def first_tokens_s(self, queries: ArrayLike) -> FloatArray:
        """Seconds of the head for `queries` tokens, and of their transfer to the first stage."""
        head = self.layers.head_s(queries, self.stages[-1].tp_degree)
        head = head + _group_message_s(self._timing, self._groups.last, BEST_BYTES, queries)
        if len(self.stages) == 1:
            return head
        return head + onward_s(self.layers, queries, TOKEN_BYTES, self._links[-1])

    def ends_s(self, queries: ArrayLike) -> FloatArray:
        """Seconds of the last stage for the last tokens of `queries` inputs, or for all tokens that
        are scored: the last layer after its attention, the head, and the transfer back."""
        if self.layers.head_rows != 1:
            queries = np.asarray(queries, float) * self.layers.head_rows
        if not self._narrowed:
            return self.first_tokens_s(queries)
        rest_s = self.layers.encode_rest_s(queries, *self._groups.last)
        return self.first_tokens_s(queries) + self._narrowed * rest_s

    def per_stage_s(self, of_degree: PerDegree, layers: FloatArray) -> FloatArray:
        """[..., stages] {degree: seconds of one layer} times the layers of each stage."""
        return _summed([(of_degree[degree], layers * is_own)
                        for degree, is_own in self._stages_of_degree.items()])

    def _with_ends(self, work: FloatArray, rows: ArrayLike) -> FloatArray:
        """`work` plus embedding, messages to the next stages and the host's overhead."""
        ways, way_of = self._onward
        onward = np.zeros((*np.shape(rows), len(ways) + 1))
        for index, link in enumerate(ways):
            onward[..., index] = onward_s(self.layers, rows, self.layers.row_bytes, link)
        work = work + onward.take(way_of, axis=-1)
        work[..., 0] += embed_s(self.layers, rows, self.stages[0].tp_degree)
        work[..., 0] += _group_message_s(self._timing, self._groups.of_stages[0], TOKEN_BYTES, rows)
        work += self.overhead_s
        return work

    @cached_property
    def _onward(self) -> tuple[list[Link], IntArray]:
        """(distinct links to next stages, [stages] index of each one's link; none of the last)."""
        ways = list(dict.fromkeys(self._links[:-1]))
        return ways, np.array([*map(ways.index, self._links[:-1]), len(ways)])

    @cached_property
    def _links(self) -> tuple[Link, ...]:
        """The link of each stage to the next one, of the last one to the first."""
        if self._given_links is not None:
            return self._given_links
        ends = [(stage.ranks[-1], following.ranks[0]) for stage, following in zip(
            self.stages, (*self.stages[1:], self.stages[0]), strict=True)]
        return tuple(self._cluster.link_between(a, b) for a, b in ends)


class StageKinds(NamedTuple):
    """Stages grouped by equal times. kind_of: [stages] index of the kind. times: of the first stage
    of each kind. names: [kinds] keys that are equal for equal times in all pools of one role."""

    kind_of: list[int]
    times: StageTimes
    names: tuple[Hashable, ...]


def _transfer_s(timing: TimingSource, num_bytes: ArrayLike, link: Link) -> FloatArray:
    return timing.message_s(MessageKind.TRANSFER, num_bytes, link)


def _group_message_s(timing: TimingSource, group: tuple[int, Link | None], row_bytes: int,
              rows: ArrayLike) -> FloatArray | float:
    """Seconds of a message of `rows` between a group's first rank and the others; 0 if not sent."""
    _, link = group
    if link is None or not timing.facts.sends_in_groups:
        return 0.0
    return _transfer_s(timing, row_bytes * np.asarray(rows, float), link)


def least_times(times: StageTimes) -> StageTimes:
    """Lower bounds on `times` (LayerTimes.least_times)."""
    layers = times.layers.least_times
    return times if layers is times.layers else StageTimes(
        layers, times._cluster, times.stages, times._given_links)


def stage_kinds(times: StageTimes) -> StageKinds:
    """The stages grouped by kind. Stages of one kind have equal times for any step: equal numbers
    of layers, equal groups and equal links. The first and last stage are kinds of their own."""
    count, links = len(times.stages), times._links
    if times.is_encoder_decoder:  # the last stage's messages depend on the number of stages
        return StageKinds(list(range(count)), times, tuple(range(count)))
    names = tuple((group, stage.num_layers, link, index == 0, index == count - 1)
                  for index, (stage, group, link) in enumerate(zip(
                      times.stages, times._groups.of_stages, links, strict=True)))
    # equal groups and links of one pool are one object, so that ids are enough
    kinds: dict[object, int] = {}
    kind_of = [kinds.setdefault((id(group), layers, id(link), is_first, is_last), len(kinds))
               for group, layers, link, is_first, is_last in names]
    first = [kind_of.index(kind) for kind in range(len(kinds))]
    alone = times if len(first) == count else StageTimes(
        times.layers, times._cluster, [times.stages[stage] for stage in first],
        tuple(links[stage] for stage in first))
    return StageKinds(kind_of, alone, tuple(names[stage] for stage in first))


class _Groups:
    """The tensor-parallel groups of stages, by degree and by the link of their all-reduces."""

    def __init__(self, cluster: Cluster, stages: Sequence[StageAssignment]) -> None:
        own = [(stage.tp_degree, None if stage.tp_degree == 1 else cluster.link_of(stage.ranks))
               for stage in stages]
        same: dict[tuple[int, Link | None], tuple[int, Link | None]] = {}
        self.of_stages = [same.setdefault(group, group) for group in own]  # equal ones are one
        self._are_of = {group: np.array([float(group is each) for each in self.of_stages])
                        for group in same}
        self.last = own[-1]

    def seconds(self, of_group: _OfGroup, sizes: ArrayLike, layers: FloatArray) -> FloatArray:
        """[..., stages] seconds of one layer by group, times the layers of each stage."""
        return _summed([(of_group(sizes, degree, link), layers * is_own)
                        for (degree, link), is_own in self._are_of.items()])


def _summed(parts: Sequence[tuple[FloatArray, FloatArray]]) -> FloatArray:
    """[..., stages] sum over `parts` of seconds of a layer [...] times layers [stages]."""
    total: FloatArray | None = None
    for layer_s, layers in parts:
        if layers.all():
            own = np.multiply.outer(layer_s, layers)
        else:  # stages without a layer take 0 s, also of unknown (infinite) times
            with np.errstate(invalid="ignore"):
                own = np.multiply.outer(layer_s, layers)
            own[..., layers == 0] = 0.0
        total = own if total is None else np.add(total, own, out=total)
    assert total is not None
    return total


class HandoverCost:
    """Seconds to hand KV cache from the encode pool to the decode pool (paper section 3, XRunner).

    All stages send at once, each to those that need its layers. So the rank that sends or receives
    most decides; one sends a KV head to each decode rank that holds it, if fewer ranks encode it.
    An encoder-decoder model sends the encoder's output to every decode stage."""

    def __init__(self, problem: Problem, timing: TimingSource, encode: Sequence[StageAssignment],
                 decode: Sequence[StageAssignment]) -> None:
        """encode, decode: the stages of the two pools."""
        self._timing = timing
        # any rank may send to any other: the slowest link counts
        self._link = problem.cluster.slowest_link([
            rank for stage in (*encode, *decode) for rank in stage.ranks])
        if problem.model.is_encoder_decoder:
            self.bytes_per_token = float(
                problem.model.hidden_size * DTYPE_BYTES[problem.dtype] * len(decode))
        else:
            sent, received = (memory.kv_bytes(problem, pool, 1.0) for pool in (encode, decode))
            copies, wanted = (np.array([kv_copies(problem.model, s.tp_degree) for s in pool])
                              for pool in (encode, decode))
            self.bytes_per_token = float(max((
                sent * np.maximum(wanted.max() / copies, 1.0)).max(), received.max()))

    def seconds(self, tokens: ArrayLike) -> FloatArray:
        """Seconds to hand over the KV cache of each number of tokens."""
        num_bytes = np.asarray(tokens, float) * self.bytes_per_token
        return self._timing.message_s(MessageKind.HANDOVER, num_bytes, self._link)
