"""Decode steps timed as a GPU takes them captured, with what stands for a capture on a CPU: work
that is done once more, into the same place, whenever it is replayed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from profiles import profile

torch = pytest.importorskip("torch", reason="measuring needs the extra `run`")

import cpu_cuda  # noqa: E402

from xgpt.core.model import ModelSpec  # noqa: E402
from xprofiler.measure.bench import LayerBench  # noqa: E402
from xprofiler.measure.probe import Capturing, Probe, StepParts, TimedCapture  # noqa: E402
from xrunner.engine.graphs import Captured, CaptureError  # noqa: E402

SPEC = ModelSpec(name="llama", family="llama", num_layers=3, hidden_size=48, num_heads=6,
                 num_kv_heads=2, vocab_size=97, intermediate_size=80, is_gated_mlp=True,
                 has_bias=False, max_positions=256, activation="silu")
EMPTY = profile()


class Ticks:
    """A clock of the tests' own: only `spend` advances it."""

    def __init__(self) -> None:
        self.now = 0

    def spend(self, ticks: int) -> None:
        self.now += ticks

    def mark(self) -> int:
        return self.now

    def settle(self) -> None:
        """Nothing is under way."""

    def seconds(self, first: int, second: int) -> float:
        return float(second - first)


class Inner:
    """Marks that are taken anew at each replay, as events of a graph are."""

    def __init__(self, clock: Ticks) -> None:
        self._clock, self.marks, self.taken = clock, list[list[int]](), 0

    def restart(self) -> None:
        self.taken = 0

    def mark(self) -> list[int]:
        if self.taken == len(self.marks):
            self.marks.append([0])
        self.taken += 1
        self.marks[self.taken - 1][0] = self._clock.now
        return self.marks[self.taken - 1]

    def settle(self) -> None:
        """Nothing is under way."""

    def seconds(self, first: list[int], second: list[int]) -> float:
        return float(second[0] - first[0])


class Capture:
    """Replays do the work again, through the layers that it was captured with."""

    limit_bytes, taken_bytes = 1 << 40, 0

    def __init__(self, clock: Ticks, model: Any, probe: Probe) -> None:
        self._clock, self._model, self._probe = clock, model, probe
        self.inner = list[Inner]()
        self.shapes, self.replays = list[tuple[int, ...]](), {True: 0, False: 0}

    def make_inner(self) -> Inner:
        self.inner.append(Inner(self._clock))
        return self.inner[-1]

    def __call__(self, work: Callable[[], Any]) -> Captured:
        inner, before = self.inner[-1], self.inner[-1].taken
        out = work()
        self.shapes.append(tuple(out.shape))
        is_marked, layers, model = inner.taken > before, self._model.layers, self._model

        def replay() -> None:
            self.replays[is_marked] += 1
            inner.restart()
            whole, model.layers = model.layers, layers
            with self._probe.marked_by(inner if is_marked else None):
                out.copy_(work())
            model.layers = whole

        return Captured(replay, out)


def test_parts_are_those_of_the_marked_step_scaled_to_the_one_without_marks():
    clock, takes = Ticks(), {"step": 1}

    def spend(ticks: int) -> Callable[..., Any]:
        return lambda *_: clock.spend(ticks * takes["step"])

    layers = [SimpleNamespace(qkv=spend(4), finish=spend(6)) for _ in range(2)]
    ends = SimpleNamespace(embed=spend(5), rotation=spend(2), scores=spend(100))
    model = SimpleNamespace(layers=layers, ends=ends)
    probe = Probe(model, clock)  # type: ignore[arg-type]

    def work() -> torch.Tensor:
        ends.embed()
        ends.rotation()
        for layer in layers:
            layer.qkv()
            spend(3)()
            layer.finish()
        spend(7)()  # no part
        return torch.zeros(2, 2)

    capture = Capture(clock, model, probe)
    timed = TimedCapture(Capturing(capture, capture.make_inner), probe, clock)
    takes["step"] = 50  # what is launched one by one
    captured = timed(work)
    takes["step"] = 10
    captured.replay()
    takes["step"] = 15  # marks cost something
    assert timed.parts(2) == StepParts(rest_s=10 * (4 + 6) + 10 * 2 / 2, attention_s=10 * 3,
                                        embed_s=10 * 5)
    assert capture.replays == {True: 1, False: 1}
    assert len(capture.inner) == 1 and len(capture.inner[0].marks) == 2 * (2 + 2 * 2)
    takes["step"] = 20
    captured.replay()
    assert timed.parts(2).attention_s == 20 * 3, "each step's own"


@contextmanager
def kernels() -> Iterator[None]:
    with cpu_cuda.using(cpu_cuda.CpuLauncher(cpu_cuda.built())), torch.inference_mode():
        yield


def bench_of(degree: int = 1) -> tuple[LayerBench, Capture]:
    """One that captures. Its clock is the processor's; within steps nothing takes a tick."""
    bench = LayerBench(SPEC, torch.float32, tp_degree=degree)
    capture = Capture(Ticks(), bench.model, bench.probe)
    bench.capturing = Capturing(capture, capture.make_inner)
    return bench, capture


@pytest.mark.parametrize("most_layers", [None, 2])
def test_a_bench_s_decode_steps_are_those_of_a_run_that_captures(most_layers):
    with kernels():
        bench, capture = bench_of()
        step = bench.decode([4, 9, 2], most_layers=most_layers)
        assert capture.shapes == [(4, SPEC.hidden_size)] * 2, "filled up to the next size"
        for steps in (1, 2):
            parts = step()
            assert capture.replays == {True: steps, False: steps}
            assert parts.captured_rest_s is not None and parts.rest_s > 0
            assert 0 < parts.head_s < parts.whole_s
        assert len(bench.model.layers) == SPEC.num_layers
        assert bench.encode([5, 8])().captured_rest_s is None
        assert capture.replays[False] == 2, "what is encoded is launched"


def test_what_a_run_does_not_capture_is_not_captured_here(monkeypatch):
    with kernels():
        bench, capture = bench_of(degree=2)
        assert bench.decode([4, 9])().captured_rest_s is None and not capture.shapes
        bench, capture = bench_of()
        monkeypatch.setattr(Capture, "__call__", refused)
        parts = bench.decode([4, 9])()
        assert parts.captured_rest_s is None and parts.rest_s > 0
        assert bench.capturing is None and "not permitted" in str(bench.capture_failure)
    bench, capture = bench_of()  # torch's operators serve
    with torch.inference_mode():
        assert bench.decode([4, 9])().captured_rest_s is None and not capture.shapes


def refused(capture: Capture, work: Callable[[], Any]) -> Captured:
    raise CaptureError("operation not permitted when stream is capturing")


def test_what_a_captured_step_takes_besides_is_what_its_own_parts_leave():
    parts = StepParts(whole_s=20, rest_s=9, attention_s=2, embed_s=1, head_s=3, captured_rest_s=4)
    assert parts.overhead_s(2) == 20 - 2 * (4 + 2) - 1 - 3
