"""Reads `config.json` of decoders with gated MLPs and rotary positions: differences of each family
from Llama. For rotary positions transformers 5 writes `rope_parameters` (Gemma 3: one per kind of
layer), version 4 `rope_theta` and `rope_scaling`; both state the part of a head to rotate.

A model whose activation or rotary positions our layers cannot execute can still be planned:
`ModelSpec.planned_only` says so. In families that are only planned, layers of two kinds (with
experts, and with one MLP) are planned as their mean."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

from xgpt.core.hf.values import ConfigValues
from xgpt.core.model import Decoder, Experts, Latent, ModelSpec, RopeValue

LATENT = "multi-head latent attention and shared experts"
CHUNKED = "attention in chunks and shared experts"
SINKS = "attention with sinks and experts with biases"
# transformers' names -> ModelSpec.activation
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_new",
               "gelu_pytorch_tanh": "gelu_new", "relu": "relu"}
_SIZES = ("num_layers", "hidden_size", "num_heads", "vocab_size", "intermediate_size",
          "max_positions")
FULL, WINDOWED = "full_attention", "sliding_attention"  # transformers' names
_ORIGINAL = "original_max_position_embeddings"
# kind of rotary positions: numbers that it needs, numbers that it may have, other keys
_KINDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "default": ((), (), ()), "linear": (("factor",), (), ()), "dynamic": (("factor",), (), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), (), ()),
    "yarn": (("factor",), ("attention_factor", "beta_fast", "beta_slow", "mscale",
                           "mscale_all_dim"), (_ORIGINAL, "truncate")),
    "longrope": ((), ("factor", "attention_factor"), (_ORIGINAL, "short_factor", "long_factor"))}
Reader = Callable[[ConfigValues, str], ModelSpec]
Windows = tuple[int | None, ...]


def sizes_of(config: ConfigValues, *keys: str) -> dict[str, Any]:
    """Values of ModelSpec's fields _SIZES, read from `keys` in this order, all required."""
    return {field: config.size(key) for field, key in zip(_SIZES, keys, strict=False)}


def gated(decoder: Decoder, windows: Callable[[ConfigValues], Windows] | None = None,
          has_qkv_bias: bool | None = None) -> Reader:
    """A reader of a family with this `decoder`. `windows`: reads the attention window by layer.
    `has_qkv_bias`: as for `_read_gated`."""
    def reader(config: ConfigValues, name: str) -> ModelSpec:
        own = decoder if windows is None else replace(decoder, windows=windows(config))
        return _read_gated(config, name, own, has_qkv_bias=has_qkv_bias)

    return reader


def read_mixtral(config: ConfigValues, name: str) -> ModelSpec:
    experts = _experts(config, "num_local_experts", config.size("intermediate_size"))
    return _read_gated(config, name, Decoder(windows=everywhere(config), experts=experts),
                       has_qkv_bias=False)


def read_qwen3_moe(config: ConfigValues, name: str) -> ModelSpec:
    if config.get("mlp_only_layers"):
        config.reject("mlp_only_layers", "is not supported, only an empty list is")
    experts = replace(_experts(config, "num_experts", config.size("moe_intermediate_size")),
                      names="qwen", is_normed=config.flag("norm_topk_prob", False))
    windows = everywhere(config)
    return _read_gated(config, name, Decoder(
        qk_norm="head", experts=experts,
        windows=windows if config.flag("use_sliding_window", False) else ()))


def read_gemma2(config: ConfigValues, name: str) -> ModelSpec:
    return _read_gemma(config, name, 2,
                       attention_cap=config.number_or_none("attn_logit_softcapping", 50.0),
                       logit_cap=config.number_or_none("final_logit_softcapping", 30.0))


def read_gemma3(config: ConfigValues, name: str) -> ModelSpec:
    """Reads Gemma 3's text model."""
    return _read_gemma(config, name, config.size_or_none("sliding_window_pattern") or 6,
                       qk_norm="head", local_rope_theta=10000.0,
                       logit_cap=config.number_or_none("final_logit_softcapping"))


def _read_gemma(config: ConfigValues, name: str, period: int, **variant: Any) -> ModelSpec:
    """Reads Gemma. Unless a pattern is stated, every `period`-th layer attends to all tokens."""
    if config.flag("use_bidirectional_attention", False):
        config.reject("use_bidirectional_attention", "is not supported, only false is")
    decoder = Decoder(
        norm_place="both", norm_adds_one=True, embedding_scale=config.size("hidden_size") ** 0.5,
        query_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        windows=_by_layer(config, [index % period != period - 1 for index in range(
            config.size("num_hidden_layers"))], config.size_or_none("sliding_window")), **variant)
    return _read_gated(config, name, decoder, activation_key="hidden_activation")


def read_granite(config: ConfigValues, name: str) -> ModelSpec:
    return _read_gated(config, name, Decoder(
        query_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0)))


def read_smollm3(config: ConfigValues, name: str) -> ModelSpec:
    """Reads SmolLM3. Unless the file says which, every fourth layer has no rotary positions. Those
    layers have the window, if windows are used."""
    layers = config.size("num_hidden_layers")
    period = config.size_or_none("no_rope_layer_interval") or 4
    rotated = config.each("no_rope_layers", layers, (0, 1)) or [
        (index + 1) % period != 0 for index in range(layers)]
    window = config.size_or_none("sliding_window")
    is_used = config.flag("use_sliding_window", False) and window is not None
    return _read_gated(config, name, Decoder(
        unrotated=tuple(index for index, rotates in enumerate(rotated) if not rotates),
        windows=_by_layer(config, [is_used and not rotates for rotates in rotated], window)))


def read_deepseek(config: ConfigValues, name: str) -> ModelSpec:
    """Reads DeepSeek V2 and V3: the first layers have one MLP, the others experts, some shared."""
    latent = Latent(
        kv_rank=config.size("kv_lora_rank"), rope_dim=config.size("qk_rope_head_dim"),
        nope_dim=config.size("qk_nope_head_dim"), value_dim=config.size("v_head_dim"),
        query_rank=config.size_or_none("q_lora_rank"))
    config.only("moe_layer_freq", 1)
    inner, layers = config.size("moe_intermediate_size"), config.size("num_hidden_layers")
    dense = config.size_or_none("first_k_dense_replace", least=0) or 0
    if dense >= layers:
        config.reject("first_k_dense_replace", f"below num_hidden_layers = {layers}")
    experts = Experts(
        count=config.size("n_routed_experts"), per_token=config.size("num_experts_per_tok"),
        inner=inner, shared=inner * (config.size_or_none("n_shared_experts") or 0),
        dense_layers=dense, dense_inner=config.size("intermediate_size") if dense else 0)
    # heads have sizes of their own
    return _planned(config, name, Decoder(experts=experts, latent=latent), LATENT,
                    num_key_value_heads=config.size("num_attention_heads"),
                    head_dim=latent.value_dim)


def read_llama4(config: ConfigValues, name: str) -> ModelSpec:
    """Reads Llama 4: every `interleave_moe_layer_step`-th layer has experts, one of them shared."""
    layers = config.size("num_hidden_layers")
    step = config.size_or_none("interleave_moe_layer_step") or 1
    stated = config.get("moe_layers")
    mixed = len(stated) if isinstance(stated, list) and stated else layers // step
    inner, dense = config.size("intermediate_size"), layers - mixed
    experts = Experts(
        count=config.size("num_local_experts"), per_token=config.size("num_experts_per_tok"),
        inner=inner, shared=inner, dense_layers=dense,
        dense_inner=config.size("intermediate_size_mlp") if dense else 0)
    return _planned(config, name, Decoder(experts=experts), CHUNKED)


def read_gpt_oss(config: ConfigValues, name: str) -> ModelSpec:
    """Every other layer, from the first on, has a window, where the file does not say which."""
    experts = _experts(config, "num_local_experts", config.size("intermediate_size"))
    windows = _by_layer(config, [index % 2 == 0 for index in range(
        config.size("num_hidden_layers"))], config.size_or_none("sliding_window"))
    return _planned(config, name, Decoder(windows=windows, experts=experts), SINKS)


def _planned(config: ConfigValues, name: str, decoder: Decoder, why: str,
             **values: object) -> ModelSpec:
    """A ModelSpec to plan only, read with other `values` and plain rotary positions. `why`: what of
    it is not executed."""
    plain = copy(config)  # mistakes still name the file's keys
    plain.values = {**config.values, **values, "rope_scaling": None, "rope_parameters": None}
    return replace(_read_gated(plain, name, decoder), planned_only=why)


def _read_gated(config: ConfigValues, name: str, decoder: Decoder, *,
                has_qkv_bias: bool | None = None, activation_key: str = "hidden_act") -> ModelSpec:
    """Reads the keys that all these decoders share. `has_qkv_bias`: None reads attention_bias,
    which families that always or never have it do not state."""
    head_size = config.size_or_none("head_dim")
    sizes = sizes_of(config, "num_hidden_layers", "hidden_size", "num_attention_heads",
                     "vocab_size", "intermediate_size")
    if head_size is None:
        config.divides("num_attention_heads", "hidden_size")
    config.divides("num_key_value_heads", "num_attention_heads")
    rope = _read_rope(config, decoder.local_rope_theta)
    head_dim = head_size or sizes["hidden_size"] // max(sizes["num_heads"], 1)
    rotary = int(head_dim * rope.share)
    decoder = replace(decoder, rotary_dim=None if rotary == head_dim else rotary,
                      local_rope_theta=rope.local_theta)
    positions = config.size_or_none("max_position_embeddings")
    if rope.most_positions is not None:
        positions = min(positions or rope.most_positions, rope.most_positions)
    if rope.local_theta is None and not any(
            window is not None and (positions is None or window < positions)
            for window in decoder.windows):
        decoder = replace(decoder, windows=())  # as good as none
    has_bias = has_qkv_bias is None and config.flag("attention_bias", False)
    config.only("mlp_bias", False)
    activation = config.get(activation_key, "silu")
    if not isinstance(activation, str):
        config.reject(activation_key, f"one of {', '.join(ACTIVATIONS)}")
    unknown = [*rope.unknown, *([f"{activation_key} {activation!r}"] if isinstance(
        activation, str) and activation not in ACTIVATIONS else ())]  # what no layer executes
    return ModelSpec(
        name=name, family="llama", **sizes, num_kv_heads=config.size_or_none("num_key_value_heads"),
        head_size=head_size, is_gated_mlp=True, has_bias=False,
        has_qkv_bias=has_bias or bool(has_qkv_bias), has_out_bias=True if has_bias else None,
        tied_embeddings=config.flag("tie_word_embeddings", False), max_positions=positions,
        activation=ACTIVATIONS.get(str(activation), "silu"),
        norm_eps=config.number("rms_norm_eps", 1e-6), rope_theta=rope.theta,
        rope_scaling=rope.scaling, decoder=decoder, planned_only=", ".join(unknown))


def _experts(config: ConfigValues, key: str, inner: int) -> Experts:
    count, chosen = config.size(key), config.size("num_experts_per_tok")
    if chosen > count:
        config.reject("num_experts_per_tok", f"at most {key} = {count}")
    return Experts(count=count, per_token=chosen, inner=inner, is_normed=True, names="mixtral")


def everywhere(config: ConfigValues) -> Windows:
    """Windows (tokens) by layer: `sliding_window` in every layer; () for none."""
    window = config.size_or_none("sliding_window")
    return () if window is None else (window,) * config.size("num_hidden_layers")


def of_last_layers(config: ConfigValues) -> Windows:
    """Windows (tokens) by layer, as in Qwen: layers from `max_window_layers` on, if used."""
    window = config.size_or_none("sliding_window")
    if not config.flag("use_sliding_window", False):
        window = None
    first = config.size_or_none("max_window_layers", 28, least=0) or 0
    return _by_layer(config, [window is not None and index >= first for index in range(
        config.size("num_hidden_layers"))], window)


def _by_layer(config: ConfigValues, has_window: list[bool],
              window: int | None) -> Windows:
    """Windows (tokens) by layer: those that `layer_types` names, else those of `has_window`."""
    stated = config.each("layer_types", len(has_window), (FULL, WINDOWED)) or [
        WINDOWED if one else FULL for one in has_window]
    if window is None and WINDOWED in stated:
        config.reject("sliding_window", f"missing: layer_types names {WINDOWED}")
    return tuple(window if kind == WINDOWED else None for kind in stated)


class Rope(NamedTuple):
    """Rotary positions. `share`: part of a head's elements that is rotated. `local_theta`: base in
    layers with a window. `most_positions`: positions beyond which frequencies would change in the
    middle of a request. `unknown`: what our layers do not execute, in words."""

    theta: float
    scaling: tuple[tuple[str, RopeValue], ...] | None
    share: float = 1.0
    local_theta: float | None = None
    most_positions: int | None = None
    unknown: tuple[str, ...] = ()


def _read_rope(config: ConfigValues, local_theta: float | None = None) -> Rope:
    """The Rope that a config states. `local_theta`: default base of layers with a window; None for
    a family with one base for all layers."""
    rope = config.section("rope_scaling")
    if not rope.values or local_theta is not None:
        rope = config.section("rope_parameters")
    if local_theta is not None:
        rope, local_theta = _of_full_layers(config, rope, local_theta)
    theta = (rope if "rope_theta" in rope.values else config).number("rope_theta", 10000.0)
    place = rope if "partial_rotary_factor" in rope.values else config
    is_phi3 = config.get("model_type") == "phi3"
    if not is_phi3:  # others' code turns whole heads
        place.only("partial_rotary_factor", 1.0)
    share = place.number("partial_rotary_factor", 1.0)
    key = "rope_type" if "rope_type" in rope.values else "type"
    kind = str(rope.get(key, "default"))
    if is_phi3 and kind in ("su", "yarn"):
        kind = "longrope"  # older files of Phi-3 have these names
    plain = Rope(theta, None, share, local_theta)
    if kind not in _KINDS:
        return plain._replace(unknown=(f"rotary positions of {key} {kind!r}",))
    if kind == "dynamic":
        config.size("max_position_embeddings")
    needed, possible, others = _KINDS[kind]
    if (original := config.size_or_none(_ORIGINAL)) is not None and _ORIGINAL in needed + others:
        rope.values[_ORIGINAL] = original  # as in transformers, over that of the section
    scaling = {k: v for k in ("rope_type", "type", *needed, *possible, *others)
               if (v := rope.get(k)) is not None}
    for number in needed + possible:
        if number in needed and number not in rope.values:
            rope.reject(number, f"missing: a number above 0, which {key} {kind} needs")
        elif number in needed or number in scaling:
            rope.number(number, 1.0)
    if kind in ("default", "dynamic"):  # the two are equal up to the model's positions
        return plain
    return _scaled(config, rope, kind, scaling, plain)


def _of_full_layers(config: ConfigValues, both: ConfigValues,
                    local_theta: float) -> tuple[ConfigValues, float]:
    """(keys of the rotary positions of layers that attend to all tokens, base of the others), as
    Gemma 3 states them."""
    rope, local = both.section(FULL), both.section(WINDOWED)
    scaling = config.section("rope_scaling")
    rope.values.update({key: scaling.get(key) for key in scaling.values})
    local.only("rope_type" if "rope_type" in local.values else "type", "default")
    local.only("partial_rotary_factor", 1.0)
    return rope, (local.number("rope_theta", local_theta) if "rope_theta" in local.values else
                  config.number("rope_local_base_freq", local_theta))


def _scaled(config: ConfigValues, rope: ConfigValues, kind: str, scaling: dict[str, Any],
            plain: Rope) -> Rope:
    given = {k: v for k, v in scaling.items() if k not in ("type", "rope_type")}
    if kind in ("yarn", "longrope"):
        positions = config.size_or_none("max_position_embeddings")
        original = given.get(_ORIGINAL) or positions
        if not isinstance(original, int) or original < 1:
            rope.reject(_ORIGINAL, f"missing: a whole number >= 1, which rope_type {kind} needs")
            return plain
        given[_ORIGINAL] = original
        if kind == "longrope":
            factors = rope.get("short_factor")
            if not isinstance(factors, list) or not all(
                    isinstance(f, (int, float)) and f > 0 for f in factors):
                rope.reject("short_factor", "a list of numbers above 0, one for each rotated pair")
                return plain
            given["short_factor"] = tuple(float(f) for f in factors)
            given.pop("long_factor", None)
            given["factor"] = given.get("factor") or (positions or original) / original
            plain = plain._replace(most_positions=original)
    given["rope_type"] = kind
    return plain._replace(scaling=tuple(sorted(given.items())))
