"""The operators as XRunner executes them, wrapped so that each can be timed apart.

Attention, embedding and head are timed alone. The rest of a layer is what a real step of the stage
executor takes less those: so the parts add up to a real forward pass by construction, and whatever
a step costs besides its kernels (views, tables, cold caches) is where it belongs.

Weights of one layer alone would stay in the CPU's cache; a run streams all layers of its stage.
So every timing cycles through as many layers as a stage holds and divides by their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from xgpt.model import ModelSpec
from xgpt.schedule import StageAssignment
from xprofiler.timing import Operator
from xrunner.kv import KvCache
from xrunner.messages import Joined, StartMessage, StepMessage
from xrunner.models.attention import attend_decode, attend_encode, decode_context
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import RandomWeights
from xrunner.rules.steps import StepKind
from xrunner.sampling import Sampling, sample
from xrunner.stage import StageExecutor

_MAX_WEIGHT_BYTES = 2 * 2**30  # more layers than this neither fit nor change the cache's behaviour
DECODE_ROWS_UP_TO = 66  # rows of LAYER_REST timed as a decode step; more, as an encode step
STEP_CONTEXT = 65  # cached tokens of each query in such a decode step
_MEAN_INPUT = 70  # tokens of an average query in such an encode step


class LayerBench:
    """One stage's worth of layers with random weights, and both ends of the model."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, num_stages: int) -> None:
        layer_bytes = spec.decoder_layer_params * dtype.itemsize
        self.num_layers = max(1, min(math.ceil(spec.num_layers / num_stages),
                                     _MAX_WEIGHT_BYTES // layer_bytes))
        self.spec, self.dtype = spec, dtype
        weights = RandomWeights(dtype)
        stage = StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=self.num_layers)
        # one layer more than the stage has: it is the first stage, and never the last
        deeper = replace(spec, num_layers=self.num_layers + 1)
        self.model = StageModel(deeper, weights, stage, dtype)
        self.ends = type(self.model.ends)(spec, weights, first=True, last=True)

    def operator(self, operator: Operator, x: int, y: int) -> tuple[Callable[[], object], int]:
        """(work, calls it stands for): seconds of `work` over `calls` is the operator's time. Not
        for LAYER_REST, which is what `step` leaves after the others."""
        build = {
            Operator.ENCODE_ATTENTION: self._encode_attention,
            Operator.DECODE_ATTENTION: self._decode_attention, Operator.EMBED: self._embed,
            Operator.HEAD: self._head,
        }[operator]
        return build(x, y)

    def step(self, rows: int) -> tuple[Callable[[], object], list[int]]:
        """(one real step of `rows` tokens through all layers, the input lengths it encodes); a
        decode step, with no such lengths, up to DECODE_ROWS_UP_TO rows."""
        if rows <= DECODE_ROWS_UP_TO:
            return self._decode_step(rows), []
        lengths = _split(rows)
        return self._encode_step(lengths), lengths

    @property
    def step_context(self) -> int:
        """Cached tokens of each query in a decode `step`."""
        return min(STEP_CONTEXT, (self.spec.max_positions or STEP_CONTEXT + 1) - 1)

    def _decode_step(self, queries: int) -> Callable[[], object]:
        context = self.step_context
        executor = self._executor(queries, context + 1)
        cache = executor.caches[0]
        cache.allocate(list(range(queries)), [context] * queries)
        cache.store.normal_()
        tokens = torch.ones(queries, dtype=torch.long)
        message = StepMessage(kind=StepKind.DECODE, group=0, phase=0, iteration=1)

        def work() -> None:
            cache.lengths = [context] * queries
            executor.execute(message, tokens)

        return work

    def _encode_step(self, lengths: list[int]) -> Callable[[], object]:
        executor = self._executor(len(lengths), max(lengths))
        cache, tokens = executor.caches[0], torch.ones(sum(lengths), dtype=torch.long)
        joined = tuple(Joined(query=i, input_tokens=n, sampling=Sampling())
                       for i, n in enumerate(lengths))
        message = StepMessage(kind=StepKind.ENCODE, group=0, phase=0, iteration=0, joined=joined)

        def work() -> None:
            cache.queries, cache.lengths = [], []
            executor.execute(message, tokens)

        return work

    def _executor(self, queries: int, capacity: int) -> StageExecutor:
        executor = StageExecutor(self.model)
        executor.start(StartMessage(num_groups=1, slots=queries, capacity=capacity,
                                    spare_bytes=_MAX_WEIGHT_BYTES))
        return executor

    def _encode_attention(self, length: int, _y: int) -> tuple[Callable[[], object], int]:
        cache = self._cache(1, length, length)
        query, key, value = self._qkv(length)

        def work() -> None:
            for keys, values in cache.store:
                attend_encode(query, key, value, keys, values, 0, [length])

        return work, self.num_layers

    def _decode_attention(self, queries: int, context: int) -> tuple[Callable[[], object], int]:
        cache = self._cache(queries, context, context + 1)
        query, key, value = self._qkv(queries)
        step = decode_context(torch.full((queries,), context), self.dtype)

        def work() -> None:
            for keys, values in cache.store:
                attend_decode(query, key, value, keys, values, step)

        return work, self.num_layers

    def _embed(self, tokens: int, _y: int) -> tuple[Callable[[], object], int]:
        ids, positions = torch.arange(tokens) % self.spec.vocab_size, torch.arange(tokens) % 64
        return lambda: (self.ends.embed(ids, positions),
                        self.ends.prepare(positions, self.dtype)), 1

    def _head(self, queries: int, _y: int) -> tuple[Callable[[], object], int]:
        hidden, choices = self._hidden(queries), [Sampling()] * queries
        return lambda: sample(self.ends.logits(hidden), choices, [1] * queries), 1

    def _hidden(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.spec.hidden_size).to(self.dtype)

    def _qkv(self, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads, kv_heads, dim = self.spec.num_heads, self.spec.kv_heads, self.spec.head_dim
        joint = torch.randn(rows, heads + 2 * kv_heads, dim).to(self.dtype)
        return joint[:, :heads], joint[:, heads:heads + kv_heads], joint[:, heads + kv_heads:]

    def _cache(self, queries: int, length: int, reserve: int) -> KvCache:
        cache = KvCache(self.spec, self.num_layers, self.dtype, slots=queries, capacity=reserve)
        cache.allocate(list(range(queries)), [length] * queries)
        cache.store.normal_()  # resident and finite, as in a run
        return cache


def _split(rows: int) -> list[int]:
    """Input lengths that sum to `rows`: ordinary ones, all different, the same each time."""
    rng = np.random.default_rng(rows)
    shares = rng.uniform(0.5, 1.5, size=max(round(rows / _MEAN_INPUT), 1))
    lengths = np.maximum(np.floor(shares / shares.sum() * rows).astype(int), 1)
    lengths[0] += rows - lengths.sum()
    return [int(n) for n in lengths]
