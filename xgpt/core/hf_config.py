"""A Hugging Face `config.json` as a ModelSpec: one reader a kind of model, in a table by the
`model_type` that the file states."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from xgpt.core.decoder import Decoder, NormPlace
from xgpt.core.hf_gated import GATED_READERS
from xgpt.core.hf_keys import not_used, refuse_others, with_usual
from xgpt.core.hf_planned import PLANNED_READERS
from xgpt.core.hf_quantised import read_quantised
from xgpt.core.model import ModelSpec
from xgpt.core.model_file import ConfigValues, load_json

ELSEWHERE = "vLLM (`vllm serve`) executes many others, which xgpt does not plan"


def read_shape(folder: Path, name: str) -> ModelSpec:
    """The shape in `folder`/config.json. Raises InputError."""
    path = folder / "config.json"
    return from_hf_config(load_json(path), name, path)


def from_hf_config(config: Mapping[str, Any], name: str,
                   path: Path = Path("config.json")) -> ModelSpec:
    """A Hugging Face `config.json`, which came from `path`, as a ModelSpec. Raises InputError for a
    family or variant that xgpt can neither execute nor plan, naming every key at fault."""
    values = ConfigValues(config, path)
    readers = _READERS | PLANNED_READERS
    kind = values.text("model_type", "", readers, more=f"; {ELSEWHERE}")
    reader = readers.get(kind)
    if reader is None:
        values.finish()
    assert reader is not None
    with_usual(values, kind)
    spec = reader(values, name)
    if kind in _READERS:
        refuse_others(values, kind, spec)
        spec = replace(spec, not_used=", ".join(not_used(config, values.asked)))
    # of what is planned alone nothing is loaded: run.weight_dtype says as what it is planned
    stored = None if kind in PLANNED_READERS else read_quantised(values, spec.family)
    values.finish()
    return replace(spec, source="config.json", stored_as="" if stored is None else str(stored))


def _read_opt(config: ConfigValues, name: str) -> ModelSpec:
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
    config.divides("n_head", "n_embd")
    hidden = config.size("n_embd")
    return ModelSpec(
        name=name, family="gpt2", num_layers=config.size("n_layer"), hidden_size=hidden,
        num_heads=config.size("n_head"), vocab_size=config.size("vocab_size"),
        intermediate_size=config.size_or_none("n_inner") or 4 * hidden,
        max_positions=config.size("n_positions"), has_learned_positions=True,
        activation="gelu_new", norm_eps=config.number("layer_norm_epsilon", 1e-5),
        tied_embeddings=config.flag("tie_word_embeddings", True))


def _read_t5(config: ConfigValues, name: str) -> ModelSpec:
    # Version 1.1 is known by its untied head; transformers 5 says `scale_decoder_outputs` instead
    is_tied = config.flag("scale_decoder_outputs", config.flag("tie_word_embeddings", True))
    return _t5(config, name, "relu", is_tied=is_tied)


def _read_mt5(config: ConfigValues, name: str) -> ModelSpec:
    """T5 1.1's layout. Nothing scales what goes into its head, whatever `tie_word_embeddings` says:
    published files say false, and transformers 5 writes true of any."""
    config.flag("tie_word_embeddings", True)
    return _t5(config, name, "gated-gelu", is_tied=False)


def _t5(config: ConfigValues, name: str, usual_projection: str, *, is_tied: bool) -> ModelSpec:
    projection = config.text("feed_forward_proj", usual_projection, _T5_ACTIVATIONS)
    layers = config.size("num_layers")
    config.only("dense_act_fn", _T5_ACTIVATIONS[projection])
    config.only("is_gated_act", projection.startswith("gated-"))
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


def _read_bart(config: ConfigValues, name: str, norm_place: NormPlace = "sum") -> ModelSpec:
    for part in ("attention_heads", "ffn_dim"):
        if config.get(f"decoder_{part}") != config.get(f"encoder_{part}"):
            config.reject(f"decoder_{part}", f"only the encoder_{part} is supported")
    config.divides("encoder_attention_heads", "d_model")
    hidden = config.size("d_model")
    scale = hidden ** 0.5 if config.flag("scale_embedding", False) else 1.0
    return ModelSpec(
        name=name, family="bart", num_layers=config.size("decoder_layers"),
        num_encoder_layers=config.size("encoder_layers"), hidden_size=hidden,
        num_heads=config.size("encoder_attention_heads"), vocab_size=config.size("vocab_size"),
        intermediate_size=config.size("encoder_ffn_dim"),
        max_positions=config.size("max_position_embeddings"), has_learned_positions=True,
        activation=config.text("activation_function", "gelu", ("gelu", "gelu_new", "relu")),
        decoder=Decoder(norm_place=norm_place, embedding_scale=scale))


_T5_ACTIVATIONS = {"relu": "relu", "gated-gelu": "gelu_new"}
_READERS: dict[str, Callable[[ConfigValues, str], ModelSpec]] = {
    "opt": _read_opt, "gpt2": _read_gpt2, **GATED_READERS, "t5": _read_t5, "mt5": _read_mt5,
    "bart": _read_bart, "mbart": partial(_read_bart, norm_place="before")}
MODEL_TYPES = tuple(_READERS)
PLANNED_TYPES = tuple(PLANNED_READERS)  # alone, not executed
