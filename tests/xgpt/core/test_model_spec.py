"""ModelSpec from Hugging Face's config.json, and the parameters it counts."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs import job
from xgpt.core import catalog
from xgpt.core.errors import InputError
from xgpt.core.hf.config import PLANNED_TYPES, from_hf_config, read_shape
from xgpt.core.model import (
    ModelSpec,
    active_layer_params,
    kv_copies,
    kv_elements_of_rank,
    layer_params_of_rank,
    model_from_dict,
    refuse_tp_degree,
)
from xgpt.job.resolve import resolve
from xprofiler.profile import model_shape
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator

# keys of the published config.json
PUBLISHED = json.loads(Path(__file__).with_name("published_models.json").read_text("utf-8"))
ALL, EXECUTED = PUBLISHED["planned"], PUBLISHED["executed"]
QWEN3_8B = EXECUTED["qwen3-8b"] | {
    "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"}
OPT_125M = {
    "model_type": "opt", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
    "vocab_size": 50272, "ffn_dim": 3072, "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768, "do_layer_norm_before": True}
LLAMA_31 = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0, "tie_word_embeddings": False, "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}}
QWEN = {
    "model_type": "qwen2", "num_hidden_layers": 24, "hidden_size": 896, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "intermediate_size": 4864,
    "max_position_embeddings": 32768, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "tie_word_embeddings": True, "use_sliding_window": False}
GPT2_124M = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
        "n_positions": 1024, "n_inner": None}
T5_11B = {"model_type": "t5", "num_layers": 24, "d_model": 1024, "num_heads": 128, "d_kv": 128,
          "d_ff": 65536, "vocab_size": 32128, "feed_forward_proj": "relu"}


def _shape(spec: ModelSpec) -> ModelSpec:
    return replace(spec, hub_id=None, wheel=None, source="", name="", stored_as="")


@pytest.mark.parametrize(("config", "row"), [
    (OPT_125M, "opt-125m"), (LLAMA_31, "llama-3.1-8b"), (QWEN, "qwen2.5-0.5b"), (GPT2_124M, "gpt2"),
    (T5_11B, "t5-11b"), (ALL["gpt-oss-20b"], "gpt-oss-20b"),
    (QWEN3_8B, "qwen3-8b")])
def test_a_config_reads_as_the_catalogs_row(config, row):
    read, kept = from_hf_config(config, row), catalog.model(row)
    # the catalog leaves to defaults what the config spells out, and the other way round
    same = {"num_kv_heads": kept.kv_heads, "has_qkv_bias": kept.qkv_bias}
    assert _shape(replace(read, num_kv_heads=read.kv_heads, has_qkv_bias=read.qkv_bias)) == _shape(
        replace(kept, **same))


def test_both_spellings_of_rope_settings_read_alike():
    new = {k: v for k, v in LLAMA_31.items() if k not in ("rope_theta", "rope_scaling")}
    scaling = LLAMA_31["rope_scaling"]
    assert isinstance(scaling, dict)
    new["rope_parameters"] = {**scaling, "rope_theta": 500000.0}
    assert from_hf_config(new, "x") == from_hf_config(LLAMA_31, "x")


def test_parameters_are_counted_once_and_those_of_shared_heads_and_cross_attention_too():
    spec = catalog.model("smollm2-135m")
    untied = replace(spec, tied_embeddings=False)
    assert untied.num_params - spec.num_params == spec.vocab_size * spec.hidden_size
    many, few = catalog.model("llama-2-7b"), replace(catalog.model("llama-2-7b"), num_kv_heads=8)
    assert many.kv_elements_per_token_layer == 4 * few.kv_elements_per_token_layer == 2 * 4096
    assert many.attention_params - few.attention_params == 2 * 4096 * 24 * 128
    spec = catalog.model("t5-11b")
    assert spec.is_encoder_decoder and not catalog.model("opt-13b").is_encoder_decoder
    extra = spec.decoder_layer_params - spec.encoder_layer_params
    assert extra == spec.attention_params + spec.hidden_size


def test_beyond_its_kv_heads_each_rank_of_a_group_holds_a_whole_one():
    """Qwen3-235B has 4 KV heads: on 8 ranks every head lies twice, with its projections."""
    spec, h200 = catalog.model("qwen3-235b-a22b"), catalog.device("H200")
    assert [kv_copies(spec, degree) for degree in (1, 2, 4, 8, 16)] == [1, 1, 1, 2, 4]
    assert [kv_elements_of_rank(spec, degree) / 256 for degree in (1, 2, 4, 8)] == [4, 2, 1, 1]
    of_head = 2 * 128 * 4096
    assert layer_params_of_rank(spec, 4) == spec.decoder_layer_params / 4
    assert layer_params_of_rank(spec, 8) == spec.decoder_layer_params / 8 + of_head / 2
    biased = replace(spec, has_qkv_bias=True)
    assert layer_params_of_rank(biased, 8) == biased.decoder_layer_params / 8 + (of_head + 256) / 2
    # reading one head's entries takes as long, whether eight or sixteen of queries read them
    times = [float(Roofline(spec, h200, "bfloat16").operator_s(
        Operator.DECODE_ATTENTION, 256.0, 8000.0, tp_degree=degree)) for degree in (2, 4, 8)]
    assert times[0] > 1.8 * times[1] and times[1] == pytest.approx(times[2], rel=0.05)


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
         "num_key_value_heads": 1, "vocab_size": 11, "intermediate_size": 16}
OPT = {"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
       "vocab_size": 11, "ffn_dim": 16, "max_position_embeddings": 32}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11,
        "n_positions": 16, "n_inner": None}
T5 = {"model_type": "t5", "num_layers": 2, "d_model": 8, "num_heads": 2, "d_kv": 4, "d_ff": 16,
      "vocab_size": 11}
BASES = {"llama": LLAMA, "opt": OPT, "gpt2": GPT2, "t5": T5}


def refused(folder: Path, config: object) -> list[tuple[str, object, str]]:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(InputError) as caught:
        read_shape(folder, "toy")
    for mistake in caught.value.mistakes:
        assert (mistake.file, mistake.key) == (str(folder), "config.json") or (
            mistake.file == str(path))
    return [(m.key, m.value, m.allowed) for m in caught.value.mistakes]


@pytest.mark.parametrize("config", BASES.values(), ids=BASES)
def test_every_size_that_is_no_size_is_named_at_once(tmp_path, config):
    sizes = [key for key, value in config.items() if isinstance(value, int)]
    values = [None, "12", 0, 1.5, True, [3], -1]
    broken = {**config, **dict(zip(sizes, values, strict=False))}
    found = refused(tmp_path, broken)
    assert {(key, repr(value)) for key, value, _ in found} == {
        (key, repr(broken[key])) for key in sizes}
    assert len(found) == len(sizes) and all("whole number >= 1" in why for _, _, why in found)
    (first,) = [why for key, _, why in found if key == sizes[0]]
    assert first.startswith("null")
    for key in sizes:
        if key != "num_key_value_heads":  # as many as heads
            assert refused(tmp_path, {k: v for k, v in config.items() if k != key})[0][:2] == (
                key, None)


@pytest.mark.parametrize(("text", "reason"), [
    ("", "no JSON"), ("{", "no JSON"), ("[]", "not a JSON object"), ("null", "not a JSON object"),
    ("[" * 100_000, "no JSON"), ('{"a": "\x01"}', "no JSON")])
def test_a_file_that_is_no_config(tmp_path, text, reason):
    ((_, _, why),) = refused(tmp_path, text)
    assert reason in why


WRONG = [tuple(part.strip() for part in f"{line} ".split(" | "))
         for line in Path(__file__).with_name("wrong_models.txt").read_text("utf-8").splitlines()
         if line and not line.startswith("#")]


@pytest.mark.parametrize(("config", "keys", "said"), WRONG, ids=[row[0][:60] for row in WRONG])
def test_a_wrong_config_is_refused_by_its_keys(tmp_path, config, keys, said):
    """Those of wrong_models.txt: a base and what differs from it."""
    base, _, changes = config.partition(" ")
    found = refused(tmp_path, {**BASES.get(base, {}), **json.loads(changes)})
    assert list(dict.fromkeys(key for key, _, _ in found)) == keys.split(", "), found
    assert all(words in str(found) for words in said.split(" / ")), found


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True, "sym": False}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    own = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**own, **weights}}}}


@pytest.mark.parametrize(("stored", "words"), [
    (FP8, "8 bits (fp8, blocks of 128 x 128; activations stay plain)"),
    (compressed(), "4 bits (compressed-tensors pack-quantized, groups of 64)"),
    (compressed("int-quantized", num_bits=8, strategy="channel", group_size=None),
     "8 bits (compressed-tensors int-quantized, a scale a row)"),
    (compressed("float-quantized", num_bits=8, type="float", strategy="tensor", group_size=None),
     "8 bits (compressed-tensors float-quantized, a scale a tensor)"),
    (AWQ, "4 bits (AWQ, groups of 128)"), (GPTQ, "4 bits (GPTQ, a scale a row)"),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"},
     "4 bits (AWQ, groups of 64)"),
    ({**GPTQ, "bits": 8, "checkpoint_format": "gptq_v2", "dynamic": {"-:.*down.*": {}}},
     "8 bits (GPTQ, a scale a row)")])
def test_weights_of_fewer_bits_are_planned_and_said(stored, words):
    spec = from_hf_config({**LLAMA, "quantization_config": stored}, "x")
    assert spec.stored_as == words and spec.num_params == from_hf_config(LLAMA, "x").num_params


SHAPE = LLAMA | {"num_key_value_heads": 1, "head_dim": 6, "max_position_embeddings": 64}


@pytest.mark.parametrize(("config", "why"), [
    ({"hidden_act": "relu2"}, "hidden_act 'relu2'"),
    ({"rope_scaling": {"rope_type": "mrope", "factor": 2.0}}, "rope_type 'mrope'"),
    ({"model_type": "gemma2", "hidden_activation": "xielu"}, "hidden_activation 'xielu'")])
def test_shapes_that_are_only_planned_are_read_and_say_what_is_not_executed(config, why):
    spec = from_hf_config({**SHAPE, **config}, "x")
    assert why in spec.planned_only and spec.kv_elements_per_token_layer == 12
    plain = {key: value for key, value in config.items() if key == "model_type"}
    assert not from_hf_config({**SHAPE, **plain}, "x").planned_only


@pytest.mark.parametrize(("config", "windows"), [
    ({"model_type": "gemma2", "sliding_window": 8}, (8, None)),
    ({"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 2}, (8, None)),
    ({"model_type": "gemma3_text", "sliding_window": 8}, (8, 8)),
    ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, ()),
    ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True,
      "max_window_layers": 1}, (None, 8)),
    ({"model_type": "mistral", "sliding_window": 8, "max_position_embeddings": 8}, ())])
def test_windows_are_of_the_layers_that_the_config_says(config, windows):
    assert from_hf_config({**SHAPE, **config}, "x").decoder.windows == windows


def test_longrope_and_a_window_that_holds_all_positions_are_executed():
    rope = {"type": "longrope", "short_factor": [1.0, 1.0, 2.0], "long_factor": [1.0, 2.0, 3.0]}
    spec = from_hf_config({**SHAPE, "model_type": "phi3", "rope_scaling": rope,
                           "original_max_position_embeddings": 16}, "x")
    assert spec.max_positions == 16 and dict(spec.rope_scaling or ())["factor"] == 4.0
    for window in (None, 64, 128):
        spec = from_hf_config({**SHAPE, "model_type": "mistral", "sliding_window": window}, "x")
        assert spec == from_hf_config(SHAPE, "x")


def test_a_model_that_is_only_planned_is_planned_elsewhere_and_refused_here(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        **SHAPE, "hidden_act": "relu2", "max_position_embeddings": 1024}))
    assert resolve(job(tmp_path, model=str(tmp_path), cluster="h100-8")).model.planned_only
    with pytest.raises(InputError, match="relu2' is planned for.*engine: vllm"):
        resolve(job(tmp_path, model=str(tmp_path), cluster="local"))


# Models that are planned and not executed: their parameters are those that are published, their
# caches what their attention leaves, and whoever would run them is told.


def shape(name: str) -> ModelSpec:
    return from_hf_config(ALL[name], name)


@pytest.mark.parametrize(("name", "total", "active"), [
    ("deepseek-v3", 671e9, 37e9), ("deepseek-v2-lite", 15.7e9, 2.4e9),
    ("llama-4-scout", 109e9, 17e9), ("llama-4-maverick", 400e9, 17e9),
    ("qwen3-8b", 8.19e9, 0.0), ("mistral-7b", 7.24e9, 0.0), ("gemma-2-9b", 9.24e9, 0.0),
    ("gemma-3-4b", 3.88e9, 0.0), ("phi-4", 14.66e9, 0.0), ("qwen3-30b-a3b", 30.5e9, 3.3e9),
    ("mixtral-8x7b", 46.7e9, 12.9e9), ("gpt-oss-20b", 20.91e9, 3.61e9),
    ("gpt-oss-120b", 116.83e9, 5.13e9)])
def test_parameters_are_those_that_are_published(name, total, active):
    """Within 2 % of what is only planned: Scout's have the vision tower among them; within 0.3 % of
    what is executed. Published active ones are with the embedding or without one of its copies;
    Gemma 3's are those of its text model: the card's 4.3e9 less the vision tower's."""
    spec = from_hf_config(EXECUTED.get(name) or ALL[name], name)
    assert spec.num_params == pytest.approx(total, rel=0.003 if name in EXECUTED else 0.02)
    idle = spec.decoder_layer_params - active_layer_params(spec)
    used = spec.num_params - spec.num_layers * idle
    counts = (used, used - spec.embedding_params)
    assert not active or any(own == pytest.approx(active, rel=0.04) for own in counts)


def test_a_model_that_sees_is_its_text_model_and_layers_of_two_kinds_are_added_up():
    attention = 5120 * 128 * 2 * (40 + 8)
    mixture, dense = 5120 * (128 * (3 * 8192 + 1) + 3 * 8192), 3 * 5120 * 16384
    layers = 48 * (attention + 2 * 5120) + 24 * (mixture + dense)
    assert abs(shape("llama-4-maverick").num_params
               - (layers + 2 * 202048 * 5120 + 5120)) <= 48
    seeing, text = shape("scout-that-sees"), shape("llama-4-scout")
    assert seeing.num_params == text.num_params and "vision" in seeing.planned_only
    with pytest.raises(InputError, match="text_config"):
        from_hf_config({"model_type": "gemma3"}, "x")


@pytest.mark.parametrize("name", ["deepseek-v3", "deepseek-v2-lite"])
def test_a_token_leaves_its_latent_vector_and_every_rank_holds_it_whole(name):
    spec = shape(name)
    assert spec.kv_elements_per_token_layer == 512 + 64
    assert kv_elements_of_rank(spec, 8) == kv_elements_of_rank(spec, 1) == 576
    assert kv_elements_of_rank(shape("llama-4-scout"), 8) == 2 * 8 * 128 / 8


@pytest.mark.parametrize("name", ALL)
def test_each_says_what_of_it_is_not_executed_and_comes_back_from_json(name):
    spec = shape(name)
    assert {values["model_type"] for values in ALL.values()} == set(PLANNED_TYPES)
    assert spec.planned_only and model_from_dict(asdict(spec)) == spec
    with pytest.raises(InputError, match="num_hidden_layers"):
        values = ALL[name]
        text = values.get("text_config", values) | {"num_hidden_layers": None}
        from_hf_config(values | {"text_config": text} if "text_config" in values else text, name)


def test_parts_of_planned_models_divide_cost_and_are_told_apart():
    spec = shape("llama-4-scout")
    assert refuse_tp_degree(spec, 8) is None
    experts = spec.decoder.experts
    assert experts is not None
    odd = replace(spec, decoder=replace(spec.decoder, experts=replace(experts, shared=8193)))
    assert "shared experts" in str(refuse_tp_degree(odd, 8))
    spec, device = shape("deepseek-v3"), catalog.device("H200")
    plain = replace(spec, decoder=replace(spec.decoder, latent=None))
    assert plain.kv_elements_per_token_layer == pytest.approx(57 * 576, rel=0.01)
    latent_s, heads_s = (float(Roofline(own, device, "bfloat16", engine="vllm").operator_s(
        Operator.DECODE_ATTENTION, 64.0, 4000.0)) for own in (spec, plain))
    assert 5 < heads_s / latent_s < 57
    assert model_shape(catalog.model("llama-3.1-8b")) == "15bfc5df617a2978"
    assert model_shape(shape("deepseek-v3")) != model_shape(
        replace(shape("deepseek-v3"), decoder=replace(shape("deepseek-v3").decoder, latent=None)))


@pytest.mark.parametrize("name", ["deepseek-v3", "llama-4-maverick"])
def test_times_grow_with_size_and_fall_in_relation_to_it(name):
    source = Roofline(shape(name), catalog.device("H200"), "bfloat16", engine="vllm")
    x = np.geomspace(1, 1e5, 60)
    for operator in (Operator.LAYER_REST, Operator.DECODE_ATTENTION, Operator.ENCODE_ATTENTION):
        seconds = source.operator_s(operator, x, 300.0, tp_degree=8)
        assert (np.diff(seconds) >= 0).all(), operator
    rest = source.operator_s(Operator.LAYER_REST, x, tp_degree=8)
    assert (np.diff(rest / x) <= 1e-15).all()
