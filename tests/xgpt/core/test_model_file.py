"""A config.json that is broken is wrong input: every mistake at once, by file, key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from xgpt.cli.main import cli
from xgpt.core.errors import InputError
from xgpt.core.hf.config import read_shape

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
def test_every_size_that_is_no_size_is_named_at_once(tmp_path: Path,
                                                     config: dict[str, Any]) -> None:
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
def test_a_size_beyond_all_models_is_refused_and_not_planned(
        tmp_path: Path, config: dict[str, Any], key: str, most: int) -> None:
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
def test_what_is_no_size_is_refused_by_its_key_alone(tmp_path: Path, config: dict[str, Any],
                                                     key: str) -> None:
    assert [found for found, _, _ in refused(tmp_path, config)] == [key]


@pytest.mark.parametrize(("text", "reason"), [
    ("", "no JSON"), ("{", "no JSON"), ("[]", "not a JSON object"), ("null", "not a JSON object"),
    ("[" * 100_000, "no JSON"), ('{"a": "\x01"}', "no JSON")])
def test_a_file_that_is_no_config(tmp_path: Path, text: str, reason: str) -> None:
    ((_, _, why),) = refused(tmp_path, text)
    assert reason in why


def test_the_command_refuses_a_job_with_it(tmp_path: Path) -> None:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "config.json").write_text(json.dumps(
        {**LLAMA, "hidden_size": None, "num_attention_heads": "12"}))
    job = tmp_path / "job.yaml"
    job.write_text("model: ./toy\ncluster: a40-4\nworkload: {requests: {count: 9}, task: S}\n")
    done = CliRunner().invoke(cli, ["schedule", str(job)])
    assert isinstance(done.exception, InputError)
    assert {m.key for m in done.exception.mistakes} == {"hidden_size", "num_attention_heads"}
