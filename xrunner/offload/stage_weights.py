"""The weights of a stage for a file: its products by name, and what stays on the device."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from xgpt.core.model import ModelSpec
from xrunner.checkpoint.layout import EXPERTS
from xrunner.models.decoder import DecoderEnds, DecoderLayer, Mixture
from xrunner.models.stage_model import StageReader
from xrunner.models.weights import TensorPart, WeightSource
from xrunner.offload.weights_file import Writer
from xrunner.ops.linear import Product

TABLE = "embedding"


def write_stage(writer: Writer, read: StageReader, count: int,
                pack: Callable[[Product], None]) -> None:
    """Writes the embedding, `count` layers and the head, a layer in memory at a time. `pack`:
    brings a product into a layout that may lie anywhere."""
    for index in range(count):
        for name, _, product in products_of(index, read.layer(read.weights, index)):
            pack(product)
            writer.add(name, product)
    ends = read.ends(read.weights)
    for name, _, product in pieces_of(ends):
        pack(product)
        writer.add(name, product)
    if ends.embedding is not None:
        writer.table(TABLE, ends.embedding)


class Shapes:
    """Another source's small tensors; products and the embedding as shapes alone ("meta").
    `num_bytes`: of the small ones."""

    def __init__(self, weights: WeightSource, spec: ModelSpec) -> None:
        self._weights, self._spec, self.dtype, self.num_bytes = weights, spec, weights.dtype, 0
        experts = spec.decoder.experts
        self._router = "" if experts is None else f"{EXPERTS[experts.names].router}.weight"

    def get(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        is_router = bool(self._router) and name.endswith(self._router)
        if len(shape) == 1 or is_router or self._spec.max_positions is not None and (
                shape[0] != self._spec.vocab_size and ".layers." not in name
                and not name.startswith("h.")):
            tensor = self._weights.get(name, shape, part)
            self.num_bytes += tensor.nbytes
            return tensor
        return torch.empty(shape if part is None else part.shape(shape), dtype=self.dtype,
                           device="meta")

    def has(self, name: str) -> bool:
        return self._weights.has(name)


def products_of(index: int, layer: DecoderLayer) -> Iterator[tuple[str, object, Product]]:
    """Name, unit and product of each of a layer's products: an expert is a unit of its own."""
    experts = isinstance(layer.weights.mlp, Mixture)
    for place, product in enumerate(layer.products):
        unit: object = (index, (place - 2) // 2) if experts and place >= 2 else index
        yield f"{index}.{place}", unit, product


def pieces_of(ends: DecoderEnds) -> Iterator[tuple[str, object, Product]]:
    """Name, unit and product of each piece of the head."""
    for place, product in enumerate([] if ends.head is None else ends.head.pieces):
        yield f"head.{place}", ("head", place), product
