"""The shortest that a period and a latency of RRA can be, from the sums of step times that every
path through the pipeline has (rra.bounds says why)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.pipeline import StageWork
from xsimulator.policies.rra.least_steps import StageSteps
from xsimulator.policies.rra.phase_batches import PhaseBatches


def stage_work(kinds: Sequence[StageSteps], kind_of: Sequence[int]) -> list[StageWork]:
    """The steps are given by stage, as xsimulator.pipeline takes them."""
    work = [StageWork(encode_s=k.encode_one, encode_rest_s=k.encode_all - k.encode_one,
                 decode_s=k.decode_one, decode_rest_s=k.decode_all - k.decode_one) for k in kinds]
    return [work[kind] for kind in kind_of]


def least_period_s(kinds: Sequence[StageSteps], kind_of: Sequence[int],
                   batches: PhaseBatches) -> FloatArray:
    """A period is no shorter than the busiest stage's work; a group's own steps one after the
    other; or all groups' encode steps on one stage and the last one's way on, then the first
    group's iterations."""
    widths, counts = batches.queries.widths, np.bincount(kind_of)
    decode: FloatArray = np.zeros(len(batches.encode_batch))
    period: FloatArray = np.zeros(len(batches.encode_batch))
    for kind, count in zip(kinds, counts, strict=True):
        decode += count * (widths * kind.decode_one).sum(axis=0)
        np.maximum(period, kind.encode_all + (widths * kind.decode_all).sum(axis=0), out=period)
    np.maximum(period, decode + _encode_through(kinds, counts), out=period)
    first = np.sum([k.decode_one[0] * c for k, c in zip(kinds, counts, strict=True)], axis=0)
    behind = _encode_all(kinds, counts) + kinds[kind_of[-1]].decode_one[0]
    return np.asarray(np.maximum(period, behind + decode - first))


def least_latency_s(kinds: Sequence[StageSteps], kind_of: Sequence[int], batches: PhaseBatches, *,
                    seen_iterations: int, is_line: bool) -> FloatArray:
    """A latency is no shorter than own steps one after the other, the first group's behind all
    groups' encode steps; nor than the way through the stages up to one, all groups' steps there,
    and on through the others; in the mean of first and last group."""
    blocks, rows, counts = batches.queries, np.arange(len(batches.encode_batch)), np.bincount(
        kind_of)
    through = _encode_through(kinds, counts)
    if seen_iterations == 0:
        return np.asarray(through)
    last_one = [k.decode_one[blocks.seen, rows] for k in kinds]
    until = [np.cumsum(blocks.widths * k.decode_one, axis=0)[blocks.seen, rows] for k in kinds]
    own = np.sum([u * c for u, c in zip(until, counts, strict=True)], axis=0)
    first = np.sum([k.decode_one[0] * c for k, c in zip(kinds, counts, strict=True)], axis=0)
    behind = _encode_all(kinds, counts) + kinds[kind_of[-1]].decode_one[0] - first
    longest = own + 0.5 * (through + np.maximum(through, behind))
    before: FloatArray = np.zeros(len(rows))
    after = np.sum([one * c for one, c in zip(last_one, counts, strict=True)], axis=0)
    for place, kind in enumerate(kind_of):
        after = after - last_one[kind]
        # a kind's first and last stage are enough
        if kind not in kind_of[:place] or kind not in kind_of[place + 1:]:
            k = kinds[kind]
            all_s = np.cumsum(blocks.widths * k.decode_all, axis=0)[blocks.seen, rows]
            last_all = k.decode_all[blocks.seen, rows]
            if is_line:
                path = (before + 0.5 * (k.encode_all + k.encode_one) + all_s
                        - 0.5 * (last_all - last_one[kind]) + after)
            else:
                path = k.encode_one + all_s - last_all
            longest = np.maximum(longest, path)
        before = before + kinds[kind].encode_one
    return np.asarray(longest + blocks.phases_before * least_period_s(kinds, kind_of, batches))


def _encode_through(kinds: Sequence[StageSteps], counts: IntArray) -> FloatArray:
    """One group's encode step goes through every stage."""
    return np.asarray(np.sum([k.encode_one * c for k, c in zip(kinds, counts, strict=True)],
                             axis=0))


def _encode_all(kinds: Sequence[StageSteps], counts: IntArray) -> FloatArray:
    """All groups' encode steps pass one stage, and one group's the others."""
    most = np.max([k.encode_all - k.encode_one for k in kinds], axis=0)
    return np.asarray(_encode_through(kinds, counts) + most)
