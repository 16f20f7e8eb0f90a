"""The bench and its clock on a CUDA device, and the direct handover between two."""

import pytest

torch = pytest.importorskip("torch", reason="the bench needs the extra `run`")

from xgpt.core.model import ModelSpec  # noqa: E402
from xprofiler.measure.bench import LayerBench  # noqa: E402
from xprofiler.measure.probe import (  # noqa: E402
    Capturing,  # noqa: E402
    CudaClock,
    clock_of,
    measure_peaks,
)
from xrunner.engine.graphs import CudaCapture, capture_obstacle  # noqa: E402

pytestmark = pytest.mark.gpu
SPEC = ModelSpec(name="toy", family="llama", num_layers=4, hidden_size=512, num_heads=8,
                 num_kv_heads=4, vocab_size=4000, intermediate_size=1408, is_gated_mlp=True,
                 has_bias=False, tied_embeddings=True, max_positions=2048)


@pytest.mark.parametrize("tp_degree", [1, 2, 4])
def test_parts_of_a_step_add_up_on_the_devices_own_clock(tp_degree):
    bench = LayerBench(SPEC, torch.bfloat16, tp_degree=tp_degree, device="cuda")
    assert isinstance(clock_of(bench.device), CudaClock)
    with torch.inference_mode():
        for step in (bench.decode([100, 7, 300]), bench.encode([64, 200])):
            step()
            parts = step()
            layers_s = bench.num_layers * (parts.rest_s + parts.attention_s)
            assert parts.rest_s > 0 and parts.attention_s > 0 and parts.head_s > 0
            # events are read in half microseconds; what is left over is the step's own
            assert layers_s + parts.embed_s + parts.head_s <= parts.whole_s * 1.02 + 1e-5


def test_captured_decode_steps_are_told_apart_on_the_device():
    bench, device = LayerBench(SPEC, torch.bfloat16, device="cuda"), torch.device("cuda", 0)
    bench.capturing = Capturing(CudaCapture(device))
    with torch.inference_mode():
        if (why := capture_obstacle(bench.model)) is not None:
            pytest.skip(why)
        step = bench.decode([100, 7, 300])
        step()
        parts = step()
    assert parts.captured_rest_s is not None
    assert 0 < parts.captured_rest_s < parts.rest_s, "launched kernel by kernel it takes longer"
    layers_s = bench.num_layers * (parts.captured_rest_s + parts.attention_s)
    assert 0 < layers_s + parts.embed_s + parts.head_s <= parts.whole_s * 1.02 + 1e-5


def test_compaction_moves_rows_on_the_device():
    bench = LayerBench(SPEC, torch.bfloat16, device="cuda")
    assert bench.compaction(3, 200)() > 0


def test_peaks_are_those_of_a_gpu():
    peaks = measure_peaks(torch.bfloat16, torch.device("cuda"))
    assert peaks.flops_per_s > 1e13 and peaks.bandwidth_bytes_per_s > 1e11
