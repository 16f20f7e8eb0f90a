"""What a decoder layer does beside the plainest one, which norms, attends to everything before it,
norms again and multiplies by one MLP. Families are values of these, not classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Of attention and MLP: what goes in, what comes out, both, or the sum it is added to
NormPlace = Literal["before", "after", "both", "sum"]
QkNorm = Literal["", "head", "all"]  # of queries and keys: each head alone, or all heads together


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in the place of a layer's MLP (Shazeer et al., arXiv:1701.06538): a
    router gives each token to `per_token` of `count` gated MLPs of `inner` columns each."""

    count: int
    per_token: int
    inner: int
    is_normed: bool = True  # the weights of a token's experts are made to sum to 1
    names: Literal["mixtral", "qwen"] = "mixtral"  # whose the tensors' names are
    shared: int = 0  # inner columns that every token goes through beside its own experts'
    dense_layers: int = 0  # layers with one gated MLP of `dense_inner` columns instead
    dense_inner: int = 0

    def hit(self, tokens: Any) -> Any:
        """Experts that so many tokens (a number or an array) go to in the mean, if all experts are
        as likely: their weights are read."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): the cache holds, for all heads
    together, a compressed vector of `kv_rank` elements and a rotated key of `rope_dim`. Of each
    head, queries and keys have `nope_dim` elements beside the rotated, values `value_dim`."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None  # queries are compressed, too; None: not

    def attention_params(self, hidden: int, heads: int) -> int:
        """Of one layer: what is projected down with its norms, up, and out."""
        key_dim = self.nope_dim + self.rope_dim
        query = hidden * heads * key_dim if self.query_rank is None else (
            self.query_rank * (hidden + 1 + heads * key_dim))
        keys = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * (
            1 + heads * (self.nope_dim + self.value_dim))
        return query + keys + heads * self.value_dim * hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """A decoder layer's variant; as it is made, Llama's. `windows`: of each layer the last tokens
    that one attends to, its own among them, None: all; empty: all layers to all."""

    norm_place: NormPlace = "before"
    norm_adds_one: bool = False  # a norm's weight w is stored as w - 1 (Gemma)
    qk_norm: QkNorm = ""
    windows: tuple[int | None, ...] = ()
    attention_cap: float | None = None  # a score s becomes cap * tanh(s / cap); logits likewise
    logit_cap: float | None = None
    query_scale: float | None = None  # of the scores; None: head_dim ** -0.5
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and MLP add
    logit_scale: float = 1.0
    rotary_dim: int | None = None  # the first elements of a head, which are rotated; None: all
    local_rope_theta: float | None = None  # the base of layers with a window; None: as the others
    unrotated: tuple[int, ...] = ()  # layers without rotary positions
    is_fused: bool = False  # query, key, value are stored as one tensor; gate and up as another
    experts: Experts | None = None
    latent: Latent | None = None

    def window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def is_native(self) -> bool:
        """Whether the operators of csrc/ compute all of its attention, at any length."""
        return self.attention_cap is None and not any(self.windows)


def decoder_from_dict(raw: Mapping[str, Any]) -> Decoder:
    """One written by dataclasses.asdict, through JSON. Raises TypeError for other keys."""
    values = dict(raw)
    if values.get("experts") is not None:
        values["experts"] = Experts(**values["experts"])
    if values.get("latent") is not None:
        values["latent"] = Latent(**values["latent"])
    for key in ("windows", "unrotated"):
        if key in values:
            values[key] = tuple(values[key])
    return Decoder(**values)
