"""vLLM on the CPU, offline (`LLM.generate`), compiled or eager.

    python run_vllm.py --model FOLDER --workload FILE [--mode compiled|eager] [--threads 2]
                       [--caching] [--kv-tokens N]
"""

import os
from typing import Any

from driver import Query, Report, read_arguments

_CACHE_GIB = 2
_BLOCK_TOKENS = 128
_LEAST_TOKENS = 512  # of the longest query, input and output


def main() -> None:
    given = read_arguments(("compiled", "eager"))
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
        VLLM_CPU_KVCACHE_SPACE=str(_CACHE_GIB),
        VLLM_CPU_OMP_THREADS_BIND=f"0-{given.threads - 1}")  # its own choice is slower
    report = Report()
    import vllm
    from vllm import LLM, SamplingParams

    longest = max(len(query.input_ids) + query.output_tokens + 1 for query in given.queries)
    room: dict[str, Any] = {} if given.kv_tokens is None else {
        "num_gpu_blocks_override": given.kv_tokens // _BLOCK_TOKENS + 1}  # it takes one itself
    engine = LLM(model=given.model, dtype=given.dtype, max_model_len=max(longest, _LEAST_TOKENS),
                 seed=0, enforce_eager=given.mode == "eager", skip_tokenizer_init=True,
                 enable_prefix_caching=given.is_cached, block_size=_BLOCK_TOKENS, **room)

    def exactly(query: Query) -> SamplingParams:
        if query.targets:
            return SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        return SamplingParams(temperature=float(query.samples > 1), n=query.samples,
                              ignore_eos=True, max_tokens=query.output_tokens, detokenize=False)

    first = Query(list(range(200, 240)), 4, samples=1, targets=0)
    engine.generate([{"prompt_token_ids": first.input_ids}] * 4, exactly(first), use_tqdm=False)
    report.begin()
    outputs = engine.generate([{"prompt_token_ids": query.input_ids} for query in given.queries],
                              [exactly(query) for query in given.queries], use_tqdm=False)
    counts = [len(output.prompt_logprobs[-query.targets:]) if query.targets else
              sum(len(answer.token_ids) for answer in output.outputs)
              for query, output in zip(given.queries, outputs, strict=True)]
    report.end(vllm.__version__, given.queries, counts)


if __name__ == "__main__":  # vLLM starts this module again in its engine's process
    main()
