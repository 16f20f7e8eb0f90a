"""vLLM in several replicas on this machine's cores, without xgpt.

    python run_vllm_copies.py --model FOLDER --workload FILE [--mode halves] [--threads 2]

`halves`: a process of one core each, over equal parts of the file, as `xgpt schedule --export vllm`
runs it. `parallel`: vLLM's own data parallelism (`data_parallel_size`), whose engines of one core
each take requests from one client. Eager, unless the mode ends in `-compiled`. All parts begin when
all engines are loaded, and the run ends with the last of them.
"""

import asyncio
import multiprocessing as mp
import multiprocessing.connection
import os
import sys
import threading
from multiprocessing.synchronize import Barrier
from typing import Any

from driver import Arguments, Query, Report, read_arguments

_CACHE_BYTES = 1 << 30  # of each engine
_LEAST_TOKENS = 512  # of the longest query, input and output
_LOAD_S, _RUN_S = 600.0, 600.0


def main() -> None:
    given = read_arguments(tuple(
        mode + how for mode in ("halves", "parallel") for how in ("", "-compiled")))
    os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
                      VLLM_LOGGING_LEVEL="WARNING", VLLM_CPU_OMP_THREADS_BIND="|".join(
                          str(core) for core in range(given.threads)))
    if given.mode.startswith("halves"):
        run_halves(given, Report())
    else:
        asyncio.run(run_parallel(given, Report()))
    sys.stdout.flush()
    os._exit(0)  # vLLM's own end may take longer than the run


def run_halves(given: Arguments, report: Report) -> None:
    context = mp.get_context("spawn")
    barrier, answers = context.Barrier(given.threads + 1), context.Queue()
    each = -(-len(given.queries) // given.threads)
    parts = [given.queries[first:first + each] for first in range(0, len(given.queries), each)]
    processes = [context.Process(target=_part, args=(given, core, part, barrier, answers))
                 for core, part in enumerate(parts)]
    for process in processes:
        process.start()
    threading.Thread(target=_watch, args=(processes, barrier), daemon=True).start()
    barrier.wait(_LOAD_S)
    report.begin()
    found = dict(answers.get(timeout=_RUN_S) for _ in processes)
    report.end(found[0][0], given.queries,
               [count for core in sorted(found) for count in found[core][1]])
    for process in processes:
        process.join()


def _watch(processes: list[Any], barrier: Barrier) -> None:
    """Ends the wait where a process ends before it is loaded."""
    mp.connection.wait([process.sentinel for process in processes])
    barrier.abort()


def _part(given: Arguments, core: int, part: list[Query], barrier: Barrier, answers: Any) -> None:
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(core)
    import vllm

    engine = vllm.LLM(**_arguments(given))
    engine.generate([_prompt(Query([200] * 40, 4, samples=1, targets=0))] * 4,
                    _exactly(Query([], 4, samples=1, targets=0)), use_tqdm=False)
    barrier.wait(_LOAD_S)
    outputs = engine.generate([_prompt(query) for query in part],
                              [_exactly(query) for query in part], use_tqdm=False)
    answers.put((core, (vllm.__version__, [len(one.outputs[0].token_ids) for one in outputs])))
    answers.close()
    answers.join_thread()
    engine.llm_engine.engine_core.shutdown()
    os._exit(0)


async def run_parallel(given: Arguments, report: Report) -> None:
    import vllm

    engine = vllm.AsyncLLMEngine.from_engine_args(vllm.AsyncEngineArgs(
        data_parallel_size=given.threads, **_arguments(given)))

    async def answer(name: str, query: Query) -> int:
        return [len(one.outputs[0].token_ids) async for one in engine.generate(
            _prompt(query), _exactly(query), name)][-1]

    await asyncio.gather(*(answer(f"first{place}", Query([200] * 40, 4, samples=1, targets=0))
                           for place in range(4 * given.threads)))
    report.begin()
    counts = await asyncio.gather(*(answer(str(place), query)
                                    for place, query in enumerate(given.queries)))
    report.end(vllm.__version__, given.queries, counts)
    engine.shutdown()


def _arguments(given: Arguments) -> dict[str, Any]:
    longest = max(len(query.input_ids) + query.output_tokens + 1 for query in given.queries)
    return {"model": given.model, "dtype": given.dtype, "seed": 0,
            "enforce_eager": not given.mode.endswith("compiled"),
            "max_model_len": max(longest, _LEAST_TOKENS), "skip_tokenizer_init": True,
            "enable_prefix_caching": False, "kv_cache_memory_bytes": _CACHE_BYTES}


def _prompt(query: Query) -> dict[str, list[int]]:
    return {"prompt_token_ids": query.input_ids}


def _exactly(query: Query) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=query.output_tokens,
                          detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


if __name__ == "__main__":  # each engine's process starts this module again
    main()
