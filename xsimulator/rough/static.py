"""Rough formula for static batches (FT, DSI; paper section 2, Figure 1). A batch of B requests is
encoded in parts, then decoded in G groups until its longest request is done. Finished rows go on
decoding.

    period = encoding + M cycles, M = mean of the largest D of B requests
    throughput = B / period"""

import math

import numpy as np

from xgpt.core.controls import Controls, StaticControls
from xgpt.core.lengths import FloatArray, IntArray
from xsimulator import memory
from xsimulator.rough.figures import RoughFigures
from xsimulator.rough.one_pool import OnePool, TimedPool
from xsimulator.rough.ranges import cross_product, grid_of


class Static(OnePool):
    """Rough formula of FT (encode_batch, decode_micro_batches), DSI (also encode_micro_batches)."""

    @property
    def _most(self) -> float:
        """Most requests of a batch that the job allows."""
        formed = self.problem.adjustment.batches
        return math.inf if formed is None else formed.most

    def points(self, plan: tuple[int, int]) -> IntArray:
        pool, fixed = self._pool(*plan), self.problem.fixed
        room = pool.memory.most_tokens(self._capacity, np.ones(1), np.ones(1))[0]
        most = max(min(int(room / max(self._workload.reserve, 1.0)), self._most_queries()), 1)
        most = int(min(most, self._most))
        groups = sorted({1, max(pool.stages // 2, 1), pool.stages, 2 * pool.stages})
        given = fixed.value_of("decode_micro_batches")
        batches = grid_of(most, fixed.value_of("encode_batch"), 1.25)
        groups = groups if given is None else [given]
        if self.policy == "ft":
            return cross_product(batches, groups)
        parts = fixed.value_of("encode_micro_batches")
        found = [(batch, own, own * each if parts is None else parts)
                 for batch in batches for own in groups for each in (1, 3)]
        return np.array(found, np.int64)

    def _groups(self, pool: TimedPool, point: tuple[int, ...]) -> int:
        return int(min(point[1], point[0], self._most))

    def _rough(self, pool: TimedPool, points: FloatArray) -> RoughFigures:
        work, (batch, groups, encodes) = self._workload, self._columns(points)
        mean = work.inputs.mean
        encode = pool.pace.encode(batch * mean / encodes)
        encode_s = (encodes - 1) * encode.slowest + encode.through
        most = work.rounds(batch)

        def spent(rounds: FloatArray) -> FloatArray:
            # the tables are for the mean context; here contexts grow from the input on
            beyond = mean + rounds / 2 - work.context
            return rounds * pool.pace.decode(batch / groups, beyond).cycle(groups)

        decode_s = spent(most)
        period_s = encode_s + decode_s
        watched = work.rounds(batch, work.watched)
        latency_s = encode_s / 2 * (1 + 1 / encodes) + spent(
            watched if self.problem.constraint.kind == "sequence" else most)
        rows, heads = self._step_sizes(pool, points)
        inputs, largest = work.inputs, np.ceil(batch / groups)
        reserved = np.minimum(largest * mean + memory.KV_QUANTILE_Z * inputs.std * np.sqrt(largest),
                              largest * inputs.max)
        tokens = (np.maximum(np.ceil(reserved), inputs.max)
                  + largest * (work.longest - inputs.max)) * groups
        return RoughFigures.from_columns(
            throughput_qps=batch / period_s,
            latency_s=latency_s, ttft_s=encode_s, encode_s=encode_s,
            iteration_s=decode_s / np.maximum(most, 1.0), period_s=period_s, decode_batch=batch,
            present=batch, kv_tokens=tokens, memory_bytes=pool.memory.fullest(tokens, rows, heads))

    def _columns(self, points: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        batch = np.minimum(points[:, 0], self._most)
        groups = np.minimum(points[:, 1], batch)
        parts = np.maximum(points[:, 2] // groups, 1.0) if points.shape[1] > 2 else 1.0
        parts = np.minimum(parts, np.ceil(batch / groups))
        return batch, groups, np.minimum(groups * parts, batch)

    def _step_sizes(self, pool: TimedPool, points: FloatArray) -> tuple[FloatArray, FloatArray]:
        batch, groups, encodes = self._columns(points)
        encoded, decoded = np.ceil(batch / encodes), np.ceil(batch / groups)
        rows = np.maximum(memory.largest_rows(self._workload.inputs, encoded), decoded)
        return rows, np.maximum(encoded, decoded)

    def _controls(self, point: tuple[int, ...], groups: int, found: dict[str, float],
                  ) -> tuple[Controls, float, float]:
        batch, parts = int(min(point[0], self._most)), point[2] // groups if len(point) > 2 else 1
        parts = min(max(parts, 1), -(-batch // groups))
        controls = StaticControls(
            policy=self.policy, encode_batch=batch, decode_micro_batches=groups,
            encode_micro_batches=int(groups * parts), batches=self.problem.adjustment.batches,
            forecast=self.problem.adjustment.admission.forecast)
        rounds = float(self._workload.rounds(np.array([float(batch)]))[0])
        return controls, batch, rounds
