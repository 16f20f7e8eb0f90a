"""Checkpoints: shards, wrong shapes, missing tensors, where a model comes from; every tensor of a
slice is read once. A model is known by what is in its files, not by where they lie or when they
were written."""

import errno
import shutil
import socket
import ssl
import urllib.error
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from examples import some
from toy_runs import run_in_process, split_stages
from toys import ENCODER_DECODER_FAMILIES, FAMILIES, make_model, random_queries, spec_of

from xgpt.core.errors import XgptError
from xrunner.checkpoint import source
from xrunner.checkpoint import source as hub
from xrunner.checkpoint.identity import changed_files, model_files
from xrunner.checkpoint.layout import wanted_tensors
from xrunner.checkpoint.reader import CheckpointReader
from xrunner.models.encoder_decoder import load_stage


def test_shards_and_pytorch_files_give_the_same_tokens(tmp_path):
    model = make_model("llama", tmp_path / "single")
    model.save_pretrained(tmp_path / "sharded", max_shard_size="40KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    (tmp_path / "bin").mkdir()
    torch.save(model.state_dict(), tmp_path / "bin" / "pytorch_model.bin")
    config = (tmp_path / "single" / "config.json").read_text()
    (tmp_path / "bin" / "config.json").write_text(config)
    answers = []
    for name in ("single", "sharded", "bin"):
        sink, _ = run_in_process(tmp_path / name, random_queries(5), num_stages=2, num_groups=2)
        answers.append({r.query.index: r.output_ids for r in sink.results})
    assert answers[0] == answers[1] == answers[2]


@pytest.mark.parametrize(("value", "dtype"), [
    (float("nan"), torch.float32), (float("inf"), torch.float32), (1e6, torch.float16)])
def test_weights_that_are_not_finite_are_named(value, dtype, tmp_path):
    """1e6 is more than float16 holds."""
    weight = torch.ones(4, 3)
    weight[2, 1] = value
    torch.save({"some.weight": weight}, tmp_path / "pytorch_model.bin")
    with pytest.raises(XgptError, match="'some.weight' holds values that are not finite as float"):
        CheckpointReader(tmp_path, dtype).get("some.weight", (4, 3))


def test_quantised_tensors_in_pytorchs_own_files_are_refused(tmp_path):
    torch.save({"norm.weight": torch.ones(4, dtype=torch.int8)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(XgptError, match=r"norm.weight.*I8.*scales"):
        CheckpointReader(tmp_path, torch.float32).get("norm.weight", (4,))


def test_names_one_level_up_are_found(llama, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(llama[0] / "model.safetensors")
    save_file({k.removeprefix("model."): v for k, v in tensors.items()},
              tmp_path / "model.safetensors")
    reader = CheckpointReader(tmp_path, torch.float32)
    ours = reader.get("model.layers.0.mlp.up_proj.weight", (80, 48))
    assert torch.equal(ours, tensors["model.layers.0.mlp.up_proj.weight"])


def test_a_local_directory_serves_itself_and_says_so(llama):
    files = source.find_model(str(llama[0]), say=lambda message: None)
    assert files.directory == llama[0] and "local directory" in files.served_by
    assert files.spec == spec_of(llama[0]) or files.spec.num_layers == 5


def test_a_model_nobody_has_is_refused_with_every_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def no_hub(hub_id: str, reasons: list[str], *, local_only: bool) -> None:
        if not local_only:
            reasons.append(f"hub {hub_id}: unreachable")

    monkeypatch.setattr(source, "_from_hub", no_hub)
    with pytest.raises(XgptError, match="no folder of that name.*someone/nothing: unreachable"):
        source.find_model("someone/nothing", say=lambda message: None)


UNKNOWN = socket.gaierror(-2, "Name or service not known")


@pytest.fixture
def failing(monkeypatch):
    def ask(error: Exception) -> None:
        def open_(request: Any, timeout: float) -> Any:
            raise error
        monkeypatch.setattr(hub.urllib.request, "urlopen", open_)

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")
    return ask


@pytest.mark.parametrize(("cause", "is_vain"), [
    (UNKNOWN, True), (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), True),
    (TimeoutError("timed out"), True), (OSError(errno.ENETUNREACH, "Network is unreachable"), True),
    (ssl.SSLError(1, "certificate verify failed"), False), ("unknown url type", False)])
def test_only_what_no_client_gets_round_is_in_vain(failing, cause, is_vain):
    failing(urllib.error.URLError(cause))
    said = hub.why_unreachable(1.0)
    assert (said is not None) == is_vain
    if is_vain:
        assert f"https://mirror.example cannot be reached: {cause.strerror or cause}" == said


def test_an_answer_of_any_kind_is_one(failing, monkeypatch):
    failing(urllib.error.HTTPError("https://mirror.example", 405, "no", {}, None))
    assert hub.hub_error(1.0) is None and hub.why_unreachable(1.0) is None
    failing(urllib.error.URLError(UNKNOWN))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert hub.why_unreachable(1.0) is None  # the client says so itself, at once


def test_without_a_network_nothing_is_tried_six_times(failing, monkeypatch, tmp_path):
    client = pytest.importorskip("huggingface_hub")
    calls = []

    def ask(*arguments: Any, local_files_only: bool, **_: Any) -> str:
        calls.append(local_files_only)
        raise FileNotFoundError(errno.ENOENT, "not kept")

    for name in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(client, name, ask)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    failing(urllib.error.URLError(UNKNOWN))
    assert source.config_from_hub("a/b") == (
        None, "https://mirror.example cannot be reached: Name or service not known")
    with pytest.raises(XgptError, match="no folder of that name; https://mirror.example "
                                        "cannot be reached: Name or service not known"):
        source.find_model("a/b", lambda message: None)
    assert calls == [True]


HALVES = (torch.float16, torch.bfloat16)


class Noting(CheckpointReader):
    """A reader that notes what was asked of it."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        super().__init__(directory, dtype)
        self.asked: list[tuple[object, ...]] = []

    def get(self, name: str, *rest: Any) -> torch.Tensor:
        found = super().get(name, *rest)
        self.asked.append((name, *rest, found.sum().item()))
        return found


def load(directory: Path, dtype: torch.dtype, num_stages: int) -> list[Noting]:
    spec = spec_of(directory)
    readers = []
    for stage in split_stages(spec.num_layers, num_stages, encoder_layers=spec.num_encoder_layers):
        readers.append(Noting(directory, dtype))
        load_stage(spec, readers[-1], stage)
    return readers


@pytest.mark.parametrize("family", some(
    (*FAMILIES, *ENCODER_DECODER_FAMILIES),
    lambda family: family in ("llama-tied", "opt", "gpt2", "t5", "bart")))
def test_half_precision_and_sharded_directories_load_and_each_tensor_once(family, tmp_path):
    model = make_model(family, tmp_path / "float32")
    for dtype in HALVES:
        name = str(dtype).removeprefix("torch.")
        model.to(dtype).save_pretrained(tmp_path / name, max_shard_size="40KB")
        config = (tmp_path / "float32" / "config.json").read_text()
        (tmp_path / name / "config.json").write_text(config)
        assert len(list((tmp_path / name).glob("*.safetensors"))) > 3
        model.float()  # rounded for good; both halves start from what the first left
        model.save_pretrained(tmp_path / f"{name}-whole")
        (tmp_path / f"{name}-whole" / "config.json").write_text(config)
        for num_stages in (1, 2):
            sharded = load(tmp_path / name, dtype, num_stages)
            whole = load(tmp_path / f"{name}-whole", dtype, num_stages)
            for ours, theirs in zip(sharded, whole, strict=True):
                assert ours.asked == theirs.asked
                assert 2 * ours.bytes_read == theirs.bytes_read, "as stored: 2 bytes, and 4"
                once = [asked[:-1] for asked in ours.asked]
                assert len(once) == len(set(once)), "a tensor was read twice"
            asked = {name: shape for reader in sharded for name, shape, *_ in reader.asked}
            assert asked == dict(wanted_tensors(spec_of(tmp_path / name))), "what is checked"
    bias = getattr(model, "final_logits_bias", None)  # BART's, which is no parameter
    weights = sum(p.numel() for p in model.parameters()) + (0 if bias is None else bias.numel())
    assert sum(reader.bytes_read for reader in load(tmp_path / name, dtype, 1)) == 2 * weights


def test_other_weights_of_the_same_size_and_shape_are_another_model(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    (first / "config.json").write_text("{}")
    (first / "notes.md").write_text("not of the model")
    source = np.random.default_rng(3)
    content = source.bytes(4_000_000)
    (first / "model.safetensors").write_bytes(content)
    before = model_files(first)
    assert set(before) == {"config.json", "model.safetensors"}
    shutil.copytree(first, second)
    (second / "notes.md").write_text("changed")
    (second / "config.json").touch()
    assert model_files(second) == before
    # the header and the size stay, every weight is another: as after one more training step
    (second / "model.safetensors").write_bytes(content[:2_000_000] + source.bytes(2_000_000))
    (second / "tokenizer.json").write_text("{}")
    assert changed_files(before, model_files(second)) == ["model.safetensors", "tokenizer.json"]


def test_a_small_file_is_read_whole(tmp_path):
    (tmp_path / "model.bin").write_bytes(bytes(100_000))
    before = model_files(tmp_path)
    (tmp_path / "model.bin").write_bytes(bytes(70_001) + b"x" + bytes(29_998))
    assert changed_files(before, model_files(tmp_path)) == ["model.bin"]


@pytest.mark.parametrize("name", [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
    "tokenizer.model", "merges.txt", "chat_template.jinja", "model.gguf"])
def test_each_file_that_decides_answers_is_looked_at(name, tmp_path):
    before = model_files(tmp_path)
    (tmp_path / name).write_text("one")
    there = model_files(tmp_path)
    (tmp_path / name).write_text("two")
    assert changed_files(before, there) == changed_files(there, model_files(tmp_path)) == [name]
