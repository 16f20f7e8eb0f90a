"""Measures vLLM's steps, in an engine in a process of its own, as a run executes them:
`python -m xprofiler.measure.vllm_worker REQUEST.json`. Points, noise limits and profile are those
of any source.

vLLM's kernels cannot be marked from outside as our own can. The seconds of a step's parts follow
from differences between steps, for n requests and T tokens.

    `head(1)`      step of one request, times the head's share of the model's weights.
    `head(n)`      n requests that decode next to no context, minus n tokens encoded in few inputs.
    `rest(T)`      T tokens in inputs too short for attention to count, minus head.
    `attention`    a step, minus rest and head of its sizes.

So the parts of a measured step add up to it. The two steps of a head have the same rows and are
timed in turns. The median of their differences counts: else a machine that slows down a minute
later would be taken for a head. A part that is lost in the noise counts as a hundredth of its
step: of nothing, any noise would be a large share."""

if __name__ == "__main__":  # before what takes seconds to import
    from xgpt.core.system.lifeline import begin_rank

    begin_rank()

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from xgpt.core.errors import XgptError
from xgpt.core.model import kv_elements_of_rank, model_from_dict
from xgpt.core.system.lifeline import finish_imports
from xgpt.core.units import DTYPE_BYTES
from xprofiler.measure.probe import StepParts
from xprofiler.measure.ranks import connect
from xprofiler.measure.worker import MeasureRequest, Measuring, messages_between
from xprofiler.points import Needs, Point
from xprofiler.profile import ALL_REDUCE, ENGINE_START, Sample, TableKey
from xrunner.backends.vllm.child import EngineChild
from xrunner.backends.vllm.devices import own_devices
from xrunner.backends.vllm.protocol import PREFIX, Added, Step
from xrunner.backends.vllm.settings import EngineSettings, cores_of_each
from xrunner.engine.pipeline import ExecutorDied
from xrunner.query import Sampling
from xrunner.rank.lifecycle import end_process

SHORT = 32  # chosen: tokens of an input whose attention and head hardly count
LEAST_S = 1e-9  # seconds of a part that does not exist: a profile holds no zeros
_LEAST, _MOST = 0.01, 0.9  # chosen: share of a step that attention or head has
_REPEATS = 5  # chosen: repeats of a step that others are compared with
_SLOW_S, _SLOW_REPEATS = 0.3, 3  # chosen: and of one that takes as long or longer
_TOKEN = 7  # any


class VllmBench:
    """Executes and times steps of the whole model in a vLLM engine core."""

    def __init__(self, core: EngineChild, num_layers: int, sampling: Sampling, *, head_share: float,
                 clock: Callable[[], float] = time.perf_counter) -> None:
        """`head_share`: the head's share of the model's weights."""
        self.num_layers, self._head_share = num_layers, head_share
        self._core, self._sampling, self._clock, self._numbers = core, sampling, clock, count()
        self._known: dict[int, tuple[float, float]] = {}
        self._rests: dict[int, float] = {}

    def decode(self, contexts: list[int], *,
               most_layers: int | None = None) -> Callable[[], StepParts]:
        """A function that executes and times a decode step of requests with `contexts` tokens.
        `most_layers` is ignored: vLLM executes all layers."""
        queries = len(contexts)

        def measured() -> StepParts:
            base_s, head_s = self._decoded_apart(queries)
            whole_s = self._decoded_s(contexts)
            return self._parts(whole_s, whole_s - base_s, head_s)

        return measured

    def encode(self, lengths: list[int], *,
               most_layers: int | None = None) -> Callable[[], StepParts]:
        """A function that executes and times an encode step of inputs of `lengths` tokens.
        `most_layers` is ignored: vLLM executes all layers."""
        def measured() -> StepParts:
            head_s, rest_s = self.head_s(len(lengths)), self._rest_s(sum(lengths))
            whole_s = self._encoded_s(lengths)
            return self._parts(whole_s, whole_s - rest_s - head_s, head_s)

        return measured

    def compaction(self, rows: int, tokens: int) -> Callable[[], float]:
        """A function that returns next to 0 s: vLLM's paged KV cache moves no rows."""
        return lambda: LEAST_S

    def head_s(self, queries: int) -> float:
        """Seconds of the head for `queries` next tokens, after the layers."""
        return self._decoded_apart(queries)[1]

    def _decoded_apart(self, queries: int) -> tuple[float, float]:
        """(seconds of a decode step of `queries` requests with next to no context, seconds of its
        head)."""
        if queries not in self._known:
            base_s, more_s = self._in_turns(queries)
            if queries == 1:
                head_s = self._head_share * base_s
            else:
                few = len(_inputs(queries))
                # each request after the first adds as much
                head_s = self.head_s(1) + more_s * (queries - 1) / (queries - few)
            self._known[queries] = base_s, min(max(head_s, _LEAST * base_s), _MOST * base_s)
        return self._known[queries]

    def _in_turns(self, queries: int) -> tuple[float, float]:
        """(seconds of a decode step of `queries` requests, its seconds minus those of as many rows
        in few inputs), each the median of repeats taken in turns."""
        contexts, inputs = [1] * queries, _inputs(queries)
        self._encoded_s(inputs)  # it may compile, or get memory
        repeats = _REPEATS if self._decoded_s(contexts) < _SLOW_S else _SLOW_REPEATS
        pairs = [(self._decoded_s(contexts), self._encoded_s(inputs)) for _ in range(repeats)]
        return (statistics.median(decoded_s for decoded_s, _ in pairs),
                statistics.median(decoded_s - encoded_s for decoded_s, encoded_s in pairs))

    def _rest_s(self, tokens: int) -> float:
        """Seconds of all layers for so many tokens, without attention and head."""
        if tokens not in self._rests:
            inputs = _inputs(tokens)
            first_s = self._encoded_s(inputs)
            repeats = _REPEATS if first_s < _SLOW_S else _SLOW_REPEATS
            whole_s = statistics.median(self._encoded_s(inputs) for _ in range(repeats))
            self._rests[tokens] = max(whole_s - self.head_s(len(inputs)), LEAST_S)
        return self._rests[tokens]

    def _parts(self, whole_s: float, attention_s: float, head_s: float) -> StepParts:
        """StepParts of a step with these seconds of attention in all layers and of head; the
        remainder is the layers' rest."""
        head_s = min(head_s, _MOST * whole_s)
        attention_s = min(max(attention_s, _LEAST * whole_s), _MOST * (whole_s - head_s))
        rest_s = whole_s - head_s - attention_s
        return StepParts(whole_s=whole_s, rest_s=rest_s / self.num_layers, embed_s=LEAST_S,
                         attention_s=attention_s / self.num_layers, head_s=head_s)

    def _decoded_s(self, contexts: Sequence[int]) -> float:
        """Seconds of a decode step, which follows the step that starts the requests."""
        assert self._core.loaded is not None
        most = self._core.loaded.max_tokens - 2  # contexts scatter beyond the model's positions
        added = self._added([min(max(n - 1, 1), most) for n in contexts], PREFIX)
        wanted = [(one.name, 1) for one in added]
        self._core.step(Step(wanted, added))
        start_s = self._clock()
        self._core.step(Step(wanted))
        return self._ended(added, self._clock() - start_s)

    def _encoded_s(self, lengths: Sequence[int]) -> float:
        added = self._added(lengths, "")
        start_s = self._clock()  # a run also adds its requests within the step
        self._core.step(Step([(one.name, len(one.tokens)) for one in added], added))
        return self._ended(added, self._clock() - start_s)

    def _added(self, lengths: Sequence[int], prefix: str) -> list[Added]:
        return [Added(f"{prefix}{next(self._numbers)}", [_TOKEN] * length, self._sampling)
                for length in lengths]

    def _ended(self, added: Sequence[Added], seconds: float) -> float:
        self._core.step(Step((), ended=[one.name for one in added]))
        return seconds


def _inputs(tokens: int) -> list[int]:
    """Lengths of short inputs that sum to `tokens`; the last one may be shorter."""
    whole, left = divmod(tokens, SHORT)
    return [SHORT] * whole + [left] * (left > 0)


_ANY_SIZE = (1.0, 2.0**40)  # bytes of a message, from the least to the most
_FILLED = {"kv_connector": "FilledCache", "kv_role": "kv_both",
           "kv_connector_module_path": "xrunner.backends.vllm.filled"}


class _OfVllm(Measuring):
    """Measures a profile's points in a vLLM engine core."""

    _core: EngineChild | None = None

    def bench_of(self, degree: int) -> Any:
        """A VllmBench of this tensor-parallel degree; closes the core of the degree before."""
        request = self.request
        engine, ranks, threads = request.engine, self._ranks, request.metadata["threads_per_rank"]
        is_cpu = engine["device_kind"] == "cpu"
        started_s = time.monotonic()
        self.close()
        devices = own_devices(lambda words: ranks.gather(words, str), ranks.rank,
                              engine["device_kind"], degree * (threads if is_cpu else 1))
        self._core = core = EngineChild(
            engine["python"], Path(request.target).with_suffix(f".{ranks.rank}.log"),
            () if is_cpu else devices, replica=ranks.rank,
            cores=[int(core) for core in devices] if is_cpu else ())
        core.load(settings_of(request, Needs(**request.needs), degree, cores_of_each(
            [int(own) for own in devices], degree, threads) if is_cpu else ()).load)
        core.await_ready()
        self._recorder.add(TableKey(ENGINE_START, degree), ranks.size, 0,
                           [max(ranks.gather(core.start_s, float))])
        self.begin_s += time.monotonic() - started_s  # loading does not count as measuring
        return VllmBench(core, self._spec.num_layers, self._sampling,
                         head_share=self._spec.head_params / self._spec.num_params)

    def close(self) -> None:
        """Closes the engine core, if there is one."""
        if self._core is not None:
            self._core.close()

    def device_of(self, name: str) -> torch.device:
        """The kind of device alone: vLLM takes its own, and this process may have no build for
        it."""
        return torch.device("cpu" if name.startswith("cpu") else "cuda")

    def most_layers(self, bench: Any, point: Point) -> int | None:
        """None: vLLM's steps execute all layers."""
        return None

    def add_network(self) -> None:
        """Adds all-reduce tables of next to 0 s: all-reduces are part of the measured steps.
        Between stages vLLM sends a hidden state and a residual, by the rate of the node's link."""
        metadata, (latency_s, rate) = self.request.metadata, self.request.engine["link"]
        self._recorder.add_network({
            key: tuple(Sample(x=size, y=0.0, samples_s=(
                LEAST_S if key.name == ALL_REDUCE else 2 * (latency_s + size / rate),))
                for size in _ANY_SIZE)
            for key in messages_between(self.request, metadata["ranks"], metadata["nodes"])
            if key.link == self.request.near})


def settings_of(request: MeasureRequest, needs: Needs, tp_degree: int = 1,
                cores: Sequence[Sequence[int]] = ()) -> EngineSettings:
    """Settings to start vLLM with, so that it can execute any step up to `needs`, on `tp_degree`
    processes, on CPUs with `cores` each."""
    spec, engine, dtype = model_from_dict(request.model), request.engine, request.metadata["dtype"]
    queries = max(needs.queries, -(-needs.tokens // SHORT) + 1)
    kv_bytes = int(kv_elements_of_rank(spec, tp_degree) * spec.num_layers * DTYPE_BYTES[dtype])
    # contexts scatter around their mean by a third; a decode step is measured one token later
    longest = max(4 * needs.context_tokens // 3, needs.input_tokens) + 4
    held = max(needs.queries * (needs.context_tokens + 2), needs.tokens + 2 * queries)
    return EngineSettings(
        model_dir=Path(engine["model_dir"]), dtype=dtype, is_random=True,
        cores=cores, max_queries=queries, kv_tokens=held,
        max_tokens=min(longest, spec.max_positions or longest),
        kv_token_bytes=kv_bytes, tp_degree=tp_degree, device_kind=engine["device_kind"],
        most_tokens=needs.tokens,
        arguments={**engine["arguments"], "kv_transfer_config": _FILLED})


def main(arguments: list[str]) -> int:
    """Measures as the request file `arguments[0]` says; returns the exit code."""
    finish_imports()
    request = MeasureRequest(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    measuring = _OfVllm(request, connect(request.ranks, float(request.metadata["sharing"])))
    try:
        measuring.run()
    except (XgptError, ExecutorDied) as error:
        print(f"xgpt: {error}", file=sys.stderr, flush=True)
        return getattr(error, "exit_code", 1)
    finally:
        measuring.close()
    return 0


if __name__ == "__main__":
    end_process(main(sys.argv[1:]))
