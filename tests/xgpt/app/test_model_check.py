"""`xgpt models --check`: planned or not, executed by which engine, memory, keys not supported."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from xgpt.app import models as model_check
from xgpt.app.models import UnsupportedModel, check_model_named
from xgpt.app.opened_job import open_file
from xgpt.cli.main import cli
from xgpt.core.errors import EXIT_BAD_INPUT, XgptError

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 256, "tie_word_embeddings": True, "hidden_act": "silu"}


def folder_of(path: Path, **changes: object) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return path


def shown(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["models", "--check", *map(str, arguments)])


def test_what_is_planned_and_executed_by_whom():
    check = check_model_named("gpt3-175b")
    assert check.is_planned and not check.is_executed and "weights: random" in check.weights
    held = {row["dtype"]: row["weight_bytes"] for row in check.memory}
    assert held["float32"] == 2 * held["bfloat16"]
    assert held["int8"] < held["bfloat16"]
    assert 2 * 175e9 < held["bfloat16"] < 2.1 * 175e9
    result = shown("gpt3-175b")
    assert result.exit_code == 0 and max(map(len, result.stdout.splitlines())) <= 80
    check = check_model_named("t5-small")
    engines = dict(check.engines)
    assert engines["xgpt"] == "" and "decoder-only" in engines["deepspeed"]
    assert "int8" not in {row["dtype"] for row in check.memory}


def test_the_list_says_what_was_run_and_what_is_planned_only():
    listed = CliRunner().invoke(cli, ["models", "--verbose"]).stdout
    last = {line.split()[0]: line.split()[-1] for line in listed.splitlines() if line}
    assert (last["smollm2-135m"], last["opt-13b"], last["qwen3-8b"]) == (
        "weights", "random", "only")
    assert "H200 (run)" in " ".join(listed.split()) and "B200 (run)" not in listed
    assert max(map(len, listed.splitlines())) <= 80


def test_a_hub_id_is_checked_by_its_shape_and_gpt_oss_says_who_executes_it():
    words = " ".join(shown("Qwen/Qwen3-8B-Base").stdout.split())
    assert "in the catalog, of the shape of qwen3-8b" in words and "yes, by xgpt" in words
    check = check_model_named("openai/gpt-oss-20b")
    assert check.is_planned and "attention with sinks" in dict(check.engines)["xgpt"]


def test_a_folder_without_weights_says_so(tmp_path):
    result = shown(folder_of(tmp_path / "toy"))
    assert result.exit_code == 0 and "no: " in result.stdout and "model.safetensors" in (
        " ".join(result.stdout.split()))
    told = json.loads(shown(tmp_path / "toy", "--json").stdout)
    assert told["is_planned"] is True and told["is_executed"] is False


def test_weights_of_fewer_bits_are_said_and_planned_as_they_are_executed(tmp_path):
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    stored = check_model_named(str(folder_of(tmp_path / "toy", quantization_config=awq)))
    plain = check_model_named(str(folder_of(tmp_path / "plain")))
    assert stored.memory == plain.memory and stored.is_planned
    words = " ".join(str(stored).split())
    assert "stored as 4 bits (AWQ, groups of 32); widened when they are loaded" in words
    assert "plain weights" in dict(stored.engines)["deepspeed"] and not dict(stored.engines)["xgpt"]


@pytest.mark.parametrize(("engine", "words"), [
    ("xgpt", " and executed as float32: the plan reserves 545 KiB for them"),
    ("vllm", ", which vLLM executes; the plan reserves 545 KiB for them, as if they were float32")])
def test_a_job_says_as_what_its_weights_are_stored_and_planned(tmp_path, engine, words):
    awq = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    for name, stored in (("toy", awq), ("plain", None)):
        folder = folder_of(tmp_path / name, quantization_config=stored,
                           max_position_embeddings=1024)
        job, said = tmp_path / f"{name}.yaml", list[str]()
        job.write_text(f"model: {folder}\ncluster: local\n"
                       "workload: {task: S, requests: {count: 5}}\n"
                       f"run: {{engine: {engine}, dtype: float32, ranks: 1}}\n")
        tell: Any = SimpleNamespace(say=said.append)
        open_file(job, tell=tell, need="lengths")
        joint = " ".join(" ".join(said).split())
        assert (f"the weights are stored as 4 bits (AWQ, groups of 32){words}" in joint) == (
            name == "toy")


def test_keys_that_are_not_supported_are_named_and_end_with_exit_code_2(tmp_path):
    toy = folder_of(tmp_path / "toy", mlp_bias=True, attention_bias="yes",
                    quantization_config={"quant_method": "hqq"})
    result = shown(toy)
    assert isinstance(result.exception, UnsupportedModel)
    assert result.exception.exit_code == EXIT_BAD_INPUT
    words = " ".join(result.stdout.split())
    assert "planned no" in words
    named = str(result.exception)
    assert all(key in named for key in ("mlp_bias", "attention_bias", "quantization_config", "hqq"))
    assert set(result.exception.details["not_supported"]) >= {"mlp_bias", "attention_bias"}


def test_of_a_hub_model_the_config_alone_is_fetched(tmp_path, monkeypatch):
    toy = folder_of(tmp_path / "toy")
    monkeypatch.setattr(model_check, "config_from_hub", lambda hub_id: (toy, ""))
    check = check_model_named("someone/toy")
    assert check.is_fetched and check.is_executed and "submit` fetches" in " ".join(
        str(check).split())
    monkeypatch.setattr(model_check, "config_from_hub", lambda hub_id: (None, "no way to it"))
    with pytest.raises(XgptError, match="no way to it"):
        check_model_named("someone/toy")
