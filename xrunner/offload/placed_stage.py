"""A stage whose weights, entries and hidden states lie on tiers. Steps are taken through it by
device batches, in zig-zag or row order (FlexGen, arXiv:2303.06865, section 4.1)."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from xgpt.core.deployment import StageAssignment
from xgpt.core.model import ModelSpec
from xgpt.core.placement import DEVICE, DISK, HOST, TIERS, Placement, queries_by_tier, stage_tiers
from xrunner.devices import CPU
from xrunner.engine.kv import KvCache
from xrunner.models.decoder import DecoderEnds, DecoderLayer, Mixture
from xrunner.models.passes import Pass
from xrunner.models.stage_model import PIECE_TOKENS, StageModel, StageReader
from xrunner.models.weights import PlacedWeights, WeightSource
from xrunner.offload.arena import Arena
from xrunner.offload.kv_parts import Tiers
from xrunner.offload.lender import Lender
from xrunner.offload.mover import Mover, copy
from xrunner.offload.placed_cache import Piece, PlacedCache
from xrunner.offload.report import OffloadReport
from xrunner.offload.stage_weights import (
    TABLE,
    Shapes,
    pieces_of,
    products_of,
    write_stage,
)
from xrunner.offload.weights_file import weights_file
from xrunner.ops.linear import Product
from xrunner.ops.rows import Residual
from xrunner.rules.slots import Span


def open_tiers(placement: Placement, stage: int, device: torch.device, folder: Path) -> Tiers:
    """Arenas of the bytes that are planned for a rank of `stage`, and the copies between them.
    `folder`: of files. A CPU rank without a host tier has the device's arena for the host's."""
    planned = placement.budgets[stage] if placement.budgets else (None, None, None)
    on_device, host, disk = (Arena(name, most) for name, most in zip(TIERS, planned, strict=True))
    if device.type == "cpu" and not any((placement.weights[HOST], placement.kv[HOST],
                                         placement.hidden[HOST])):
        host = on_device
    return Tiers(placement, device, (on_device, host, disk),
                 Mover(overlap=placement.overlap, device=device), folder)


class PlacedStage(StageModel):
    """Layers and ends as of StageModel, on the tiers of `tiers`."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, stage: StageAssignment,
                 dtype: torch.dtype, tiers: Tiers, identity: str,
                 weight_dtype: torch.dtype | None = None) -> None:
        """`identity`: of the model's files, for the file of its weights. Raises XgptError."""
        self.tiers, self._source = tiers, weights
        self._key = {"model": identity, "first": stage.first_layer, "layers": stage.num_layers}
        super().__init__(spec, weights, stage, dtype, device=tiers.device,
                         weight_dtype=weight_dtype)

    def _held(self, read: StageReader, count: int) -> tuple[Sequence[DecoderLayer], DecoderEnds]:
        tiers, placement = self.tiers, self.tiers.placement
        pack = partial(Product.pack_movable, dtype=self.as_type, device_type=self.device.type)
        file = weights_file(
            tiers.folder, {**self._key, "dtype": str(self.dtype), "held": str(self.as_type),
                           "device": self.device.type}, placement.weight_bits,
            lambda writer: write_stage(writer, read._replace(
                weights=PlacedWeights(self._source, CPU, self.work_dtype)), count, pack))
        self.lender = lender = Lender(file, tiers.arenas, tiers.mover, self.device)
        shapes = Shapes(read.weights, self.spec)
        where = stage_tiers(self.spec, count, placement.weights, is_first=self.is_first,
                            is_last=self.is_last)
        layers = [read.layer(shapes, index) for index in range(count)]
        ends = read.ends(shapes)
        for index, (layer, own) in enumerate(zip(layers, where.layers, strict=True)):
            for (name, unit, product), tier in zip(products_of(index, layer), own, strict=True):
                pack(product)
                lender.add(unit, name, product, tier)
            if isinstance(mixture := layer.weights.mlp, Mixture):
                mixture.lend = partial(self._lend_expert, index)
        if ends.head is not None:
            assert where.head is not None
            for name, unit, product in pieces_of(ends):
                pack(product)
                lender.add(unit, name, product, where.head)
            ends.head.lend = self._lend_piece
            self._pieces = len(ends.head.pieces)
        if self.is_first:
            assert where.embedding is not None
            self._place_table(ends, where.embedding)
        device = tiers.arenas[DEVICE]
        device.take(shapes.num_bytes, "norms, biases, routers and positions")
        lender.open()
        return layers, ends

    def in_pieces(self, inputs: Tensor, cache: KvCache, spans: Sequence[Span],
                  tails: Sequence[int]) -> Tensor:
        """Hidden states [n, H] of a step that encodes whole inputs, `spans`, or, without any,
        decodes a token of every request; on the last stage of rows asked for, as of `mixed` with
        `ends_only`. `tails`: see EncodeContext. Raises XgptError."""
        assert isinstance(cache, PlacedCache), f"{cache = }"
        pieces = cache.pieces(spans, tails)
        if self.tiers.placement.order == "zigzag":
            return self._through(inputs, cache, pieces, is_again=False)
        return torch.cat([self._through(inputs, cache, [piece], is_again=piece is not pieces[-1])
                          for piece in pieces])

    def end(self, caches: Sequence[KvCache]) -> None:
        """Waits for all copies, and gives back the memory and files of the caches. Raises
        XgptError."""
        self.tiers.mover.flush()
        for cache in caches:
            assert isinstance(cache, PlacedCache), f"{cache = }"
            cache.close()

    def report(self, compute_s: float) -> OffloadReport:
        """Seconds and bytes since the last report: the next run may use the same stage.
        `compute_s`: of all steps, copies waited for included."""
        mover, arenas = self.tiers.mover, self.tiers.arenas
        peaks = {arena.tier: arena.peak for arena in arenas}
        for arena in arenas:
            arena.peak = arena.held
        seconds, num_bytes, waited_s = mover.taken()
        return OffloadReport(
            seconds={**seconds, "compute": max(compute_s - waited_s, 0.0)}, num_bytes=num_bytes,
            waited_s=waited_s, io=self.lender.file.file.way, peaks=peaks)

    def _through(self, inputs: Tensor, cache: PlacedCache, pieces: Sequence[Piece], *,
                 is_again: bool) -> Tensor:
        """Takes all pieces through each layer before the next. `is_again`: other pieces go through
        the layers after these."""
        hosted, row_bytes = self._hosted(pieces), self.spec.hidden_size * self.work_dtype.itemsize
        held = [0, 0]  # bytes of hidden states on the device and on the host
        for place, piece in enumerate(pieces):
            held[place in hosted] += len(inputs[piece.rows]) * row_bytes
        for arena, num_bytes in zip(self.tiers.arenas, held, strict=False):
            arena.take(num_bytes, "hidden states")
        passes = [[self._kept(one, place in hosted) for one in self._passes(
            inputs[piece.rows], piece)] for place, piece in enumerate(pieces)]
        cache.ahead(0, pieces[0])
        last = len(self.layers) - 1
        for index, layer in self._lent(is_again=is_again):
            is_mixture = isinstance(layer.weights.mlp, Mixture)
            for place, (piece, own) in enumerate(zip(pieces, passes, strict=True)):
                entries = cache.lend(index, piece)
                if place + 1 < len(pieces):
                    cache.ahead(index, pieces[place + 1])
                elif index < last:
                    cache.ahead(index + 1, pieces[0])
                for one in own:
                    if place in hosted:
                        one.hidden = Residual(self._across("up", one.hidden.total()))
                    attended = one.attended(layer, entries, is_last=index == last)  # may narrow it
                    layer.project(one.hidden, attended)
                    if not is_mixture:
                        layer.mix([one.hidden])
                    self._kept(one, place in hosted and index < last)
                cache.put(index, piece)
            if is_mixture:
                layer.mix([one.hidden for own in passes for one in own])
        for arena, num_bytes in zip(self.tiers.arenas, held, strict=False):
            arena.give_back(num_bytes)
        return torch.cat([one.output() for own in passes for one in own])

    def _passes(self, inputs: Tensor, piece: Piece) -> list[Pass]:
        """The piece's ways through the layers: several, of fewer rows, where that is quicker."""
        below = piece.decoded is not None and piece.tier != DEVICE
        across = self._across if below and self.tiers.placement.host_attention else None
        if piece.encoded is None or self.device.type != "cpu":
            return [Pass(self, inputs, piece.decoded, piece.encoded, ends_only=self.is_last,
                         across=across)]
        return [Pass(self, inputs[rows], None, own, ends_only=self.is_last)
                for rows, own in piece.encoded.pieces(PIECE_TOKENS)]

    def _hosted(self, pieces: Sequence[Piece]) -> set[int]:
        """Numbers of the pieces whose hidden states lie on the host between layers: of a mixture of
        experts none, since each expert takes rows of all pieces."""
        if self.spec.decoder.experts is not None:
            return set()
        first, count = pieces[0].slots.start, sum(len(piece.slots) for piece in pieces)
        on_device = len(queries_by_tier(count, self.tiers.placement.hidden)[DEVICE])
        return {place for place, piece in enumerate(pieces)
                if piece.slots.stop - first > on_device and len(pieces) > 1}

    def _kept(self, one: Pass, is_hosted: bool) -> Pass:
        """The pass, its hidden states moved to the host if `is_hosted`."""
        if is_hosted:
            one.hidden = Residual(self._across("down", one.hidden.total()))
        return one

    def _across(self, way: Literal["up", "down"], rows: Tensor) -> Tensor:
        """A copy of the rows on the device (up) or on the host."""
        device = self.device if way == "up" else CPU
        found = torch.empty(rows.shape, dtype=rows.dtype, device=device,
                            pin_memory=way == "down" and self.device.type != "cpu")
        mover = self.tiers.mover
        mover.wait(mover.submit(way, rows.nbytes, partial(copy, found, rows.contiguous())))
        return found

    def _lent(self, *, is_again: bool) -> Iterator[tuple[int, DecoderLayer]]:
        """The layers with their numbers, their weights in place one after the other."""
        for index, layer in enumerate(self.layers):
            self._then: object = index + 1
            if index + 1 == len(self.layers):
                self._then = 0 if is_again or not self.is_last else ("head", 0)
            is_mixture = isinstance(layer.weights.mlp, Mixture)
            self.lender.lend(index, None if is_mixture else self._then)
            yield index, layer

    def _lend_expert(self, layer: int, expert: int, following: int | None) -> None:
        self.lender.lend((layer, expert), self._then if following is None else (layer, following))

    def _lend_piece(self, piece: int) -> None:
        self.lender.lend(("head", piece), ("head", piece + 1) if piece + 1 < self._pieces else 0)

    def _place_table(self, ends: DecoderEnds, tier: int) -> None:
        if tier == DISK:
            ends.embedding, ends.rows = None, self._rows
            return
        table = self.lender.table(TABLE, tier)
        if tier == DEVICE:
            ends.embedding = table
        else:
            ends.embedding = None
            ends.rows = lambda tokens: self._across("up", F.embedding(tokens.to(CPU), table))

    def _rows(self, tokens: Tensor) -> Tensor:
        """Rows [T, H] of the embedding, read singly from the disk."""
        file, mover, found = self.lender.file, self.tiers.mover, list[Tensor]()

        def read() -> None:  # behind the reads that are under way, whose bytes are not its own
            before = file.file.bytes_read
            found.append(file.rows(TABLE, tokens))
            mover.num_bytes["read"] += file.file.bytes_read - before

        mover.wait(mover.submit("read", 0, read))
        return found[0].to(self.device)
