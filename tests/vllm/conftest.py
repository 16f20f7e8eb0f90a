"""vLLM's interpreter for the tests marked `vllm`: XGPT_VLLM_PYTHON, else this one where it has
vLLM. Without either they are skipped."""

import importlib.util
import os
import sys

import pytest

pytest.importorskip("torch", reason="the reference needs the extra `run`")

import toys
from vllm_answers import Asked


@pytest.fixture(scope="session")
def vllm_python():
    python = os.environ.get("XGPT_VLLM_PYTHON")
    if python is None and importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: XGPT_VLLM_PYTHON names the Python of an environment that has it")
    return python or sys.executable


@pytest.fixture(scope="session")
def toy(tmp_path_factory):
    """A Llama of heads that vLLM's CPU kernels take, and transformers' own instance of it."""
    folder = tmp_path_factory.mktemp("toy")
    return folder, toys.make_modern(
        "llama", folder, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="session")
def asked(vllm_python, tmp_path_factory):
    """One process that answers, in turn, what has no command around it."""
    engine = Asked(vllm_python, tmp_path_factory.mktemp("asked"))
    yield engine
    engine.close()
