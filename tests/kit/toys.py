"""Toy models of random weights as Hugging Face directories, and what transformers answers."""

import json
from collections.abc import Hashable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from xgpt.core.model import ModelSpec
from xgpt.requests.request_files import RequestFiles
from xgpt.requests.spool import SpoolWriter
from xrunner.checkpoint.source import read_spec
from xrunner.files.runnable import save_runnable
from xrunner.files.spooled_requests import ModelTokeniser, read_and_tokenise
from xrunner.files.tokenizer import TextTokenizer
from xrunner.models.weights import TensorPart
from xrunner.plan import RunPlan
from xrunner.query import PreparedQuery

torch.set_num_threads(1)  # ranks are threads or processes already; more than cores is a disaster

VOCAB, EOS = 97, 5
FAMILIES = ("llama", "llama-tied", "llama3-rope", "qwen2", "mistral", "opt", "gpt2", "gpt2-untied")
T5_FAMILIES = ("t5", "t5-1.1")
ENCODER_DECODER_FAMILIES = (*T5_FAMILIES, "mt5", "bart", "mbart")


def logits_of(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """hidden [n, H] -> this shard's logits [n, V_local], of a last stage's model or of its ends."""
    logits: torch.Tensor = model.scores(hidden).of(range(len(hidden)))
    return logits


def make_model(family: str, directory: Path, *, heads: int = 6, head_dim: int = 8) -> Any:
    """Writes a model of `family`, of 5 layers (encoder-decoders: 5 and 4), to `directory`; returns
    transformers' own instance. `heads`, `head_dim`: of OPT and GPT-2."""
    if family in ("bart", "mbart"):
        return make_bart(family, directory)
    if family in ENCODER_DECODER_FAMILIES:
        version = {"t5": "1.0", "t5-1.1": "1.1"}.get(family, family)
        return make_t5(version, directory, encoder_layers=5, decoder_layers=4)
    if family not in ("opt", "gpt2", "gpt2-untied"):
        return make_modern(family, directory)
    import transformers

    torch.manual_seed(0)
    width = heads * head_dim
    own: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": EOS,
                           "pad_token_id": 0}
    if family == "opt":
        model: Any = transformers.OPTForCausalLM(transformers.OPTConfig(
            **own, hidden_size=width, ffn_dim=80, num_hidden_layers=5, num_attention_heads=heads,
            max_position_embeddings=128, word_embed_proj_dim=width, init_std=0.3))
    else:
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            **own, n_embd=width, n_inner=80, n_layer=5, n_head=heads, n_positions=128,
            initializer_range=0.3, tie_word_embeddings=family == "gpt2"))
    stir_norms_and_biases(model)
    model.eval().save_pretrained(directory)
    return model


def make_t5(version: str, directory: Path, *, encoder_layers: int = 3,
            decoder_layers: int = 2) -> Any:
    """Writes a T5 to `directory`, of version "1.0" or "1.1", or an "mt5", as published checkpoints
    of it are; returns transformers' own instance."""
    import transformers

    torch.manual_seed(0)
    is_new, prefix = version != "1.0", "MT5" if version == "mt5" else "T5"
    # few buckets and a short reach, so that all kinds of distance occur in short inputs
    config = getattr(transformers, f"{prefix}Config")(
        vocab_size=VOCAB, d_model=32, d_kv=4, d_ff=36, num_layers=encoder_layers,
        num_decoder_layers=decoder_layers,
        num_heads=6, relative_attention_num_buckets=8, relative_attention_max_distance=10,
        feed_forward_proj="gated-gelu" if is_new else "relu", tie_word_embeddings=not is_new,
        decoder_start_token_id=0, eos_token_id=EOS, pad_token_id=0)
    model: Any = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.4)
    if is_new:
        model.lm_head.weight = torch.nn.Parameter(torch.randn(VOCAB, 32))
    stir_norms_and_biases(model, centre=1.0)
    model.eval().save_pretrained(directory)
    written = json.loads((directory / "config.json").read_text())
    # transformers 5 tells the versions apart by this key, the hub's files by the tied head
    written["tie_word_embeddings"] = written.pop("scale_decoder_outputs", False)
    (directory / "config.json").write_text(json.dumps(written))
    return model


def make_bart(family: str, directory: Path, **generation: Any) -> Any:
    """Writes a "bart" or "mbart" to `directory`; returns transformers' own instance. `generation`:
    what its generation_config.json says beside the tokens that begin and end."""
    import transformers

    torch.manual_seed(0)
    is_mbart = family == "mbart"
    prefix = "MBart" if is_mbart else "Bart"
    own: dict[str, Any] = {"forced_eos_token_id": None, **generation}
    model = getattr(transformers, f"{prefix}ForConditionalGeneration")(
        getattr(transformers, f"{prefix}Config")(
            vocab_size=VOCAB, d_model=48, encoder_layers=5, decoder_layers=4,
            encoder_attention_heads=6, decoder_attention_heads=6, encoder_ffn_dim=80,
            decoder_ffn_dim=80, max_position_embeddings=32, init_std=0.3,
            scale_embedding=is_mbart, activation_function="relu" if is_mbart else "gelu",
            pad_token_id=0, bos_token_id=1, eos_token_id=EOS, decoder_start_token_id=2))
    for key, value in own.items():
        setattr(model.generation_config, key, value)
    torch.nn.init.normal_(model.final_logits_bias, 0.0, 0.5)
    model.final_logits_bias[0, EOS] += 1.0
    stir_norms_and_biases(model)
    decoder = model.model.decoder
    # of either sign, or every token is likeliest behind itself: the head is the embedding
    last = decoder.layer_norm if is_mbart else decoder.layers[-1].final_layer_norm
    torch.nn.init.normal_(last.weight)
    # norms of sums forget what large blocks are added to: every token would be the same
    shares = {"self_attn.out_proj": 0.05, "encoder_attn.out_proj": 0.2, "fc2": 0.2,
              "norm.bias": 0.3}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter *= next((shares[part] for part in shares if part in name), 1.0)
    model.eval().save_pretrained(directory)
    return model


def stir_norms_and_biases(model: Any, centre: float | None = None) -> None:
    """Away from 1 and 0, or they go unseen. `centre` None: the one they are near."""
    for parameter in model.parameters():
        if parameter.ndim == 1:
            near = 1.0 if float(parameter.detach().mean()) > 0.5 else 0.0
            torch.nn.init.normal_(parameter, near if centre is None else centre, 0.3)


def spec_of(directory: Path) -> ModelSpec:
    return read_spec(directory, directory.name)


def write_spool(plan: RunPlan, requests: Path) -> None:
    """What the launcher hands on of a file of requests."""
    spec, spool = spec_of(plan.model_dir), SpoolWriter()
    tokeniser = ModelTokeniser(TextTokenizer(plan.model_dir), plan.is_chat, spec.vocab_size)
    found = read_and_tokenise(RequestFiles(paths=(requests,)), tokeniser, spool)
    if plan.shares_prefixes:
        found = replace(found, prefixes=spool.find_prefixes(found.unusable))
    save_runnable(found, spool, plan, spec)


def random_queries(count: int, seed: int = 1, longest: int = 20) -> list[PreparedQuery]:
    """Queries whose inputs and outputs all differ in length."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, size: int = 1) -> list[int]:
        values: list[int] = torch.randint(low, high, (size,), generator=generator).tolist()
        return values

    return [PreparedQuery(index=i, id=f"q{i}", input_ids=tuple(draw(6, VOCAB, draw(1, longest)[0])),
                          max_new_tokens=draw(1, 30)[0]) for i in range(count)]


_ANSWERS: dict[Hashable, list[int]] = {}
_DIGESTS: WeakKeyDictionary[Any, tuple[Hashable, str]] = WeakKeyDictionary()


def _digest(model: Any) -> str:
    """Of weights and configuration; both may change, or be those of another instance."""
    state = (*((p.data_ptr(), p._version, p.dtype) for p in model.parameters()),
             repr(model.generation_config))
    if model not in _DIGESTS or _DIGESTS[model][0] != state:
        digest = sha256((repr(model.config) + repr(model.generation_config)).encode())
        for tensor in model.state_dict().values():
            digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
        _DIGESTS[model] = state, digest.hexdigest()
    return _DIGESTS[model][1]


def generate(model: Any, query: PreparedQuery) -> list[int]:
    """What transformers' generate answers to one query alone, greedily; asked once for the same
    weights."""
    key = (_digest(model), query.input_ids, query.max_new_tokens, query.is_forced)
    if key not in _ANSWERS:
        _ANSWERS[key] = greedily(model, query.input_ids, query.max_new_tokens, pad_token_id=0,
                                 eos_token_id=None if query.is_forced else EOS)
    return [*_ANSWERS[key]]


def greedily(model: Any, tokens: Sequence[int], most: int, **own: Any) -> list[int]:
    """What transformers' generate answers to the tokens, with at most so many, greedily. `own`:
    its other arguments."""
    inputs = torch.tensor([list(tokens)])
    with torch.no_grad():
        out = model.generate(inputs, attention_mask=torch.ones_like(inputs), do_sample=False,
                             max_new_tokens=most, **own)
    # an encoder-decoder model's answer begins with the token its decoder is fed first
    before = 1 if model.config.is_encoder_decoder else len(tokens)
    answer: list[int] = out[0, before:].tolist()
    return answer


def reference_of(folder: Path) -> Any:
    """transformers' own instance of a model's folder, in float32."""
    import transformers

    spec = spec_of(folder)
    kind = "Seq2SeqLM" if spec.is_encoder_decoder else "CausalLM"
    # its other ways of attention leave soft-capping out
    own = {"attn_implementation": "eager"} if spec.decoder.attention_cap else {}
    return getattr(transformers, f"AutoModelFor{kind}").from_pretrained(
        folder, dtype=torch.float32, **own).eval()


LAYERS, WINDOW, POSITIONS = 5, 7, 128
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS,
    "initializer_range": 0.3, "bos_token_id": 1, "eos_token_id": EOS, "pad_token_id": 0}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
         "rope_theta": 10000.0}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.3, 2.0],
             "long_factor": [2.0, 4.0, 8.0], "original_max_position_embeddings": 64,
             "partial_rotary_factor": 0.75}
# name -> (prefix of transformers' classes, what its config states beside the shape)
_OLDER: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": False}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_parameters": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32, "rope_theta": 10000.0}}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 10})}
MODERN_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2-yarn": ("Qwen2", {"rope_parameters": _YARN}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW,
                                "max_window_layers": 2}),
    "llama-biased": ("Llama", {"attention_bias": True}),
    "falcon3": ("Llama", {"head_dim": 16, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000042.0}}),
    "llama-linear": ("Llama", {"rope_parameters": {
        "rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
    "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "mistral-window": ("Mistral", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2", {"head_dim": 12, "sliding_window": WINDOW, "query_pre_attn_scalar": 20,
                          "attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}),
    "gemma3": ("Gemma3Text", {
        "head_dim": 12, "sliding_window": WINDOW, "query_pre_attn_scalar": 20,
        "sliding_window_pattern": 3, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "phi4-mini": ("Phi3", {"rope_parameters": _LONGROPE}),
    "smollm3": ("SmolLM3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4,
                            "attention_multiplier": 0.2, "logits_scaling": 5.0}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2,
                            "sliding_window": WINDOW}),
    "qwen3-moe": ("Qwen3Moe", {"head_dim": 12, "num_experts": 6, "num_experts_per_tok": 3,
                               "moe_intermediate_size": 20, "norm_topk_prob": True}),
}


def make_modern(family: str, directory: Path, **other: Any) -> Any:
    """Writes a model of `family` to `directory`; returns transformers' own instance. `other`: of
    its config."""
    import transformers

    torch.manual_seed(0)
    prefix, own = (_OLDER | MODERN_FAMILIES)[family]
    config = getattr(transformers, f"{prefix}Config")(**{**_SHAPE, **own, **other})
    # the others leave soft-capping out
    config._attn_implementation = "eager" if family == "gemma2" else "sdpa"
    model = getattr(transformers, f"{prefix.removesuffix('Text')}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3 or name.endswith("gate.weight"):  # experts, which begin as zeros
            torch.nn.init.normal_(parameter, 0.0, 0.3)
    stir_norms_and_biases(model)
    model.eval().save_pretrained(directory)
    return model


class Zeros:
    """A WeightSource in the host's memory."""

    dtype = torch.float32

    def get(self, name: str, shape: tuple[int, ...], part: TensorPart | None = None) -> Tensor:
        return torch.zeros(shape if part is None else part.shape(shape))

    def has(self, name: str) -> bool:
        return True
