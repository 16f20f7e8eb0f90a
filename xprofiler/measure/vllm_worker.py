"""Measures vLLM's steps: `PYTHON -m xprofiler.measure.vllm_worker REQUEST.json`, in the interpreter
that has vLLM. The points, the noise and the profile are those of any source."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from xgpt.core.errors import XgptError
from xgpt.core.model import model_from_dict
from xgpt.core.units import DTYPE_BYTES
from xprofiler.measure.bench import DRAWN, GREEDY
from xprofiler.measure.ranks import connect
from xprofiler.measure.vllm_bench import LEAST_S, SHORT, VllmBench
from xprofiler.measure.worker import MeasureRequest, Measuring, messages_between
from xprofiler.points import Needs, Point
from xprofiler.profile import ALL_REDUCE, Sample
from xrunner.backends.vllm.core import CoreSettings, EngineCore
from xrunner.rank.lead import leave

_ANY_SIZE = (1.0, 2.0**40)  # bytes of a message, from the least to the most
_FILLED = {"kv_connector": "FilledCache", "kv_role": "kv_both",
           "kv_connector_module_path": "xrunner.backends.vllm.filled"}


class _OfVllm(Measuring):
    """The points of a profile, by a vLLM engine core."""

    _core: EngineCore | None = None

    def bench_of(self, degree: int) -> Any:
        request = self.request
        needs, drawn = Needs(**request.needs), request.metadata["sampling"] == "drawn"
        settings = settings_of(request, needs, degree)
        started_s = time.monotonic()
        self.close()
        self._core = core = EngineCore(settings)
        sampling = DRAWN if drawn else GREEDY
        self.begin_s += time.monotonic() - started_s  # to load it is not to measure
        spec = model_from_dict(request.model)
        return VllmBench(core, spec.num_layers, sampling,
                         head_share=spec.head_params / spec.num_params)

    def close(self) -> None:
        """Ends what the core has started, if there is one."""
        if self._core is not None:
            self._core.close()

    def most_layers(self, bench: Any, point: Point) -> int | None:
        return None  # a step of vLLM's goes through all of them

    def add_network(self) -> None:
        """What the processes of a group tell each other is part of the steps, so that nothing is
        added to them for it. vLLM has no other messages under xgpt."""
        metadata = self.request.metadata
        self._recorder.add_network({
            key: tuple(Sample(x=size, y=0.0, samples_s=(LEAST_S,)) for size in _ANY_SIZE)
            for key in messages_between(self.request, metadata["ranks"], metadata["nodes"])
            if key.name == ALL_REDUCE})


def settings_of(request: MeasureRequest, needs: Needs, tp_degree: int = 1) -> CoreSettings:
    """What vLLM is started with to take any step of these sizes, divided over so many
    processes."""
    spec, engine, dtype = model_from_dict(request.model), request.engine, request.metadata["dtype"]
    queries = max(needs.queries, -(-needs.tokens // SHORT) + 1)
    kv_bytes = spec.kv_elements_per_token_layer * spec.num_layers * DTYPE_BYTES[dtype]
    # contexts scatter around their mean, by a third; a decode step is measured one token on
    longest = max(4 * needs.context_tokens // 3, needs.input_tokens) + 4
    held = max(needs.queries * (needs.context_tokens + 2), needs.tokens + 2 * queries)
    return CoreSettings(
        model_dir=Path(engine["model_dir"]), dtype=dtype, is_random=True,
        threads=int(request.metadata["threads_per_rank"]), max_queries=queries,
        max_tokens=min(longest, spec.max_positions or longest),
        kv_tokens=held,
        kv_token_bytes=kv_bytes, tp_degree=tp_degree, device_kind=engine["device_kind"],
        most_tokens=needs.tokens,
        arguments={**engine["arguments"], "kv_transfer_config": _FILLED})


def main(arguments: list[str]) -> int:
    request = MeasureRequest(**json.loads(Path(arguments[0]).read_text(encoding="utf-8")))
    torch.set_num_threads(int(request.metadata["threads_per_rank"]))
    measuring = _OfVllm(request, connect(1))
    try:
        measuring.run()
    except XgptError as error:
        print(f"xgpt: {error}", file=sys.stderr, flush=True)
        return error.exit_code
    finally:
        measuring.close()
    return 0


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
