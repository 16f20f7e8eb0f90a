"""Captured decode steps, with the CUDA sources executed on the CPU and what stands for a capture:
work that is done once more, into the same place, whenever it is replayed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import cpu_cuda
import pytest
import toys
from torch import Tensor

from xrunner.engine import blocks, graphs
from xrunner.engine.graphs import Captured, is_capturable
from xrunner.rules.paged import BLOCK_TOKENS, vllm


class Capture:
    """Counts what is captured, and what is replayed."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.replays = 0

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        out = work().clone().fill_(float("nan"))  # a capture computes nothing
        self.sizes.append(len(out))

        def replay() -> None:
            self.replays += 1
            out.copy_(work())

        return Captured(replay, out)


@pytest.mark.parametrize("family", ["llama", *(
    pytest.param(family, marks=pytest.mark.slow) for family in ("opt", "gpt2"))])
def test_captured_steps_answer_as_generate_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                family: str) -> None:
    model = toys.make_model(family, tmp_path)
    queries, capture = toys.random_queries(9), Capture()
    monkeypatch.setattr(toys, "executor_of", partial(toys.executor_of, capture=capture))
    with cpu_cuda.using(cpu_cuda.CpuLauncher(cpu_cuda.built())):
        sink, executors = toys.run_in_process(tmp_path, queries, degrees=(1, 1), num_groups=2)
    assert {r.query.index: list(r.output_ids) for r in sink.results} == {
        q.index: toys.generate(model, q) for q in queries}
    decodes = [step.queries for executor in executors for step in executor.log
               if step.kind == "decode"]
    # of each size of each group on each stage the first step is taken as it is
    assert 0 < capture.replays < len(decodes)
    assert capture.replays == len(decodes) - sum(
        len(group.graphs._steps) for executor in executors for group in executor.groups)
    assert len(set(capture.sizes)) > 1 and set(capture.sizes) <= {1, 2, 4, 8}


def test_captured_steps_read_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(blocks.BLOCK_TOKENS, "cpu", BLOCK_TOKENS)
    model = toys.make_model("llama", tmp_path)
    queries, capture = toys.random_queries(9), Capture()
    monkeypatch.setattr(toys, "executor_of", partial(toys.executor_of, capture=capture))
    rule = vllm(num_groups=2, max_active=10, kv_tokens=2 * 7 * BLOCK_TOKENS, token_budget=40)
    with cpu_cuda.using(cpu_cuda.CpuLauncher(cpu_cuda.built())):
        sink, _ = toys.run_in_process(tmp_path, queries, degrees=(1,), rule=rule)
    assert {r.query.index: list(r.output_ids) for r in sink.results} == {
        q.index: toys.generate(model, q) for q in queries}
    assert capture.replays > 5


def test_batches_of_no_captured_size_are_decoded_as_ever(tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    toys.make_model("llama", tmp_path)
    capture = Capture()
    monkeypatch.setattr(graphs, "bucket_of", lambda queries: None)
    executor = toys.executor_of(tmp_path, toys.stages_of(tmp_path, [1])[0], capture=capture)
    with cpu_cuda.using(cpu_cuda.CpuLauncher(cpu_cuda.built())):
        monkeypatch.setattr(toys, "executor_of", lambda *given, **more: executor)
        toys.run_in_process(tmp_path, toys.random_queries(3), degrees=(1,))
    assert executor.groups[0].graphs is not None and not capture.sizes


def test_where_torchs_attention_serves_nothing_is_captured(tmp_path: Path) -> None:
    toys.make_model("llama", tmp_path)
    executor = toys.executor_of(tmp_path, toys.stages_of(tmp_path, [1])[0])
    assert not is_capturable(executor.model)
    launcher = cpu_cuda.CpuLauncher(cpu_cuda.built())
    with cpu_cuda.using(launcher):
        assert is_capturable(executor.model)
