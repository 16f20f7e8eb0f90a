"""What OPT and GPT-2 share: layer norms with biases, and positions that are learned as a table."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from xgpt.core.model import ModelSpec
from xrunner.models.decoder import DecoderEnds, EndWeights
from xrunner.models.norms import Norm
from xrunner.models.shard import WHOLE, Shard, embedding_weight, head_weight
from xrunner.models.weights import WeightSource
from xrunner.ops.head import OutputHead


class EndNames(NamedTuple):
    """What a checkpoint calls the ends' tensors; position p is row p + `position_offset` of its
    table."""

    positions: str
    norm: str
    position_offset: int = 0


def ends_of(names: EndNames) -> Callable[..., DecoderEnds]:
    """What reads the ends of a family that has these names."""
    return partial(_ends, names)


def _ends(names: EndNames, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
          shard: Shard = WHOLE) -> DecoderEnds:
    assert spec.max_positions is not None, "a model with learned positions"
    embedding = positions = norm = head = None
    if first:
        rows = spec.max_positions + names.position_offset
        embedding = embedding_weight(spec, weights)
        positions = weights.get(names.positions, (rows, spec.hidden_size))
    if last:
        norm = read_norm(spec, weights, names.norm)
        head = OutputHead(head_weight(spec, weights, embedding, shard))
    return DecoderEnds(spec, EndWeights(embedding, positions, names.position_offset, norm, head))


def read_norm(spec: ModelSpec, weights: WeightSource, name: str) -> Norm:
    size = (spec.hidden_size,)
    return Norm(weights.get(f"{name}.weight", size), weights.get(f"{name}.bias", size),
                spec.norm_eps)
