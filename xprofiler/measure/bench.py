"""Executes and times steps on one rank: XRunner's executor on random weights, with a probe around
its parts.

Weights of one layer alone would stay in a cache; a run streams all layers of its stage. So the
bench holds as many layers as a stage does, and embedding and head, whose vocabularies matter.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from xgpt.core.deployment import StageAssignment
from xgpt.core.model import ModelSpec, layer_params_of_rank
from xprofiler.measure.probe import (
    Capturing,
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
from xrunner.models.encoder_decoder import EncoderDecoderStage, load_stage
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import RandomWeights, Shard
from xrunner.ops.contexts import layers_of
from xrunner.query import Sampling
from xrunner.rules.steps import StepKind

_ENTRY = 0.5  # value of every KV cache entry: attention's time depends on no value but NaN
MAX_WEIGHT_BYTES = 2 * 2**30  # chosen: more neither fit nor change what processor caches keep
FEW_WEIGHT_BYTES = 2**26  # chosen: fewer might stay in a processor's caches
_ROW_LAYERS, LEAST_LAYERS, MOST_LAYERS = 4200, 2, 6  # chosen: rows x layers of a brief step
# chosen: layers whose KV caches would take more share one cache, which must then be too large for
# processor caches to keep from one layer to the next
_MAX_KV_BYTES, _SHARED_KV_BYTES = 2**30, 2**26
GREEDY, DRAWN = Sampling(), Sampling(temperature=1.0, top_k=50, top_p=0.95)

Measurement = Callable[[], StepParts]  # executes the step once


class LayerBench:
    """One of `num_stages` stages with embedding and head, as one shard of `tp_degree`, on `device`.
    It has layers of both kinds for an encoder-decoder model.

    `capturing`: how decode steps are captured as CUDA graphs (None: they are not).
    `capture_failure`: why capturing failed, if it did; then no step is captured, as in a run."""

    capturing: Capturing | None = None
    capture_failure: str | None = None

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, *, num_stages: int = 1,
                 tp_degree: int | Shard = 1, device: torch.device | str = "cpu",
                 sampling: Sampling = GREEDY,
                 weight_dtype: torch.dtype | None = None) -> None:
        """`weight_dtype`: dtype that weights are multiplied in (None: `dtype`). `tp_degree`: degree
        of a shard whose sums are left out, or the shard."""
        shard = Shard(degree=tp_degree) if isinstance(tp_degree, int) else tp_degree
        layer_bytes = layer_params_of_rank(spec, shard.degree) * dtype.itemsize
        sides = 2 if spec.is_encoder_decoder else 1
        most = max(int(MAX_WEIGHT_BYTES / sides / layer_bytes), 1)
        self.num_layers, encoder_layers = (min(math.ceil(count / num_stages), most) for count in (
            spec.num_layers, spec.num_encoder_layers))
        self.spec, self.dtype, self.device = spec, dtype, torch.device(device)
        self._sampling = sampling
        stage = StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=self.num_layers,
                                num_encoder_layers=encoder_layers)
        self.model = load_stage(
            replace(spec, num_layers=self.num_layers, num_encoder_layers=encoder_layers),
            RandomWeights(dtype), stage, shard, self.device, weight_dtype)
        if isinstance(self.model, StageModel):
            self.model.narrows = False  # a layer is timed with all of its rows
        self.probe = Probe(self.model, clock_of(self.device))

    def decode(self, contexts: list[int], *, most_layers: int | None = None) -> Measurement:
        """A function that executes and times a decode step of one request per entry of `contexts`.

        `contexts`: tokens already cached. For an encoder-decoder model each request has one more
        input token, so that one step times self-attention and cross-attention. `most_layers`:
        number of layers to execute before the head (None: all)."""
        layers = self.model.layers[:most_layers]
        executor = self._executor(len(contexts), max(contexts) + 1, len(layers))
        group, joined = executor.groups[0], self._joined(contexts)
        inputs = [n + 1 for n in contexts] if self.spec.is_encoder_decoder else None
        capture = None if self.capturing is None else TimedCapture(
            self.capturing, self.probe, clock_of(self.device))
        graphs = None
        with self._through(layers):
            if capture is not None:
                try:
                    assert isinstance(self.model, StageModel), f"{self.spec.family = }"
                    graphs = captured_step(self.model, group, len(contexts), capture)
                except CaptureError as error:
                    self.capturing, self.capture_failure = None, str(error)
        tokens = torch.ones(len(contexts), dtype=torch.long, device=self.device)
        message = StepMessage(kind=StepKind.DECODE, group=0, phase=0, iteration=1)

        def step() -> StepParts:
            group.adopt(joined, inputs)
            with self._through(layers):
                return self.probe.time(lambda: executor.execute(message, tokens), len(layers))

        def captured() -> StepParts:
            """Times the step launched kernel by kernel, as encode steps are, and then captured."""
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
        """A function that executes and times an encode step of requests with these `lengths`.

        For an encoder-decoder model it executes the encoder's layers, and then every decoder
        layer's cross keys and values. `most_layers`: number of layers to execute, without the head,
        where only attention counts and weights may stay in a processor cache."""
        is_encoder = isinstance(self.model, EncoderDecoderStage)
        layers = self.model.layers[:None if is_encoder else most_layers]
        timed = self.model.encoder_layers if isinstance(self.model, EncoderDecoderStage) else layers
        executor = self._executor(len(lengths), max(lengths), len(layers))
        tokens = torch.ones(sum(lengths), dtype=torch.long, device=self.device)
        message = StepMessage(kind=StepKind.ENCODE, group=0, phase=0, iteration=0,
                              joined=self._joined(lengths))

        def step() -> StepParts:
            executor.groups[0].adopt((), ())
            with self._through(layers, has_head=is_encoder or most_layers is None):
                return self.probe.time(lambda: executor.execute(message, tokens), len(timed))

        return step

    @contextmanager
    def _through(self, layers: Any, *, has_head: bool = True) -> Iterator[None]:
        """Makes steps execute only `layers`, the model's first ones, inside the `with` block."""
        whole, self.model.layers, self.model.is_last = self.model.layers, layers, has_head
        try:
            yield
        finally:
            self.model.layers, self.model.is_last = whole, True

    def compaction(self, rows: int, tokens: int) -> Callable[[], float]:
        """A function that returns seconds per layer of moving `rows` KV cache rows of `tokens`
        each. It uses fewer layers where all would exceed the bench's memory."""
        shape, clock = self._shape(2 * rows, tokens), clock_of(self.device)
        most = max(_MAX_KV_BYTES // shape._replace(num_layers=1).num_bytes, 1)
        cache = bench_cache(shape._replace(num_layers=min(shape.num_layers, most)), self.device)

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

    def layer_kv_bytes(self, queries: int, capacity: int) -> int:
        """Bytes of one layer's KV cache for `queries` requests of `capacity` tokens."""
        return self._shape(queries, capacity)._replace(num_layers=1).num_bytes

    def _executor(self, queries: int, capacity: int, layers: int) -> StageExecutor:
        executor = StageExecutor(self.model)
        executor.start(StartMessage(num_groups=1, slots=1, capacity=1, encoded_capacity=1))
        shape = self._shape(queries, capacity)._replace(num_layers=layers)
        group = StageGroup(*(bench_cache(shape, self.device)
                             for _ in range(1 + self.spec.is_encoder_decoder)))
        if executor.keeps_tokens:
            group.last_tokens = LastTokens(self.device, queries)
        executor.groups = [group]
        return executor

    def _joined(self, lengths: list[int]) -> tuple[Joined, ...]:
        return tuple(Joined(query=i, input_tokens=n, sampling=self._sampling)
                     for i, n in enumerate(lengths))

    def _shape(self, queries: int, capacity: int) -> KvShape:
        return kv_shape(self.spec, self.dtype, slots=queries, capacity=capacity,
                        num_layers=self.num_layers, kv_heads=self.model.kv_heads)


def few_layers(spec: ModelSpec, dtype: torch.dtype, tp_degree: int, *, least: int = 1,
               stages: int = 1) -> ModelSpec:
    """`spec` cut to the fewest layers, in each of `stages`, whose weights stream from memory."""
    layer_bytes = layer_params_of_rank(spec, tp_degree) * dtype.itemsize
    most = stages * max(int(FEW_WEIGHT_BYTES / layer_bytes), least)
    return replace(spec, num_layers=min(spec.num_layers, most),
                   num_encoder_layers=min(spec.num_encoder_layers, most))


def layers_for(rows: int) -> int:
    """Number of layers that a brief step of `rows` tokens executes."""
    return min(max(_ROW_LAYERS // rows, LEAST_LAYERS), MOST_LAYERS)


def bench_cache(shape: KvShape, device: torch.device) -> KvCache:
    """A KV cache of that shape with every page written, and no NaN in it."""
    layers, layer_bytes = shape.num_layers, shape._replace(num_layers=1).num_bytes
    is_shared = layer_bytes > _SHARED_KV_BYTES and layer_bytes * layers > _MAX_KV_BYTES
    cache = KvCache(shape._replace(num_layers=1 if is_shared else layers), device)
    if is_shared:  # all layers read and write the same entries: what they compute is meaningless
        cache.store = cache.store.expand(layers, -1, -1, -1, -1, -1)
        cache.layers = layers_of(cache.store)
    cache.store[:1 if is_shared else None].fill_(_ENTRY)
    return cache


def contexts_of_mean(queries: int, mean: int) -> list[int]:
    """Contexts (tokens) of a decode batch of `queries` requests, of different lengths with exactly
    this mean; the same for the same arguments."""
    rng = np.random.default_rng((queries, mean))
    drawn = rng.integers(max(2 * mean // 3, 1), 4 * mean // 3 + 1, size=queries)
    left = mean * queries - int(drawn.sum())
    shift, odd = divmod(left, queries)
    return [max(int(n) + shift + (i < odd), 1) for i, n in enumerate(drawn)]


def contexts_up_to(queries: int, longest: int) -> list[int]:
    """Contexts (tokens) of a decode batch of `queries` requests, of different lengths up to
    `longest`, which is one of them; the same for the same arguments."""
    rng = np.random.default_rng((queries, longest))
    contexts = [int(n) for n in rng.integers(max(longest // 3, 1), longest + 1, size=queries)]
    contexts[queries // 2] = longest
    return contexts


def ordinary_inputs(tokens: int, longest: int | None = None) -> list[int]:
    """Input lengths of at most `longest` that sum to `tokens`, scattered around an ordinary
    request's; the same for the same arguments."""
    mean = MEAN_INPUT if longest is None else min(MEAN_INPUT, max(longest // 2, 1))
    rng = np.random.default_rng(tokens)
    shares = rng.uniform(0.5, 1.5, size=max(round(tokens / mean), 1))
    lengths = np.maximum(np.floor(shares / shares.sum() * tokens).astype(int), 1)
    inputs = [int(n) for n in (lengths if longest is None else np.minimum(lengths, longest))]
    while (left := tokens - sum(inputs)) > 0:
        inputs.append(left if longest is None else min(left, longest))
    return inputs
