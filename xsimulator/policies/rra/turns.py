"""Rounds of RRA in chunks where fewer queries are encoded than there are groups, run.

Symbols: as in rra.chunked. Which groups have a chunk then goes round: (g + phase B_E) mod G < B_E,
so that of two phases' long steps the later may come earlier in its round. It is then on its way
before all of the earlier one's round is through, and two rounds take less than two ways through all
stages; in the other order they take both. So a few phases as they are dealt (rra.dealt) are run
(continuous.in_flight), every group's step with its chunk or without one."""

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.occupancy import QueryFlow
from xsimulator.plans import StagePlan
from xsimulator.policies.continuous.in_flight import mean_interval_s
from xsimulator.policies.rra.dealt import Dealt
from xsimulator.policies.rra.phases import EncodeTokens

MOST_ITERATIONS = 32  # of a phase: of longer ones most rounds are like the one before
ROUNDS = 512  # at least, as far as phases were dealt
_SIZES = 24  # of chunks that are told apart


def rounds_s(plan: StagePlan, dealt: Dealt, flow: QueryFlow, tokens: EncodeTokens, *,
             is_padded: bool) -> tuple[int, float]:
    """(so many of these phases' rounds, their seconds: nan where the timing source does not
    answer)."""
    rounds, length = _chunks(dealt), len(dealt.every) * dealt.iterations
    sizes, rows = _told_apart(rounds)
    decoding = np.full(len(sizes), float(dealt.stays.sum()) / length / rounds.shape[1])
    context = flow.charged_context(np.maximum(decoding, 1.0), padded=is_padded)
    ended = np.full(len(sizes), len(dealt.joins) / max(float(dealt.chunks.sum()), 1.0))
    one = plan.times.mean_attention_s(np.maximum(ended, 1.0))
    mixed = plan.steps.mixed_s(sizes, ended, {
        degree: sizes / tokens.mean * own for degree, own in one.items()}, decoding, context)
    plain = plan.steps.decode_s(np.maximum(decoding[:1], 1.0), context[:1])
    steps_s = np.concatenate([np.stack(mixed, axis=-1), np.stack(plain, axis=-1)])
    if not np.isfinite(steps_s).all():
        return len(rows), float("nan")
    return len(rows), len(rows) * mean_interval_s(steps_s, rows, plan.steps.kind_of)


def _chunks(dealt: Dealt) -> IntArray:
    """[rounds, groups] tokens of each one's chunk, 0 where it has none."""
    phases = max(min(-(-ROUNDS // dealt.iterations), len(dealt.every)), 1)
    found = np.zeros((phases, dealt.iterations, dealt.tokens.shape[1]), np.int64)
    for phase in range(phases):
        for group, (tokens, chunks) in enumerate(zip(
                dealt.tokens[phase].tolist(), dealt.chunks[phase].tolist(), strict=True)):
            at = np.arange(chunks) * dealt.every[phase]
            found[phase, at, group] = np.diff(np.arange(chunks + 1) * tokens // max(chunks, 1))
    return found.reshape(-1, found.shape[2])


def _told_apart(chunks: IntArray) -> tuple[FloatArray, IntArray]:
    """(sizes of chunks, which of them each has); one after the last has none."""
    some = np.sort(chunks[chunks > 0])
    parts = [part for part in np.array_split(some, _SIZES) if len(part)]
    if not parts:
        return np.ones(1), np.ones_like(chunks)
    until = np.array([part[-1] for part in parts])
    rows = np.searchsorted(until, chunks)
    return np.array([part.mean() for part in parts]), np.where(chunks > 0, rows, len(parts))
