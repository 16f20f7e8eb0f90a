"""A model is known by what is in its files, not by where they lie or when they were written."""

import shutil

import numpy as np
import pytest

from xrunner.checkpoint.identity import changed_files, model_files


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
