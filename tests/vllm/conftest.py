"""vLLM's interpreter for the tests marked `vllm`: XGPT_VLLM_PYTHON, else this one where it has
vLLM. Without either they are skipped."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

import pytest

pytest.importorskip("torch", reason="the reference needs the extra `run`")

import toys
from job_folder import SUPPORT
from vllm_answers import ANSWER


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
def asked(vllm_python):
    """What one process answers (kit/vllm_answers.py): vLLM takes longer to import than toys
    take to run. One that ended is followed by another."""
    with tempfile.TemporaryFile("w+") as said:
        processes: list[subprocess.Popen[str]] = []

        def ask(**question: Any) -> dict[str, Any]:
            if not processes or processes[-1].poll() is not None:
                processes.append(subprocess.Popen(
                    [vllm_python, str(SUPPORT / "vllm_answers.py")], text=True, stderr=said,
                    stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            process = processes[-1]
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))
            said.seek(0)
            raise AssertionError(said.read()[-3000:])

        yield ask
        for process in processes:
            process.kill()
            process.communicate()
