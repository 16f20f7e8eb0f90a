"""An adapter that the job names changes every answer as it does when it is merged into the
weights."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from job_folder import as_requests, read_lines
from mpi_runs import call
from safetensors.torch import save_file
from vllm_jobs import vllm_job

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
QUERIES = toys.random_queries(12)
RANK, SCALE = 4, 2.0


def write_adapter(folder: Path, model: Any) -> Any:
    """Writes one of two products of each layer; returns the model with it merged."""
    folder.mkdir()
    merged, generator, tensors = copy.deepcopy(model), torch.Generator().manual_seed(3), {}
    for name, weight in merged.state_dict().items():
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            first = torch.randn(RANK, weight.shape[1], generator=generator) / 8
            second = torch.randn(weight.shape[0], RANK, generator=generator) / 8
            own = f"base_model.model.{name.removesuffix('.weight')}"
            tensors |= {f"{own}.lora_A.weight": first, f"{own}.lora_B.weight": second}
            weight += SCALE * second @ first
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "bias": "none",
        "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}))
    return merged


def test_every_answer_is_the_adapted_models(tmp_path, toy, vllm_python, cache):
    folder, model = toy
    merged = write_adapter(tmp_path / "adapter", model)
    job = vllm_job(tmp_path, folder, vllm_python, as_requests(QUERIES),
                   "policy: rra, encode_batch: 5, decode_iterations: 4",
                   f"engine_args: {{lora_path: {tmp_path / 'adapter'}}}, ")
    call("submit", job, "--json", env=cache, timeout_s=800)
    results = read_lines(tmp_path / "out" / "results.jsonl")
    answers = {line["id"]: line["output_ids"] for line in results}
    assert answers == {q.id: toys.generate(merged, q) for q in QUERIES}
    assert answers != {q.id: toys.generate(model, q) for q in QUERIES}
