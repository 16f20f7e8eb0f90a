"""What executes CUDA sources on the CPU shows the faults it is there for."""

import platform
from pathlib import Path

import cpu_cuda
import pytest
import torch

from xrunner.ops.cuda.launch import Launch, struct

SUPPORT = Path(cpu_cuda.__file__).parent
NUMBERS = struct("Numbers", "out count")


@pytest.fixture(scope="module", params=[(), ("-DXGPT_UCONTEXT",)], ids=["own", "ucontext"])
def launcher(request, tmp_path_factory):
    if not request.param and platform.machine() != "x86_64":
        pytest.skip("the own change of stacks is for x86-64")
    return cpu_cuda.CpuLauncher(cpu_cuda.build(
        tmp_path_factory.mktemp("faulty"), request.param, SUPPORT, ["faulty_kernels"]))


def run(launcher: cpu_cuda.CpuLauncher, kernel: str, out: torch.Tensor, threads: int = 96) -> None:
    launcher(Launch("faulty_kernels", kernel, (1, 1, 1), threads, 4 * threads,
                    NUMBERS(out.data_ptr(), 0)))


def found_in(launcher: cpu_cuda.CpuLauncher, kernel: str) -> list[bool]:
    """Whether it gives each thread its neighbour's number, in each order of the threads."""
    found = []
    for launcher.order in cpu_cuda.ORDERS.values():
        out = torch.zeros(96)
        run(launcher, kernel, out)
        found.append(out.tolist() == [*range(1, 96), 0])
    return found


def test_missing_barriers_and_warps_that_run_ahead_show_in_one_of_the_orders(launcher):
    assert found_in(launcher, "next_thread") == [True] * 4, "a barrier holds until all came"
    assert not all(found_in(launcher, "next_without_barrier")[:2])
    found = found_in(launcher, "overwritten")
    assert all(found[:2]) and not all(found[2:]), "by warp"


@pytest.mark.parametrize("order", cpu_cuda.ORDERS)
def test_a_barrier_that_some_threads_leave_out_is_an_error(launcher, order):
    launcher.order = cpu_cuda.ORDERS[order]
    out = torch.zeros(96)
    with pytest.raises(AssertionError, match="not all threads come to a barrier"):
        run(launcher, "barrier_left_out", out)
    run(launcher, "next_thread", out)  # and the next launch is none the worse
    assert out[0] == 1
