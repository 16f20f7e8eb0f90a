"""A whole run on the CUDA sources, executed on the CPU: every family answers as `generate` does,
through the launches that a GPU would have been given."""

from __future__ import annotations

from pathlib import Path

import cpu_cuda
import pytest
import toy_runs
import toys
from examples import some

FAMILIES = (*toys.FAMILIES, *toys.ENCODER_DECODER_FAMILIES)
EVERY = {"decode_attention", "encode_attention", "place", "kv_compact"}
T5 = EVERY - {"encode_attention"}  # its encoder has no cache
BART = T5 | {"add_layer_norm"}
OF_FAMILY = {"llama": EVERY | {"add_rms_norm", "silu_mul"}, "t5": T5, "t5-1.1": T5,
             "mt5": T5, "bart": BART, "mbart": BART}


# the others have no launch of their own
@pytest.mark.parametrize("family", some(
    FAMILIES, lambda family: family not in (
        "opt", "llama-tied", "llama3-rope", "qwen2", "mistral", "gpt2", "gpt2-untied", "t5-1.1",
        "mt5", "mbart")))
def test_every_family_answers_as_generate_does(tmp_path: Path, family: str) -> None:
    model = toys.make_model(family, tmp_path)
    queries = toys.random_queries(5)
    launcher = cpu_cuda.CpuLauncher(cpu_cuda.built())
    with cpu_cuda.using(launcher):
        sink, _ = toy_runs.run_in_process(tmp_path, queries, degrees=(1,), num_groups=1)
    assert {r.query.index: list(r.output_ids) for r in sink.results} == {
        q.index: toys.generate(model, q) for q in queries}
    launched = " ".join(sorted({launch.kernel for launch in launcher.launched}))
    expected = OF_FAMILY.get(family, EVERY)
    assert {operator for operator in expected if operator in launched} == expected, launched
