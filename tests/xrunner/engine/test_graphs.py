"""Captured decode steps, with the CUDA sources executed on the CPU and what stands for a capture:
work that is done once more, into the same place, whenever it is replayed."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import cpu_cuda
import graph_trial
import pytest
import torch
import toy_runs
import toys
from cuda_check import tolerance
from examples import some
from holding import rule_of
from prefix_queries import nested
from replays import answers_of, generated
from torch import Tensor

from xrunner.comm.messages import StartMessage
from xrunner.engine import graphs
from xrunner.engine.graphs import MEMORY_SHARE, Captured, CaptureError, capture_steps
from xrunner.engine.kv import KvCache, kv_shape
from xrunner.engine.stage import StageExecutor
from xrunner.models.stage_model import StageModel
from xrunner.models.weights import WHOLE, Shard
from xsimulator.memory import USABLE_SHARE


class Capture:
    """Counts what is captured, and what is replayed. `each_bytes`: what a captured step keeps."""

    def __init__(self, limit_bytes: int = 1 << 40, each_bytes: int = 0) -> None:
        self.limit_bytes, self.taken_bytes, self._each_bytes = limit_bytes, 0, each_bytes
        self.sizes = Counter[int]()
        self.replays = 0

    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        out = work().clone().fill_(float("nan"))  # a capture computes nothing
        self.sizes[len(out)] += 1
        self.taken_bytes += self._each_bytes

        def replay() -> None:
            self.replays += 1
            self.replay(work, out)

        return Captured(replay, out)

    def replay(self, work: Callable[[], Tensor], out: Tensor) -> None:
        out.copy_(work())


class Stale(Capture):
    """A graph that some kernel is missing from: nothing comes out anew."""

    def replay(self, work: Callable[[], Tensor], out: Tensor) -> None:
        pass


class Refusing(Capture):
    def __call__(self, work: Callable[[], Tensor]) -> Captured:
        raise CaptureError("operation not permitted when stream is capturing")


@contextmanager
def kernels() -> Iterator[None]:
    with cpu_cuda.using(cpu_cuda.CpuLauncher(cpu_cuda.built())):
        yield


def run(directory: Path, monkeypatch: pytest.MonkeyPatch, capture: Capture, count: int = 5,
        **given: Any) -> tuple[dict[int, list[int]], list[StageExecutor]]:
    """The answers of so many queries, and who gave them."""
    monkeypatch.setattr(toy_runs, "executor_of", partial(toy_runs.executor_of, capture=capture))
    with kernels():
        sink, executors = toy_runs.run_in_process(directory, toys.random_queries(count),
                                                  **{"max_active": 4, **given})
    return answers_of(sink), executors


def expected(model: Any, count: int = 5) -> dict[int, list[int]]:
    return {query.index: toys.generate(model, query) for query in toys.random_queries(count)}


def decodes(executors: list[StageExecutor]) -> int:
    return sum(step.kind == "decode" for executor in executors for step in executor.log)


TWO_STAGES = {"degrees": (1, 1), "num_groups": 2}


# the third: an input that is encoded in part stays in its row until its next chunk; the last two
# and gemma3 have windows, and norms over heads
@pytest.mark.parametrize(("family", "count", "given"), some([
    ("llama", 7, TWO_STAGES), ("gpt2", 7, TWO_STAGES),
    ("llama", 7, {"degrees": (1,), "rule": lambda: rule_of(
        "rra", encode=2, iterations=20, batch=4, chunk=5)}),
    ("gemma3", 3, {"degrees": (1,), "max_active": 2}), ("opt", 7, TWO_STAGES),
    ("olmo2", 3, {"degrees": (1,), "max_active": 2})],
    lambda case: case[0] in ("llama", "gemma3")))
def test_captured_steps_answer_as_generate_does(made, monkeypatch, family, count, given):
    (directory, model), capture = made(family), Capture()
    own = {key: value() if key == "rule" else value for key, value in given.items()}
    answers, executors = run(directory, monkeypatch, capture, count, **own)
    assert answers == expected(model, count)
    # once for each size of each group on each stage, and all of them before the first step
    assert set(capture.sizes.values()) == {4 if given is TWO_STAGES else 1}
    assert capture.replays == decodes(executors)
    for executor in executors:
        assert str(executor.graphs_said).startswith(
            f"decode steps of up to {max(capture.sizes)} requests in CUDA graphs")


def test_captured_steps_read_prefixes_that_several_share(made, monkeypatch, small_blocks):
    (directory, model), capture = made("llama"), Capture()
    monkeypatch.setattr(toy_runs, "executor_of", partial(toy_runs.executor_of, capture=capture))
    queries, prefixes = nested(21, 4, block_tokens=16)
    with kernels():
        sink, executors = toy_runs.run_in_process(
            directory, queries, degrees=(1,), rule=rule_of("vllm", groups=2, batch=4, budget=300),
            prefixes=prefixes)
    assert answers_of(sink) == generated(model, queries)
    assert capture.replays == decodes(executors) > 0
    assert len(set(capture.sizes.values())) == 1, "groups share the blocks, and the steps"


def test_groups_that_share_their_blocks_share_their_steps(made, monkeypatch, small_blocks):
    (directory, model), capture = made("llama"), Capture()
    rule = rule_of("vllm", groups=2, batch=6, kv_tokens=2 * 7 * 16)
    answers, (executor,) = run(directory, monkeypatch, capture, degrees=(1,), rule=rule)
    assert answers == expected(model)
    stores = {group.cache.store.data_ptr() for group in executor.groups}
    assert set(capture.sizes.values()) == {len(stores)}
    assert capture.replays > 5


@pytest.mark.parametrize(("capture", "why"), [
    (Refusing(), "no CUDA graphs: operation not permitted when stream is capturing"),
    (Capture(limit_bytes=0), "no CUDA graphs: they may take 0 B of memory"),
    (Capture(limit_bytes=100, each_bytes=50),
     "of up to 2 requests in CUDA graphs (more would take over 100")],
    ids=["refused", "no memory", "some memory"])
def test_a_run_goes_on_without_those_that_cannot_be_captured(made, monkeypatch, capture, why):
    """The smallest are captured as long as there is memory."""
    directory, model = made("llama")
    answers, (executor,) = run(directory, monkeypatch, capture, degrees=(1,), num_groups=1)
    assert answers == expected(model) and why in str(executor.graphs_said)
    assert sorted(capture.sizes) == ([1, 2] if "up to 2" in why else [])
    assert decodes([executor]) > capture.replays and (capture.replays > 0) == ("up to 2" in why)


def own_cache(directory: Path) -> tuple[KvCache, StageModel]:
    """Of one group of 5 queries of 20 tokens, and a model."""
    model = toy_runs.executor_of(directory, toy_runs.stages_of(directory, [1])[0]).model
    assert isinstance(model, StageModel)
    return KvCache(kv_shape(model.spec, torch.float32, slots=5, capacity=20)), model


@pytest.mark.parametrize(("kind", "agrees"), [
    (Capture, True), (Stale, False)])
def test_a_trial_finds_a_captured_step_that_is_not_what_it_was(made, kind, agrees):
    cache, model = own_cache(made("llama")[0])
    own = graphs.DecodeGraphs(model, cache.layers, kind(), width=1)
    with kernels():
        found = [graph_trial.tried(own, size)[1] for size in (1, 4)]
    assert (max(found) <= graph_trial.STEPS_OFF * tolerance(torch.float32)) == agrees
    assert not cache.store.any(), "nothing is left of what was tried"


def test_what_they_take_is_not_planned_for_anything_else():
    assert USABLE_SHARE + 2 * MEMORY_SHARE <= 1 + 1e-9


@pytest.mark.parametrize(("blocks", "size", "sizes"), [
    (3, 2, [1, 2, 4, 8]), (1, 1, [1]), (0, 4, [])])
def test_a_cache_of_few_entries_has_steps_of_few_queries(made, blocks, size, sizes):
    """More may be planned at most than a small budget of blocks ever admits."""
    _, model = own_cache(made("llama")[0])
    cache = KvCache(kv_shape(model.spec, torch.float32, slots=blocks, capacity=size))
    capture = Capture()
    with kernels():
        _, said = capture_steps(model, [cache], 100, capture)
    assert sorted(capture.sizes) == sizes
    assert said.startswith("no CUDA graphs: the caches") == (not sizes)


@pytest.mark.parametrize(("family", "shard", "why"), [
    ("t5", WHOLE, "an encoder-decoder model's"), ("llama", WHOLE, "torch's operators are used"),
    ("llama", Shard(1, 2), "a tensor-parallel group's")])
def test_a_rank_that_cannot_have_them_says_so(made, family, shard, why):
    directory, _ = made(family)
    executor = toy_runs.executor_of(directory, toy_runs.stages_of(directory, [1])[0], shard,
                                    capture=Refusing())
    with nullcontext() if "torch" in why else kernels():
        executor.start(StartMessage(num_groups=1, slots=2, capacity=8, encoded_capacity=8))
    assert why in str(executor.graphs_said) and "no CUDA graphs: " in str(executor.graphs_said)


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
def test_every_family_answers_as_generate_does(made, family):
    directory, model = made(family)
    queries = toys.random_queries(4)
    launcher = cpu_cuda.CpuLauncher(cpu_cuda.built())
    with cpu_cuda.using(launcher):
        sink, _ = toy_runs.run_in_process(directory, queries, degrees=(1,), num_groups=1)
    assert answers_of(sink) == generated(model, queries)
    launched = " ".join(sorted({launch.kernel for launch in launcher.launched}))
    expected = OF_FAMILY.get(family, EVERY)
    assert {operator for operator in expected if operator in launched} == expected, launched
