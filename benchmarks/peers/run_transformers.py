"""transformers: `generate` in static batches (decoder-only models and T5), or its continuous
batching (decoder-only).

    python run_transformers.py --model FOLDER --workload FILE [--mode static|continuous]
                               [--dtype bfloat16] [--threads 2]

A static batch is padded to its longest input and runs to its longest output; the queries are taken
as they come.
"""

import os
from typing import Any

from driver import Arguments, Query, Report, read_arguments

_BATCH = 32  # the quickest of 8, 16, 32, 64 and 200 where all were tried
_STEP_TOKENS, _BLOCKS, _PAGE_TOKENS = 256, 256, 32


def main() -> None:
    given = read_arguments(("static", "continuous"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(given.threads))
    report = Report()
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(given.threads)
    is_t5 = transformers.AutoConfig.from_pretrained(
        given.model, trust_remote_code=False).is_encoder_decoder
    family = transformers.AutoModelForSeq2SeqLM if is_t5 else transformers.AutoModelForCausalLM
    model = family.from_pretrained(given.model, trust_remote_code=False,
                                   dtype=getattr(torch, given.dtype),
                                   attn_implementation="sdpa").eval()
    run = static if given.mode == "static" else continuous
    counts = run(model, given, report)
    report.end(transformers.__version__, given.queries, counts)


def static(model: Any, given: Arguments, report: Report) -> list[int]:
    """Tokens of each query."""
    generate(model, [query._replace(output_tokens=4) for query in given.queries[:_BATCH]])
    report.begin()
    for start in range(0, len(given.queries), _BATCH):
        generate(model, given.queries[start:start + _BATCH])
    return [query.output_tokens for query in given.queries]  # `generate` has looked


def generate(model: Any, queries: list[Query]) -> None:
    """Inputs are padded on the left, an encoder's on the right."""
    import torch

    is_t5 = model.config.is_encoder_decoder
    pad = 0 if is_t5 else 1
    width = max(len(query.input_ids) for query in queries)
    tokens = torch.full((len(queries), width), pad)
    mask = torch.zeros((len(queries), width), dtype=torch.long)
    for row, query in enumerate(queries):
        size = len(query.input_ids)
        here = slice(0, size) if is_t5 else slice(width - size, width)
        tokens[row, here], mask[row, here] = torch.tensor(query.input_ids), 1
    most = max(query.output_tokens for query in queries)
    out = model.generate(input_ids=tokens, attention_mask=mask, do_sample=False, num_beams=1,
                         min_new_tokens=most, max_new_tokens=most, eos_token_id=None,
                         pad_token_id=pad)
    assert out.shape[1] - (1 if is_t5 else width) == most, f"{out.shape = } {width = } {most = }"


def continuous(model: Any, given: Arguments, report: Report) -> list[int]:
    """Tokens of each query."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    how = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=1,
                           max_new_tokens=max(q.output_tokens for q in given.queries))
    config = ContinuousBatchingConfig(
        num_blocks=_BLOCKS, max_batch_tokens=_STEP_TOKENS, page_size=_PAGE_TOKENS,
        max_requests_per_batch=_BATCH, use_cuda_graph=False, use_async_batching=False,
        allow_block_sharing=False)
    counts: dict[str, int] = {}
    with model.continuous_batching_context_manager(
            generation_config=how, continuous_batching_config=config, block=True,
            timeout=30) as manager:
        report.begin()
        for number, query in enumerate(given.queries):
            manager.add_request(input_ids=query.input_ids, request_id=str(number),
                                max_new_tokens=query.output_tokens, eos_token_id=-1)
        while len(counts) < len(given.queries) and manager.is_running():
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                counts[result.request_id] = len(result.generated_tokens)
    return [counts.get(str(number), 0) for number in range(len(given.queries))]


if __name__ == "__main__":
    main()
