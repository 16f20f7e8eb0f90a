"""Copies of tokenizers in xgpt's cache: made once by transformers, and read without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="runs need the extra `run`")

from small_tokenizers import plain_folder  # noqa: E402

from xrunner.io.tokenizer import TextTokenizer  # noqa: E402

READ = ("import sys, pathlib; from xrunner.io.tokenizer import TextTokenizer as T; "
        "t = T(pathlib.Path(sys.argv[1])); print(t.encode_many(['a dog'], special=True), "
        "t.render_chat([{'role': 'user', 'content': 'x'}]), 'transformers' in sys.modules)")


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return plain_folder(tmp_path / "model", bos_token="<s>",
                        chat_template="{{ bos_token }}{{ messages[0].content }}")


def copies(model: Path) -> list[str]:
    return sorted(path.name for path in (model.parent / "cache/xgpt/tokenizers").iterdir())


def test_two_that_make_the_same_copy_at_once_do_not_hurt_each_other(model):
    words = [sys.executable, "-c", READ, str(model)]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = {process.communicate(timeout=120)[0] for process in both}
    assert len(told) == 1 and len(copies(model)) == 1
    warm = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert warm == told.pop().replace("True", "False"), "it is read without transformers"


def test_a_copy_is_of_the_files_and_of_the_version(model, monkeypatch):
    TextTokenizer(model)
    first = copies(model)
    (model / "model.safetensors").write_bytes(b"weights")
    moved = model.rename(model.with_name("moved"))
    TextTokenizer(moved)
    assert copies(moved) == first, "neither its weights nor its place count"
    (moved / "special_tokens_map.json").write_text('{"bos_token": "</s>"}')
    assert TextTokenizer(moved).render_chat([{"role": "user", "content": "x"}]) == "</s>x"
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    TextTokenizer(moved)
    assert len(copies(moved)) == 3


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("x")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "not there"):
        assert not TextTokenizer(folder).is_there and TextTokenizer(folder).template is None
