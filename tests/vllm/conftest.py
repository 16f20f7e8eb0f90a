"""vLLM's interpreter for the tests marked `vllm`: XGPT_VLLM_PYTHON, else this one where it has
vLLM. Without either they are skipped."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def vllm_python() -> str:
    python = os.environ.get("XGPT_VLLM_PYTHON")
    if python is None and importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM: XGPT_VLLM_PYTHON names the Python of an environment that has it")
    return python or sys.executable


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A Llama of heads that vLLM's CPU kernels take, and transformers' own instance of it."""
    pytest.importorskip("torch")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("toy")
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=97, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.3, bos_token_id=1, eos_token_id=5, pad_token_id=0)).eval()
    model.save_pretrained(folder)
    return folder, model
