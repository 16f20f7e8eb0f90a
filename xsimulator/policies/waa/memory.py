"""Bytes on the ranks of WAA's two pools (docs/design.md; xsimulator.memory)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from xgpt.core.lengths import FloatArray, IntArray
from xgpt.core.problem import Problem
from xsimulator import memory
from xsimulator.occupancy import QueryFlow
from xsimulator.plans import PlanSource, StagePlan
from xsimulator.policies.waa.config import WaaConfigs
from xsimulator.policies.waa.held import HeldPerUnit, HeldSizes, encode_tokens
from xsimulator.policies.waa.plans import WaaPlan


class WaaMemory:
    """It says what the configurations of one problem need."""

    def __init__(self, problem: Problem, flow: QueryFlow, plans: PlanSource,
                 adjustment: float) -> None:
        self._problem, self._plans, self._adjustment = problem, plans, adjustment
        self.mean_outputs = problem.lengths.outputs.mean
        self._most_tokens = float(flow.max_reserve_tokens)
        self._inputs = problem.lengths.inputs
        self._mean, self._std = self._inputs.mean, self._inputs.std
        # those present are biased to long outputs, and so to the inputs that go with them
        lengths = problem.lengths
        weights = lengths.outputs.pmf * np.maximum(
            lengths.outputs.support - flow.iterations_fewer, 1e-9)
        biased = float(weights @ lengths.mean_input_given_output() / weights.sum())
        self._mean_reserved = biased + self._most_tokens - self._inputs.max
        self._held = HeldPerUnit(problem)

    def by_stage(self, plan: WaaPlan, configs: WaaConfigs, in_system: FloatArray) -> FloatArray:
        """Each rank of a stage holds so many bytes [configs, stages of both pools]."""
        pools = []
        for pool, tokens, rows, heads in self._largest(plan, self.sizes(configs, in_system)):
            rest, token, row, head = self._held.by_stage(pool, pool is plan.encode)
            pools.append(rest + tokens[:, None] * token + rows[:, None] * row
                         + heads[:, None] * head)
        return np.concatenate(pools, axis=1)

    def fullest(self, plan: WaaPlan, configs: WaaConfigs, in_system: FloatArray) -> FloatArray:
        """The fullest rank of any stage holds so many bytes [configs]."""
        return self.fullest_of(plan, self.sizes(configs, in_system))

    def fullest_of(self, plan: WaaPlan, sizes: HeldSizes) -> FloatArray:
        """The same of what is held, which is asked of many plans."""
        encode, decode = (self._held.of_pool(pool, pool is plan.encode).fullest(tokens, rows, heads)
                          for pool, tokens, rows, heads in self._largest(plan, sizes))
        return np.maximum(encode, decode)

    def fullest_of_many(self, plans: Sequence[WaaPlan], sizes: HeldSizes) -> FloatArray:
        """The same [plans, configs] of many plans at once."""
        return self._held.of_many(tuple(plans)).fullest(sizes)

    def fullest_of_pairs(self, plans: Sequence[WaaPlan], which: IntArray,
                         sizes: HeldSizes) -> FloatArray:
        """The same of configurations that each have one of the plans: `which` [configs]."""
        return self._held.of_many(tuple(plans)).of_pairs(which, sizes)

    def sizes(self, configs: WaaConfigs, in_system: FloatArray) -> HeldSizes:
        """What the pools hold with so many queries in the system."""
        encoded = np.ceil(configs.batch * (1 + self._adjustment))
        decoded = np.ceil(in_system / configs.groups)
        largest = self._largest_batch(configs.batch)
        return HeldSizes(
            batch_tokens=largest, encode_rows=memory.largest_rows(self._inputs, encoded),
            encoded=encoded,
            # its caches, and a batch that has been handed over and waits for its turn to join
            decode_tokens=self.kv_tokens(in_system) + largest,
            decode_rows=decoded + configs.chunk,
            # beside a chunk, and those whose encoding it ends
            decoded=decoded + np.ceil(configs.chunk / self._mean))

    def evenly(self, counts: IntArray, batch: FloatArray, in_system: FloatArray) -> FloatArray:
        """The fullest device would hold so many bytes [counts of encode devices, configs] if all
        were spread evenly over each pool's: a lower bound, without laying anything out."""
        (encode_rest, encode_token), (decode_rest, decode_token) = self._of_whole
        encoding = counts[:, None]
        return np.asarray(np.maximum(
            (encode_rest + self.encode_kv_tokens(batch, 1) * encode_token) / encoding,
            (decode_rest + self.kv_tokens(in_system) * decode_token)
            / (self._problem.cluster.num_devices - encoding)))

    @cached_property
    def _of_whole(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Bytes at rest, and of a token, of each pool on one device; the encode pool of an
        encoder-decoder model has no cache."""
        encode, decode = (self._plans.pool([(0,)], role) for role in ("encode", "decode"))
        tokens = [float(memory.kv_bytes(self._problem, pool.stages, 1.0)[0])
                  for pool in (encode, decode)]
        if self._problem.model.is_encoder_decoder:
            tokens[0] = 0.0
        return (float(encode.weight_bytes[0]), tokens[0]), (float(decode.weight_bytes[0]),
                                                            tokens[1])

    def encode_kv_tokens(self, batch: FloatArray, stages: int) -> FloatArray:
        """The encode pool has so many tokens at most: a batch in each stage, one that waits, and
        one that is handed over."""
        return encode_tokens(self._largest_batch(batch), stages)

    def _largest_batch(self, batch: FloatArray) -> FloatArray:
        """An encode batch has so many tokens at its upper threshold."""
        return np.maximum(batch * self._mean * (1 + self._adjustment), self._inputs.max)

    def kv_tokens(self, in_system: FloatArray) -> FloatArray:
        """So many tokens are reserved for the queries in the system, at a high quantile, for one
        longest query at least."""
        most = self._most_tokens
        wanted = (in_system * self._mean_reserved
                  + memory.KV_QUANTILE_Z * self._std * np.sqrt(in_system))
        return np.asarray(np.ceil(np.minimum(np.maximum(wanted, most),
                                             np.maximum(in_system, 1.0) * most)))

    def _largest(self, plan: WaaPlan, sizes: HeldSizes,
                 ) -> list[tuple[StagePlan, FloatArray, FloatArray, FloatArray]]:
        """Each pool comes with KV tokens, and rows and queries of its largest step."""
        tokens = encode_tokens(sizes.batch_tokens, len(plan.encode.stages))
        return [(plan.encode, tokens, sizes.encode_rows, sizes.encoded),
                (plan.decode, sizes.decode_tokens, sizes.decode_rows, sizes.decoded)]
