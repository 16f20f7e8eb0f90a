"""A model's folder that is broken is refused before anything is measured: by file and key."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_tokenizers import plain_folder
from toys import make_model, spec_of

from xgpt.core.errors import InputError, Mistake
from xrunner.checkpoint.reader import CheckpointReader
from xrunner.checkpoint.source import read_spec
from xrunner.checkpoint.tensors import MAX_SHOWN, check_weights, header
from xrunner.files.tokenizer import TextTokenizer, eos_ids, start_token


@pytest.fixture
def sharded(tmp_path):
    make_model("llama", tmp_path).save_pretrained(tmp_path, max_shard_size="40KB")
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    check_weights(tmp_path, spec_of(tmp_path))
    return tmp_path


def refused(folder: Path) -> tuple[Mistake, ...]:
    with pytest.raises(InputError) as caught:
        check_weights(folder, spec_of(folder))
    return caught.value.mistakes


def test_every_shard_that_is_missing_or_cut_off_is_named(sharded):
    first, second, third, *_ = sorted(sharded.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-100])
    third.write_bytes(third.read_bytes()[:20])
    found = {m.value or Path(m.file).name: m.allowed for m in refused(sharded)}
    assert "missing from the folder" in found[first.name]
    assert "cut off" in found[second.name] and "cut off" in found[third.name]
    for name, file in CheckpointReader(sharded, torch.float32)._files.places.items():
        if file == second:
            with pytest.raises(InputError, match=f"{file.name}: cannot be read"):
                CheckpointReader(sharded, torch.float32).get(name, (1,))


@pytest.mark.parametrize(("content", "reason"), [
    (b"", "cut off"), (b"\0" * 64, "cannot be read"), (struct.pack("<Q", 9) + b"{" * 9,
                                                            "cannot be read"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git lfs pull"),
    (b"<!DOCTYPE html><html>", "cannot be read"), (struct.pack("<Q", 2) + b"[]", "cannot be read")])
def test_a_file_that_is_no_safetensors_file(tmp_path, content, reason):
    make_model("opt", tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    (mistake,) = refused(tmp_path)
    assert mistake.file == str(path) and reason in mistake.allowed
    with pytest.raises(InputError, match="model.safetensors: cannot be read"):
        CheckpointReader(tmp_path, torch.float32)


def test_an_index_that_is_broken_or_says_too_much(sharded):
    index = sharded / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"]["model.layers.77.mlp"] = table["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(table))
    assert [m.key for m in refused(sharded)] == ["model.layers.77.mlp"]
    for text in ("{", "[]"):
        index.write_text(text)
        assert refused(sharded)[0].key == index.name
    index.write_text("{}")
    assert [(m.file, m.key) for m in refused(sharded)] == [(str(index), "weight_map")]


def test_tensors_that_are_missing_or_of_other_shapes_are_told_at_once(tmp_path):
    make_model("llama", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    wrong, gone = "model.layers.3.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight"
    tensors[wrong] = tensors[wrong][:70].contiguous()
    del tensors[gone]
    save_file(tensors, path)
    found = {m.key: (m.value, m.allowed) for m in refused(tmp_path)}
    assert set(found) == {wrong, gone}
    assert found[wrong] == ([70, 48], "by config.json its shape is [80, 48]")
    assert "no such tensor" in found[gone][1]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 81}))
    many = refused(tmp_path)
    assert len(many) == MAX_SHOWN + 1 and "more like these" in many[-1].allowed


def test_weights_of_fewer_bits_and_their_scales_are_refused(tmp_path):
    """An fp8 checkpoint whose config.json does not say so was read as if it were plain."""
    make_model("llama", tmp_path)
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(path)
    save_file({**tensors, name: tensors[name].to(torch.float8_e4m3fn),
               f"{name}_scale": torch.ones(1)}, path)
    seen = {m.key: m for m in refused(tmp_path)}
    assert set(seen) == {name, f"{name}_scale"}
    assert seen[name].value == "F8_E4M3" and "BF16" in seen[name].allowed
    assert "scales of quantised weights" in seen[f"{name}_scale"].allowed
    save_file({**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, path)
    check_weights(tmp_path, read_spec(tmp_path, "llama"))


def test_a_folder_without_weights(tmp_path):
    make_model("opt", tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (mistake,) = refused(tmp_path)
    assert "no model.safetensors" in mistake.allowed
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\3\4 no torch file")
    with pytest.raises(InputError, match="pytorch_model.bin: cannot be read"):
        CheckpointReader(tmp_path, torch.float32)


@pytest.mark.parametrize(("file", "text", "key"), [
    ("tokenizer.json", "{", "tokenizer.json"), ("tokenizer.json", "{}", "tokenizer.json"),
    ("tokenizer.json", '{"model": 3}', "tokenizer.json"),
    ("tokenizer_config.json", "[", "tokenizer_config.json"),
    ("tokenizer_config.json", '{"chat_template": 4}', "chat_template"),
    ("tokenizer_config.json", '{"bos_token": 4}', "bos_token"),
    ("special_tokens_map.json", '{"eos_token": [1]}', "eos_token"),
    ("config.json", '{"model_type": "gpt2", "n_embd": "x"}', "n_embd"),
    ("vocab.json", "{", "vocab.json")])
def test_a_tokenizer_that_is_broken(tmp_path, monkeypatch, file, text, key):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / file).write_text(text)
    with pytest.raises(InputError) as caught:
        TextTokenizer(tmp_path)
    assert [m.key for m in caught.value.mistakes] == [key]


@pytest.mark.parametrize("value", ["2", [1, "2"], -1, True, 1.5])
def test_tokens_that_are_none(tmp_path, value):
    for name in ("generation_config.json", "config.json"):
        (tmp_path / name).write_text(json.dumps({"eos_token_id": value, "pad_token_id": value}))
        for read, key in ((eos_ids, "eos_token_id"), (start_token, "pad_token_id")):
            with pytest.raises(InputError) as caught:
                read(tmp_path)
            assert [(m.file, m.key, m.value) for m in caught.value.mistakes] == [
                (str(tmp_path / name), key, value)]
        (tmp_path / name).unlink()


@pytest.mark.parametrize("offsets", [[], [3], {}, None])
def test_a_header_whose_offsets_are_none_is_refused(tmp_path, offsets):
    head = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(head).to_bytes(8, "little") + head + bytes(4))
    with pytest.raises(ValueError, match="its header cannot be read"):
        header(path)


def test_a_tensor_that_an_index_promises_and_its_file_lacks_is_named_with_the_file(sharded):
    index = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    name, shard = next(iter(index.items()))
    held = load_file(sharded / shard)
    del held[name]
    save_file(held, sharded / shard)
    assert [(Path(m.file).name, m.key, m.allowed) for m in refused(sharded)] == [
        (shard, name, "no such tensor there, but the index says so")]
    said = f"{shard}: no tensor '{name}' there, but the index says so"
    with pytest.raises(InputError, match=said):
        CheckpointReader(sharded, torch.float32).get(name, (1,))


@pytest.mark.parametrize(("content", "said"), [
    ({"other": torch.ones(2)}, "no tensor 'lm_head.weight' there, but the index says so"),
    ({"lm_head.weight": "text"}, "no tensor 'lm_head.weight' there, but the index says so"),
    ([torch.ones(2)], "holds no tensors by their names")])
def test_the_same_of_a_pickle(tmp_path, content, said):
    torch.save(content, tmp_path / "pytorch_model-1.bin")
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(
        {"weight_map": {"lm_head.weight": "pytorch_model-1.bin"}}))
    with pytest.raises(InputError, match=f"pytorch_model-1.bin: {said}"):
        CheckpointReader(tmp_path, torch.float32).get("lm_head.weight", (2,))


@pytest.fixture
def pickled(tmp_path):
    """A toy model's folder whose weights are two files of torch.save and their index."""
    make_model("gpt2", tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(held)
    files = {"pytorch_model-1.bin": names[::2], "pytorch_model-2.bin": names[1::2]}
    for file, own in files.items():
        # as old checkpoints have them: parameters, and what is no tensor
        torch.save({**{n: torch.nn.Parameter(held[n]) for n in own}, "epoch": 3}, tmp_path / file)
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(
        {"weight_map": {name: file for file, own in files.items() for name in own}}))
    check_weights(tmp_path, spec_of(tmp_path), may_unpickle=True)
    return tmp_path


def test_tensors_of_pickles_are_checked_before_a_run_like_those_of_safetensors(pickled):
    first, second = pickled / "pytorch_model-1.bin", pickled / "pytorch_model-2.bin"
    held = torch.load(first)
    gone, wrong = [name for name in held if name != "epoch"][:2]

    def found() -> dict[str, str]:
        with pytest.raises(InputError) as caught:
            check_weights(pickled, spec_of(pickled), may_unpickle=True)
        return {f"{Path(m.file).name} {m.key}": m.allowed for m in caught.value.mistakes}

    torch.save({name: tensor for name, tensor in held.items() if name != gone}, first)
    assert found() == {f"{first.name} {gone}": "no such tensor there, but the index says so"}
    torch.save({**held, wrong: torch.ones(3, 1, 7)}, first)
    ((place, said),) = found().items()
    assert place.endswith(wrong.removeprefix("transformer."))
    assert "by config.json its shape is" in said
    torch.save(held, first)
    second.write_bytes(second.read_bytes()[:-100])
    ((place, said),) = found().items()
    assert place == f"{second.name} weights" and "cut off" in said


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_looking_at_a_pickle_runs_nothing_of_it(pickled, tmp_path):
    first, made = pickled / "pytorch_model-1.bin", tmp_path / "made"
    torch.save({**torch.load(first), "more": _Runs(made)}, first)
    with pytest.raises(InputError, match=r"it names posix.mkdir, which is no part of a tensor"):
        check_weights(pickled, spec_of(pickled), may_unpickle=True)
    assert not made.exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int32,
                                   torch.int8, torch.uint8, torch.float8_e4m3fn, torch.bool])
def test_a_pickles_tensors_are_noted_as_they_are(tmp_path, dtype):
    base = torch.zeros(6, 4).to(dtype)
    kept = {"whole": base, "turned": base.T, "rows": base[2:5], "scalar": base[0, 0]}
    path = tmp_path / "pytorch_model.bin"
    torch.save(kept, path)
    save_file({n: t.clone().contiguous() for n, t in kept.items()}, tmp_path / "a.safetensors")
    assert header(path) == header(tmp_path / "a.safetensors")
