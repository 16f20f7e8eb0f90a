"""The runner on a GPU: tokens equal transformers' `generate` (float32, on the CPU), with one rank
and with several on one GPU, under real mpiexec too; NCCL between GPUs where there are two.

None of this runs without a CUDA device, or with a PyTorch that has no CUDA.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from replays import answers_of, generated

torch = pytest.importorskip("torch", reason="ranks need the extra `run`")
import cuda_check  # noqa: E402
import graph_trial  # noqa: E402
import job_folder  # noqa: E402
import toy_runs  # noqa: E402
import toys  # noqa: E402
from holding import rule_of  # noqa: E402
from job_folder import SUPPORT, as_requests  # noqa: E402
from mpi_runs import answered, call, json_of, launched  # noqa: E402
from prefix_blocks import SharingMachine  # noqa: E402
from prefix_queries import nested  # noqa: E402

from xgpt.core.errors import XgptError  # noqa: E402
from xgpt.launch.launcher import find_mpiexec  # noqa: E402
from xrunner import devices  # noqa: E402
from xrunner.comm.messages import StepMessage  # noqa: E402
from xrunner.engine.graphs import CaptureError, CudaCapture  # noqa: E402
from xrunner.engine.kv import KvCache, kv_shape  # noqa: E402
from xrunner.engine.stage import StageExecutor  # noqa: E402
from xrunner.engine.step_log import timeline_of  # noqa: E402
from xrunner.ops.cuda import cuda_modules  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(
    not torch.cuda.is_available(), reason="this PyTorch can use no CUDA device")]
FAMILIES = (*toys.FAMILIES, *toys.ENCODER_DECODER_FAMILIES)
QUERIES = 9
Made = Callable[[str], tuple[Path, Any]]


@pytest.fixture()
def device():
    return devices.select_device("gpu", 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_as_generate_does(made, device, family):
    directory, model = made(family)
    queries = toys.random_queries(17)
    expected = generated(model, queries)
    for degrees, groups in (((1,), 2), ((1, 1), 2), ((2,), 1), ((2, 1), 3)):
        sink, executors = toy_runs.run_in_process(directory, queries, degrees=degrees,
                                                  num_groups=groups, device=device)
        assert answers_of(sink) == expected, f"{degrees = }"
        assert all(e.groups[0].cache.store.device == device for e in executors)
        assert sum(e.rows_compacted for e in executors) > 0


def test_prefixes_are_shared_and_parts_of_their_blocks_copied(made, device):
    """Blocks of any content first, then answers."""
    for seed in range(8):
        machine = SharingMachine(seed, 16, device)
        for _ in range(25):
            machine.step()
            machine.check()
    (directory, model), (queries, prefixes) = made("llama"), nested(33, 20, block_tokens=16)
    for policy, groups in (("rra", 2), ("orca", 1), ("vllm", 1), ("sarathi", 2)):
        sink, _ = toy_runs.run_in_process(
            directory, queries, degrees=(1,), device=device, prefixes=prefixes,
            rule=rule_of(policy, groups=groups, batch=12, kv_tokens=600, budget=100))
        assert answers_of(sink) == generated(model, queries), policy


@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_captured_decode_steps_answer_as_generate_does(made, device, family, monkeypatch):
    directory, model = made(family)
    executor_of = toy_runs.executor_of
    captures = CudaCapture(device), CudaCapture(device)  # a rank's each
    given = iter(captures)
    monkeypatch.setattr(toy_runs, "executor_of", lambda *known, **more: executor_of(
        *known, **more, capture=next(given)))
    queries = toys.random_queries(17)
    sink, executors = toy_runs.run_in_process(directory, queries, degrees=(1, 1), num_groups=2,
                                              device=device)
    if cuda_modules.gpu_of(device).ops is None:
        pytest.skip(f"our kernels do not serve: {cuda_modules.describe(device)}")
    assert answers_of(sink) == generated(model, queries)
    for executor, capture in zip(executors, captures, strict=True):
        assert "requests in CUDA graphs" in executor.graphs_said
        assert all(group.graphs.steps for group in executor.groups)
        assert 0 <= capture.taken_bytes < capture.limit_bytes


@pytest.mark.parametrize("dtype", cuda_check.DTYPES)
def test_a_captured_step_gives_what_it_gives_kernel_by_kernel(device, dtype):
    graphs = graph_trial.toy_graphs(dtype, device, CudaCapture(device))
    for size in (1, 4, 32):
        _, off = graph_trial.tried(graphs, size)
        assert off <= graph_trial.STEPS_OFF * cuda_check.tolerance(dtype), f"{size = }"


def test_a_capture_that_fails_leaves_the_gpu_at_work(device):
    stream, numbers = torch.cuda.current_stream(device), torch.ones(5, device=device)
    with pytest.raises(CaptureError):
        CudaCapture(device)(lambda: numbers * int(numbers.sum()))  # the host may not look there
    assert torch.cuda.current_stream(device) == stream
    assert (numbers + 1).tolist() == [2.0] * 5
    captured = CudaCapture(device)(lambda: numbers * 3)
    captured.replay()
    assert captured.out.tolist() == [3.0] * 5


def test_a_capture_may_follow_on_others_that_are_gone(device):
    capture, numbers = CudaCapture(device), torch.ones(1 << 20, device=device)
    held = capture(lambda: numbers * 3).out  # its graph is gone
    again = capture(lambda: numbers + 1)
    again.replay()
    assert again.out.tolist()[:2] == [2.0, 2.0] and held.shape == again.out.shape


def test_steps_last_as_long_as_the_gpu_works_on_them(device):
    timeline, steps = timeline_of(device, time.monotonic), []
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    asked_s = time.monotonic()
    begin.record()
    for _ in range(2):  # the second is asked for while the GPU is at the first
        timeline.begin()
        torch.cuda._sleep(100_000_000)
        steps.append(timeline.end())
    end.record()
    assert not steps[0].is_over()
    (first_s, over_s), (second_s, last_s) = (step.times() for step in steps)
    slept_s = begin.elapsed_time(end) / 1e3
    assert over_s - first_s == pytest.approx(slept_s / 2, rel=0.1)
    assert over_s <= second_s < over_s + 1e-3, "it begins when the one before it ends"
    assert last_s - asked_s == pytest.approx(slept_s, rel=0.1)


@pytest.mark.parametrize("is_forced", [False, True])
@pytest.mark.parametrize("family", ["llama", "opt", "gpt2"])
def test_nothing_within_a_step_waits_for_the_gpu(made, device, family, is_forced, monkeypatch):
    execute = StageExecutor.execute

    def strictly(self: StageExecutor, message: StepMessage, inputs: torch.Tensor) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return execute(self, message, inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    directory, model = made(family)
    queries = [replace(query, is_forced=is_forced) for query in toys.random_queries(17)]
    toy_runs.run_in_process(directory, queries, degrees=(1,), device=device)  # loads kernels
    monkeypatch.setattr(StageExecutor, "execute", strictly)
    sink, (executor,) = toy_runs.run_in_process(directory, queries, degrees=(1,), device=device)
    assert answers_of(sink) == generated(model, queries)
    # one step after the other, as the GPU took them
    times = [(record.start_s, record.end_s) for record in executor.log]
    assert all(begin < end for begin, end in times)
    assert all(end <= later + 1e-4 for (_, end), (later, _) in pairwise(times))


def test_a_tensor_is_whole_when_it_is_in_the_hosts_memory(device):
    tensor = torch.zeros(1 << 20, device=device)
    torch.cuda._sleep(200_000_000)
    tensor += 3
    found = devices.to_host(tensor[::2])
    assert found.is_pinned() and bool((found == 3).all())


def test_caches_that_do_not_fit_are_refused_in_words(made, device):
    directory, _ = made("llama")
    with pytest.raises(XgptError, match="the KV cache of .* more than cuda"):
        KvCache(kv_shape(toys.spec_of(directory), torch.float32, slots=10**6, capacity=10**5),
                device)


RRA = [("llama", (1, 1)), ("llama", (2,)), ("opt", (2, 1)), ("gpt2", (1, 2)), ("t5", (1, 1)),
       ("t5", (2,))]
WAA = [("llama", (1,), (1,)), ("t5", (1,), (1,)), ("opt", (2,), (1,)), ("gpt2", (1,), (2,))]


def cases(made: Made, *, group: str, most_ranks: int) -> list[dict[str, Any]]:
    """As tests/kit/runs_script.py takes them. `group`: how tensor-parallel ranks are to sum."""
    found: list[dict[str, Any]] = []
    for family, degrees in RRA:
        found.append({"directory": str(made(family)[0]), "degrees": degrees, "num_groups": 2,
                      "encode_batch": 4, "decode_iterations": 3})
    for family, encode, decode in WAA:
        found.append({"directory": str(made(family)[0]), "encode": encode, "decode": decode,
                      "num_groups": 2, "encode_batch": 3})
    ranks = [sum(c.get("degrees", ())) + sum(c.get("encode", ())) + sum(c.get("decode", ()))
             for c in found]
    return [{**case, "queries": QUERIES, "device": "gpu", "group": group}
            for case, count in zip(found, ranks, strict=True) if count <= most_ranks]


def check(made: Made, folder: Path, wanted: list[dict[str, Any]], ranks: int) -> None:
    found, _ = launched(folder, wanted, ranks)
    models = {str(directory): model for directory, model in map(made, ("llama", "opt", "gpt2",
                                                                       "t5"))}
    for case, answer in zip(wanted, found, strict=True):
        assert answer == {str(q.index): toys.generate(models[case["directory"]], q)
                          for q in toys.random_queries(QUERIES)}, f"{case = }"


def test_ranks_that_share_a_gpu_answer_as_generate_does(made, tmp_path, monkeypatch):
    """All on the first GPU, however many there are: sums go through the host's memory."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    check(made, tmp_path, cases(made, group="MpiGroup", most_ranks=3), 3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank: 2")
def test_ranks_with_a_gpu_each_sum_over_nccl(made, tmp_path):
    check(made, tmp_path, cases(made, group="TorchGroup", most_ranks=2), 2)


def test_a_group_over_nccl_sums_and_is_closed():
    """Of as many ranks as there are GPUs: one will do."""
    ranks = str(torch.cuda.device_count())
    done = subprocess.run(
        [find_mpiexec(), "-n", ranks, sys.executable, "-m", "mpi4py",
         str(SUPPORT / "ranks_script.py"), "nccl"],
        capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0 and "ok" in done.stdout, done.stdout + done.stderr


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    """One profile cache for all runs."""
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


@pytest.mark.parametrize(("ranks", "schedule"), [
    (1, "policy: rra, encode_batch: 3, decode_iterations: 4"),
    (2, "policy: rra, encode_batch: 3, decode_iterations: 4"),
    (2, "policy: waa-c, encode_batch: 1")])
def test_the_whole_command_profiles_schedules_and_runs(made, tmp_path, profiles, ranks, schedule):
    directory, model = made("llama")
    queries = toys.random_queries(20, seed=3)
    job = job_folder.write_job(tmp_path, directory, as_requests(queries), schedule=schedule,
                               ranks=ranks)
    call("profile", job, env=profiles)
    done, out = call("submit", job, env=profiles), tmp_path / "out"
    answered(out, queries, model)
    assert json_of(out / "run.json")["device_kind"] == "gpu"
    assert ("share" in done.stderr) == (ranks > torch.cuda.device_count())
    measured = json_of(out / "measured.json")
    assert all(s["peak_memory_bytes"] > 0 for s in measured["stages"])
