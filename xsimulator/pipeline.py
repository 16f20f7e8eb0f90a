"""Exact steady-state timeline of RRA's phases over a pipeline (design.md section 3.4).

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
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from xgpt.lengths import FloatArray, IntArray

WARM_UP_PHASES = 2  # until the timeline repeats
# Shorter phases may then swing between two lengths: their period is a mean over two. (With more
# groups than stages swings over three, or a late settling, were seen: 3 % off in one of 1,500.)
SHORT_ITERATIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Seconds, per configuration. `finish_s[:, u - 1]`: from the start of a query's encoding to
    its token of iteration u of its first phase, for the group where that takes longest."""

    period_s: FloatArray  # [configs]
    encoded_s: FloatArray  # [configs] from its start to its token, for the slowest group
    finish_s: FloatArray  # [configs, max N_D]; constant beyond the configuration's own N_D


def phase_timeline(*, encode_s: FloatArray, encode_rest_s: FloatArray, decode_s: FloatArray,
                   decode_rest_s: FloatArray, iterations: IntArray) -> Timeline:
    """Steady-state timeline.

    encode_s: [configs, stages] one group's encode step; encode_rest_s: [configs, stages] those of
    all other groups together; decode_s, decode_rest_s: [configs, max N_D, stages] likewise;
    iterations: [configs] N_D, rows beyond it are ignored. Where groups are unequal, give the
    slowest as the one: G unequal steps over equal stages take the sum of all plus
    (stages - 1) times the slowest. Groups without an encode step are taken to be ready when the
    last encoded one is. Stages that a configuration lacks come last, with zero time.
    """
    assert encode_s.shape == encode_rest_s.shape and decode_s.shape == decode_rest_s.shape
    assert (iterations >= 1).all() and decode_s.shape[1] >= iterations.max()
    configs = len(iterations)
    period, encoded = np.empty(configs), np.empty(configs)
    finish = np.empty((configs, decode_s.shape[1]))
    is_short = iterations <= SHORT_ITERATIONS
    for chosen, watched_phases in ((is_short, 2), (~is_short, 1)):
        rows = np.flatnonzero(chosen)
        if rows.size == 0:
            continue
        rows = rows[np.argsort(-iterations[rows], kind="stable")]
        deepest = iterations[rows[0]]
        rounds = _Rounds(encode_s[rows], encode_rest_s[rows], decode_s[rows, :deepest],
                         decode_rest_s[rows, :deepest], iterations[rows])
        period[rows], encoded[rows], finish[rows, :deepest] = rounds.steady(watched_phases)
        finish[rows, deepest:] = finish[rows, deepest - 1][:, None]
    return Timeline(period_s=period, encoded_s=encoded, finish_s=finish)


class _State:
    """Where the pipeline stands after a round: stages' ends, and the returns of the tokens of the
    first and the last group."""

    def __init__(self, *, configs: int, stages: int) -> None:
        self.free = np.zeros((configs, stages))
        self.first = np.zeros(configs)
        self.last = np.zeros(configs)

    def next_start(self) -> FloatArray:
        """When the first group's next step begins at stage 0."""
        return np.maximum(self.first, self.free[:, 0])

    def advance(self, count: int, step_s: FloatArray, through_s: FloatArray,
                rest_s: FloatArray) -> None:
        """Every group takes one step in the first `count` configurations.

        step_s: [count, stages] the first's, rest_s: all others'; through_s: running sum of step_s
        over the stages, along which end(s) = max(end(s - 1), ready(s)) + step(s) is a running
        maximum of ready - through.
        """
        free = self.free[:count]
        head = free + step_s - through_s
        head[:, 0] = np.maximum(head[:, 0], self.first[:count])
        first = np.maximum.accumulate(head, axis=1) + through_s
        tail = first - through_s + rest_s
        tail[:, 0] = np.maximum(tail[:, 0], self.last[:count])
        np.maximum.accumulate(tail, axis=1, out=tail)
        np.add(tail, through_s, out=free)
        self.first[:count], self.last[:count] = first[:, -1], free[:, -1]


class _Rounds:
    """One phase's rounds, configurations in falling order of N_D: those still decoding at an
    iteration are then the first ones."""

    def __init__(self, encode_s: FloatArray, encode_rest_s: FloatArray, decode_s: FloatArray,
                 decode_rest_s: FloatArray, iterations: IntArray) -> None:
        self._encode_s, self._encode_rest_s = encode_s, encode_rest_s
        self._decode_s, self._decode_rest_s = decode_s, decode_rest_s
        self._encode_through_s = np.cumsum(encode_s, axis=1)
        self._decode_through_s = np.cumsum(decode_s, axis=2)
        self._counts = np.searchsorted(
            -iterations, -np.arange(1, decode_s.shape[1] + 1), side="right").tolist()
        # what the last group waits for at stage 0 before its next step: all others' ones
        self._before_last = np.concatenate(
            [decode_rest_s[:, :, 0], encode_rest_s[:, :1]], axis=1)  # [configs, N_D + 1]
        self._before_last[np.arange(len(iterations)), iterations] = encode_rest_s[:, 0]

    def steady(self, watched_phases: int) -> tuple[FloatArray, FloatArray, FloatArray]:
        """(period, encoded_s, finish_s); the period is a mean over the phases watched."""
        state = _State(configs=len(self._encode_s), stages=self._encode_s.shape[1])
        for _ in range(WARM_UP_PHASES):
            self._encode(state)
            for u in range(len(self._counts)):
                self._decode(state, u)
        begun = state.next_start()
        for _ in range(watched_phases):
            encoded, finish = self._watched_phase(state)
        return (state.next_start() - begun) / watched_phases, encoded, finish

    def _watched_phase(self, state: _State) -> tuple[FloatArray, FloatArray]:
        first_start = state.next_start()
        last_start = np.maximum(state.last, first_start + self._encode_rest_s[:, 0])

        def seen(before_last: FloatArray) -> FloatArray:
            """Until the head takes up the tokens; the last group waits for the others' steps."""
            again = state.next_start()
            last: FloatArray = np.maximum(state.last, again + before_last) - last_start
            return np.maximum(again - first_start, last)

        self._encode(state)
        encoded = seen(self._before_last[:, 0])
        finish = np.empty(self._before_last[:, 1:].shape)
        for u in range(len(self._counts)):
            self._decode(state, u)
            finish[:, u] = seen(self._before_last[:, u + 1])
        return encoded, finish

    def _encode(self, state: _State) -> None:
        state.advance(len(self._encode_s), self._encode_s, self._encode_through_s,
                      self._encode_rest_s)

    def _decode(self, state: _State, u: int) -> None:
        count = self._counts[u]
        state.advance(count, self._decode_s[:count, u], self._decode_through_s[:count, u],
                      self._decode_rest_s[:count, u])
