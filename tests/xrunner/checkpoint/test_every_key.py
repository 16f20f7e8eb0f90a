"""Every key of config.json that transformers' class of a family reads is executed, refused by its
name, or of no influence; others are told as not used."""

import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import toys
from click.testing import CliRunner
from toy_runs import run_in_process

from xgpt.cli.main import cli
from xgpt.core.errors import InputError
from xgpt.core.hf.config import MODEL_TYPES, PLANNED_TYPES, from_hf_config
from xgpt.core.model import ModelSpec
from xrunner.checkpoint.tensors import check_weights
from xrunner.files.generation import generation_rules, ignored_settings

TOYS = ("llama", "mistral-window", "qwen2-windows", "qwen3", "gemma2", "gemma3", "phi3", "smollm3",
        "olmo2", "granite", "mixtral", "qwen3-moe", "opt", "gpt2", "t5", "mt5", "bart", "mbart")


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A family's folder and its config.json, which a test may write anew."""

    @cache
    def make(family: str) -> tuple[Path, dict[str, Any]]:
        folder = tmp_path_factory.mktemp(family)
        (toys.make_modern if family in toys.MODERN_FAMILIES else toys.make_model)(family, folder)
        return folder, json.loads((folder / "config.json").read_text())

    return make


def query() -> Any:
    return dataclasses.replace(max(toys.random_queries(8), key=lambda q: len(q.input_ids)),
                               index=0, max_new_tokens=12)


def refused(folder: Path, config: dict[str, Any]) -> str:
    """What is said of the first key or tensor that is refused; "": none is."""
    (folder / "config.json").write_text(json.dumps(config))
    try:
        check_weights(folder, toys.spec_of(folder))
    except InputError as error:
        return str(error)
    return ""


def holds(folder: Path, family: str, config: dict[str, Any], key: str) -> str:
    """"refused" by the key, or "executed" as transformers does it."""
    if said := refused(folder, config):
        assert key in said, f"{key} of {family}: {said}"
        return "refused"
    sink, _ = run_in_process(folder, [query()], degrees=(1,))
    expected = toys.generate(toys.reference_of(folder), query())
    assert list(sink.results[0].output_ids) == expected, f"{family} {key} {config.get(key)}"
    return "executed"


@pytest.mark.parametrize("kind", MODEL_TYPES)
def test_every_key_of_transformers_class_is_known(kind):
    """One that a new version adds is found here."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]()
    config = {**made.to_dict(), "model_type": kind, "tie_word_embeddings": True}
    if kind == "qwen3_moe":
        config["num_experts"] = config["num_local_experts"]
    assert from_hf_config(config, "x").not_used == ""
    own = {field.name for field in dataclasses.fields(made)} | set(type(made).attribute_map)
    for key in own:
        if config.get(key) is None:  # which asks for nothing, as it stands
            try:
                told = from_hf_config({**config, key: 1}, "x").not_used
            except InputError as error:
                told = "" if key in str(error) else str(error)
            assert told == "", f"{key}: {told}"


@pytest.mark.parametrize("kind", [*MODEL_TYPES, *PLANNED_TYPES])
def test_an_absent_key_has_the_default_of_transformers_class(kind):
    """Or is missed by its name. Positions beyond which a model was not trained have none here."""
    from transformers import CONFIG_MAPPING

    def read(config: dict[str, Any]) -> ModelSpec:
        spec = from_hf_config(config, "x")
        return dataclasses.replace(spec, num_kv_heads=spec.kv_heads, head_size=spec.head_dim,
                                   max_positions=None)

    config = {**CONFIG_MAPPING[kind]().to_dict(), "model_type": kind}
    if kind == "qwen3_moe":
        del config["num_local_experts"]  # another name of num_experts
        config["num_experts"] = 128
    if kind == "deepseek_v2":
        config["num_experts_per_tok"] = 6  # its class names none
    whole, required = read(config), set[str]()
    for key in config.keys() - {"model_type"}:
        try:
            assert read({name: config[name] for name in config if name != key}) == whole, key
        except InputError as error:
            assert key in str(error)
            required.add(key)
    assert 1 <= len(required) <= 16  # sizes


CASES = [(family, json.loads(changes)) for families, _, changes in (
    line.partition(" | ") for line in
    Path(__file__).with_name("every_key.txt").read_text("utf-8").splitlines()[1:])
    for family in (TOYS if families == "all" else families.split(", "))]


@pytest.mark.parametrize(("family", "changes"), CASES)
def test_a_key_is_executed_as_transformers_does_it_or_refused(toy, family, changes):
    folder, config = toy(family)
    holds(folder, family, {**config, **changes}, next(iter(changes)))


@pytest.mark.parametrize("family", TOYS)
def test_a_key_that_is_absent_means_what_it_does_in_transformers(toy, family):
    """Or is missed by its name, or by that of the tensors whose shape it is."""
    folder, config = toy(family)
    executed = 0
    for key in ("sliding_window", "rope_parameters", "hidden_act", "hidden_activation",
                "rms_norm_eps", "layer_types", "head_dim", "num_key_value_heads", "norm_topk_prob"):
        if key in config:
            rest = {name: value for name, value in config.items() if name != key}
            executed += not refused(folder, rest) and holds(folder, family, rest, key) == "executed"
    assert executed or family in ("opt", "gpt2", *toys.ENCODER_DECODER_FAMILIES)


def test_windows_are_refused_by_their_key_where_the_family_has_none():
    for kind in ("llama", "olmo2", "granite"):
        config = {"model_type": kind, "num_hidden_layers": 2, "hidden_size": 8,
                  "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 11,
                  "intermediate_size": 16, "max_position_embeddings": 64}
        for window in (None, 64):
            from_hf_config({**config, "sliding_window": window}, "x")
        with pytest.raises(InputError, match=rf"config.json: sliding_window = 4: .*type {kind}"):
            from_hf_config({**config, "sliding_window": 4}, "x")


def test_what_nothing_reads_is_told(tmp_path):
    toys.make_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["alpha"] = 8.0
    (tmp_path / "config.json").write_text(json.dumps({**config, "use_qk_norm": True, "moe": None}))
    said = json.loads((tmp_path / "generation_config.json").read_text())
    (tmp_path / "generation_config.json").write_text(json.dumps({**said, "top_p": 0.8, "x": 1}))
    assert toys.spec_of(tmp_path).not_used == "use_qk_norm, rope_parameters.alpha"
    shown = CliRunner().invoke(cli, ["models", "--check", str(tmp_path)])
    assert shown.exit_code == 0
    assert ("not used use_qk_norm, rope_parameters.alpha of config.json; top_p, x of "
            "generation_config.json") in " ".join(shown.stdout.split())


def test_every_key_of_generation_config_is_done_refused_or_told(tmp_path):
    from transformers import GenerationConfig

    done = {"forced_bos_token_id", "forced_eos_token_id", "min_length", "min_new_tokens",
            "no_repeat_ngram_size", "repetition_penalty", "bos_token_id", "eos_token_id",
            "pad_token_id", "decoder_start_token_id"}  # the last four by the tokenizer's reader
    harmless = {"output_attentions", "output_hidden_states", "use_cache", "transformers_version",
                "_from_model_config"}
    for key in vars(GenerationConfig()).keys() - done - harmless:
        folder = tmp_path / key
        folder.mkdir()
        (folder / "generation_config.json").write_text(json.dumps({key: 7}))
        try:
            generation_rules(folder)
        except InputError as error:
            assert key in str(error)
        else:
            assert ignored_settings(folder) == [key]
        shutil.rmtree(folder)


@pytest.mark.parametrize(("family", "key", "value"), [
    ("gpt2", "activation_function", "gelu"), ("gpt2", "scale_attn_weights", False),
    ("gpt2", "scale_attn_by_inverse_layer_idx", True), ("gpt2", "reorder_and_upcast_attn", True),
    ("gpt2", "add_cross_attention", True), ("t5", "feed_forward_proj", "gated-silu")])
def test_a_variant_is_refused_by_its_key(toy, family, key, value):
    config = toy(family)[1]
    from_hf_config(config, "x")
    with pytest.raises(InputError, match=f"{key} = "):
        from_hf_config({**config, key: value}, "x")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_t5_saved_by_transformers_5_scales_its_head_as_the_published_one(tmp_path, version):
    toys.make_t5(version, tmp_path / "published").config.save_pretrained(tmp_path / "saved")
    assert (toys.spec_of(tmp_path / "saved").tied_embeddings
            == toys.spec_of(tmp_path / "published").tied_embeddings == (version == "1.0"))
