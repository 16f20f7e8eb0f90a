"""Times layers whose weights are copied beside the computing, and other work of a run on bytes that
lie below its devices."""

import itertools
import statistics
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from xgpt.core.placement import DEVICE, DISK, HOST, TIERS, layer_tensors
from xprofiler.measure.bench import bench_cache
from xprofiler.measure.network import Subject
from xprofiler.measure.probe import clock_of, times_s
from xprofiler.measure.ranks import Ranks
from xprofiler.profile import STREAMED, STREAMED_PARTS, TableKey
from xprofiler.timing import Operator
from xrunner.devices import CPU
from xrunner.engine.kv import kv_shape
from xrunner.offload.arena import Arena
from xrunner.offload.lender import Lender
from xrunner.offload.mover import Mover
from xrunner.offload.weights_file import Writer, weights_file
from xrunner.ops import four_bits
from xrunner.ops.attention import decode_attention
from xrunner.ops.contexts import decode_context
from xrunner.ops.linear import Product, activations_of

# chosen: weights of a layer; a bus to a GPU needs more to be busy for milliseconds
_LAYER_BYTES = {"cpu": 2**25, "cuda": 2**27}
# chosen: weights of all layers, more than caches keep; layers, so that none waits in a buffer
_BYTES, _LEAST_LAYERS = 2**26, 4
_MOST_ROWS, ENOUGH_S = 2**13, 2.0  # chosen; seconds for each number of rows
_ELEMENTS, _QUERIES, _CONTEXTS = (2**18, 2**22), (1, 32), (128, 1024)  # chosen


class StreamedBench:
    """Layers of a model's products, cut to _LAYER_BYTES. They lie on the device, and again on the
    tier below: the disk for a CPU, the host for a GPU."""

    def __init__(self, subject: Subject, folder: str) -> None:
        """`folder`: of the weights' file, which soon has no name. Raises XgptError."""
        self._dtype, self._device, self._next = subject.weight_dtype, subject.device, 0
        tensors = layer_tensors(subject.spec)[:4]  # of a mixture: attention and an expert
        layer_bytes = sum(own.elements for own in tensors) * self._dtype.itemsize
        share = min(_LAYER_BYTES[self._device.type] / layer_bytes, 1)
        self._shapes = [(max(int(share * own.outputs), 1), own.inputs) for own in tensors]
        self.num_layers = max(int(min(_BYTES / share / layer_bytes, subject.spec.num_layers)),
                              _LEAST_LAYERS)
        self.mover, arenas = Mover(device=self._device), [Arena(name) for name in TIERS]
        with TemporaryDirectory(prefix="xgpt-streamed-", dir=folder) as own:
            self.file = weights_file(Path(own), {"device": self._device.type}, 16, self._write)
        self._held = list[tuple[Lender, list[list[Product]]]]()
        for tier in (DEVICE, DISK if self._device.type == "cpu" else HOST):
            lender = Lender(self.file, arenas, self.mover, self._device)
            layers = [self._products("meta") for _ in range(self.num_layers)]
            for index, layer in enumerate(layers):
                for place, product in enumerate(layer):
                    lender.add(index, f"{index}.{place}", product, tier)
            lender.open()
            self._held.append((lender, layers))

    def layer_s(self, rows: int, *, is_streamed: bool) -> float:
        """Seconds of a layer, the mean over all. `rows`: that are computed (0: none).
        `is_streamed`: weights are copied meanwhile, else they lie on the device."""
        inputs = {width: torch.ones(rows, width, dtype=activations_of(self._dtype),
                                    device=self._device) for _, width in self._shapes}
        (lender, layers), clock = self._held[is_streamed], clock_of(self._device)
        count = len(layers)
        first = self._next = (self._next + 2 * is_streamed) % count  # in no buffer
        lender.lend(first, (first + 1) % count)
        begin = clock.mark()
        for place in range(first, first + count):
            for product in layers[place % count] if rows else ():
                product(inputs[product.shape[1]])
            lender.lend((place + 1) % count, (place + 2) % count)
        end = clock.mark()
        self.mover.flush()
        clock.settle()
        return clock.seconds(begin, end) / count

    def _products(self, device: str) -> list[Product]:
        made = [Product(torch.full(shape, 0.02, device=device)) for shape in self._shapes]
        for one in made:
            one.pack_movable(self._dtype, self._device.type)
        return made

    def _write(self, writer: Writer) -> None:
        for index in range(self.num_layers):
            for place, product in enumerate(self._products("cpu")):
                writer.add(f"{index}.{place}", product)


def times_below(subject: Subject, folder: str, ranks: Ranks) -> Iterator[
        tuple[TableKey, int, int, list[float]]]:
    """Yields tables, sizes x and y, and seconds: of streamed layers, of UNPACK, and on a GPU of
    HOST_ATTENTION, without its copies, which are other terms of a step. Layers have few rows, as
    many as take about as long as the copies, and more. `folder`: on the disk. Raises XgptError."""
    def taken(rows: int, *, is_streamed: bool = True) -> float:
        return statistics.fmean(ranks.measure_all(lambda: [
            bench.layer_s(rows, is_streamed=is_streamed)]))

    bench, dtype, device = StreamedBench(subject, folder), subject.dtype, subject.device
    copy_s, rows = min(taken(0) for _ in range(3)), 1
    while rows < _MOST_ROWS and min(taken(rows, is_streamed=False) for _ in range(2)) < copy_s:
        rows *= 2
    for own in sorted({max(rows // 8, 1), rows, 2 * rows}):
        turns, begin_s = list[tuple[float, ...]](), time.monotonic()
        while not turns or ranks.agree(time.monotonic() - begin_s < ENOUGH_S):
            turns.append((taken(0), taken(own, is_streamed=False), taken(own)))
        for part, samples in zip(STREAMED_PARTS, zip(*turns, strict=True), strict=True):
            yield TableKey(STREAMED, link=part), own, 0, list(samples)
    bench.mover.close()
    bench.file.close()
    for elements in _ELEMENTS:
        packed = torch.zeros(four_bits.packed_bytes((elements,)), dtype=torch.uint8, device=device)
        work = partial(four_bits.unpack, packed, torch.empty(elements, dtype=dtype, device=device))
        yield TableKey(Operator.UNPACK.value), elements, 0, ranks.measure_all(
            partial(times_s, work, device))
    for queries, context in itertools.product(_QUERIES, _CONTEXTS) if device.type == "cuda" else ():
        shape = kv_shape(subject.spec, dtype, slots=queries, capacity=context, num_layers=1)
        query = torch.ones(queries, subject.spec.num_heads, subject.spec.head_dim, dtype=dtype)
        work = partial(decode_attention, query, bench_cache(shape, CPU).layers[0],
                       decode_context([context] * queries))
        yield TableKey(Operator.HOST_ATTENTION.value), queries, context, ranks.measure_all(
            partial(times_s, work, CPU))
