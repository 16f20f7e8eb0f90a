"""Cost of deploying a schedule: bytes that each rank loads, and seconds from SSD and from DRAM
(paper section 7.7 and Table 4).

A rank's weights are pieces: embedding, output head, and layers, each whole or a shard of a
tensor-parallel group. A rank loads every piece that it does not hold already as the same shard of
the same degree.

    from DRAM  bytes of the fullest rank / host-to-device bandwidth of one device
    from SSD   distinct bytes of a node / bandwidth of its drive, at least the time from DRAM

Every node has the model on its own drive or in its DRAM. Process start, parsing of checkpoints and
compilation of kernels are not counted."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xgpt.core.cluster import Cluster
from xgpt.core.deployment import Pool, StageAssignment
from xgpt.core.model import ModelSpec, layer_params_of_rank
from xgpt.core.units import DTYPE_BYTES
from xsimulator.allocation import pool_layers


class Piece(NamedTuple):
    """Weights that are loaded together: shard `shard` of `degree` of one part."""

    part: str  # "embedding", "head", "layer", "encoder layer"
    layer: int  # 0 elsewhere
    shard: int
    degree: int


Holdings = Mapping[int, Mapping[Piece, int]]  # rank -> its pieces' bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Bytes and seconds of a deployment. rank_bytes: [ranks] to load, in rank order. node_bytes:
    [nodes] of distinct pieces."""

    rank_bytes: tuple[int, ...]
    node_bytes: tuple[int, ...]
    from_dram_s: float
    from_ssd_s: float

    @property
    def total_bytes(self) -> int:
        return sum(self.rank_bytes)


def holdings(pools: Sequence[Pool], model: ModelSpec, dtype: str) -> Holdings:
    """{rank: {piece: bytes}} of the pools' ranks; a rank of two pools holds the pieces of both."""
    held: dict[int, dict[Piece, int]] = {}
    for stage, pieces in _stage_pieces(pools, model):
        degree = stage.tp_degree
        for shard, rank in enumerate(stage.ranks):
            own = held.setdefault(rank, {})
            for part, index, params in pieces:
                # the embedding lies whole on every rank of a first stage (xsimulator.memory)
                piece = (Piece(part, index, 0, 1) if part == "embedding"
                         else Piece(part, index, shard, degree))
                params = (layer_params_of_rank(model, degree) if part == "layer"
                          else params / piece.degree)
                own[piece] = round(params * DTYPE_BYTES[dtype])
    return held


def loading_between(old: Sequence[Pool], new: Sequence[Pool], model: ModelSpec, dtype: str,
                 cluster: Cluster) -> Loading:
    """The loading of all pieces that the new pools' ranks do not hold from the old ones."""
    held = holdings(old, model, dtype)
    return _loading({
        rank: {piece: size for piece, size in pieces.items() if piece not in held.get(rank, {})}
        for rank, pieces in holdings(new, model, dtype).items()}, cluster)


def _stage_pieces(pools: Sequence[Pool], model: ModelSpec,
                  ) -> Iterator[tuple[StageAssignment, list[tuple[str, int, float]]]]:
    """Yields each stage with its pieces [(part, layer index, number of parameters)]."""
    layer, encoder_layer = float(model.decoder_layer_params), float(model.encoder_layer_params)
    for pool in pools:
        for stage in pool.stages:
            pieces = [("layer", stage.first_layer + k, layer) for k in range(stage.num_layers)]
            pieces += [("encoder layer", stage.first_encoder_layer + k, encoder_layer)
                       for k in range(stage.num_encoder_layers)]
            if stage is pool.stages[0]:
                pieces.append(("embedding", 0, float(model.embedding_params)))
            if stage is pool.stages[-1] and pool_layers(model, pool.role)[0] > 0:
                pieces.append(("head", 0, float(model.head_params)))
            yield stage, pieces


def _loading(wanted: Holdings, cluster: Cluster) -> Loading:
    of_rank = [sum(wanted.get(rank, {}).values()) for rank in range(cluster.num_devices)]
    of_node: list[dict[Piece, int]] = [{} for _ in range(cluster.num_nodes)]
    for rank, pieces in wanted.items():
        of_node[cluster.node_of(rank)].update(pieces)
    node_bytes = [sum(pieces.values()) for pieces in of_node]
    from_dram_s = max(of_rank) / cluster.host_bytes_per_s
    return Loading(rank_bytes=tuple(of_rank), node_bytes=tuple(node_bytes), from_dram_s=from_dram_s,
                   from_ssd_s=max(max(node_bytes) / cluster.ssd_bytes_per_s, from_dram_s))
