"""BART and mBART: learned positions (offset 2), biases, layer norms: of each block's sum (BART), or
of what goes into a block, with one more behind all layers (mBART)."""

from torch import Tensor
from torch.nn import functional as F

from xgpt.core.model import ModelSpec
from xrunner.models.cross import PRODUCT_ACTIVATIONS, CrossEnds, LayerReader
from xrunner.models.layer_parts import Norm, PlainMlp
from xrunner.models.learned import read_norm
from xrunner.models.shard import WHOLE, Shard, embedding_weight, head_weight
from xrunner.models.weights import TensorPart, WeightSource
from xrunner.ops.attention import PLAIN
from xrunner.ops.linear import Product
from xrunner.ops.output_head import OutputHead

SCORING = PLAIN
POSITION_OFFSET = 2  # the first two rows of a position table belong to padding
LOGITS_BIAS = "final_logits_bias"
_MODULES = {"self": "self_attn", "cross": "encoder_attn", "mlp": "final"}


class BartReader(LayerReader):
    """As in transformers' BartEncoderLayer, MBartDecoderLayer and so on."""

    def attention(self, name: str, part: str) -> str:
        return f"{self._prefix}{_MODULES[name]}.{'out' if part == 'o' else part}_proj"

    def norm(self, name: str) -> Norm:
        return read_norm(self.spec, self.weights, f"{self._prefix}{_MODULES[name]}_layer_norm")

    def mlp(self) -> PlainMlp:
        spec = self.spec
        up = Product(*self.columns(f"{self._prefix}fc1", spec.intermediate_size, spec.hidden_size),
                     activation=PRODUCT_ACTIVATIONS[spec.activation])
        return PlainMlp(up, self.rows(f"{self._prefix}fc2", spec.intermediate_size))

    @property
    def _prefix(self) -> str:
        return f"{self.side}.layers.{self.index}."


class _Embedding:
    """Tokens and positions of one side, normed."""

    def __init__(self, spec: ModelSpec, weights: WeightSource, side: str, tokens: Tensor) -> None:
        assert spec.max_positions is not None, "a model with learned positions"
        self._tokens, self._scale = tokens, spec.decoder.embedding_scale
        self._last = spec.max_positions - 1
        self._positions = weights.get(f"{side}.embed_positions.weight", (
            spec.max_positions + POSITION_OFFSET, spec.hidden_size))
        self._norm = read_norm(spec, weights, f"{side}.layernorm_embedding")

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """A static batch decodes the rows of queries that are done, beyond the last position if
        others need as long; nobody reads those."""
        at = positions.clamp(max=self._last) + POSITION_OFFSET
        hidden = F.embedding(tokens, self._tokens) * self._scale + F.embedding(at, self._positions)
        # in the type of the norm's weights, which are wider than the embedding's where products are
        return self._norm(hidden.to(self._norm.weight.dtype))


def bart_ends(side: str, spec: ModelSpec, weights: WeightSource, *, first: bool, last: bool,
              shard: Shard = WHOLE, embedding: Tensor | None = None) -> CrossEnds:
    """`embedding`: of tokens [V, H], where the other side's ends hold it."""
    if first and embedding is None:
        embedding = embedding_weight(spec, weights)
    # where norms are of sums, the last layer's is the final one
    has_norm, has_head = last and spec.decoder.norm_place != "sum", last and side == "decoder"
    return CrossEnds(
        embedding=embedding if first else None,
        embed=_Embedding(spec, weights, side, embedding) if first and embedding is not None
        else None,
        norm=read_norm(spec, weights, f"{side}.layer_norm") if has_norm else None,
        head=OutputHead(head_weight(spec, weights, embedding, shard)) if has_head else None,
        logits_bias=_logits_bias(spec, weights, shard) if has_head else None)


def _logits_bias(spec: ModelSpec, weights: WeightSource, shard: Shard) -> Tensor | None:
    """[V_local]; None where it is left out, or of zeros, as in published checkpoints."""
    if not weights.has(LOGITS_BIAS):
        return None
    part = shard.vocabulary_part(spec.vocab_size)
    bias = weights.get(LOGITS_BIAS, (1, spec.vocab_size),
                       None if part is None else TensorPart(1, part.start, part.stop))[0]
    return bias if bool(bias.any()) else None
