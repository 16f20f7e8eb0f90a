"""Names and shapes of the tensors that a model takes from its checkpoint. The layers of
xrunner.models ask for the same ones (by test). Free of torch."""

from collections.abc import Iterator
from typing import NamedTuple

from xgpt.core.model import ModelSpec

Shape = tuple[int, ...]
HEAD = "lm_head.weight"
_LOGITS_BIAS = "final_logits_bias"
# Names of the token table by family; transformers ties them, so any one may be the only one.
_EMBEDDINGS = {
    "llama": ("model.embed_tokens.weight",), "opt": ("model.decoder.embed_tokens.weight",),
    "gpt2": ("wte.weight",), **dict.fromkeys(("t5", "bart"), (
        "shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"))}
_PADDING_ROWS = 2  # of OPT's and BART's position tables


class ExpertNames(NamedTuple):
    """Names of a layer's router, its experts by number, and each expert's products."""

    router: str
    expert: str
    gate: str
    up: str
    down: str


EXPERTS = {
    "mixtral": ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.{}",
                           "w1", "w3", "w2"),
    "qwen": ExpertNames("mlp.gate", "mlp.experts.{}", "gate_proj", "up_proj", "down_proj")}


def embedding_names(spec: ModelSpec) -> tuple[str, ...]:
    """Possible names of the token table, with a tied model's head; those present must be equal."""
    names: tuple[str, ...] = _EMBEDDINGS[spec.family]
    return (*names, HEAD) if spec.tied_embeddings else names


def is_optional(spec: ModelSpec, name: str) -> bool:
    """Whether the tensor may be absent: a zero bias, or T5's head, which is then tied."""
    return name == _LOGITS_BIAS or name == HEAD and spec.family == "t5"


def wanted_tensors(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    """Yields (name, shape) of each tensor, layer by layer, then an untied head."""
    yield from _FAMILIES[spec.family](spec)
    if not spec.tied_embeddings:
        yield HEAD, (spec.vocab_size, spec.hidden_size)


def norm_names(spec: ModelSpec) -> dict[str, str]:
    """Names of a gated decoder's norms by field of xrunner.models.decoder.LayerWeights."""
    return {
        "before": {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
        "after": {"attended_norm": "post_attention_layernorm",
                  "output_norm": "post_feedforward_layernorm"},
        "both": {"input_norm": "input_layernorm", "attended_norm": "post_attention_layernorm",
                 "mlp_norm": "pre_feedforward_layernorm",
                 "output_norm": "post_feedforward_layernorm"}}[spec.decoder.norm_place]


def _gated(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden = spec.hidden_size
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}."
        for name, shape in (*_attention(spec), *_mlp(spec)):
            yield layer + name, shape
        for name in norm_names(spec).values():
            yield f"{layer}{name}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def _attention(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden, dim, counts = spec.hidden_size, spec.head_dim, (spec.num_heads, spec.kv_heads)
    width, kv_width = (count * dim for count in counts)
    own = {"qkv": width + 2 * kv_width} if spec.decoder.is_fused else {
        "q": width, "k": kv_width, "v": kv_width}
    for name, out in own.items():
        yield f"self_attn.{name}_proj.weight", (out, hidden)
        if spec.qkv_bias:
            yield f"self_attn.{name}_proj.bias", (out,)
    yield "self_attn.o_proj.weight", (hidden, width)
    if spec.out_bias:
        yield "self_attn.o_proj.bias", (hidden,)
    if kind := spec.decoder.qk_norm:
        for name, count in zip("qk", counts, strict=True):
            yield f"self_attn.{name}_norm.weight", (dim if kind == "head" else count * dim,)


def _mlp(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden, inner, experts = spec.hidden_size, spec.intermediate_size, spec.decoder.experts
    if experts is not None:
        names = EXPERTS[experts.names]
        yield f"{names.router}.weight", (experts.count, hidden)
        for index in range(experts.count):
            expert = names.expert.format(index)
            for name in (names.gate, names.up):
                yield f"{expert}.{name}.weight", (experts.inner, hidden)
            yield f"{expert}.{names.down}.weight", (hidden, experts.inner)
        return
    for name, count in ({"gate_up": 2} if spec.decoder.is_fused else {"gate": 1, "up": 1}).items():
        yield f"mlp.{name}_proj.weight", (count * inner, hidden)
    yield "mlp.down_proj.weight", (hidden, inner)


def _opt(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden = spec.hidden_size
    assert spec.max_positions is not None
    yield "model.decoder.embed_tokens.weight", (spec.vocab_size, hidden)
    yield "model.decoder.embed_positions.weight", (spec.max_positions + _PADDING_ROWS, hidden)
    for index in range(spec.num_layers):
        yield from _bart_layer(spec, f"model.decoder.layers.{index}.", "self_attn")
    yield from _norm("model.decoder.final_layer_norm", hidden)


def _gpt2(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    assert spec.max_positions is not None
    yield "wte.weight", (spec.vocab_size, hidden)
    yield "wpe.weight", (spec.max_positions, hidden)
    for index in range(spec.num_layers):
        for name, into, out in (("attn.c_attn", hidden, 3 * hidden),
                                ("attn.c_proj", hidden, hidden), ("mlp.c_fc", hidden, inner),
                                ("mlp.c_proj", inner, hidden)):
            yield f"h.{index}.{name}.weight", (into, out)
            yield f"h.{index}.{name}.bias", (out,)
        for name in ("ln_1", "ln_2"):
            yield from _norm(f"h.{index}.{name}", hidden)
    yield from _norm("ln_f", hidden)


def _t5(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden, inner, width = spec.hidden_size, spec.intermediate_size, spec.num_heads * spec.head_dim
    ups = ("wi_0", "wi_1") if spec.is_gated_mlp else ("wi",)
    yield "shared.weight", (spec.vocab_size, hidden)
    for side, count, attentions in (
            ("encoder", spec.num_encoder_layers, ("SelfAttention",)),
            ("decoder", spec.num_layers, ("SelfAttention", "EncDecAttention"))):
        yield (f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
               (spec.relative_buckets, spec.num_heads))
        for index in range(count):
            for place, attention in enumerate(attentions):
                block = f"{side}.block.{index}.layer.{place}."
                for name in ("q", "k", "v"):
                    yield f"{block}{attention}.{name}.weight", (width, hidden)
                yield f"{block}{attention}.o.weight", (hidden, width)
                yield f"{block}layer_norm.weight", (hidden,)
            block = f"{side}.block.{index}.layer.{len(attentions)}."
            for name in ups:
                yield f"{block}DenseReluDense.{name}.weight", (inner, hidden)
            yield f"{block}DenseReluDense.wo.weight", (hidden, inner)
            yield f"{block}layer_norm.weight", (hidden,)
        yield f"{side}.final_layer_norm.weight", (hidden,)


def _bart(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden = spec.hidden_size
    assert spec.max_positions is not None
    yield "shared.weight", (spec.vocab_size, hidden)
    for side, count, attentions in (("encoder", spec.num_encoder_layers, ("self_attn",)),
                                    ("decoder", spec.num_layers, ("self_attn", "encoder_attn"))):
        yield f"{side}.embed_positions.weight", (spec.max_positions + _PADDING_ROWS, hidden)
        yield from _norm(f"{side}.layernorm_embedding", hidden)
        for index in range(count):
            yield from _bart_layer(spec, f"{side}.layers.{index}.", *attentions)
        if spec.decoder.norm_place != "sum":
            yield from _norm(f"{side}.layer_norm", hidden)
    yield _LOGITS_BIAS, (1, spec.vocab_size)


def _bart_layer(spec: ModelSpec, layer: str, *attentions: str) -> Iterator[tuple[str, Shape]]:
    """Tensors of a layer of BART's, or OPT's."""
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    for name, out, into in (
            *((f"{attention}.{n}_proj", hidden, hidden) for attention in attentions
              for n in ("q", "k", "v", "out")), ("fc1", ffn, hidden), ("fc2", hidden, ffn)):
        yield f"{layer}{name}.weight", (out, into)
        if spec.has_bias:
            yield f"{layer}{name}.bias", (out,)
    for name in (*attentions, "final"):
        yield from _norm(f"{layer}{name}_layer_norm", hidden)


def _norm(name: str, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (hidden,)
    yield f"{name}.bias", (hidden,)


_FAMILIES = {"llama": _gated, "opt": _opt, "gpt2": _gpt2, "t5": _t5, "bart": _bart}
