"""What a family's class in transformers reads of a `config.json` beside the keys that its reader
here asks for: names that stand for others, values of keys that are absent, and keys that would
change the tokens. Those are refused but for the value that changes nothing."""

from collections.abc import Mapping

from xgpt.core.hf_rope import FULL, WINDOWED
from xgpt.core.model import ModelSpec
from xgpt.core.model_file import ConfigValues

_T5 = {"hidden_size": "d_model", "num_attention_heads": "num_heads",
       "num_hidden_layers": "num_layers", "head_dim": "d_kv"}
_BART = {"hidden_size": "d_model", "num_attention_heads": "encoder_attention_heads",
         "num_hidden_layers": "encoder_layers"}
# model_type -> a key, and the one that it stands for (transformers' `attribute_map`)
_OTHER_NAMES: dict[str, dict[str, str]] = {
    "gpt2": {"hidden_size": "n_embd", "max_position_embeddings": "n_positions",
             "num_attention_heads": "n_head", "num_hidden_layers": "n_layer"},
    "t5": _T5, "mt5": _T5, "bart": _BART, "mbart": _BART,
    "mixtral": {"num_experts": "num_local_experts"},
    "qwen3_moe": {"num_local_experts": "num_experts"}}
# model_type -> what an absent key means, where it is not Llama's meaning; null means none
_TEXT_OF_GEMMA: dict[str, object] = {
    "num_key_value_heads": 4, "sliding_window": 4096, "head_dim": 256, "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh"}
_USUAL: dict[str, dict[str, object]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
    "phi3": {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    "gemma2": _TEXT_OF_GEMMA, "gemma3_text": {**_TEXT_OF_GEMMA, "rope_theta": 1e6},
    "olmo2": {"rms_norm_eps": 1e-5}, "llama4_text": {"rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    "smollm3": {"num_key_value_heads": 4, "rope_theta": 2e6, "tie_word_embeddings": True}}
# the one value that is executed: of all kinds ("*": masks, caches and files), and of one of them
_TIED: dict[str, object] = {"tie_word_embeddings": True}
_ONLY: dict[str, dict[str, object]] = {
    "*": {"attention_chunk_size": None, "per_layer_config": None, "kv_sharing_modes": None,
          "transformers_weights": None},
    "opt": {"activation_function": "relu", "do_layer_norm_before": True,
            "_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True},
    "gpt2": {"activation_function": "gelu_new", "scale_attn_weights": True,
             "scale_attn_by_inverse_layer_idx": False, "reorder_and_upcast_attn": False,
             "add_cross_attention": False},
    "qwen3_moe": {"decoder_sparse_step": 1}, "bart": _TIED, "mbart": _TIED,
    "gemma3_text": {"attn_logit_softcapping": None}}
# Of training, of classifiers' heads, of what is returned beside tokens, of the file itself, and
# what xrunner.io does: rules of which tokens are chosen, the first and the last one.
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


def with_usual(config: ConfigValues, kind: str) -> None:
    """Puts the values of absent keys in their place, and those that stand under another name."""
    for other, key in _OTHER_NAMES.get(kind, {}).items():
        value = config.get(other)
        if value is not None and config.values.setdefault(key, value) != value:
            config.reject(other, f"as {key} = {config.values[key]}, of which it is another name")
    for key, usual in _USUAL.get(kind, {}).items():
        config.values.setdefault(key, usual)


def refuse_others(config: ConfigValues, kind: str, spec: ModelSpec) -> None:
    """Records as mistakes the values of `config` that nothing here executes."""
    is_pair = spec.is_encoder_decoder
    for key, only in {**_ONLY["*"], **_ONLY.get(kind, {}), "is_encoder_decoder": is_pair,
                      "is_causal": None if is_pair else True}.items():  # of an encoder's masks, too
        config.only(key, only)
    # transformers' caches forget by these, whatever the family: its masks may know nothing of it
    if "sliding_window" not in config.asked:
        window, most = config.size_or_none("sliding_window"), spec.max_positions
        if window is not None and (most is None or window < most):
            config.reject("sliding_window", f"is not executed in a model of type {kind}: null, or "
                                            "at least the number of positions")
    if "layer_types" not in config.asked:
        config.each("layer_types", spec.num_layers,
                    (WINDOWED if any(spec.decoder.windows) else FULL,))


def not_used(config: Mapping[str, object], asked: set[str], prefix: str = "") -> list[str]:
    """The keys of `config`, and of its rotary positions, that nothing asked for and that may ask
    for something."""
    found = [prefix + key for key, value in config.items() if value is not None
             and prefix + key not in asked and key not in NO_INFLUENCE]
    for key in ("rope_scaling", "rope_parameters", FULL, WINDOWED):
        if isinstance(section := config.get(key), dict) and prefix + key in asked:
            found += not_used(section, asked, f"{prefix}{key}.")
    return found
