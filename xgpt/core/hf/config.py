"""Reads a Hugging Face `config.json` as a ModelSpec, by a row of FAMILIES for each `model_type`.
tests/xrunner/checkpoint/test_every_key.py holds the rows equal to transformers' config classes."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from xgpt.core.errors import InputError
from xgpt.core.hf import gated as hf_gated
from xgpt.core.hf.gated import FULL, WINDOWED, Reader, gated, sizes_of
from xgpt.core.hf.quantised import read_quantised
from xgpt.core.hf.values import ConfigValues, load_json
from xgpt.core.model import Decoder, ModelSpec, NormPlace

ELSEWHERE = "vLLM (`vllm serve`) executes many others, which xgpt does not plan"
VISION = "the vision tower, whose text model alone"
_T5_ACTIVATIONS = {"relu": "relu", "gated-gelu": "gelu_new"}


class Family(NamedTuple):
    """A family of models by `model_type`. `absent`: values of absent keys, unless `read` has its
    own; null means none. `only`: keys that change the tokens, with the only value that is executed.
    `names`: keys that stand for others (transformers' `attribute_map`)."""

    read: Reader
    absent: Mapping[str, object] = {}
    only: Mapping[str, object] = {}
    names: Mapping[str, str] = {}


def read_shape(folder: Path, name: str) -> ModelSpec:
    """The ModelSpec of `folder`/config.json. Raises InputError."""
    path = folder / "config.json"
    return from_hf_config(load_json(path), name, path)


def from_hf_config(config: Mapping[str, Any], name: str,
                   path: Path = Path("config.json")) -> ModelSpec:
    """The ModelSpec of a `config.json`, read from `path`. Raises InputError, naming every key at
    fault, for a family or variant that xgpt can neither execute nor plan."""
    values = ConfigValues(config, path)
    kind = values.text("model_type", "", FAMILIES, more=f"; {ELSEWHERE}")
    if kind not in FAMILIES:
        values.finish()
    family, stored = FAMILIES[kind], None
    _with_absent(values, family)
    spec = family.read(values, name)
    # models that are only planned load no weights: run.weight_dtype says their dtype
    if kind in MODEL_TYPES:
        _refuse_others(values, kind, spec)
        spec = replace(spec, not_used=", ".join(_not_used(config, values.asked)))
        stored = read_quantised(values, spec.family)
    values.finish()
    return replace(spec, source="config.json", stored_as="" if stored is None else str(stored))


def _with_absent(config: ConfigValues, family: Family) -> None:
    """Fills in absent keys, and keys that stand under another name."""
    for other, key in family.names.items():
        value = config.get(other)
        if value is not None and config.values.setdefault(key, value) != value:
            config.reject(other, f"as {key} = {config.values[key]}, of which it is another name")
    config.values = {**family.absent, **config.values}


def _refuse_others(config: ConfigValues, kind: str, spec: ModelSpec) -> None:
    """Records the values of `config` that the runner does not execute as mistakes."""
    is_pair = spec.is_encoder_decoder
    for key, only in {**_ONLY, **FAMILIES[kind].only, "is_encoder_decoder": is_pair,
                      "is_causal": None if is_pair else True}.items():  # of an encoder's masks, too
        config.only(key, only)
    # transformers' caches drop tokens by these keys in every family, even if its masks ignore them
    if "sliding_window" not in config.asked:
        window, most = config.size_or_none("sliding_window"), spec.max_positions
        if window is not None and (most is None or window < most):
            config.reject("sliding_window", f"is not executed in a model of type {kind}: null, or "
                                            "at least the number of positions")
    if "layer_types" not in config.asked:
        config.each("layer_types", spec.num_layers,
                    (WINDOWED if any(spec.decoder.windows) else FULL,))


def _not_used(config: Mapping[str, object], asked: set[str], prefix: str = "") -> Iterator[str]:
    """Yields the keys of `config`, and of its rotary positions, that no reader asked for and that
    may matter."""
    yield from (prefix + key for key, value in config.items() if value is not None
                and prefix + key not in asked and key not in NO_INFLUENCE)
    for key in ("rope_scaling", "rope_parameters", FULL, WINDOWED):
        if isinstance(section := config.get(key), dict) and prefix + key in asked:
            yield from _not_used(section, asked, f"{prefix}{key}.")


def _read_opt(config: ConfigValues, name: str) -> ModelSpec:
    if config.size_or_none("word_embed_proj_dim") not in (None, config.get("hidden_size")):
        config.reject("word_embed_proj_dim", "only the hidden_size is supported")
    config.divides("num_attention_heads", "hidden_size")
    return ModelSpec(
        name=name, family="opt", has_bias=config.flag("enable_bias", True), activation="relu",
        has_learned_positions=True, tied_embeddings=config.flag("tie_word_embeddings", True),
        **sizes_of(config, "num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size",
                   "ffn_dim", "max_position_embeddings"))


def _read_gpt2(config: ConfigValues, name: str) -> ModelSpec:
    config.divides("n_head", "n_embd")
    sizes = sizes_of(config, "n_layer", "n_embd", "n_head", "vocab_size")
    return ModelSpec(
        name=name, family="gpt2", **sizes, max_positions=config.size("n_positions"),
        intermediate_size=config.size_or_none("n_inner") or 4 * sizes["hidden_size"],
        has_learned_positions=True, activation="gelu_new",
        norm_eps=config.number("layer_norm_epsilon", 1e-5),
        tied_embeddings=config.flag("tie_word_embeddings", True))


def _read_t5(config: ConfigValues, name: str, *, is_mt5: bool = False) -> ModelSpec:
    """Reads T5 and mT5. Version 1.1 is known by its untied head, which transformers 5 states as
    `scale_decoder_outputs`. mT5's head input is never scaled, whatever `tie_word_embeddings` says:
    published files say false, and transformers 5 always writes true."""
    is_tied = config.flag("tie_word_embeddings", True)
    projection = config.text("feed_forward_proj", "relu", _T5_ACTIVATIONS)
    is_gated, activation = projection.startswith("gated-"), _T5_ACTIVATIONS[projection]
    config.only("dense_act_fn", activation)
    config.only("is_gated_act", is_gated)
    sizes = sizes_of(config, "num_layers", "d_model", "num_heads", "vocab_size", "d_ff")
    layers = sizes.pop("num_layers")
    return ModelSpec(
        name=name, family="t5", num_encoder_layers=layers, **sizes, head_size=config.size("d_kv"),
        num_layers=config.size_or_none("num_decoder_layers") or layers, is_gated_mlp=is_gated,
        has_bias=False, activation=activation, norm_eps=config.number("layer_norm_epsilon", 1e-6),
        tied_embeddings=not is_mt5 and config.flag("scale_decoder_outputs", is_tied),
        relative_buckets=config.size_or_none("relative_attention_num_buckets") or 32,
        relative_max_distance=config.size_or_none("relative_attention_max_distance") or 128)


def _read_bart(config: ConfigValues, name: str, norm_place: NormPlace = "sum") -> ModelSpec:
    for part in ("attention_heads", "ffn_dim"):
        if config.get(f"decoder_{part}") != config.get(f"encoder_{part}"):
            config.reject(f"decoder_{part}", f"only the encoder_{part} is supported")
    config.divides("encoder_attention_heads", "d_model")
    sizes = sizes_of(config, "decoder_layers", "d_model", "encoder_attention_heads", "vocab_size",
                     "encoder_ffn_dim", "max_position_embeddings")
    scale = sizes["hidden_size"] ** 0.5 if config.flag("scale_embedding", False) else 1.0
    return ModelSpec(
        name=name, family="bart", num_encoder_layers=config.size("encoder_layers"), **sizes,
        has_learned_positions=True,
        activation=config.text("activation_function", "gelu", ("gelu", "gelu_new", "relu")),
        decoder=Decoder(norm_place=norm_place, embedding_scale=scale))


def _of_text(kind: str) -> Reader:
    """A reader of the `text_config` of a model with vision, as a family `kind`."""
    def reader(config: ConfigValues, name: str) -> ModelSpec:
        text = config.section("text_config")
        if not text.values:
            config.reject("text_config", "required: the text model's own values")
        _with_absent(text, FAMILIES[kind])
        spec = FAMILIES[kind].read(text, name)
        return replace(spec, planned_only=", and ".join(filter(None, (spec.planned_only, VISION))))

    return reader


_T5_NAMES = {"hidden_size": "d_model", "num_attention_heads": "num_heads",
             "num_hidden_layers": "num_layers", "head_dim": "d_kv"}
_BART_NAMES = {"hidden_size": "d_model", "num_attention_heads": "encoder_attention_heads",
               "num_hidden_layers": "encoder_layers"}
_GEMMA: dict[str, object] = {
    "num_key_value_heads": 4, "sliding_window": 4096, "head_dim": 256, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh"}
_QWEN: dict[str, object] = {"num_key_value_heads": 32, "sliding_window": 4096}
_TIED: dict[str, object] = {"tie_word_embeddings": True}
_ONLY: dict[str, object] = {  # as `only`, for all families: masks, caches and files
    "attention_chunk_size": None, "per_layer_config": None, "kv_sharing_modes": None,
    "transformers_weights": None}
_EXECUTED = {
    "opt": Family(_read_opt, only={
        "activation_function": "relu", "do_layer_norm_before": True,
        "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True}),
    "gpt2": Family(_read_gpt2, only={
        "activation_function": "gelu_new", "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
        "add_cross_attention": False}, names={
            "hidden_size": "n_embd", "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"}),
    "llama": Family(gated(Decoder())),
    "qwen2": Family(gated(Decoder(), hf_gated.of_last_layers, has_qkv_bias=True), _QWEN),
    "qwen3": Family(gated(Decoder(qk_norm="head"), hf_gated.of_last_layers), {
        **_QWEN, "head_dim": 128}),
    "mistral": Family(gated(Decoder(), hf_gated.everywhere, has_qkv_bias=False), {
        "num_key_value_heads": 8, "sliding_window": 4096}),
    "mixtral": Family(hf_gated.read_mixtral, {
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        names={"num_experts": "num_local_experts"}),
    "qwen3_moe": Family(hf_gated.read_qwen3_moe, {**_QWEN, "num_key_value_heads": 4},
                        {"decoder_sparse_step": 1}, {"num_local_experts": "num_experts"}),
    "phi3": Family(gated(Decoder(is_fused=True), hf_gated.everywhere, has_qkv_bias=False), {
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}),
    "gemma2": Family(hf_gated.read_gemma2, _GEMMA),
    "gemma3_text": Family(hf_gated.read_gemma3, {**_GEMMA, "rope_theta": 1e6},
                          {"attn_logit_softcapping": None}),
    "olmo2": Family(gated(Decoder(norm_place="after", qk_norm="all")), {"rms_norm_eps": 1e-5}),
    "granite": Family(hf_gated.read_granite),
    "smollm3": Family(hf_gated.read_smollm3, {
        "num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True}),
    "t5": Family(_read_t5, names=_T5_NAMES),
    "mt5": Family(partial(_read_t5, is_mt5=True), {"feed_forward_proj": "gated-gelu"},
                  names=_T5_NAMES),
    "bart": Family(_read_bart, only=_TIED, names=_BART_NAMES),
    "mbart": Family(partial(_read_bart, norm_place="before"), only=_TIED, names=_BART_NAMES)}
_PLANNED = {
    "deepseek_v2": Family(hf_gated.read_deepseek, {"q_lora_rank": 1536, "n_shared_experts": 2}),
    "deepseek_v3": Family(hf_gated.read_deepseek, {
        "q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3}),
    "gpt_oss": Family(hf_gated.read_gpt_oss, {
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 4, "attention_bias": True},
        names={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}),
    "llama4_text": Family(hf_gated.read_llama4, {
        "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0}),
    "llama4": Family(_of_text("llama4_text")), "gemma3": Family(_of_text("gemma3_text"))}
FAMILIES: Mapping[str, Family] = _EXECUTED | _PLANNED
MODEL_TYPES, PLANNED_TYPES = tuple(_EXECUTED), tuple(_PLANNED)  # the latter are not executed
# Keys of training, classifier heads, outputs beside tokens and the file itself; and rules for the
# choice of tokens, the first and the last one, which xrunner.files reads.
NO_INFLUENCE = """
    _from_model_config _model_name_or_path _name_or_path _sliding_window_pattern
    activation_dropout architectures attention_dropout attn_pdrop auto_map bos_token_id
    chunk_size_feed_forward classifier_dropout compression_config decoder_layerdrop
    decoder_start_token_id dropout dropout_rate dtype embd_pdrop encoder_layerdrop eos_token_id
    forced_bos_token_id forced_eos_token_id id2label init_std initializer_factor initializer_range
    is_decoder label2id layerdrop min_length min_new_tokens model_type no_repeat_ngram_size
    output_attentions output_hidden_states output_router_logits pad_token_id pretraining_tp
    problem_type quantization_config repetition_penalty resid_pdrop return_dict
    router_aux_loss_coef router_jitter_noise summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj torch_dtype transformers_version
    unk_token_id use_cache""".split()  # noqa: SIM905
# Families of which a config.json is written; what is read of it tells which one a shape is.
_WRITTEN = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM",
            "opt": "OPTForCausalLM"}
_FIELDS = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
           "num_key_value_heads": "kv_heads", "max_position_embeddings": "max_positions",
           "rms_norm_eps": "norm_eps", "attention_bias": "out_bias", "mlp_bias": "has_bias",
           "tie_word_embeddings": "tied_embeddings", "hidden_act": "activation",
           "ffn_dim": "intermediate_size", "word_embed_proj_dim": "hidden_size",
           **{name: name for name in ("hidden_size", "head_dim", "vocab_size", "rope_theta",
                                      "intermediate_size")}}


def written_config(spec: ModelSpec) -> dict[str, Any] | None:
    """A `config.json` of the shape, for another engine; None for a family that is not written."""
    own = {key: getattr(spec, name) for key, name in _FIELDS.items()}
    own["rope_scaling"] = spec.rope_scaling and dict(spec.rope_scaling)
    for kind, architecture in _WRITTEN.items():
        config = {"model_type": kind, "architectures": [architecture], **own}
        with suppress(InputError):
            if _resolved(from_hf_config(config, spec.name)) == _resolved(spec):
                return config
    return None


def _resolved(spec: ModelSpec) -> ModelSpec:
    """The shape alone, with its defaults resolved."""
    return replace(spec, name="", hub_id=None, wheel=None, source="", not_used="",
                   num_kv_heads=spec.kv_heads, head_size=spec.head_dim,
                   has_qkv_bias=spec.qkv_bias, has_out_bias=spec.out_bias)
