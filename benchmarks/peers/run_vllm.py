"""vLLM on the CPU, offline (`LLM.generate`), compiled or eager.

    python run_vllm.py --model FOLDER --workload FILE [--mode compiled|eager] [--threads 2]
"""

import os

from driver import Report, read_arguments

_CACHE_GIB = 2
_MOST_TOKENS = 512  # of a query, input and output


def main() -> None:
    given = read_arguments(("compiled", "eager"))
    os.environ.update(
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1",
        VLLM_CPU_KVCACHE_SPACE=str(_CACHE_GIB),
        VLLM_CPU_OMP_THREADS_BIND=f"0-{given.threads - 1}")  # its own choice is slower
    report = Report()
    import vllm
    from vllm import LLM, SamplingParams

    engine = LLM(model=given.model, dtype=given.dtype, max_model_len=_MOST_TOKENS, seed=0,
                 enforce_eager=given.mode == "eager", skip_tokenizer_init=True,
                 enable_prefix_caching=False)

    def exactly(tokens: int) -> SamplingParams:
        return SamplingParams(temperature=0, ignore_eos=True, max_tokens=tokens, detokenize=False)

    engine.generate([{"prompt_token_ids": list(range(200, 240))}] * 4, exactly(4), use_tqdm=False)
    report.begin()
    outputs = engine.generate([{"prompt_token_ids": query.input_ids} for query in given.queries],
                              [exactly(query.output_tokens) for query in given.queries],
                              use_tqdm=False)
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    report.end(vllm.__version__, given.queries, counts)


if __name__ == "__main__":  # vLLM starts this module again in its engine's process
    main()
