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
# model_type -> what an absent key means; null is something else (as many heads, no window)
_USUAL: dict[str, dict[str, int]] = {
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "mixtral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3_moe": {"num_key_value_heads": 4, "sliding_window": 4096},
    "phi3": {"original_max_position_embeddings": 4096},
    "gemma2": {"num_key_value_heads": 4, "sliding_window": 4096},
    "gemma3_text": {"num_key_value_heads": 4, "sliding_window": 4096},
    "smollm3": {"num_key_value_heads": 4}}
# the one value that is executed: of all kinds ("*": masks, caches and files), and of one of them
_ONLY: dict[str, dict[str, object]] = {
    "*": {"is_causal": True, "attention_chunk_size": None, "per_layer_config": None,
          "kv_sharing_modes": None, "transformers_weights": None},
    "opt": {"_remove_final_layer_norm": False, "layer_norm_elementwise_affine": True}}
# What generation_config.json may say, or config.json where there is none: xrunner.io.generation
# does it, refuses it, or leaves it to the job (beams, draws, lengths, ways to the same tokens).
_OF_GENERATION = """
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
    assistant_lookbehind bad_words_ids begin_suppress_tokens bos_token_id cache_config
    cache_implementation compile_config constraints continuous_batching_config
    decoder_start_token_id disable_compile diversity_penalty do_sample dola_layers early_stopping
    encoder_no_repeat_ngram_size encoder_repetition_penalty eos_token_id epsilon_cutoff eta_cutoff
    exponential_decay_length_penalty force_words_ids forced_bos_token_id forced_eos_token_id
    guidance_scale is_assistant length_penalty low_memory max_cache_len max_length
    max_matching_ngram_size max_new_tokens max_time min_length min_new_tokens min_p
    no_repeat_ngram_size num_assistant_tokens num_assistant_tokens_schedule num_beam_groups
    num_beams num_return_sequences output_attentions output_hidden_states output_logits
    output_scores pad_token_id penalty_alpha prefill_chunk_size prompt_lookup_num_tokens
    remove_invalid_values renormalize_logits repetition_penalty return_dict_in_generate
    sequence_bias speculation_type stop_strings suppress_tokens target_lookbehind temperature
    token_healing top_h top_k top_p typical_p use_cache use_mtp watermarking_config
    transformers_version _from_model_config"""
GENERATION = frozenset(_OF_GENERATION.split())
# of training, of classifiers' heads, of what is returned beside tokens, and of the file itself
_OF_NO_INFLUENCE = """
    _attn_implementation _attn_implementation_autoset _commit_hash _model_name_or_path _name_or_path
    _sliding_window_pattern activation_dropout architectures attention_dropout attn_pdrop auto_map
    chunk_size_feed_forward classifier_dropout compression_config decoder_layerdrop dropout
    dropout_rate dtype embd_pdrop encoder_layerdrop gradient_checkpointing id2label init_std
    initializer_factor initializer_range is_decoder label2id layerdrop model_type num_labels
    output_router_logits pretraining_tp problem_type quantization_config resid_pdrop return_dict
    router_aux_loss_coef router_jitter_noise sep_token_id summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj task_specific_params tokenizer_class
    torch_dtype unk_token_id"""
_NO_INFLUENCE = GENERATION.union(_OF_NO_INFLUENCE.split())


def with_usual(config: ConfigValues, kind: str) -> None:
    """Puts the values of absent keys in their place, and those that stand under another name."""
    for other, key in _OTHER_NAMES.get(kind, {}).items():
        value = config.values.get(other)
        if value is not None and config.values.setdefault(key, value) != value:
            config.reject(other, f"as {key} = {config.values[key]}, of which it is another name")
    for key, usual in _USUAL.get(kind, {}).items():
        config.values.setdefault(key, usual)


def refuse_others(config: ConfigValues, kind: str, spec: ModelSpec) -> None:
    """Records as mistakes the values of `config` that nothing here executes."""
    for key, only in {**_ONLY["*"], **_ONLY.get(kind, {}),
                      "is_encoder_decoder": spec.is_encoder_decoder}.items():
        config.only(key, only)
    # transformers' caches forget by these, whatever the family: its masks may know nothing of it
    if "sliding_window" not in config.asked:
        window, most = config.size_or_none("sliding_window"), spec.max_positions
        if window is not None and (most is None or window < most):
            config.reject("sliding_window", f"is not executed in a model of type {kind}: null, or "
                                            "at least the number of positions")
    if "layer_types" not in config.asked:
        stated = config.values.get("layer_types")
        is_windowed = any(spec.decoder.windows) and isinstance(stated, list) and (
            WINDOWED in stated)
        config.each("layer_types", spec.num_layers, (WINDOWED if is_windowed else FULL,))


def not_used(config: Mapping[str, object], asked: set[str], prefix: str = "") -> list[str]:
    """The keys of `config`, and of its rotary positions, that nothing asked for and that may ask
    for something."""
    found = [prefix + key for key, value in config.items() if value is not None
             and prefix + key not in asked and key not in _NO_INFLUENCE]
    for key in ("rope_scaling", "rope_parameters", FULL, WINDOWED):
        if isinstance(section := config.get(key), dict) and prefix + key in asked:
            found += not_used(section, asked, f"{prefix}{key}.")
    return found
