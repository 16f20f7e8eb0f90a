"""vLLM's own scheduler on the CPU, eagerly, with its default settings or given ones: throughput,
and the 99th percentile of latencies from the start of a query's encoding to its last token.

    python run_vllm_bounds.py --model FOLDER --workload FILE [--threads 2] [--max-num-seqs N]
                              [--max-num-batched-tokens N]
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

_CACHE_GIB = 2
_MOST_TOKENS = 512  # of a query, input and output


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder")
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int)
    given = parser.parse_args()
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
        VLLM_CPU_KVCACHE_SPACE=str(_CACHE_GIB), VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_OMP_THREADS_BIND=f"0-{given.threads - 1}")  # its own choice is slower
    import vllm
    from vllm import LLM, SamplingParams

    rows = [json.loads(line) for line in given.workload.open(encoding="utf-8")]
    settings = {"max_num_seqs": given.max_num_seqs,
                "max_num_batched_tokens": given.max_num_batched_tokens}
    engine = LLM(model=given.model, dtype=given.dtype, max_model_len=_MOST_TOKENS, seed=0,
                 enforce_eager=True, skip_tokenizer_init=True, enable_prefix_caching=False,
                 disable_log_stats=False,
                 **{key: value for key, value in settings.items() if value is not None})
    scheduler = engine.llm_engine.vllm_config.scheduler_config

    def exactly(tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, detokenize=False)

    engine.generate([{"prompt_token_ids": list(range(200, 240))}] * 4, exactly(4), use_tqdm=False)
    started_s = time.perf_counter()
    outputs = engine.generate([{"prompt_token_ids": row["input_ids"]} for row in rows],
                              [exactly(row["output_len"]) for row in rows], use_tqdm=False)
    run_s = time.perf_counter() - started_s
    latencies = [one.metrics.last_token_ts - one.metrics.scheduled_ts for one in outputs]
    counts = [len(one.outputs[0].token_ids) for one in outputs]
    print(json.dumps({
        "version": vllm.__version__, "run_s": run_s, "throughput_qps": len(rows) / run_s,
        "latency_p99_s": statistics.quantiles(latencies, n=100, method="inclusive")[-1],
        "output_tokens": sum(counts), "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "is_exact": counts == [row["output_len"] for row in rows]}), flush=True)


if __name__ == "__main__":
    main()
