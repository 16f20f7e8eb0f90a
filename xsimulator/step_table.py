"""Step times of one plan for arrays of configurations: stages that cost the same are timed once,
and what depends on one size alone is looked up in tables fine enough to be as good as asking.

Closed forms of RRA and of continuous batching, and RRA's bounds, ask for expected sizes, between
whole numbers, of a hundred thousand configurations at once; the replay has tables of its own
(xsimulator.replay.step_clock), exact at whole numbers, of one step at a time. One table for both
was either slower for one of them or not exact for the other."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from xgpt.core.lengths import FloatArray
from xsimulator.addresses import address_of
from xsimulator.envelope import rising_minorant
from xsimulator.layer_times import is_compaction_timed
from xsimulator.native import Native, native
from xsimulator.stage_times import PerDegree, StageKinds, StageTimes

SPLITS = 5  # halvings of an octave: a bend's times come out 1e-2 / 32 too high at most
LEAST = 2.0**-10  # sizes below it count as this
_SHIFT = 52 - SPLITS  # of a float's bits: what is left says octave and part of it
_LEAST_NODES = 24 << SPLITS  # a table has at once: up to sizes of 2^14, for it is made anew to grow
_FIRST = int(np.array(LEAST).view(np.int64)) >> _SHIFT
_PROBES: NDArray[np.float64] = np.array([1.0, 64.0])  # at both of which equal links cost the same
_PROBES.flags.writeable = False  # so that what many plans' layers take is asked for once


class SizeTable:
    """Seconds [sizes..., columns] of one size, as a table over nodes that divide each octave
    evenly, so that a line stays one; it grows as larger sizes are asked for. Where a node is
    infinite (refused) the function itself answers. `lowered`: its envelope instead, a lower bound
    (xsimulator.envelope). `kept`: what the function says at the nodes, by their number, which
    tables of one function may share."""

    def __init__(self, function: Callable[[FloatArray], FloatArray], *, lowered: bool = False,
                 kept: dict[int, FloatArray] | None = None) -> None:
        self._function, self._lowered = function, lowered
        self._kept = {} if kept is None else kept
        self.nodes = self.rises = np.empty((0, 0))  # [columns, nodes]
        self._at = 0, 0  # addresses of both
        self._end = 0.0  # sizes below it are within the table
        self.is_finite = True

    def __call__(self, sizes: FloatArray) -> FloatArray:
        """[columns, *sizes.shape]."""
        of_columns = self._in_arrays(sizes) if (library := native()) is None else (
            self._natively(library, sizes))
        if not self.is_finite:
            unsure = ~np.isfinite(of_columns).all(axis=0)
            own = np.maximum(sizes, LEAST)[unsure]
            of_columns[:, unsure] = np.moveaxis(self._function(own), -1, 0)
        return of_columns

    def _natively(self, library: Native, sizes: FloatArray) -> FloatArray:
        """By csrc/planning.cpp, to the bit."""
        sizes = np.asarray(sizes, float, order="C")
        while True:
            columns, width = self.nodes.shape
            of_columns = np.empty((columns, *sizes.shape))
            top = library.lines(*self._at, columns, width, address_of(sizes), sizes.size, LEAST,
                                _SHIFT, _FIRST, address_of(of_columns))
            if top < width:
                return of_columns
            self._extend(max(top + (2 << SPLITS), _LEAST_NODES))

    def _in_arrays(self, sizes: FloatArray) -> FloatArray:
        sizes = np.maximum(sizes, LEAST)
        index = sizes.view(np.int64) >> _SHIFT
        beyond = np.left_shift(index, _SHIFT).view(np.float64)  # the node before
        np.subtract(sizes, beyond, out=beyond)
        index -= _FIRST
        top = int(index.max(initial=0))
        if top >= self.nodes.shape[1]:
            self._extend(max(top + (2 << SPLITS), _LEAST_NODES))
        of_columns = np.empty((len(self.nodes), *sizes.shape))
        with np.errstate(invalid="ignore"):
            for seconds, nodes, rises in zip(of_columns, self.nodes, self.rises, strict=True):
                rises.take(index, out=seconds, mode="clip")
                seconds *= beyond
                seconds += nodes.take(index)
        return of_columns

    def reach(self, size: float) -> None:
        """The table has the nodes around sizes up to this one."""
        if size < self._end:
            return
        top = (int(np.array(max(size, LEAST)).view(np.int64)) >> _SHIFT) - _FIRST
        if top >= self.nodes.shape[1]:
            self._extend(max(top + (2 << SPLITS), _LEAST_NODES))

    def _extend(self, count: int) -> None:
        sizes = _node_sizes(count)
        if count not in self._kept:
            self._kept[count] = np.moveaxis(self._function(sizes), -1, 0)
        nodes = self._kept[count]
        if self._lowered:
            nodes = rising_minorant(sizes, nodes)
        self.is_finite = bool(np.isfinite(nodes).all())
        with np.errstate(invalid="ignore"):
            rises = (nodes[:, 1:] - nodes[:, :-1]) / (sizes[1:] - sizes[:-1])
        self._end = float(sizes[-1])
        self.nodes = np.ascontiguousarray(nodes[:, :-1])
        self.rises = np.ascontiguousarray(rises)
        self._at = address_of(self.nodes), address_of(self.rises)


@lru_cache(maxsize=16)
def _node_sizes(count: int) -> FloatArray:
    """The first `count` nodes, and the one after them: the same array for every table, so that who
    answers for it can know it again."""
    sizes = (np.arange(_FIRST, _FIRST + count + 1) << _SHIFT).view(np.float64).copy()
    sizes.flags.writeable = False
    return sizes


class KeptNodes(NamedTuple):
    """Of the tables of a StepTable, by the number of nodes."""

    encode: dict[int, FloatArray]
    decode: dict[int, FloatArray]
    ends: dict[int, FloatArray]


class StepTable:
    """Encode and decode step times of one plan. The stages of a `kind` have the same layers, degree
    and ends; results have one entry a kind. `lowered`: tables of one size are lower bounds.
    `kept`: what the times are at the nodes, which tables of the same times may share."""

    def __init__(self, kinds: StageKinds, *, lowered: bool = False,
                 kept: KeptNodes | None = None) -> None:
        every, times, _ = kinds
        self._times = times
        kind_of, of_kind = _kinds(times)
        self.kind_of = [kind_of[kind] for kind in every]
        self.stages_of_kinds = np.bincount(self.kind_of).tolist()
        self._stage_of = np.array(of_kind)
        self.degrees = [times.stages[stage].tp_degree for stage in of_kind]
        self.is_encoder_decoder = times.is_encoder_decoder
        # [kinds] layers that decoding, and attention of encoding, runs through
        self.layers = (times.decoder_layers[of_kind], times.encode_layers[of_kind])
        self._last = self.kind_of[-1]  # no other stage is of the last one's kind: it has the head
        kept = kept or KeptNodes({}, {}, {})
        self.encode_rows = SizeTable(lambda n: times.encode_rows_s(n)[..., self._stage_of],
                                      lowered=lowered, kept=kept.encode)
        self.decode_rows = SizeTable(self._decode_rows_s, lowered=lowered, kept=kept.decode)
        self.ends = SizeTable(lambda n: times.ends_s(n)[..., None], lowered=lowered, kept=kept.ends)

    def rows_s(self, tokens: FloatArray) -> FloatArray:
        """[kinds, *tokens.shape] of encode steps: all but attention and `head_s`."""
        return self.encode_rows(tokens)

    def head_s(self, queries: FloatArray) -> FloatArray:
        """What the last stage does for the queries alone that get a token: the last layer's end
        (StageTimes.ends_s), the head, and the tokens' way back to the first."""
        return np.asarray(self.ends(queries)[0])

    def encode_s(self, tokens: FloatArray, queries: FloatArray,
                 attention_s: PerDegree) -> list[FloatArray]:
        """Seconds of encode steps, with the arguments of StageTimes.encode_s."""
        work = list(self.encode_rows(tokens))
        self._add_per_layer(work, attention_s, self._times.encode_layers)
        if not self._times.is_encoder_decoder:
            work[self._last] = work[self._last] + self.head_s(queries)
        return work

    def decode_s(self, queries: FloatArray, context: FloatArray) -> list[FloatArray]:
        """Seconds of decode steps, with the arguments of StageTimes.decode_s."""
        return self.decode_rows_s(queries, self._times.decode_attention_s(queries, context))

    def mixed_s(self, tokens: FloatArray, encoded: FloatArray, attention_s: PerDegree,
                queries: FloatArray, context: FloatArray) -> list[FloatArray]:
        """Seconds of steps that encode (see encode_s) and decode `queries` besides. A decoder-only
        model's layers run all rows together, attention apart; an encoder-decoder model's run one
        after the other."""
        if self._times.is_encoder_decoder:
            return [encode + np.where(queries > 0, decode - self._times.overhead_s, 0.0)
                    for encode, decode in zip(self.encode_s(tokens, encoded, attention_s),
                                              self.decode_s(queries, context), strict=True)]
        work = self.encode_s(tokens + queries, encoded + queries, attention_s)
        self._add_per_layer(work, self._times.decode_attention_s(queries, context),
                            self._times.decoder_layers)
        return work

    def decode_rows_s(self, queries: FloatArray, attention_s: PerDegree) -> list[FloatArray]:
        """The same with one layer's attention given."""
        work = self.decode_bare_s(queries)
        self.add_attention(work, attention_s)
        return work

    def decode_bare_s(self, queries: FloatArray) -> list[FloatArray]:
        """The same without attention."""
        return list(self.decode_rows(queries))

    def add_attention(self, work: Sequence[FloatArray], attention_s: PerDegree) -> None:
        """A layer's attention is added to decode steps, in place."""
        self._add_per_layer(work, attention_s, self._times.decoder_layers)

    def _decode_rows_s(self, queries: FloatArray) -> FloatArray:
        work: FloatArray = self._times.decode_rows_s(queries)[..., self._stage_of]
        work[..., self._last] += self._times.first_tokens_s(queries)
        return work

    def compaction_s(self, rows: FloatArray, context: FloatArray) -> list[FloatArray | float]:
        """Moving `rows` of the KV cache before a decode step; free where it has not been timed."""
        layers = self._times.layers
        own = {degree: layers.compaction_s(rows, context, degree)
               for degree in self._times.degrees if is_compaction_timed(layers.timing, degree)}
        return [own[degree] * self._times.decoder_layers[stage] if degree in own else 0.0
                for degree, stage in zip(self.degrees, self._stage_of, strict=True)]

    def _add_per_layer(self, work: Sequence[FloatArray], of_degree: PerDegree,
                       layers: FloatArray) -> None:
        of_kinds = layers.take(self._stage_of).tolist()
        for seconds, degree, count in zip(work, self.degrees, of_kinds, strict=True):
            seconds += of_degree[degree] * count


def _kinds(times: StageTimes) -> tuple[list[int], list[int]]:
    """(kind of each stage, a stage of each kind)."""
    last = len(times.stages) - 1
    keys: list[tuple[object, ...]] = [
        (stage.tp_degree, stage.num_layers, stage.num_encoder_layers, index in (0, last),
         index == last) for index, stage in enumerate(times.stages)]
    if len(set(keys)) < len(keys):
        rows = times.decode_rows_s(_PROBES).T
        keys = [(*key, own.tobytes()) for key, own in zip(keys, rows, strict=True)]
    kinds: dict[object, int] = {}
    kind_of: list[int] = []
    of_kind: list[int] = []
    for index, key in enumerate(keys):
        if key not in kinds:
            kinds[key] = len(of_kind)
            of_kind.append(index)
        kind_of.append(kinds[key])
    return kind_of, of_kind
