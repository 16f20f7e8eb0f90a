"""A real step taken apart: nothing counted twice, nothing left out, nothing changed by looking."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="measuring needs the extra `run`")

from xgpt.core.deployment import StageAssignment  # noqa: E402
from xgpt.core.model import ModelSpec  # noqa: E402
from xprofiler.measure.bench import (  # noqa: E402
    LayerBench,  # noqa: E402
    contexts_of_mean,
    contexts_up_to,
    ordinary_inputs,
)
from xprofiler.measure.probe import (  # noqa: E402
    CpuClock,  # noqa: E402
    Probe,
    StepParts,
)
from xrunner.comm.messages import Joined, StartMessage, StepMessage  # noqa: E402
from xrunner.devices import Arriving  # noqa: E402
from xrunner.engine.stage import StageExecutor  # noqa: E402
from xrunner.models.stage_model import StageModel  # noqa: E402
from xrunner.models.weights import RandomWeights  # noqa: E402
from xrunner.query import Sampling  # noqa: E402
from xrunner.rules.steps import StepKind  # noqa: E402

SPECS = {
    "llama": ModelSpec(name="llama", family="llama", num_layers=3, hidden_size=48, num_heads=6,
                       num_kv_heads=2, vocab_size=97, intermediate_size=80, is_gated_mlp=True,
                       has_bias=False, max_positions=256, activation="silu"),
    "opt": ModelSpec(name="opt", family="opt", num_layers=3, hidden_size=48, num_heads=6,
                     vocab_size=97, intermediate_size=80, max_positions=256,
                     has_learned_positions=True),
    "gpt2": ModelSpec(name="gpt2", family="gpt2", num_layers=3, hidden_size=48, num_heads=6,
                      vocab_size=97, intermediate_size=80, max_positions=256,
                      has_learned_positions=True, activation="gelu"),
}
T5 = ModelSpec(name="t5", family="t5", num_layers=2, num_encoder_layers=3, hidden_size=32,
               num_heads=6, head_size=4, vocab_size=97, intermediate_size=36, has_bias=False)


class FakeClock:
    """Ticks: a mark is the time so far, which only `spend` advances, and `per_mark` each mark."""

    def __init__(self, per_mark: int = 0) -> None:
        self.now, self.marks, self._per_mark, self._settled = 0, 0, per_mark, -1

    def spend(self, ticks: int) -> None:
        self.now += ticks

    def mark(self) -> int:
        self.marks += 1
        self.now += self._per_mark
        return self.now

    def settle(self) -> None:
        self._settled = self.now

    def seconds(self, first: int, second: int) -> float:
        assert first <= second <= self._settled, "read before it was settled, or the wrong way"
        return float(second - first)


class FakeModel:
    """Layers and ends that spend ticks: every call another power of two, so that a sum tells which
    calls it is of. `spent` [part] are the ticks of each."""

    def __init__(self, clock: FakeClock, num_layers: int, *, is_last: bool = True) -> None:
        self._clock, self.is_last = clock, is_last
        self._powers = (1 << i for i in itertools.count())
        self.layers = [SimpleNamespace(qkv=self._part("rest"), finish=self._part("rest"))
                       for _ in range(num_layers)]
        self.ends = SimpleNamespace(embed=self._part("embed"), rotation=self._part("rest"),
                                    scores=self._part("head"))
        self.spent: dict[str, int] = {}

    def _part(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            ticks = next(self._powers)
            self.spent[name] = self.spent.get(name, 0) + ticks
            self._clock.spend(ticks)
            return arguments

        return call

    def step(self) -> None:
        """A stage's step in the order in which StageModel and StageExecutor take it."""
        spend = self._part
        spend("overhead")()
        self.ends.embed("tokens", "positions")
        self.ends.rotation("positions")
        for layer in self.layers:
            assert layer.qkv("hidden") == ("hidden",)
            spend("attention")()
            layer.finish("hidden", "attended")
        spend("overhead")()
        if self.is_last:
            self.ends.scores("hidden")
            spend("head")()  # sampling


@pytest.mark.parametrize("num_layers", [1, 2, 5])
def test_every_part_is_counted_once_where_it_belongs(num_layers):
    clock = FakeClock()
    model = FakeModel(clock, num_layers)
    probe = Probe(model, clock)  # type: ignore[arg-type]
    for _ in range(2):  # what a step leaves behind does not count in the next
        model.spent.clear()
        parts = probe.time(model.step)
        spent = {name: float(ticks) for name, ticks in model.spent.items()}
        assert parts.rest_s * num_layers == pytest.approx(spent["rest"], rel=1e-12)
        assert parts.attention_s * num_layers == pytest.approx(spent["attention"], rel=1e-12)
        assert (parts.embed_s, parts.head_s) == (spent["embed"], spent["head"])
        assert parts.whole_s == sum(spent.values())
        assert parts.overhead_s(num_layers) == pytest.approx(spent["overhead"], rel=1e-9)


def total_s(parts: StepParts, num_layers: int) -> float:
    """What the parts of a decode step, and what it takes besides, add up to."""
    layer_s = parts.rest_s + parts.attention_s + parts.cross_s
    return num_layers * layer_s + parts.embed_s + parts.head_s + parts.overhead_s(num_layers)


@pytest.mark.parametrize("is_last", [True, False])
def test_parts_and_overhead_are_the_whole_whatever_a_mark_costs(is_last):
    clock = FakeClock(per_mark=1)
    model = FakeModel(clock, 4, is_last=is_last)
    parts = Probe(model, clock).time(model.step)  # type: ignore[arg-type]
    assert total_s(parts, 4) == parts.whole_s
    assert parts.whole_s == sum(model.spent.values()) + clock.marks - 1
    assert (parts.head_s > 0) == is_last


def test_marks_alone_put_a_fixed_number_of_moments_around_the_parts():
    """Each mark is a tick, nothing else takes time: 2 around each of a layer's parts."""
    clock = FakeClock(per_mark=1)
    layer = SimpleNamespace(qkv=lambda *_: None, finish=lambda *_: None)
    ends = SimpleNamespace(embed=lambda *_: None, rotation=lambda *_: None, scores=lambda *_: None)

    def step() -> None:
        for call in (ends.embed, ends.rotation, layer.qkv, layer.finish, ends.scores):
            call()

    probe = Probe(SimpleNamespace(layers=[layer], ends=ends), clock)  # type: ignore[arg-type]
    parts = probe.time(step)
    assert clock.marks == 2 + 2 * 4 + 1
    assert parts == StepParts(whole_s=10, rest_s=3, attention_s=1, embed_s=1, head_s=1)
    assert parts.overhead_s(1) == 4
    # clocks of a GPU's events and of the whole may disagree by a rounding
    assert StepParts(whole_s=1.0, rest_s=0.6, attention_s=0.5, embed_s=0, head_s=0
                     ).overhead_s(1) == 0


def test_a_step_that_skips_a_layer_is_our_own_mistake():
    clock = FakeClock()
    model = FakeModel(clock, 3)
    probe = Probe(model, clock)  # type: ignore[arg-type]

    def skipping() -> None:
        whole, model.layers = model.layers, model.layers[:-1]
        model.step()
        model.layers = whole

    with pytest.raises(AssertionError, match="passed"):
        probe.time(skipping)


def executor_of(spec: ModelSpec) -> StageExecutor:
    stage = StageAssignment(index=0, ranks=(0,), first_layer=0, num_layers=spec.num_layers)
    executor = StageExecutor(StageModel(spec, RandomWeights(torch.float32, scale=0.3), stage,
                                        torch.float32))
    executor.start(StartMessage(num_groups=1, slots=3, capacity=32))
    return executor


def generated(executor: StageExecutor, probe: Probe | None) -> list[list[int]]:
    """Tokens of three queries over six steps, the first of which encodes."""
    lengths, sampling = (7, 3, 5), Sampling(temperature=1.0, top_k=20, seed=3)
    joined = tuple(Joined(query=i, input_tokens=n, sampling=sampling)
                   for i, n in enumerate(lengths))
    message = StepMessage(kind=StepKind.ENCODE, group=0, phase=0, iteration=0, joined=joined)
    tokens, found = torch.arange(sum(lengths)) % 97, []
    for iteration in range(1, 7):
        def step(message: StepMessage = message, inputs: Any = tokens) -> None:
            nonlocal tokens
            given = executor.execute(message, inputs)
            assert isinstance(given, Arriving)
            tokens = given.wait()

        if probe is None:
            step()
        else:
            parts = probe.time(step)
            assert total_s(parts, 3) == pytest.approx(parts.whole_s, rel=1e-9)
        found.append([int(token) for token in tokens])
        message = StepMessage(kind=StepKind.DECODE, group=0, phase=0, iteration=iteration)
    return found


@pytest.mark.parametrize("family", SPECS)
def test_a_probed_step_gives_the_tokens_that_it_gives_unprobed(family):
    plain, probed = executor_of(SPECS[family]), executor_of(SPECS[family])
    expected = generated(plain, None)
    assert generated(probed, Probe(probed.model, CpuClock())) == expected
    assert len({tuple(step) for step in expected}) > 1, "a model that says one thing shows nothing"


def all_parts_are_there(parts: StepParts, num_layers: int) -> None:
    """An identity and signs, no times."""
    assert total_s(parts, num_layers) == pytest.approx(parts.whole_s, rel=1e-9)
    assert min(parts.rest_s, parts.attention_s, parts.embed_s, parts.head_s) > 0
    measured_s = parts.whole_s - parts.overhead_s(num_layers)
    assert 0 < measured_s < parts.whole_s


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize("degree", [1, 2])
def test_a_benchs_steps_add_up_to_the_whole(family, degree):
    bench = LayerBench(SPECS[family], torch.float32, tp_degree=degree)
    assert bench.num_layers == 3
    for measurement in (bench.decode([4, 9, 2]), bench.encode([5, 8])):
        for _ in range(3):  # a step can be taken again
            all_parts_are_there(measurement(), 3)


def test_a_bench_holds_as_many_layers_as_a_stage_and_both_ends():
    for stages, layers in ((1, 3), (2, 2), (3, 1), (8, 1)):
        bench = LayerBench(SPECS["llama"], torch.float32, num_stages=stages)
        assert (bench.num_layers, len(bench.model.layers)) == (layers, layers)
        assert bench.model.is_first and bench.model.is_last
        all_parts_are_there(bench.decode([4])(), layers)


def test_a_step_of_few_layers_for_attention_has_no_head_and_leaves_the_bench_whole():
    bench = LayerBench(SPECS["llama"], torch.float32)
    parts = bench.encode([5, 8], most_layers=2)()
    assert parts.attention_s > 0 and parts.head_s == 0
    assert total_s(parts, 2) == pytest.approx(parts.whole_s, rel=1e-9)
    assert bench.num_layers == len(bench.model.layers) == 3 and bench.model.is_last
    all_parts_are_there(bench.encode([5, 8])(), 3)


def test_an_encoder_decoders_steps_add_up_to_the_whole():
    bench = LayerBench(T5, torch.float32)
    decode = bench.decode([4, 9, 2])()
    all_parts_are_there(decode, bench.num_layers)
    assert decode.cross_s > 0
    encode = bench.encode([5, 8])()
    encoder_s = len(bench.model.encoder_layers) * (encode.rest_s + encode.attention_s)
    parts_s = encoder_s + encode.embed_s + bench.num_layers * encode.cross_kv_s
    assert 0 < parts_s < encode.whole_s


def test_sizes_of_a_timed_step_are_those_asked_for_and_always_the_same():
    for queries, longest in ((1, 1), (1, 50), (2, 1), (7, 129)):
        contexts = contexts_up_to(queries, longest)
        assert len(contexts) == queries and max(contexts) == longest and min(contexts) >= 1
        assert contexts == contexts_up_to(queries, longest)
        assert queries < 7 or len(set(contexts)) > queries // 2
    for queries, mean in ((1, 1), (1, 300), (7, 2), (33, 100), (128, 519)):
        contexts = contexts_of_mean(queries, mean)
        assert len(contexts) == queries and sum(contexts) == mean * queries
        assert min(contexts) >= 1 and max(contexts) <= 2 * mean
        assert contexts == contexts_of_mean(queries, mean)
    for tokens in (1, 30, 75, 300, 2080):
        lengths = ordinary_inputs(tokens)
        assert sum(lengths) == tokens and min(lengths) >= 1
        assert lengths == ordinary_inputs(tokens)


@pytest.mark.parametrize("spec", [T5, SPECS["opt"]])
def test_moving_cache_rows_can_be_timed_again_and_again(spec):
    move = LayerBench(spec, torch.float32).compaction(3, 16)
    assert all(move() > 0 for _ in range(3))
