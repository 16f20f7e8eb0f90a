"""One rank's share of a model, ready to take any real step: XRunner's own executor on random
weights, with a probe around the parts.

Weights of one layer alone would stay in a cache; a run streams all layers of its stage. So the
bench holds as many layers as a stage does, and both ends of the model, whose vocabularies matter.
Of an encoder-decoder model the parts of a step are called one by one, in the models' own order."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from xgpt.core.deployment import StageAssignment
from xgpt.core.model import ModelSpec
from xprofiler.measure.probe import (
    Capturing,
    Clock,
    Probe,
    StepParts,
    TimedCapture,
    captured_step,
    clock_of,
)
from xprofiler.points import MEAN_INPUT
from xrunner.comm.messages import Joined, StartMessage, StepMessage
from xrunner.engine.graphs import CaptureError
from xrunner.engine.group import LastTokens, StageGroup
from xrunner.engine.kv import KvCache, KvShape, kv_shape
from xrunner.engine.stage import StageExecutor
from xrunner.models.stage_model import ENCODER_DECODER_CLASSES, StageModel, packed, residual
from xrunner.models.weights import OnDevice, RandomWeights, Shard, WideVectors
from xrunner.ops.attention import decode_attention, packed_attention, store_packed
from xrunner.ops.contexts import decode_context, encode_context, layers_of, whole_inputs
from xrunner.ops.linear import activations_of
from xrunner.ops.rows import Residual, place
from xrunner.ops.sampling import sample
from xrunner.query import Sampling
from xrunner.rules.steps import StepKind

_ENTRY = 0.5  # of every cache: attention takes as long whatever it reads, unless it is no number
MAX_WEIGHT_BYTES = 2 * 2**30  # more layers than this neither fit nor change the cache's behaviour
# Layers whose caches would take more than this share one, where it is too large for any processor's
# caches to keep from one layer to the next.
_MAX_KV_BYTES, _SHARED_KV_BYTES = 2**30, 2**26
GREEDY, DRAWN = Sampling(), Sampling(temperature=1.0, top_k=50, top_p=0.95)

Measurement = Callable[[], StepParts]  # executes the step once


class LayerBench:
    """A stage of `num_stages` with both ends, one shard of `tp_degree` of it, on `device`.
    `capturing`: decode steps are timed captured, where a run captures them; None: none is.
    `capture_failure`: why none is from now on, for a run that cannot capture one captures none."""

    capturing: Capturing | None = None
    capture_failure: str | None = None

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, *, num_stages: int = 1,
                 tp_degree: int | Shard = 1, device: torch.device | str = "cpu",
                 sampling: Sampling = GREEDY,
                 weight_dtype: torch.dtype | None = None) -> None:
        """`weight_dtype`: as which weights are multiplied; None: as `dtype`.
        `tp_degree`: of a shard whose products nothing sums, or the shard."""
        shard = shard_of(tp_degree)
        layer_bytes = spec.decoder_layer_params * dtype.itemsize // shard.degree
        self.num_layers = max(1, min(math.ceil(spec.num_layers / num_stages),
                                     MAX_WEIGHT_BYTES // layer_bytes))
        self.spec, self.dtype, self.device = spec, dtype, torch.device(device)
        self._sampling = sampling
        stage = StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=self.num_layers)
        self.model = StageModel(replace(spec, num_layers=self.num_layers), RandomWeights(dtype),
                                stage, dtype, shard=shard,
                                device=self.device, weight_dtype=weight_dtype)
        self.model.narrows = False  # a layer is timed with all of its rows
        self.probe = Probe(self.model, clock_of(self.device))

    def decode(self, contexts: list[int], *, most_layers: int | None = None) -> Measurement:
        """A decode step of one query for each of `contexts` (tokens already cached). `most_layers`:
        through so many layers, and the head."""
        layers = self.model.layers[:most_layers]
        executor = self._executor(len(contexts), max(contexts) + 1, len(layers))
        group, joined = executor.groups[0], self._joined(contexts)
        capture = None if self.capturing is None else TimedCapture(
            self.capturing, self.probe, clock_of(self.device))
        graphs = None
        with self._through(layers):
            if capture is not None:
                try:
                    graphs = captured_step(self.model, group, len(contexts), capture)
                except CaptureError as error:
                    self.capturing, self.capture_failure = None, str(error)
        tokens = torch.ones(len(contexts), dtype=torch.long, device=self.device)
        message = StepMessage(kind=StepKind.DECODE, group=0, phase=0, iteration=1)

        def step() -> StepParts:
            group.adopt(joined)
            with self._through(layers):
                return self.probe.time(lambda: executor.execute(message, tokens))

        def captured() -> StepParts:
            """Launched kernel by kernel, for what steps that encode launch; then captured."""
            assert capture is not None, f"{graphs = }"
            launched = step()
            group.adopt(joined)
            group.graphs = graphs
            ends = self.probe.ends(lambda: executor.execute(message, tokens))
            group.graphs = None
            inner = capture.parts(len(layers))
            return launched._replace(
                whole_s=ends.whole_s, head_s=ends.head_s, attention_s=inner.attention_s,
                embed_s=inner.embed_s, captured_rest_s=inner.rest_s)

        return step if graphs is None else captured

    def encode(self, lengths: list[int], *, most_layers: int | None = None) -> Measurement:
        """An encode step of queries of these lengths. `most_layers`: through so many layers only,
        and no head, where the attention alone counts; their weights may stay in a cache."""
        layers = self.model.layers[:most_layers]
        executor = self._executor(len(lengths), max(lengths), len(layers))
        tokens = torch.ones(sum(lengths), dtype=torch.long, device=self.device)
        message = StepMessage(kind=StepKind.ENCODE, group=0, phase=0, iteration=0,
                              joined=self._joined(lengths))

        def step() -> StepParts:
            executor.groups[0].adopt(())
            with self._through(layers, has_head=most_layers is None):
                return self.probe.time(lambda: executor.execute(message, tokens))

        return step

    @contextmanager
    def _through(self, layers: list[Any], *, has_head: bool = True) -> Iterator[None]:
        """Steps go through `layers` meanwhile, the model's first ones."""
        whole, self.model.layers, self.model.is_last = self.model.layers, layers, has_head
        try:
            yield
        finally:
            self.model.layers, self.model.is_last = whole, True

    def compaction(self, rows: int, tokens: int) -> Callable[[], float]:
        """Seconds, a layer, of moving `rows` cache rows of `tokens` each."""
        return compaction(self._shape(2 * rows, tokens), rows, tokens, clock_of(self.device),
                          self.device)

    def layer_kv_bytes(self, queries: int, capacity: int) -> int:
        """One layer's cache of so many queries of `capacity` tokens."""
        return kv_shape(self.spec, self.dtype, slots=queries, capacity=capacity, num_layers=1,
                        kv_heads=self.model.kv_heads).num_bytes

    def _executor(self, queries: int, capacity: int, layers: int | None = None) -> StageExecutor:
        executor = StageExecutor(self.model)
        executor.start(StartMessage(num_groups=1, slots=1, capacity=1))
        group = StageGroup(self._cache(queries, capacity, layers=layers))
        if executor.keeps_tokens:
            group.last_tokens = LastTokens(self.device)
        executor.groups = [group]
        return executor

    def _joined(self, lengths: list[int]) -> tuple[Joined, ...]:
        return tuple(Joined(query=i, input_tokens=n, sampling=self._sampling)
                     for i, n in enumerate(lengths))

    def _cache(self, queries: int, capacity: int, *, layers: int | None = None) -> KvCache:
        return bench_cache(self._shape(queries, capacity)._replace(
            num_layers=layers or self.num_layers), self.device)

    def _shape(self, queries: int, capacity: int) -> KvShape:
        return kv_shape(self.spec, self.dtype, slots=queries, capacity=capacity,
                        num_layers=self.num_layers, kv_heads=self.model.kv_heads)


def bench_cache(shape: KvShape, device: torch.device) -> KvCache:
    """A cache of that shape, resident and finite, as in a run."""
    layers, layer_bytes = shape.num_layers, shape._replace(num_layers=1).num_bytes
    is_shared = layer_bytes > _SHARED_KV_BYTES and layer_bytes * layers > _MAX_KV_BYTES
    cache = KvCache(shape._replace(num_layers=1 if is_shared else layers), device)
    if is_shared:  # all layers read and write the same entries: what they compute is meaningless
        cache.store = cache.store.expand(layers, -1, -1, -1, -1, -1)
        cache.layers = layers_of(cache.store)
    cache.store[:1 if is_shared else None].fill_(_ENTRY)
    return cache


def shard_of(tp_degree: int | Shard) -> Shard:
    """The first of so many, unless it is given."""
    return Shard(degree=tp_degree) if isinstance(tp_degree, int) else tp_degree


def compaction(shape: KvShape, rows: int, tokens: int, clock: Clock,
               device: torch.device) -> Callable[[], float]:
    """Seconds, a layer, of moving `rows` of the twice as many rows of a cache of that shape: of
    fewer layers, each with memory of its own, where it would take more than a bench may."""
    layer_bytes = shape._replace(num_layers=1).num_bytes
    most = max(_MAX_KV_BYTES // layer_bytes, 1)
    cache = bench_cache(shape._replace(num_layers=min(shape.num_layers, most)), device)

    def move() -> float:
        # the first half leaves, the second moves into its place
        cache.adopt([tokens] * (2 * rows))
        begin = clock.mark()
        moved = cache.free(range(rows))
        end = clock.mark()
        clock.settle()
        assert moved == rows, f"{moved = } {rows = }"
        return clock.seconds(begin, end) / len(cache.store)

    return move


def around(queries: int, mean: int) -> list[int]:
    """Contexts of a decode batch, all different, of exactly this mean; the same each time."""
    rng = np.random.default_rng((queries, mean))
    drawn = rng.integers(max(2 * mean // 3, 1), 4 * mean // 3 + 1, size=queries)
    left = mean * queries - int(drawn.sum())
    shift, odd = divmod(left, queries)
    return [max(int(n) + shift + (i < odd), 1) for i, n in enumerate(drawn)]


def ragged(queries: int, longest: int) -> list[int]:
    """Contexts of a decode batch: all different, the longest among them; the same each time."""
    rng = np.random.default_rng((queries, longest))
    contexts = [int(n) for n in rng.integers(max(longest // 3, 1), longest + 1, size=queries)]
    contexts[queries // 2] = longest
    return contexts


def ordinary_inputs(tokens: int, longest: int | None = None) -> list[int]:
    """Input lengths of at most `longest` that sum to `tokens`: ordinary ones, all different, the
    same each time."""
    mean = MEAN_INPUT if longest is None else min(MEAN_INPUT, max(longest // 2, 1))
    rng = np.random.default_rng(tokens)
    shares = rng.uniform(0.5, 1.5, size=max(round(tokens / mean), 1))
    lengths = np.maximum(np.floor(shares / shares.sum() * tokens).astype(int), 1)
    inputs = [int(n) for n in (lengths if longest is None else np.minimum(lengths, longest))]
    while (left := tokens - sum(inputs)) > 0:
        inputs.append(left if longest is None else min(left, longest))
    return inputs


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

    def encode(self, lengths: Sequence[int], *, most_layers: int | None = None) -> Measurement:
        """An encode step: the encoder's layers, then every decoder layer's cross keys and values,
        put into their caches. `most_layers`: it takes all."""
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

    def decode(self, contexts: Sequence[int], *, most_layers: int | None = None) -> Measurement:
        """A decode step of queries with so many tokens cached, and one more of input, so that one
        step serves self-attention and cross-attention. `most_layers`: it takes all."""
        queries, encoder_tokens = len(contexts), [n + 1 for n in contexts]
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
