"""The bench of an encoder-decoder model: one stage's encoder and decoder layers, taken apart.

The layers and kernels are XRunner's; their order here is the models' own: each decoder layer
attends to itself, then to the encoder's output.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from xgpt.core.model import ModelSpec
from xprofiler.measure.bench import (
    GREEDY,
    MAX_WEIGHT_BYTES,
    Measurement,
    bench_cache,
    compaction,
    shard_of,
)
from xprofiler.measure.clock import clock_of
from xprofiler.measure.probe import StepParts
from xrunner.engine.kv import KvCache, KvShape, kv_shape
from xrunner.models.stage_model import ENCODER_DECODER_CLASSES, packed, residual
from xrunner.models.weights import OnDevice, RandomWeights, Shard, WideVectors
from xrunner.ops.attention import decode_attention, packed_attention, store_packed
from xrunner.ops.contexts import decode_context, encode_context, whole_inputs
from xrunner.ops.linear import activations_of
from xrunner.ops.rows import Residual, place
from xrunner.ops.sampling import sample
from xrunner.query import Sampling


class EncoderDecoderBench:
    """Encoder and decoder layers of a stage of `num_stages`, with both ends, one shard of
    `tp_degree` of them, on `device`; random weights."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, *, num_stages: int = 1,
                 tp_degree: int | Shard = 1, device: torch.device | str = "cpu",
                 sampling: Sampling = GREEDY,
                 weight_dtype: torch.dtype | None = None) -> None:
        shard = shard_of(tp_degree)
        layer_bytes = spec.decoder_layer_params * dtype.itemsize // shard.degree
        most = max(MAX_WEIGHT_BYTES // 2 // layer_bytes, 1)
        self.num_layers = min(math.ceil(spec.num_layers / num_stages), most)
        self.num_encoder_layers = min(math.ceil(spec.num_encoder_layers / num_stages), most)
        self.spec, self.dtype, self.device = spec, dtype, torch.device(device)
        self._sampling, self._clock = sampling, clock_of(self.device)
        classes = ENCODER_DECODER_CLASSES[spec.family]
        self._scoring = classes.scoring
        as_type = weight_dtype or dtype
        self._work_dtype = activations_of(as_type)
        weights = WideVectors(OnDevice(RandomWeights(dtype), self.device), self._work_dtype)
        self._encoder: list[Any] = [packed(classes.encoder_layer(spec, weights, i, shard), as_type)
                                    for i in range(self.num_encoder_layers)]
        self._decoder: list[Any] = [packed(classes.decoder_layer(spec, weights, i, shard), as_type)
                                    for i in range(self.num_layers)]
        self._encoder_ends: Any = classes.encoder_ends(
            spec, weights, first=True, last=True, shard=shard)
        self._decoder_ends: Any = classes.decoder_ends(
            spec, weights, first=True, last=True, shard=shard)
        self._decoder_ends.head.pack(as_type)
        self._kv_heads = shard.share(spec.kv_heads)

    def encode(self, lengths: Sequence[int]) -> Measurement:
        """An encode step: the encoder's layers, then every decoder layer's cross keys and values,
        put into their caches."""
        tokens = torch.ones(sum(lengths), dtype=torch.long, device=self.device)
        places = encode_context(whole_inputs(lengths), self.device).places
        cache = self._cache(len(lengths), max(lengths))

        def step() -> StepParts:
            watch = _Watch(self._clock)
            hidden = watch("embed", self._embedded, self._encoder_ends, tokens, places.positions)
            bias = watch("rest", self._encoder_ends.bias, max(lengths))
            for layer in self._encoder:
                joint = watch("rest", layer.qkv, hidden)
                attended = watch("attention", packed_attention, joint, layer.heads, lengths,
                                 self._scoring.scale, bias)
                watch("rest", layer.finish, hidden, attended)
            encoded = watch("rest", self._encoder_ends.finish, hidden.total())
            for layer, (keys, values) in zip(self._decoder, cache.store, strict=True):
                key, value = watch("cross_kv", layer.cross_kv, encoded)
                watch("cross_kv", store_packed, key, value, (keys, values), places)
            return watch.parts(self.num_encoder_layers, cross_layers=self.num_layers)

        return step

    def decode(self, contexts: Sequence[int], encoder_tokens: Sequence[int]) -> Measurement:
        """A decode step of queries with so many tokens cached, and so many of input."""
        queries = len(contexts)
        own, cross = self._cache(queries, max(contexts) + 1), self._cache(
            queries, max(encoder_tokens))
        tokens = torch.ones(queries, dtype=torch.long, device=self.device)
        choices, positions = [self._sampling] * queries, list(contexts)

        def step() -> StepParts:
            watch = _Watch(self._clock)
            context = decode_context([n + 1 for n in contexts], device=self.device)
            across = decode_context(encoder_tokens, device=self.device)
            hidden = watch("embed", self._embedded, self._decoder_ends, tokens, context.positions)
            bias = watch("rest", self._decoder_ends.bias, context.longest)
            for layer, (keys, values), (cross_keys, cross_values) in zip(
                    self._decoder, own.store, cross.store, strict=True):
                joint = watch("rest", layer.qkv, hidden)
                query = watch("attention", place, joint, layer.heads, (keys, values),
                              context.places)
                attended = watch("attention", decode_attention, query, (keys, values), context,
                                 self._scoring, bias)
                query = watch("rest", layer.cross_query, hidden, attended)
                attended = watch("cross", decode_attention, query, (cross_keys, cross_values),
                                 across, self._scoring)
                watch("rest", layer.finish, hidden, attended)
            watch("head", lambda: sample(self._decoder_ends.scores(hidden.total()), choices,
                                         positions))
            return watch.parts(self.num_layers)

        return step

    def _embedded(self, ends: Any, tokens: torch.Tensor, positions: torch.Tensor) -> Residual:
        return residual(ends.embed(tokens, positions), self._work_dtype, is_own=True)

    def compaction(self, rows: int, tokens: int) -> Callable[[], float]:
        """Seconds, a layer, of moving `rows` cache rows of `tokens` each."""
        return compaction(self._shape(2 * rows, tokens), rows, tokens, self._clock, self.device)

    def _cache(self, queries: int, capacity: int) -> KvCache:
        return bench_cache(self._shape(queries, capacity), self.device)

    def _shape(self, queries: int, capacity: int) -> KvShape:
        return kv_shape(self.spec, self.dtype, slots=queries, capacity=capacity,
                        num_layers=self.num_layers, kv_heads=self._kv_heads)


class _Watch:
    """Runs the parts of one step and keeps when each began and ended."""

    def __init__(self, clock: Any) -> None:
        self._clock, self._begin = clock, clock.mark()
        self._spans: dict[str, list[tuple[Any, Any]]] = {}

    def __call__(self, part: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = self._clock.mark()
        out = call(*arguments)
        self._spans.setdefault(part, []).append((begin, self._clock.mark()))
        return out

    def parts(self, layers: int, *, cross_layers: int = 1) -> StepParts:
        """Seconds of each part; of layers' parts, the mean over `layers` (`cross_layers`)."""
        end = self._clock.mark()
        self._clock.settle()
        total = {part: sum(self._clock.seconds(*span) for span in spans)
                 for part, spans in self._spans.items()}
        return StepParts(
            whole_s=self._clock.seconds(self._begin, end), rest_s=total.get("rest", 0.0) / layers,
            attention_s=total.get("attention", 0.0) / layers, embed_s=total.get("embed", 0.0),
            head_s=total.get("head", 0.0), cross_s=total.get("cross", 0.0) / layers,
            cross_kv_s=total.get("cross_kv", 0.0) / cross_layers)
