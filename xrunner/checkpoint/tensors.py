"""Names and shapes of the tensors that a model of a given shape takes of its checkpoint, as the
layers of xrunner.models ask for them (a test compares the two). Free of torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from xgpt.core.model import ModelSpec

Shape = tuple[int, ...]
HEAD = "lm_head.weight"  # where it is absent, the embedding serves

# Published checkpoints differ in how deep the decoder is nested; tried in this order.
_PREFIXES = ("", "model.", "transformer.")
_OPT_PADDING_ROWS = 2  # of its position table


def locate(name: str, files: Mapping[str, object]) -> str | None:
    """The name under which a checkpoint of these tensors holds `name`; None where it has none."""
    for prefix in _PREFIXES:
        for candidate in (prefix + name, name.removeprefix(prefix or "\0")):
            if candidate in files:
                return candidate
    return None


def wanted_tensors(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    """(name, shape) of each, those of the first layer first. An untied head is among them."""
    yield from _FAMILIES[spec.family](spec)
    if not spec.tied_embeddings:
        yield HEAD, (spec.vocab_size, spec.hidden_size)


def _llama(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    width, kv_width = spec.num_heads * spec.head_dim, spec.kv_heads * spec.head_dim
    yield "model.embed_tokens.weight", (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}."
        for name, out in (("q", width), ("k", kv_width), ("v", kv_width)):
            yield f"{layer}self_attn.{name}_proj.weight", (out, hidden)
            if spec.qkv_bias:
                yield f"{layer}self_attn.{name}_proj.bias", (out,)
        yield f"{layer}self_attn.o_proj.weight", (hidden, width)
        for name in ("gate", "up"):
            yield f"{layer}mlp.{name}_proj.weight", (inner, hidden)
        yield f"{layer}mlp.down_proj.weight", (hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}{name}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)


def _opt(spec: ModelSpec) -> Iterator[tuple[str, Shape]]:
    hidden, ffn = spec.hidden_size, spec.intermediate_size
    assert spec.max_positions is not None
    yield "model.decoder.embed_tokens.weight", (spec.vocab_size, hidden)
    yield "model.decoder.embed_positions.weight", (spec.max_positions + _OPT_PADDING_ROWS, hidden)
    for index in range(spec.num_layers):
        layer = f"model.decoder.layers.{index}."
        for name, out, into in (
                *((f"self_attn.{n}_proj", hidden, hidden) for n in ("q", "k", "v", "out")),
                ("fc1", ffn, hidden), ("fc2", hidden, ffn)):
            yield f"{layer}{name}.weight", (out, into)
            if spec.has_bias:
                yield f"{layer}{name}.bias", (out,)
        for name in ("self_attn_layer_norm", "final_layer_norm"):
            yield from _norm(layer + name, hidden)
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


def _norm(name: str, hidden: int) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (hidden,)
    yield f"{name}.bias", (hidden,)


_FAMILIES = {"llama": _llama, "opt": _opt, "gpt2": _gpt2, "t5": _t5}
