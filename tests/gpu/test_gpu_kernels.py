"""The CUDA kernels on a GPU, by cupy: every one gives what torch gives, on any stream, in a CUDA
graph too; `xgpt doctor --gpu` leaves its file.

None of this runs without a CUDA device, a PyTorch that has CUDA, and cupy.
"""

import json
import subprocess

import pytest

torch = pytest.importorskip("torch", reason="ranks need the extra `run`")
pytest.importorskip("cupy", reason="the CUDA kernels need the extra `cuda12` or `cuda13`")

import cuda_check  # noqa: E402
import cuda_reference as reference  # noqa: E402

from xrunner.ops.cuda import cuda_modules  # noqa: E402
from xrunner.ops.cuda.kernels import CudaOps  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this PyTorch can use no CUDA device")]


@pytest.fixture(scope="module")
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def launcher(device):
    return cuda_modules.CupyLauncher(device)


@pytest.fixture(scope="module")
def ops(launcher, device):
    return CudaOps(launcher, torch.cuda.get_device_properties(device).multi_processor_count)


@pytest.mark.parametrize("size", [1, 4])
def test_every_kernel_gives_what_torch_gives(launcher, ops, device, size):
    torch.set_float32_matmul_precision("highest")
    off = {f"{case.operator}, {case.shape}, {case.dtype}": cuda_check.off_by(case)
           / cuda_check.tolerance(case.dtype)
           for case in cuda_check.cases(ops, launcher, device, size=size)}
    assert not {case: times for case, times in off.items() if times > 1}


def test_they_serve_on_this_card(device):
    assert cuda_modules.describe(device) == "CUDA operators: ours"
    assert cuda_modules.ops_for(torch.zeros(1, device=device)) is not None


def decoded(device: torch.device) -> tuple[torch.Tensor, ...]:
    """Queries [3, 4, 64] of heads that share a KV head, keys, values, blocks [3, 1], lengths."""
    query, keys, values = (torch.randn(3, heads, tokens, 64, device=device)
                           for heads, tokens in ((4, 1), (2, 700), (2, 700)))
    return (query[:, :, 0].contiguous(), keys, values, torch.tensor([[2], [0], [1]], device=device),
            torch.tensor([1, 700, 333], device=device))


def test_a_kernel_waits_for_the_stream_that_it_is_launched_on(ops, device):
    query, keys, values, blocks, lengths = decoded(device)
    expected = reference.decode(query, (keys, values), blocks, lengths, 0.125)
    given = torch.zeros_like(query)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(100_000_000)
        given.copy_(query)
        found = ops.decode_attention(given, (keys, values), blocks, lengths, 0.125)
    torch.cuda.synchronize()
    assert cuda_check.distance([expected], [found]) <= cuda_check.tolerance(torch.float32)


def test_a_captured_step_reads_what_its_buffers_hold_then(ops, device):
    """A row of length 0 holds no query: what fills a batch up to its bucket."""
    query, keys, values, blocks, lengths = decoded(device)
    ops.decode_attention(query, (keys, values), blocks, lengths, 0.125)  # loads the module
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = ops.decode_attention(query, (keys, values), blocks, lengths, 0.125)
    query.copy_(torch.randn_like(query))
    lengths.copy_(torch.tensor([9, 0, 512]))
    graph.replay()
    expected = reference.decode(query, (keys, values), blocks, lengths, 0.125)
    assert not found[1].any()
    assert cuda_check.distance([expected], [found]) <= cuda_check.tolerance(torch.float32)


def test_the_doctor_leaves_its_file(xgpt_command, tmp_path):
    done = subprocess.run([*xgpt_command, "doctor", "--gpu"], cwd=tmp_path, capture_output=True,
                          text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("xgpt-doctor-*.json")
    written = json.loads(file.read_text())
    assert written["copy_bytes_per_s"] > 0 and all(case["agrees"] for case in written["cases"])
