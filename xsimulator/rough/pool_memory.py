"""Memory of a pool's ranks as a linear function of cache and step sizes (xsimulator.memory)."""

import numpy as np

from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xgpt.core.units import DTYPE_BYTES
from xsimulator import memory
from xsimulator.plans import StagePlan


class PoolMemory:
    """[stages] bytes on a rank, in four parts: fixed, per KV token, per row of the largest step,
    and per row of it that yields a token. encodes_alone: the pool only encodes (WAA)."""

    def __init__(self, problem: Problem, pool: StagePlan, *, encodes_alone: bool = False) -> None:
        own = memory.StageBytes(problem, pool.stages)
        idle = own.step(0.0, 0.0)
        token = own.kv(1.0)
        if encodes_alone and problem.model.is_encoder_decoder:
            # an encode pool holds only the encoder's output, on its last stage
            token = np.zeros(len(pool.stages))
            token[-1] = problem.model.hidden_size * DTYPE_BYTES[problem.dtype]
        self._each = np.stack([pool.weight_bytes + idle, token, own.step(1.0, 0.0) - idle,
                               own.step(0.0, 1.0) - idle])
        self._kinds = np.unique(self._each, axis=1)  # most stages hold the same
        self._device = problem.cluster.device

    def fullest(self, tokens: FloatArray, rows: FloatArray, heads: FloatArray) -> FloatArray:
        """[configs] bytes on the fullest rank. heads: the rows that yield a token."""
        rest, token, row, head = self._kinds[:, :, None]
        return np.asarray((rest + token * tokens + row * rows + head * heads).max(axis=0))

    def by_stage(self, tokens: float, rows: float, heads: float) -> FloatArray:
        """[stages] bytes on each rank of a stage; arguments as of `fullest`."""
        return np.asarray(np.array([1.0, tokens, rows, heads]) @ self._each)

    def most_tokens(self, capacity_bytes: float, rows: FloatArray, heads: FloatArray) -> FloatArray:
        """[configs] KV tokens that fit beside steps of so many rows; infinite without a cache."""
        rest, token, row, head = self._kinds[:, :, None]
        left = memory.cache_bytes(self._device, capacity_bytes - rest - row * rows - head * heads)
        with np.errstate(divide="ignore"):
            return np.asarray(np.where(token > 0, left / token, np.inf).min(axis=0))
