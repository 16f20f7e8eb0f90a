"""GGUF files: tokens equal transformers' of the same weights, widened by the library; what is not
understood is refused by its key."""

import dataclasses
import json
import shutil
import sys
import types
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from replays import answers_of, generated
from toy_runs import run_in_process
from toys import EOS, VOCAB, random_queries, stir_norms_and_biases

from xgpt.app.models import check_model_named
from xgpt.core.errors import InputError, MissingExtraError, XgptError
from xgpt.core.hf.values import gguf_in
from xrunner.checkpoint import gguf_file
from xrunner.checkpoint.gguf_file import write_safetensors
from xrunner.checkpoint.layout import wanted_tensors
from xrunner.checkpoint.reader import CheckpointReader
from xrunner.checkpoint.source import ModelFiles, model_at_hand, read_spec
from xrunner.checkpoint.tensors import check_weights
from xrunner.models.weights import TensorPart

gguf = pytest.importorskip("gguf")

LAYOUTS = ((1,), (1, 1), (2,))  # tensor-parallel degrees of the stages
HEADS, KV_HEADS, DIM = 4, 2, 16
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
         "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm"}
KINDS = {"llama": ("Q8_0", "Q4_0"), "llama3": ("Q4_0", "Q8_0"), "qwen2": ("Q4_0", "F16"),
         "qwen3": ("Q8_0", "F32")}
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
ROPE3 = {**ROPE, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
         "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


def packed(weight: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """(what is stored, what it means)"""
    own = gguf.GGMLQuantizationType[kind]
    stored = gguf.quants.quantize(weight, own)
    return stored, gguf.quants.dequantize(stored, own)


def paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of a head's rows: 0, d / 2, 1, d / 2 + 1, ..."""
    height = len(weight) // heads
    order = [head * height + half * height // 2 + pair for head in range(heads)
             for pair in range(height // 2) for half in (0, 1)]
    return weight[order]


def make_gguf(kind: str, path: Path, **metadata: Any) -> Any:
    """Writes a toy; returns transformers' own of the same weights in float32."""
    import transformers

    torch.manual_seed(0)
    architecture = kind.replace("llama3", "llama")
    prefix = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}[architecture]
    model = getattr(transformers, f"{prefix}ForCausalLM")(getattr(transformers, f"{prefix}Config")(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=DIM, rms_norm_eps=1e-5,
        max_position_embeddings=128, initializer_range=0.3, tie_word_embeddings=False,
        rope_parameters=ROPE3 if kind == "llama3" else ROPE,
        bos_token_id=1, eos_token_id=EOS, pad_token_id=0))
    stir_norms_and_biases(model)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(3)
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(DIM)
    writer.add_value_length(DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5000.0)
    for key, value in metadata.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    tokens = ["<pad>", "<s>", "<unk>", "<x>", "<y>", "</s>", "ab",
              *(chr(i) for i in range(33, 123))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 6 + [1] * 91)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(EOS)
    if kind == "llama3":  # llama.cpp's converter stores what each pair's frequency is divided by
        plain = 5000.0 ** -(torch.arange(0, DIM, 2) / DIM)
        factors = plain / model.model.rotary_emb.inv_freq
        assert factors.max() > 7
        writer.add_tensor("rope_freqs.weight", factors.numpy())
    state = model.state_dict()
    for name, tensor in state.items():
        weight = tensor.numpy()
        type_name = KINDS[kind]["mlp" in name]
        stored, means = packed(weight, type_name if weight.ndim == 2 else "F32")
        tensor.copy_(torch.from_numpy(means))
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            stored = paired(stored, HEADS if ".q_proj" in name else KV_HEADS)
        is_packed = stored.dtype == np.uint8
        writer.add_tensor(own_name(name), np.ascontiguousarray(stored), raw_dtype=(
            gguf.GGMLQuantizationType[type_name] if is_packed else None))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model.eval()


def own_name(name: str) -> str:
    """GGUF's of one of transformers'."""
    module, _, ending = name.rpartition(".")
    if not module.startswith("model.layers."):
        return {"model.embed_tokens": "token_embd", "model.norm": "output_norm",
                "lm_head": "output"}[module] + f".{ending}"
    _, _, layer, part = module.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.{ending}"


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    @cache
    def make(architecture: str) -> tuple[Path, Any]:
        path = tmp_path_factory.mktemp(architecture) / "toy.gguf"
        return path, make_gguf(architecture, path)

    return make


def found(path: Path) -> ModelFiles:
    files = model_at_hand(str(path))
    assert files is not None
    return files


@pytest.mark.parametrize("architecture", KINDS)
def test_tokens_equal_generate_of_the_widened_weights(toy, architecture):
    (path, model), queries = toy(architecture), random_queries(5)
    files = found(path)
    assert files.spec.stored_as.startswith("GGUF (") and "GGUF file" in files.served_by
    check_weights(files.directory, files.spec)
    expected = generated(model, queries)
    assert len(set(map(tuple, expected.values()))) > 3
    for degrees in LAYOUTS:
        sink, _ = run_in_process(files.directory, queries, degrees=degrees)
        assert answers_of(sink) == expected


@pytest.mark.parametrize("architecture", KINDS)
def test_any_rows_or_columns_are_those_of_the_whole(toy, architecture):
    path, model = toy(architecture)
    files, state = found(path), model.state_dict()
    reader = CheckpointReader(files.directory, torch.float32)
    for name, shape in wanted_tensors(files.spec):
        assert torch.equal(reader.get(name, shape), state[name]), name
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.down_proj.weight"):
        whole = state[name]
        for dim, count in enumerate(whole.shape):
            for first, last in ((0, 1), (3, 3), (5, count - 7), (count // 2, count)):
                part = TensorPart(dim, first, last)
                assert torch.equal(reader.get(name, tuple(whole.shape), part), part.of(whole))


def test_a_file_or_its_folder_is_a_model_made_into_a_folder_once(toy):
    path, _ = toy("llama")
    assert gguf_in(path) == gguf_in(path.parent) == path
    files = found(path)
    assert found(path.parent).directory == files.directory
    assert json.loads((files.directory / "config.json").read_text())["rms_norm_eps"] == 1e-5
    assert (files.directory / "model.gguf").resolve() == path.resolve()
    (path.parent / "other.gguf").write_bytes(b"")
    assert gguf_in(path.parent) is None, "which of two is not said"
    (path.parent / "other.gguf").unlink()
    words = " ".join(str(check_model_named(str(path))).split())
    assert "stored as GGUF (Q4_0, Q8_0, F32)" in words
    assert "not by vllm: a folder of safetensors" in words


@pytest.mark.parametrize("architecture", KINDS)
def test_a_copy_as_safetensors_holds_the_same_and_is_read_by_transformers(
        toy, architecture, tmp_path):
    import transformers

    path, model = toy(architecture)
    write_safetensors(path, tmp_path / "made")
    spec = read_spec(tmp_path / "made", "x")
    assert not check_weights(tmp_path / "made", spec) and not spec.stored_as
    assert dataclasses.replace(found(path).spec, stored_as="", name="x") == spec
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "made")
    held = theirs.state_dict()
    assert all(torch.equal(held[name], weight) for name, weight in model.state_dict().items())


def test_without_room_for_the_copy_what_is_needed_is_said(toy, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(free=5))
    with pytest.raises(XgptError, match=r"are needed there for the weights of toy\.gguf"):
        write_safetensors(toy("llama")[0], tmp_path / "made")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(("metadata", "named"), [
    ({"expert_count": 4}, "llama.expert_count"), ({"rope.new_kind": 1}, "llama.rope.new_kind"),
    ({"attention.value_length": 8}, "llama.attention.value_length")])
def test_metadata_that_is_not_understood_is_refused_by_its_key(tmp_path, metadata, named):
    make_gguf("llama", tmp_path / "toy.gguf", **metadata)
    with pytest.raises(InputError, match=named):
        found(tmp_path)


def test_what_is_no_gguf_file_or_another_architecture_is_refused(tmp_path):
    path = tmp_path / "toy.gguf"
    path.write_bytes(b"not GGUF at all, but long enough for a header")
    with pytest.raises(InputError, match=r"toy.gguf.*cannot be read as GGUF"):
        found(path)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(InputError, match="'mamba' is not read: known are llama, qwen2, qwen3"):
        found(path)


def test_without_the_package_the_line_that_installs_it_is_said(tmp_path, monkeypatch):
    (tmp_path / "toy.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MissingExtraError, match=r"gguf.*pip install"):
        gguf_file.GgufFile(tmp_path / "toy.gguf")
