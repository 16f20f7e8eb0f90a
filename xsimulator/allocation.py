"""Division of layers over stages with partial tensor parallelism (paper section 4.2).

The first `tp_gpus` devices form groups of `tp_degree`, the others are single. Each group or single
device is a stage. The split of layers minimises the load of the slowest stage: the time of its
layers plus, on the first and last, of embedding and output head. Times are those of a fixed
reference workload, so the split does not depend on the batch sizes that are searched."""

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from xgpt.core.cluster import Cluster
from xgpt.core.deployment import StageAssignment
from xgpt.core.model import ModelSpec, refuse_tp_degree
from xgpt.core.policies import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Reference seconds of one stage: of each layer, and of embedding and head (`fixed_s`)."""

    layer_s: float
    fixed_s: float
    encoder_layer_s: float = 0.0  # encoder-decoder models only


def refuse_plan(model: ModelSpec, cluster: Cluster, tp_degree: int, tp_gpus: int) -> str | None:
    """The reason why (tp_degree, tp_gpus) cannot be allocated on this cluster; None if it can."""
    devices = cluster.num_devices
    if (tp_degree == 1) != (tp_gpus == 0):
        return f"tp_degree {tp_degree} with tp_gpus {tp_gpus}: degree 1 goes with 0 GPUs"
    if tp_degree < 1 or tp_gpus < 0 or tp_gpus % tp_degree or tp_gpus > devices:
        return f"tp_gpus {tp_gpus} is no multiple of tp_degree {tp_degree} within {devices} devices"
    for degree in {tp_degree, 1 if tp_gpus < devices else tp_degree}:
        if (reason := refuse_tp_degree(model, degree)) is not None:
            return reason
    for first in range(0, tp_gpus, tp_degree):
        if not is_allowed_group(cluster, range(first, first + tp_degree)):
            return (f"a group of {tp_degree} would span parts of nodes of "
                    f"{cluster.devices_per_node} devices: it lies within a node, or on whole ones")
    stages = devices - tp_gpus + tp_gpus // tp_degree
    if stages > model.num_layers:
        return f"{stages} stages for {model.num_layers} layers: more stages than layers"
    return None


def is_allowed_group(cluster: Cluster, group: Sequence[int]) -> bool:
    """Whether consecutive ranks may form a tensor-parallel group: in one node or on whole ones."""
    is_split = cluster.node_of(group[0]) != cluster.node_of(group[-1])
    return not is_split or (group[0] % cluster.devices_per_node == 0
                            and len(group) % cluster.devices_per_node == 0)


def stage_ranks(num_devices: int, tp_degree: int, tp_gpus: int) -> list[tuple[int, ...]]:
    """The ranks of each stage: groups of `tp_degree` on the first `tp_gpus`, then single ones."""
    groups = [tuple(range(first, first + tp_degree)) for first in range(0, tp_gpus, tp_degree)]
    return groups + [(rank,) for rank in range(tp_gpus, num_devices)]


def pool_ranks(cluster: Cluster, encode_devices: int, tp_degree: int, tp_gpus: int,
               ) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]] | None:
    """(ranks of each encode stage, of each decode stage); None if groups cannot be placed."""
    devices, groups = cluster.num_devices, tp_gpus // tp_degree
    if (tp_degree == 1) != (tp_gpus == 0) or tp_gpus % tp_degree:
        return None
    decoding = min(groups, (devices - encode_devices) // tp_degree)
    end, first = (groups - decoding) * tp_degree, devices - decoding * tp_degree
    encode, decode = ([tuple(range(rank, rank + tp_degree)) for rank in ranks]
                      for ranks in (range(0, end, tp_degree), range(first, devices, tp_degree)))
    if end > encode_devices or not all(
            is_allowed_group(cluster, group) for group in encode + decode):
        return None
    return (encode + [(rank,) for rank in range(end, encode_devices)],
            [(rank,) for rank in range(encode_devices, first)] + decode)


def can_hold(model: ModelSpec, encode: Sequence[tuple[int, ...]],
             decode: Sequence[tuple[int, ...]]) -> bool:
    """Whether each pool has a layer for every stage, and the model allows the degrees."""
    degrees = {len(group) for group in (*encode, *decode)}
    return (len(encode) <= max(pool_layers(model, "encode"))
            and len(decode) <= max(pool_layers(model, "decode"))
            and all(refuse_tp_degree(model, degree) is None for degree in degrees))


def allocate(model: ModelSpec, ranks: Sequence[tuple[int, ...]], costs: Sequence[StageCost],
             role: Role = "both", *, first_index: int = 0) -> tuple[StageAssignment, ...]:
    """The stages of a pool, with the split of layers whose slowest stage is quickest. Every stage
    has a layer. A pool for one phase holds that phase's layers: encoder or decoder, or all layers
    of a decoder-only model. first_index: index of the first stage."""
    layers, encoder_layers = pool_layers(model, role)
    assert len(ranks) == len(costs) <= max(layers, encoder_layers), f"{len(ranks)} for {layers}"
    fixed = [c.fixed_s for c in costs]
    is_encoder = layers == 0
    encoder = _split(encoder_layers, [c.encoder_layer_s for c in costs],
                     fixed if is_encoder else [0.0] * len(costs), at_least=int(is_encoder))
    decoder = _split(layers, [c.layer_s for c in costs], fixed, at_least=int(not is_encoder))
    begins, encoder_begins = ([0, *itertools.accumulate(split)] for split in (decoder, encoder))
    return tuple(StageAssignment(
        index=first_index + index, ranks=group,
        first_layer=begins[index], num_layers=decoder[index],
        first_encoder_layer=encoder_begins[index], num_encoder_layers=encoder[index])
        for index, group in enumerate(ranks))


def pool_layers(model: ModelSpec, role: Role) -> tuple[int, int]:
    """(number of decoder layers, number of encoder layers) that a pool of that role holds."""
    if not model.is_encoder_decoder:
        return model.num_layers, 0
    return (model.num_layers if role != "encode" else 0,
            model.num_encoder_layers if role != "decode" else 0)


def _split(layers: int, layer_s: Sequence[float], fixed_s: Sequence[float], *,
           at_least: int) -> list[int]:
    """Counts that sum to `layers` and minimise the largest fixed_s + count * layer_s.

    Giving each layer to the stage that would finish it earliest is optimal; ties go to the
    earlier."""
    counts = [at_least] * len(layer_s)
    loads = [(fixed + (at_least + 1) * cost, stage)
             for stage, (fixed, cost) in enumerate(zip(fixed_s, layer_s, strict=True))]
    heapq.heapify(loads)
    for _ in range(layers - sum(counts)):
        stage = loads[0][1]
        counts[stage] += 1
        heapq.heapreplace(loads, (fixed_s[stage] + (counts[stage] + 1) * layer_s[stage], stage))
    return counts
