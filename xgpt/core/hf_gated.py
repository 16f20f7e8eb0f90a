"""Decoders with gated MLPs and rotary positions by their `config.json`: what each family states
beside Llama. What an absent key means is in xgpt.core.hf_keys, where it is not Llama's.

What only the layers' execution depends on, and ours do not know (an activation, a kind of rotary
positions), does not keep a shape from being planned: it is noted in `ModelSpec.planned_only`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from xgpt.core.decoder import Decoder, Experts
from xgpt.core.hf_rope import FULL, WINDOWED, read_rope
from xgpt.core.model import ModelSpec
from xgpt.core.model_file import ConfigValues

# transformers' names -> ModelSpec.activation
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_new",
               "gelu_pytorch_tanh": "gelu_new", "relu": "relu"}


def _of(decoder: Decoder, windows: Callable[[ConfigValues], tuple[int | None, ...]] | None = None,
        has_qkv_bias: bool | None = None) -> Callable[[ConfigValues, str], ModelSpec]:
    """A reader of a family whose config.json states no more than that."""
    def reader(config: ConfigValues, name: str) -> ModelSpec:
        own = decoder if windows is None else replace(decoder, windows=windows(config))
        return read_gated(config, name, own, has_qkv_bias=has_qkv_bias)

    return reader


def _read_mixtral(config: ConfigValues, name: str) -> ModelSpec:
    experts = _experts(config, "num_local_experts", config.size("intermediate_size"))
    return read_gated(config, name, Decoder(windows=_everywhere(config), experts=experts),
                      has_qkv_bias=False)


def _read_qwen3_moe(config: ConfigValues, name: str) -> ModelSpec:
    if config.get("mlp_only_layers"):
        config.reject("mlp_only_layers", "is not supported, only an empty list is")
    experts = _experts(config, "num_experts", config.size("moe_intermediate_size"),
                       names="qwen", is_normed=config.flag("norm_topk_prob", False))
    windows = _everywhere(config)
    return read_gated(config, name, Decoder(
        qk_norm="head", experts=experts,
        windows=windows if config.flag("use_sliding_window", False) else ()))


def _read_gemma2(config: ConfigValues, name: str) -> ModelSpec:
    layers = config.size("num_hidden_layers")
    every_other = [FULL if index % 2 else WINDOWED for index in range(layers)]
    return _read_gemma(config, name, every_other,
                       attention_cap=config.number_or_none("attn_logit_softcapping", 50.0),
                       logit_cap=config.number_or_none("final_logit_softcapping", 30.0))


def _read_gemma3(config: ConfigValues, name: str) -> ModelSpec:
    """Of texts: every sixth layer, where no pattern is stated, attends to all."""
    period = config.size_or_none("sliding_window_pattern") or 6
    layers = [WINDOWED if (index + 1) % period else FULL
              for index in range(config.size("num_hidden_layers"))]
    return _read_gemma(config, name, layers, qk_norm="head", local_rope_theta=10000.0,
                       logit_cap=config.number_or_none("final_logit_softcapping"))


def _read_gemma(config: ConfigValues, name: str, layers: list[str],
                **variant: object) -> ModelSpec:
    if config.flag("use_bidirectional_attention", False):
        config.reject("use_bidirectional_attention", "is not supported, only false is")
    decoder = Decoder(
        norm_place="both", norm_adds_one=True, embedding_scale=config.size("hidden_size") ** 0.5,
        query_scale=config.number("query_pre_attn_scalar", 256.0) ** -0.5,
        windows=_by_layer(config, layers, config.size_or_none("sliding_window")),
        **variant)  # type: ignore[arg-type]
    return read_gated(config, name, decoder, activation_key="hidden_activation")


def _read_granite(config: ConfigValues, name: str) -> ModelSpec:
    return read_gated(config, name, Decoder(
        query_scale=config.number("attention_multiplier", 1.0),
        embedding_scale=config.number("embedding_multiplier", 1.0),
        residual_scale=config.number("residual_multiplier", 1.0),
        logit_scale=1 / config.number("logits_scaling", 1.0)))


def _read_smollm3(config: ConfigValues, name: str) -> ModelSpec:
    """Every fourth layer, where the file does not say which, has no rotary positions; these are
    the ones with a window, where windows are used."""
    layers = config.size("num_hidden_layers")
    period = config.size_or_none("no_rope_layer_interval") or 4
    rotated = config.each("no_rope_layers", layers, (0, 1)) or [
        (index + 1) % period != 0 for index in range(layers)]
    window = config.size_or_none("sliding_window")
    is_used = config.flag("use_sliding_window", False) and window is not None
    kinds = [WINDOWED if is_used and not rotates else FULL for rotates in rotated]
    return read_gated(config, name, Decoder(
        unrotated=tuple(index for index, rotates in enumerate(rotated) if not rotates),
        windows=_by_layer(config, kinds, window)))


def read_gated(config: ConfigValues, name: str, decoder: Decoder, *,
               has_qkv_bias: bool | None = None, activation_key: str = "hidden_act") -> ModelSpec:
    """What all of them have in common. `has_qkv_bias`: None: as attention_bias says, which families
    that have or lack it anyway do not read."""
    head_size = config.size_or_none("head_dim")
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    if head_size is None:
        config.divides("num_attention_heads", "hidden_size")
    config.divides("num_key_value_heads", "num_attention_heads")
    rope = read_rope(config, decoder.local_rope_theta)
    unknown = [*rope.unknown]  # what our layers do not execute, in words
    head_dim = head_size or hidden // max(heads, 1)
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
    return ModelSpec(
        name=name, family="llama", num_layers=config.size("num_hidden_layers"),
        hidden_size=hidden, num_heads=heads,
        num_kv_heads=config.size_or_none("num_key_value_heads"),
        head_size=head_size, vocab_size=config.size("vocab_size"),
        intermediate_size=config.size("intermediate_size"), is_gated_mlp=True, has_bias=False,
        has_qkv_bias=has_bias or bool(has_qkv_bias),
        has_out_bias=True if has_bias else None,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        max_positions=positions, activation=_activation(config, activation_key, unknown),
        norm_eps=config.number("rms_norm_eps", 1e-6), rope_theta=rope.theta,
        rope_scaling=rope.scaling, decoder=decoder, planned_only=", ".join(unknown))


def _activation(config: ConfigValues, key: str, unknown: list[str]) -> str:
    given = config.get(key, "silu")
    if not isinstance(given, str):
        config.reject(key, f"one of {', '.join(ACTIVATIONS)}")
    elif given not in ACTIVATIONS:
        unknown.append(f"{key} {given!r}")
    return ACTIVATIONS.get(str(given), "silu")


def _experts(config: ConfigValues, key: str, inner: int, *, is_normed: bool = True,
             names: Literal["mixtral", "qwen"] = "mixtral") -> Experts:
    count, chosen = config.size(key), config.size("num_experts_per_tok")
    if chosen > count:
        config.reject("num_experts_per_tok", f"at most {key} = {count}")
    return Experts(count=count, per_token=chosen, inner=inner, is_normed=is_normed,
                   names=names)


def _everywhere(config: ConfigValues) -> tuple[int | None, ...]:
    """The same window in every layer."""
    window = config.size_or_none("sliding_window")
    return () if window is None else (window,) * config.size("num_hidden_layers")


def _of_last_layers(config: ConfigValues) -> tuple[int | None, ...]:
    """Qwen's: layers from `max_window_layers` on, where windows are used."""
    layers = config.size("num_hidden_layers")
    window = config.size_or_none("sliding_window")
    is_used = config.flag("use_sliding_window", False) and window is not None
    first = config.size_or_none("max_window_layers", 28, least=0) or 0
    kinds = [WINDOWED if is_used and index >= first else FULL for index in range(layers)]
    return _by_layer(config, kinds, window if is_used else None)


def _by_layer(config: ConfigValues, kinds: list[str],
              window: int | None) -> tuple[int | None, ...]:
    """Windows by `layer_types`; where the file has none, by `kinds`."""
    stated = config.each("layer_types", len(kinds), (FULL, WINDOWED)) or kinds
    if window is None and WINDOWED in stated:
        config.reject("sliding_window", f"missing: layer_types names {WINDOWED}")
    return tuple(window if kind == WINDOWED else None for kind in stated)


GATED_READERS: dict[str, Callable[[ConfigValues, str], ModelSpec]] = {
    "llama": _of(Decoder()), "qwen2": _of(Decoder(), _of_last_layers, has_qkv_bias=True),
    "qwen3": _of(Decoder(qk_norm="head"), _of_last_layers),
    "mistral": _of(Decoder(), _everywhere, has_qkv_bias=False),
    "mixtral": _read_mixtral, "qwen3_moe": _read_qwen3_moe,
    "phi3": _of(Decoder(is_fused=True), _everywhere, has_qkv_bias=False),
    "gemma2": _read_gemma2, "gemma3_text": _read_gemma3,
    "olmo2": _of(Decoder(norm_place="after", qk_norm="all")),
    "granite": _read_granite, "smollm3": _read_smollm3}
