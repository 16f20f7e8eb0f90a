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

STEADY_PHASES = 3  # phases after which the timeline repeats (checked by the test)


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
    order = np.argsort(-iterations, kind="stable")  # those still decoding are then a prefix
    state = _State(configs=len(order), stages=encode_s.shape[1])
    rounds = _Rounds(encode_s=encode_s[order], encode_rest_s=encode_rest_s[order],
                     decode_s=decode_s[order], decode_rest_s=decode_rest_s[order],
                     iterations=iterations[order])
    for _ in range(STEADY_PHASES):
        begun = state.next_start()
        encoded, finish = rounds.run_phase(state)
    period, back = state.next_start() - begun, np.argsort(order)
    return Timeline(period_s=period[back], encoded_s=encoded[back], finish_s=finish[back])


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rounds:
    """The durations of one phase's rounds, configurations in falling order of N_D."""

    encode_s: FloatArray
    encode_rest_s: FloatArray
    decode_s: FloatArray
    decode_rest_s: FloatArray
    iterations: IntArray

    def run_phase(self, state: _State) -> tuple[FloatArray, FloatArray]:
        """Advance `state` by a phase; (encoded_s, finish_s) as in Timeline."""
        configs, max_iterations, _ = self.decode_s.shape
        encode_before_last = self.encode_rest_s[:, 0]
        first_start = state.next_start()
        last_start = np.maximum(state.last, first_start + encode_before_last)
        decode_before_last = self.decode_rest_s[:, :, 0]
        following = np.concatenate([decode_before_last[:, 1:], encode_before_last[:, None]], axis=1)
        following[np.arange(configs), self.iterations - 1] = encode_before_last

        def seen(before_last: FloatArray) -> FloatArray:
            """Until the head takes up the tokens: the last group waits for the others' next step."""
            again = state.next_start()
            last = np.maximum(state.last, again + before_last)
            return np.maximum(again - first_start, last - last_start)

        state.advance(configs, self.encode_s, np.cumsum(self.encode_s, axis=1), self.encode_rest_s)
        encoded = seen(decode_before_last[:, 0])
        finish = np.empty((configs, max_iterations))
        counts = np.searchsorted(-self.iterations, -np.arange(1, max_iterations + 1), side="right")
        through = np.cumsum(self.decode_s, axis=2)
        for u, count in enumerate(counts):
            state.advance(count, self.decode_s[:count, u], through[:count, u],
                          self.decode_rest_s[:count, u])
            finish[:, u] = seen(following[:, u])
        return encoded, finish
