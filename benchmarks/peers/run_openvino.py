"""OpenVINO GenAI's continuous batching on the CPU, in the precision that OpenVINO takes by itself
or in float32 (quicker on processors whose bfloat16 products are slow).

    python run_openvino.py --model FOLDER --workload FILE [--mode default|f32] [--threads 2]
                           [--caching] [--kv-tokens N]

FOLDER: `optimum-cli export openvino --model HF_FOLDER --task text-generation-with-past
--weight-format fp32 FOLDER`.
"""

from driver import Query, Report, read_arguments

_CACHE_GIB = 2
_BLOCK_TOKENS = 32  # of its CPU plugin
_MOST_QUERIES = 256
_STEP_TOKENS = 256


def main() -> None:
    given = read_arguments(("default", "f32"))
    report = Report()
    import numpy as np
    import openvino
    import openvino_genai as genai

    schedule = genai.SchedulerConfig()
    schedule.max_num_seqs = _MOST_QUERIES
    if given.kv_tokens is None:
        schedule.cache_size = _CACHE_GIB
    else:
        schedule.num_kv_blocks = given.kv_tokens // _BLOCK_TOKENS
    schedule.max_num_batched_tokens = _STEP_TOKENS
    schedule.dynamic_split_fuse = True
    schedule.enable_prefix_caching = given.is_cached
    properties: dict[str, int | str] = {"INFERENCE_NUM_THREADS": given.threads}
    if given.mode != "default":
        properties["INFERENCE_PRECISION_HINT"] = given.mode
    pipeline = genai.ContinuousBatchingPipeline(given.model, schedule, "CPU", properties)

    def add(number: int, query: Query) -> "genai.GenerationHandle":
        how = genai.GenerationConfig()
        how.max_new_tokens = how.min_new_tokens = max(query.output_tokens, 1)
        how.ignore_eos, how.do_sample = True, query.samples > 1
        how.num_return_sequences = query.samples
        if query.targets:
            how.echo, how.logprobs = True, 1
        tokens = openvino.Tensor(np.array([query.input_ids], dtype=np.int64))
        return pipeline.add_request(number, tokens, how)

    def work() -> None:
        while pipeline.has_non_finished_requests():
            pipeline.step()

    for number, query in enumerate(given.queries[:2]):  # the first steps also make kernels
        add(len(given.queries) + number, query._replace(
            input_ids=list(range(200, 240)), output_tokens=4, samples=1, targets=0))
    work()
    report.begin()
    handles = [add(number, query) for number, query in enumerate(given.queries)]
    work()
    outputs = [handle.read_all() for handle in handles]
    counts = [len(answers[0].generated_log_probs[-1 - query.targets:-1]) if query.targets else
              sum(len(answer.generated_ids) for answer in answers)
              for query, answers in zip(given.queries, outputs, strict=True)]
    report.end(genai.__version__, given.queries, counts)


if __name__ == "__main__":
    main()
