"""Simulation of a closed loop of equal requests on one tensor-parallel group, as serving benchmarks
run it.

`concurrency` requests come at the start, and a new one whenever one is done. They are served in
order of arrival, step by step. An engine with mixed steps encodes (prefills) up to a step's tokens
beside decoding. Another one encodes alone while decoding waits. Steps without encoding are
simulated together up to the next end of a request, since only the context changes. With fixed
lengths, requests that start together stay together, as in such benchmarks."""

import bisect
import heapq
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from xgpt.core.cluster import Link
from xgpt.core.lengths import FloatArray
from xgpt.core.model import ModelSpec
from xgpt.core.units import DTYPE_BYTES
from xprofiler.timing import MessageKind, Operator, TimingSource
from xsimulator.layer_times import ALL_REDUCES_PER_LAYER

_SEED = 11
ROUNDS = 10  # chosen: requests per unit of concurrency
_MOST_ROWS, _MOST_CONTEXT, _MOST_QUERIES = 2.0**15, 2.0**18, 2.0**11  # chosen: of the tables


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosedLoop:
    """The load of a closed loop, and how the engine fills its steps.

    `step_tokens`: most tokens of a step. `mixes`: whether steps encode and decode together.
    `kv_tokens`: capacity of the KV cache. `shortest`: lengths are drawn between this share of the
    stated ones and them. `cached`: share of each input that the cache already holds."""

    concurrency: int
    input_tokens: int
    output_tokens: int
    step_tokens: int
    mixes: bool
    kv_tokens: float
    shortest: float = 1.0
    cached: float = 0.0


class LoopTimes(NamedTuple):
    """Means over all requests, in seconds: TTFT, TPOT, latency."""

    ttft_s: float
    tpot_s: float
    latency_s: float


class StepSeconds:
    """Seconds of one step of a whole model on one tensor-parallel group, from tables."""

    def __init__(self, model: ModelSpec, timing: TimingSource, link: Link, dtype: str,
                 tp_degree: int) -> None:
        self._model, self._timing, self._degree = model, timing, tp_degree
        rows = np.unique(np.round(np.geomspace(1, _MOST_ROWS, 64)))
        layer_s = timing.operator_s(Operator.LAYER_REST, rows, tp_degree=tp_degree)
        reduce_s = timing.message_s(
            MessageKind.ALL_REDUCE, rows * model.hidden_size * DTYPE_BYTES[dtype], link,
            tp_degree=tp_degree)
        ends_s = timing.operator_s(Operator.EMBED, rows, tp_degree=tp_degree)
        self._rows = _Line(rows, model.num_layers * layer_s + ends_s)
        self._reduces = _Line(rows, model.num_layers * ALL_REDUCES_PER_LAYER * reduce_s)
        self._host_s = timing.facts.step_overhead_s
        self._heads = _Line(rows, timing.operator_s(Operator.HEAD, rows, tp_degree=tp_degree))
        queries = np.unique(np.round(np.geomspace(1, _MOST_QUERIES, 24)))
        contexts = np.geomspace(1, _MOST_CONTEXT, 40)
        attention_s = model.num_layers * timing.operator_s(
            Operator.DECODE_ATTENTION, queries[:, None], contexts, tp_degree=tp_degree)
        self._attention = [_Line(contexts, line) for line in attention_s]
        self._of_queries = queries.tolist()
        self._prompts: dict[tuple[int, int], float] = {}

    def encode_attention_s(self, tokens: int, together: int) -> float:
        """Seconds of all layers' attention for one prompt, encoded in a batch of `together`."""
        key = (tokens, together)
        if key not in self._prompts:
            self._prompts[key] = self._model.num_layers * float(self._timing.operator_s(
                Operator.ENCODE_ATTENTION, tokens, together, tp_degree=self._degree))
        return self._prompts[key]

    def of(self, encoded: int, prompts: int, decoding: int, context: float,
           encode_attention_s: float) -> float:
        """Seconds of a step that encodes `encoded` tokens, finishes `prompts` prompts, and decodes
        `decoding` requests with `context` tokens each."""
        ends_s = self._heads(prompts + decoding) if prompts + decoding else 0.0
        attention_s = self._decode_attention_s(decoding, context) if decoding else 0.0
        return (self._rows(encoded + decoding) + ends_s + encode_attention_s + attention_s
                + self._reduces(encoded + decoding) + self._host_s)

    def _decode_attention_s(self, queries: float, context: float) -> float:
        at = min(max(bisect.bisect_right(self._of_queries, queries) - 1, 0),
                 len(self._of_queries) - 2)
        low, high = self._of_queries[at], self._of_queries[at + 1]
        share = (queries - low) / (high - low)
        seconds: float = ((1 - share) * self._attention[at](context)
                          + share * self._attention[at + 1](context))
        return seconds


class _Line:
    """A piecewise linear function of plain numbers, which is quicker than a call of numpy."""

    def __init__(self, x: FloatArray, y: FloatArray) -> None:
        self._x, self._y = x.tolist(), y.tolist()

    def __call__(self, x: float) -> float:
        at = min(max(bisect.bisect_right(self._x, x) - 1, 0), len(self._x) - 2)
        x0, y0 = self._x[at], self._y[at]
        return float(y0 + (self._y[at + 1] - y0) * (x - x0) / (self._x[at + 1] - x0))


class _Request:
    """One request: arrival, first token, lengths, and tokens of its prompt to encode."""

    __slots__ = ("arrival_s", "first_s", "input_tokens", "left", "output_tokens")

    def __init__(self, arrival_s: float, input_tokens: int, output_tokens: int, left: int) -> None:
        self.arrival_s, self.first_s = arrival_s, 0.0
        self.input_tokens, self.left = input_tokens, left
        self.output_tokens = output_tokens


def simulate_loop(loop: ClosedLoop, steps: StepSeconds) -> LoopTimes:
    """Mean times of a simulated closed loop of ROUNDS requests per unit of concurrency."""
    return _Simulation(loop, steps).run(ROUNDS * loop.concurrency)


class _Simulation:
    """State of the loop. Decode steps are numbered; a decoding request is kept by its last step."""

    def __init__(self, loop: ClosedLoop, steps: StepSeconds) -> None:
        self._loop, self._steps = loop, steps
        self._now_s, self._step, self._num_first = 0.0, 0, 0
        self._rng = np.random.default_rng(_SEED)
        self._waiting = deque(self._arrival() for _ in range(loop.concurrency))
        self._encoding: deque[_Request] = deque()
        self._running: list[tuple[int, int, _Request]] = []  # by the step that is its last
        self._context = 0  # tokens of all that run
        self._held = 0.0  # tokens of KV cache that running and encoding requests need
        self._done: list[tuple[float, float]] = []  # (time to first token, time per token after)

    def run(self, requests: int) -> LoopTimes:
        while len(self._done) < requests:
            pieces = self._next_pieces()
            if pieces:
                self._encode(pieces)
            else:
                self._decode_on()
        ttft_s, tpot_s = np.array(self._done[:requests]).mean(axis=0).tolist()
        return LoopTimes(ttft_s, tpot_s, ttft_s + tpot_s * (self._loop.output_tokens - 1))

    def _arrival(self) -> _Request:
        loop = self._loop
        shares = (self._rng.uniform(loop.shortest, 1.0, 2).tolist() if loop.shortest < 1
                  else (1.0, 1.0))
        inputs = max(int(loop.input_tokens * shares[0]), 1)
        return _Request(self._now_s, inputs, max(int(loop.output_tokens * shares[1]), 1),
                        max(inputs - int(loop.cached * inputs), 1))

    def _next_pieces(self) -> list[int]:
        """Tokens that the next step encodes, of each request in turn."""
        loop = self._loop
        room = loop.step_tokens - (len(self._running) if loop.mixes else 0)
        pieces: list[int] = []
        while room > 0:
            if len(pieces) == len(self._encoding):
                if not self._waiting or not self._has_room(self._waiting[0]):
                    break
                request = self._waiting.popleft()
                self._held += _cache_tokens(request)
                self._encoding.append(request)
            pieces.append(min(self._encoding[len(pieces)].left, room))
            room -= pieces[-1]
        return pieces

    def _has_room(self, request: _Request) -> bool:
        """Whether the cache has room for the request; one alone is always admitted."""
        is_alone = not self._running and not self._encoding
        return is_alone or self._held + _cache_tokens(request) <= self._loop.kv_tokens

    def _encode(self, pieces: list[int]) -> None:
        decoding = len(self._running) if self._loop.mixes else 0
        attention_s, ended = 0.0, 0
        for request, tokens in zip(self._encoding, pieces, strict=False):
            # tokens after a cached part attend to it too
            share = tokens / request.input_tokens * (1 + self._loop.cached)
            attention_s += share * self._steps.encode_attention_s(
                request.input_tokens, len(pieces))
            request.left -= tokens
            ended += request.left == 0
        self._now_s += self._steps.of(
            sum(pieces), ended, decoding, self._context / decoding if decoding else 0.0,
            attention_s)
        if decoding:
            self._advance(1)
        for _ in range(ended):
            self._start(self._encoding.popleft())

    def _start(self, request: _Request) -> None:
        request.first_s = self._now_s
        if request.output_tokens == 1:
            self._end(request)
            return
        self._num_first += 1
        last = self._step + request.output_tokens - 1
        heapq.heappush(self._running, (last, self._num_first, request))
        self._context += request.input_tokens + 1

    def _decode_on(self) -> None:
        assert self._running, "a loop without a request"
        number, steps = len(self._running), self._running[0][0] - self._step
        context = self._context / number + (steps - 1) / 2
        self._now_s += steps * self._steps.of(0, 0, number, context, 0.0)
        self._advance(steps)

    def _advance(self, steps: int) -> None:
        self._step += steps
        self._context += steps * len(self._running)
        while self._running and self._running[0][0] <= self._step:
            request = heapq.heappop(self._running)[2]
            self._context -= request.input_tokens + request.output_tokens
            self._end(request)

    def _end(self, request: _Request) -> None:
        gaps = max(request.output_tokens - 1, 1)
        self._held -= _cache_tokens(request)
        self._done.append((request.first_s - request.arrival_s,
                           (self._now_s - request.first_s) / gaps))
        self._waiting.append(self._arrival())


def _cache_tokens(request: _Request) -> float:
    """Mean KV tokens of a request: engines admit by actual, not by reserved tokens."""
    return request.input_tokens + request.output_tokens / 2
