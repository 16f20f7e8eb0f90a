"""Decoders that are planned and not executed, by their `config.json`: DeepSeek-V2 and V3, Llama 4,
and Gemma 3 with its vision tower (of which the text's part alone is planned).

Layers of two kinds (with experts, and with one MLP) are planned as their mean. `planned_only` says
what our own layers do not execute."""

from collections.abc import Callable
from copy import copy
from dataclasses import replace

from xgpt.core.decoder import Decoder, Experts, Latent
from xgpt.core.hf_gated import GATED_READERS, read_gated
from xgpt.core.hf_keys import with_usual
from xgpt.core.model import ModelSpec
from xgpt.core.model_file import ConfigValues

LATENT = "multi-head latent attention and shared experts"
CHUNKED = "attention in chunks and shared experts"
VISION = "the vision tower, whose text model alone"


def _read_deepseek(config: ConfigValues, name: str) -> ModelSpec:
    """V2 and V3: the first layers have one MLP, the others experts and shared ones."""
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
    plain = _changed(  # heads have sizes of their own
        config, num_key_value_heads=config.size("num_attention_heads"), head_dim=latent.value_dim,
        rope_scaling=None, rope_parameters=None)
    spec = read_gated(plain, name, Decoder(experts=experts, latent=latent))
    return replace(spec, planned_only=LATENT)


def _read_llama4(config: ConfigValues, name: str) -> ModelSpec:
    """Every `interleave_moe_layer_step`-th layer has experts, one of them shared."""
    layers = config.size("num_hidden_layers")
    step = config.size_or_none("interleave_moe_layer_step") or 1
    stated = config.get("moe_layers")
    mixed = len(stated) if isinstance(stated, list) and stated else layers // step
    inner, dense = config.size("intermediate_size"), layers - mixed
    experts = Experts(
        count=config.size("num_local_experts"), per_token=config.size("num_experts_per_tok"),
        inner=inner, shared=inner, dense_layers=dense,
        dense_inner=config.size("intermediate_size_mlp") if dense else 0)
    plain = _changed(config, rope_scaling=None, rope_parameters=None)
    spec = read_gated(plain, name, Decoder(experts=experts))
    return replace(spec, planned_only=CHUNKED)


def _changed(config: ConfigValues, **values: object) -> ConfigValues:
    """The same with other values of some keys; mistakes stay this one's."""
    other = copy(config)
    other.values = {**config.values, **values}
    return other


def _of_text(kind: str, read: Callable[[ConfigValues, str], ModelSpec], more: str
             ) -> Callable[[ConfigValues, str], ModelSpec]:
    """Of a model that sees, its `text_config`, of that kind."""
    def reader(config: ConfigValues, name: str) -> ModelSpec:
        text = config.section("text_config")
        if not text.values:
            config.reject("text_config", "required: the text model's own values")
        with_usual(text, kind)
        spec = read(text, name)
        return replace(spec, planned_only=", and ".join(filter(None, (spec.planned_only, more))))

    return reader


PLANNED_READERS: dict[str, Callable[[ConfigValues, str], ModelSpec]] = {
    "deepseek_v2": _read_deepseek, "deepseek_v3": _read_deepseek, "llama4_text": _read_llama4,
    "llama4": _of_text("llama4_text", _read_llama4, VISION),
    "gemma3": _of_text("gemma3_text", GATED_READERS["gemma3_text"], VISION)}
