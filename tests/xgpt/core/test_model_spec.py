"""ModelSpec from Hugging Face's config.json, and the parameters it counts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from xgpt.cli.main import cli
from xgpt.core import catalog
from xgpt.core.errors import InputError
from xgpt.core.hf.config import from_hf_config, read_shape
from xgpt.core.model import ModelSpec
from xgpt.job.job_file import load_job
from xgpt.job.resolve import resolve

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
    return replace(spec, hub_id=None, wheel=None, source="", name="")


@pytest.mark.parametrize(("config", "row"), [
    (OPT_125M, "opt-125m"), (LLAMA_31, "llama-3.1-8b"), (QWEN, "qwen2.5-0.5b"), (GPT2_124M, "gpt2"),
    (T5_11B, "t5-11b")])
def test_a_config_reads_as_the_catalogs_row(config, row):
    read, kept = from_hf_config(config, row), catalog.model(row)
    # the catalog leaves to defaults what the config spells out, and the other way round
    same = {"num_kv_heads": kept.kv_heads, "has_qkv_bias": kept.qkv_bias}
    assert _shape(replace(read, num_kv_heads=read.kv_heads, has_qkv_bias=read.qkv_bias)) == _shape(
        replace(kept, **same))


@pytest.mark.parametrize(("config", "key"), [
    ({"model_type": "bert"}, "model_type"), ({}, "model_type"),
    ({**OPT_125M, "do_layer_norm_before": False}, "do_layer_norm_before"),
    ({**OPT_125M, "word_embed_proj_dim": 512}, "word_embed_proj_dim"),
    ({**LLAMA_31, "rope_scaling": {"rope_type": "yarn"}}, "rope_type"),
    ({**QWEN, "use_sliding_window": "yes"}, "use_sliding_window"),
    ({k: v for k, v in OPT_125M.items() if k != "ffn_dim"}, "ffn_dim")])
def test_what_cannot_run_is_refused_by_its_key(config, key):
    with pytest.raises(InputError, match=key):
        from_hf_config(config, "x")


def test_both_spellings_of_rope_settings_read_alike():
    new = {k: v for k, v in LLAMA_31.items() if k not in ("rope_theta", "rope_scaling")}
    scaling = LLAMA_31["rope_scaling"]
    assert isinstance(scaling, dict)
    new["rope_parameters"] = {**scaling, "rope_theta": 500000.0}
    assert from_hf_config(new, "x") == from_hf_config(LLAMA_31, "x")


def test_a_tied_head_is_counted_once():
    spec = catalog.model("smollm2-135m")
    untied = replace(spec, tied_embeddings=False)
    assert untied.num_params - spec.num_params == spec.vocab_size * spec.hidden_size


def test_fewer_key_value_heads_shrink_the_cache_and_the_projections():
    many, few = catalog.model("llama-2-7b"), replace(catalog.model("llama-2-7b"), num_kv_heads=8)
    assert many.kv_elements_per_token_layer == 4 * few.kv_elements_per_token_layer == 2 * 4096
    assert many.attention_params - few.attention_params == 2 * 4096 * 24 * 128


def test_an_encoder_decoder_counts_cross_attention():
    spec = catalog.model("t5-11b")
    assert spec.is_encoder_decoder and not catalog.model("opt-13b").is_encoder_decoder
    extra = spec.decoder_layer_params - spec.encoder_layer_params
    assert extra == spec.attention_params + spec.hidden_size


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
         "num_key_value_heads": 1, "vocab_size": 11, "intermediate_size": 16}
OPT = {"model_type": "opt", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 2,
       "vocab_size": 11, "ffn_dim": 16, "max_position_embeddings": 32}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11,
        "n_positions": 16, "n_inner": None}
T5 = {"model_type": "t5", "num_layers": 2, "d_model": 8, "num_heads": 2, "d_kv": 4, "d_ff": 16,
      "vocab_size": 11}


def refused(folder: Path, config: object) -> list[tuple[str, object, str]]:
    path = folder / "config.json"
    path.write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(InputError) as caught:
        read_shape(folder, "toy")
    for mistake in caught.value.mistakes:
        assert (mistake.file, mistake.key) == (str(folder), "config.json") or (
            mistake.file == str(path))
    return [(m.key, m.value, m.allowed) for m in caught.value.mistakes]


@pytest.mark.parametrize("config", [LLAMA, OPT, GPT2, T5])
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


@pytest.mark.parametrize(("config", "key", "most"), [
    (LLAMA, "num_hidden_layers", 10_000), (GPT2, "n_layer", 10_000), (T5, "num_layers", 10_000),
    (LLAMA, "vocab_size", 2**31 - 1)])
def test_a_size_beyond_all_models_is_refused_and_not_planned(tmp_path, config, key, most):
    assert refused(tmp_path, {**config, key: 2**31}) == [
        (key, 2**31, f"a whole number >= 1, at most {most:,}")]


@pytest.mark.parametrize(("config", "key"), [
    ({**LLAMA, "rms_norm_eps": "1e-5"}, "rms_norm_eps"), ({**LLAMA, "rope_theta": 0}, "rope_theta"),
    ({**LLAMA, "tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ({**LLAMA, "rope_scaling": "linear"}, "rope_scaling"),
    ({**LLAMA, "rope_scaling": {"type": "linear"}}, "rope_scaling.factor"),
    ({**LLAMA, "rope_scaling": {"rope_type": "linear", "factor": "2"}}, "rope_scaling.factor"),
    ({**LLAMA, "rope_parameters": {"rope_theta": None}}, "rope_parameters.rope_theta"),
    ({**LLAMA, "num_attention_heads": 3, "num_key_value_heads": 3}, "num_attention_heads"),
    ({**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads"),
    ({**LLAMA, "hidden_act": None}, "hidden_act"), ({**OPT, "num_attention_heads": 5},
                                                    "num_attention_heads"),
    ({**GPT2, "n_head": 3}, "n_head"), ({**T5, "feed_forward_proj": 3}, "feed_forward_proj"),
    ({**LLAMA, "model_type": ["llama"]}, "model_type"), ({}, "model_type")])
def test_what_is_no_size_is_refused_by_its_key_alone(tmp_path, config, key):
    assert [found for found, _, _ in refused(tmp_path, config)] == [key]


@pytest.mark.parametrize(("text", "reason"), [
    ("", "no JSON"), ("{", "no JSON"), ("[]", "not a JSON object"), ("null", "not a JSON object"),
    ("[" * 100_000, "no JSON"), ('{"a": "\x01"}', "no JSON")])
def test_a_file_that_is_no_config(tmp_path, text, reason):
    ((_, _, why),) = refused(tmp_path, text)
    assert reason in why


def test_the_command_refuses_a_job_with_it(tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "config.json").write_text(json.dumps(
        {**LLAMA, "hidden_size": None, "num_attention_heads": "12"}))
    job = tmp_path / "job.yaml"
    job.write_text("model: ./toy\ncluster: a40-4\nworkload: {requests: {count: 9}, task: S}\n")
    done = CliRunner().invoke(cli, ["schedule", str(job)])
    assert isinstance(done.exception, InputError)
    assert {m.key for m in done.exception.mistakes} == {"hidden_size", "num_attention_heads"}


@pytest.mark.parametrize(("config", "key", "value"), [
    (LLAMA, "mlp_bias", True),
    ({**LLAMA, "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2,
      "moe_intermediate_size": 4}, "mlp_only_layers", [1]),
    ({**LLAMA, "model_type": "qwen3"}, "layer_types", ["full_attention", "chunked_attention"]),
    ({**LLAMA, "model_type": "gemma2"}, "use_bidirectional_attention", True),
    (OPT, "activation_function", "gelu"), (OPT, "do_layer_norm_before", False)])
def test_a_variant_nobody_implements_is_refused(config, key, value):
    assert from_hf_config(config, "plain").num_layers == 2
    with pytest.raises(InputError, match=key):
        from_hf_config({**config, key: value}, "variant")


@pytest.mark.parametrize(("key", "stored", "named"), [
    ("quantization_config", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
    ("quantization_config", {"quant_method": "hqq"}, "hqq"),
    ("compression_config", {"format": "sparse-24"}, "sparse-24"),
    ("quantization_config", {"quant_method": "modelopt", "quant_algo": "FP8"}, "modelopt"),
    ("quantization_config", {"bits": 8}, "not named")])
def test_weights_of_an_unknown_method_are_refused_by_its_name(key, stored, named):
    with pytest.raises(InputError, match=f"{key}.*quantised by .*{named}.*known are.*awq, gptq"):
        from_hf_config({**LLAMA, key: stored}, "variant")
    assert not from_hf_config({**LLAMA, key: None}, "plain").stored_as


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": True, "sym": False}


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(form: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    own = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**own, **weights}}}}


def mixed() -> dict[str, Any]:
    one, other = compressed(), compressed(num_bits=8)
    return {**one, "config_groups": {**one["config_groups"],
                                     "group_1": other["config_groups"]["group_0"]}}


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


@pytest.mark.parametrize(("stored", "key", "allowed"), [
    (compressed("marlin-24"), "format", "pack-quantized"),
    (compressed("mixed-precision"), "format", "pack-quantized"),
    (compressed("nvfp4-pack-quantized"), "format", "pack-quantized"),
    (compressed(num_bits=3), r"config_groups\.group_0\.weights\.num_bits", "4 or 8 bits"),
    (compressed(type="float"), r"config_groups\.group_0\.weights\.type", "int"),
    (compressed(group_size=None), r"config_groups.*weights\.group_size", "of the strategy"),
    (mixed(), "config_groups", "store weights alike"),
    ({**compressed(), "transform_config": {"config_groups": {}}}, "transform_config", "none"),
    ({**FP8, "weight_block_size": [128]}, "weight_block_size", "two whole numbers"),
    ({**FP8, "fmt": "e5m2"}, "fmt", "e4m3"),
    ({**AWQ, "bits": 8}, "bits", "4 bits"), ({**AWQ, "version": "gemv"}, "version", "gemm"),
    ({**AWQ, "zero_point": False}, "zero_point", "only true"),
    ({**AWQ, "group_size": 0}, "group_size", "whole number"),
    ({**GPTQ, "bits": 5}, "bits", "2 or 3 or 4 or 8"),
    ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format", "gptq_v2"),
    ({**GPTQ, "is_marlin_format": True}, "is_marlin_format", "only false"),
    ({**GPTQ, "dynamic": {"+:.*up.*": {"bits": 8}}}, "dynamic", "left out")])
def test_what_a_method_is_not_read_with_is_named(stored, key, allowed):
    with pytest.raises(InputError, match=f"quantization_config.{key}.*{allowed}"):
        from_hf_config({**LLAMA, "quantization_config": stored}, "x")


def test_gpt2s_weights_of_fewer_bits_are_refused():
    config = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 11,
              "n_positions": 16}
    with pytest.raises(InputError, match="quantization_config.*gpt2 family"):
        from_hf_config({**config, "quantization_config": GPTQ}, "x")
    assert from_hf_config(config, "x").family == "gpt2"


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


def test_a_family_nobody_knows_is_refused_by_its_name_with_who_has_it():
    with pytest.raises(InputError, match="model_type: 'mamba2'|mamba2.*vLLM"):
        from_hf_config({**SHAPE, "model_type": "mamba2"}, "x")


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


def test_longrope_is_executed_within_the_positions_of_its_short_factors():
    rope = {"type": "longrope", "short_factor": [1.0, 1.0, 2.0], "long_factor": [1.0, 2.0, 3.0]}
    config = {**SHAPE, "model_type": "phi3", "rope_scaling": rope,
              "original_max_position_embeddings": 16}
    spec = from_hf_config(config, "x")
    assert spec.max_positions == 16 and dict(spec.rope_scaling or ())["factor"] == 4.0
    with pytest.raises(InputError, match=r"rope_scaling\.short_factor"):
        from_hf_config({**config, "rope_scaling": {"type": "longrope"}}, "x")


def test_a_mistral_whose_window_holds_all_positions_is_executed():
    for window in (None, 64, 128):
        spec = from_hf_config({**SHAPE, "model_type": "mistral", "sliding_window": window}, "x")
        assert spec == from_hf_config(SHAPE, "x")


def test_a_model_that_is_only_planned_is_planned_elsewhere_and_refused_here(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({
        **SHAPE, "hidden_act": "relu2", "max_position_embeddings": 1024}))
    words = "model: {model}\ncluster: {cluster}\nworkload: {{task: S, requests: {{count: 5}}}}\n"
    for cluster in ("h100-8", "local"):
        job = tmp_path / f"{cluster}.yaml"
        job.write_text(words.format(model=tmp_path, cluster=cluster), encoding="utf-8")
        if cluster == "local":
            with pytest.raises(InputError, match="relu2' is planned for.*engine: vllm"):
                resolve(load_job(job))
        else:
            assert resolve(load_job(job)).model.planned_only
