"""Exact steady-state timeline of RRA's phases over a pipeline (docs/design.md).

Every stage works one queue in order: E_0 .. E_{G-1}, then D_0 .. D_{G-1} for each iteration. A
group's next step starts at stage 0 only after its previous one left the last stage, because the
tokens return. Starting times are a max-plus recurrence

    end(step, s) = max(end(step, s - 1), end(previous step, s)) + duration(kind of step, s)

Within a round (the same kind of step for each group in turn) all groups take equally long, so
starts are convex in the group's number: maxima are reached at the first or at the last group, and
following those two is exact. That costs O(stages) a round whatever G is, and runs over arrays of
configurations. A closed form per iteration, max(G * slowest stage, sum of stages), misses by up to
a quarter where iterations get shorter within a phase: the last group's lag outlives its cause.
A token counts as there when the head takes it up, in its group's turn: that is what a run measures.

A block of w equal rounds is advanced at once: in w - 1 of them every stage goes on by its own work
and the tokens' way around by one step's, the last is followed exactly. A longest path through many
equal rounds stays on one stage or goes around, whichever takes longer, and changes between them at
its ends only, so this misses no more than what it takes to change over."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xsimulator.native import native

WARM_UP_PHASES = 2  # until the timeline repeats
# Shorter phases may then swing between two lengths: their period is a mean over two. (Swings over
# three, or a late settling, were seen: 0.7 % off, and with more groups than stages 3 % in one of
# 1,500.)
SHORT_ITERATIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Seconds, per configuration. `finish_s[:, u - 1]`: from the start of a query's encoding to
    its token of iteration u of its first phase (of block u's last one), in the mean of the first
    and the last group."""

    period_s: FloatArray  # [configs]
    encoded_s: FloatArray  # [configs] from its start to its token, in the same mean
    finish_s: FloatArray  # [configs, max N_D]; constant beyond the configuration's own N_D


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageWork:
    """One stage's seconds: of one group's step, and of all other groups' together. Stages that
    cost the same may share one."""

    encode_s: FloatArray  # [configs]
    encode_rest_s: FloatArray
    decode_s: FloatArray  # [blocks, configs]
    decode_rest_s: FloatArray


def sorted_timeline(work: Sequence[StageWork], blocks: IntArray,
                    widths: FloatArray | IntArray | None = None) -> Timeline:
    """Steady-state timeline of configurations in falling order of their number of `blocks`.

    blocks: [configs] iterations that are told apart; rows of `work` (by stage) beyond them are
    ignored. widths: [blocks, configs] equal iterations that each block stands for, 1 unless given.
    Where groups are unequal, the slowest is the one: G unequal steps over equal stages take the sum
    of all plus (stages - 1) times the slowest. Groups without an encode step are taken to be ready
    when the last encoded one is. Stages that a configuration lacks come last, with zero time."""
    configs = len(blocks)
    assert (np.diff(blocks) <= 0).all(), "configurations in falling order of their blocks"
    if (library := native()) is not None:
        kinds, kind_of = _kinds(work)
        period, encoded, finish = library.timeline(
            [(own.encode_s, own.encode_rest_s, own.decode_s, own.decode_rest_s) for own in kinds],
            kind_of, blocks, widths)
        return Timeline(period_s=period, encoded_s=encoded, finish_s=finish.T)
    period, encoded = np.empty(configs), np.empty(configs)
    finish = np.empty((len(work[0].decode_s), configs))
    # few blocks are few iterations: longer phases have more than SHORT_ITERATIONS blocks
    few = int(np.searchsorted(-blocks, -SHORT_ITERATIONS, side="left"))
    for part, watched_phases in ((slice(0, few), 1), (slice(few, configs), 2)):
        if part.start == part.stop:
            continue
        most = int(blocks[part][0])
        rounds = _PhaseRounds(work, blocks[part], widths, part)
        period[part], encoded[part], finish[:most, part] = rounds.steady(watched_phases)
        finish[most:, part] = finish[most - 1, part]
    return Timeline(period_s=period, encoded_s=encoded, finish_s=finish.T)


def _kinds(work: Sequence[StageWork]) -> tuple[list[StageWork], list[int]]:
    """(the work of each kind of stage, the kind of each stage)"""
    kinds = list({id(own): own for own in work}.values())
    place = {id(own): kind for kind, own in enumerate(kinds)}
    return kinds, [place[id(own)] for own in work]


class _Round:
    """A round of one kind: [configs] seconds per stage of the first's step and all others', and
    what w - 1 rounds before it (`before`) add to every stage's end (`skip`) and to the first
    group's return (`around_s`). Seconds are given by kind of stage."""

    def __init__(self, one_s: list[FloatArray], rest_s: list[FloatArray], kind_of: list[int],
                 before: FloatArray | IntArray | None, *, is_stacked: bool) -> None:
        self.one_s, self.rest_s = ([own[kind] for kind in kind_of] for own in (one_s, rest_s))
        if is_stacked:  # whole arrays [stages, configs] serve few configurations over many stages
            one, self.rest = (np.stack(own).take(kind_of, axis=0) for own in (one_s, rest_s))
            self.through = np.cumsum(one, axis=0)
            self.lead = one - self.through
        self.skip: Sequence[FloatArray] | FloatArray | None = None
        if before is None:
            return
        skip = [before * (one + rest) for one, rest in zip(one_s, rest_s, strict=True)]
        if is_stacked:
            self.around_s = before * self.through[-1]
            self.skip = np.stack(skip).take(kind_of, axis=0)
        else:
            around = self.one_s[0].copy()
            for one in self.one_s[1:]:
                around += one
            self.around_s, self.skip = before * around, [skip[kind] for kind in kind_of]
        # the last stage's end is the last group's return: it may also go around
        self.skip[-1] = np.maximum(self.skip[-1], self.around_s)


class _State:
    """The state after a round: stages' ends, of which the last is the return of
    the last group's tokens, and the return of the first group's."""

    def __init__(self, *, configs: int, stages: int) -> None:
        self.free: FloatArray = np.zeros((stages, configs))
        self.first: FloatArray = np.zeros(configs)
        self._spare = np.zeros(configs)

    @property
    def last(self) -> FloatArray:
        return np.asarray(self.free[-1])

    def next_start(self) -> FloatArray:
        """When the first group's next step begins at stage 0."""
        return np.asarray(np.maximum(self.first, self.free[0]))

    def advance(self, step: _Round, count: int) -> None:
        """Every group takes its steps in the first `count` configurations."""
        free, first, spare = self.free[:, :count], self.first[:count], self._spare[:count]
        if step.skip is not None:
            for end, skip in zip(free, step.skip, strict=True):
                end += skip
            first += step.around_s
        end = free[-1].copy()  # of the last group's step on the stage before; then on this one
        for ready, one, rest in zip(free, step.one_s, step.rest_s, strict=True):
            np.maximum(first, ready, out=first)
            first += one
            end += one
            np.add(first, rest, out=spare)
            np.maximum(end, spare, out=end)
            ready[:] = end

    def advance_stacked(self, step: _Round, count: int) -> None:
        """The same: along the stages, end(s) = max(end(s - 1), ready(s)) + step(s) is a running
        maximum of ready - running sum of steps."""
        free = self.free[:, :count]
        if step.skip is not None:
            free += step.skip
            self.first[:count] += step.around_s
        last = free[-1].copy()
        head = free + step.lead
        np.maximum(head[0], self.first[:count], out=head[0])
        np.maximum.accumulate(head, axis=0, out=head)
        np.add(head[-1], step.through[-1], out=self.first[:count])
        head += step.rest
        np.maximum(head[0], last, out=head[0])
        np.maximum.accumulate(head, axis=0, out=head)
        np.add(head, step.through, out=free)


class _PhaseRounds:
    """One phase's rounds, configurations in falling order of their blocks: those still decoding in
    a block are then the first ones."""

    def __init__(self, work: Sequence[StageWork], blocks: IntArray,
                 widths: FloatArray | IntArray | None, part: slice) -> None:
        self._configs, self._stages = len(blocks), len(work)
        # array calls per round: six a stage, or fewer that cost more a configuration
        is_stacked = self._configs < 40 + 8 * self._stages
        self._advance = _State.advance_stacked if is_stacked else _State.advance
        most = int(blocks[0])
        self._counts = np.searchsorted(-blocks, -np.arange(1, most + 1), side="right").tolist()
        kinds, kind_of = _kinds(work)
        self._encode = _Round([own.encode_s[part] for own in kinds],
                              [own.encode_rest_s[part] for own in kinds], kind_of, None,
                              is_stacked=is_stacked)
        self._decodes = []
        for k, count in enumerate(self._counts):
            before = None if widths is None else widths[k, part][:count] - 1
            self._decodes.append(_Round(
                [own.decode_s[k, part][:count] for own in kinds],
                [own.decode_rest_s[k, part][:count] for own in kinds], kind_of,
                before if before is not None and before.any() else None, is_stacked=is_stacked))
        # what the last group waits for at stage 0 before its next step: all others' ones
        encode_rest, decode_rest = work[0].encode_rest_s[part], work[0].decode_rest_s[:, part]
        self._before_last = np.concatenate([decode_rest[:most], encode_rest[None]])
        self._before_last[blocks, np.arange(self._configs)] = encode_rest

    def steady(self, watched_phases: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(period, encoded_s, finish_s [blocks, configs]); the period is a mean over the phases
        watched."""
        state = _State(configs=self._configs, stages=self._stages)
        for _ in range(WARM_UP_PHASES):
            self._advance(state, self._encode, self._configs)
            for step, count in zip(self._decodes, self._counts, strict=True):
                self._advance(state, step, count)
        begun = state.next_start()
        for _ in range(watched_phases):
            encoded, finish = self._watched_phase(state)
        return (state.next_start() - begun) / watched_phases, encoded, finish

    def _watched_phase(self, state: _State) -> tuple[FloatArray, FloatArray]:
        first_start = state.next_start()
        last_start = np.maximum(state.last, first_start + self._encode.rest_s[0])

        def seen(before_last: FloatArray) -> FloatArray:
            """Seconds until the head takes up the tokens; the last group waits for the others'
            steps."""
            again = state.next_start()
            last: FloatArray = np.maximum(state.last, again + before_last) - last_start
            return 0.5 * (again - first_start + last)

        self._advance(state, self._encode, self._configs)
        encoded = seen(self._before_last[0])
        finish = np.empty((len(self._counts), self._configs))
        for k, (step, count) in enumerate(zip(self._decodes, self._counts, strict=True)):
            self._advance(state, step, count)
            finish[k] = seen(self._before_last[k + 1])
        return encoded, finish

    def from_rest(self) -> tuple[FloatArray, FloatArray]:
        """(encoded_s, finish_s [blocks, configs]) in the mean of the first group, from stages at
        rest, and of the last one, whose encode step is the first that is done."""
        first = _State(configs=self._configs, stages=self._stages)
        last = _State(configs=self._configs, stages=self._stages)
        self._advance(first, self._encode, self._configs)
        last.free = np.cumsum(np.stack(self._encode.one_s), axis=0)
        encoded = 0.5 * (first.next_start() + np.maximum(
            last.last, last.next_start() + self._before_last[0]))
        finish = np.empty((len(self._counts), self._configs))
        for k, (step, count) in enumerate(zip(self._decodes, self._counts, strict=True)):
            for state in (first, last):
                self._advance(state, step, count)
            finish[k] = 0.5 * (first.next_start() + np.maximum(
                last.last, last.next_start() + self._before_last[k + 1]))
        return encoded, finish
