"""What OPT and GPT-2 share: layer norms with biases, and positions that are learned as a table."""

from xgpt.core.model import ModelSpec
from xrunner.models.decoder import DecoderEnds, EndWeights
from xrunner.models.norms import Norm
from xrunner.models.shard import WHOLE, Shard, embedding_weight, head_weight
from xrunner.models.weights import WeightSource
from xrunner.ops.head import OutputHead


def learned_ends(spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
                 table: tuple[str, int], norm_name: str, shard: Shard = WHOLE) -> DecoderEnds:
    """`table`: what a family's checkpoints call that of positions, and its row of position 0."""
    assert spec.max_positions is not None, "a model with learned positions"
    embedding = positions = norm = head = None
    name, offset = table
    if first:
        embedding = embedding_weight(spec, weights)
        positions = weights.get(name, (spec.max_positions + offset, spec.hidden_size))
    if last:
        norm = read_norm(spec, weights, norm_name)
        head = OutputHead(head_weight(spec, weights, embedding, shard))
    return DecoderEnds(spec, EndWeights(embedding, positions, offset, norm, head))


def read_norm(spec: ModelSpec, weights: WeightSource, name: str) -> Norm:
    size = (spec.hidden_size,)
    return Norm(weights.get(f"{name}.weight", size), weights.get(f"{name}.bias", size),
                spec.norm_eps)
