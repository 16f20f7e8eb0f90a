"""Stages whose bytes lie on a GPU, its host and a disk: tokens equal those of the model in the
GPU's memory.

None of this runs without a CUDA device, or with a PyTorch that has no CUDA."""

from typing import Any

import pytest
from replays import answers_of, generated

torch = pytest.importorskip("torch", reason="ranks need the extra `run`")
import toys  # noqa: E402
from holding import rule_of  # noqa: E402
from toy_runs import run_in_process  # noqa: E402

from xgpt.core.placement import Placement  # noqa: E402
from xrunner import devices  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this PyTorch can use no CUDA device")]
THREE = {"weights": (0.2, 0.4, 0.4), "kv": (0.2, 0.4, 0.4), "hidden": (0.5, 0.5, 0.0)}
HOST = {"weights": (0.0, 1.0, 0.0), "kv": (0.0, 1.0, 0.0), "hidden": (0.0, 1.0, 0.0)}


@pytest.mark.parametrize("own", [
    THREE, HOST, {**THREE, "host_attention": True}, {**HOST, "host_attention": True},
    {**THREE, "order": "row"}, {**THREE, "overlap": False}], ids=str)
@pytest.mark.parametrize("policy", ["ft", "rra"])
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3-moe"])
def test_tokens_are_those_of_the_model_in_memory(made, tmp_path, family, policy, own):
    directory, model = made(family)
    queries = toys.random_queries(17)
    settings: dict[str, Any] = {"device_batch": 3, **own}
    sink, (executor,) = run_in_process(
        directory, queries, num_stages=1, rule=rule_of("ft", batch=8) if policy == "ft" else None,
        device=devices.select_device("gpu", 0), placed=(Placement(**settings), tmp_path))
    assert answers_of(sink) == generated(model, queries)
    report = executor.model.report(1.0)
    assert report.num_bytes["up"] > 0 and all(report.peaks[tier] for tier in ("device", "host"))
