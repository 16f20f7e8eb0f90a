"""The operators as XRunner executes them, wrapped so that each can be timed apart.

Weights of one layer alone would stay in the CPU's cache; a run streams all layers of its stage.
So every timing cycles through as many layers as a stage holds and divides by their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from xgpt.model import ModelSpec
from xgpt.schedule import StageAssignment
from xprofiler.timing import Operator
from xrunner.kv import KvCache
from xrunner.models.attention import attend_decode, attend_encode, decode_context
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import RandomWeights
from xrunner.sampling import Sampling, sample

_MAX_WEIGHT_BYTES = 2 * 2**30  # more layers than this neither fit nor change the cache's behaviour


class LayerBench:
    """One stage's worth of layers with random weights, and both ends of the model."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, num_stages: int) -> None:
        layer_bytes = spec.decoder_layer_params * dtype.itemsize
        self.num_layers = max(1, min(math.ceil(spec.num_layers / num_stages),
                                     _MAX_WEIGHT_BYTES // layer_bytes))
        self.spec, self.dtype = spec, dtype
        weights = RandomWeights(dtype)
        stage = StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=self.num_layers)
        self.model = StageModel(spec, weights, stage, dtype)
        ends_class = type(self.model.ends)
        self.ends = ends_class(spec, weights, first=True, last=True)

    def operator(self, operator: Operator, x: int, y: int) -> tuple[Callable[[], object], int]:
        """(work, calls it stands for): seconds of `work` over `calls` is the operator's time."""
        build = {
            Operator.LAYER_REST: self._layer_rest,
            Operator.ENCODE_ATTENTION: self._encode_attention,
            Operator.DECODE_ATTENTION: self._decode_attention,
            Operator.EMBED: self._embed, Operator.HEAD: self._head,
        }[operator]
        return build(x, y)

    def _layer_rest(self, tokens: int, _y: int) -> tuple[Callable[[], object], int]:
        prepared = self.ends.prepare(torch.arange(tokens) % 64, self.dtype)
        first = self._hidden(tokens)
        attended = torch.randn(tokens, self.spec.num_heads * self.spec.head_dim).to(self.dtype)

        def work() -> None:
            hidden = first
            for layer in self.model.layers:
                layer.qkv(hidden, prepared)
                # the next layer starts from fresh values: random weights would blow them up
                layer.finish(first, attended)

        return work, self.num_layers

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
        cache = KvCache(self.spec, self.num_layers, self.dtype)
        cache.allocate(list(range(queries)), [length] * queries, [reserve] * queries)
        cache.store.normal_()  # resident and finite, as in a run
        return cache
