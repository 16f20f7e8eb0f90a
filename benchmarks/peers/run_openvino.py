"""OpenVINO GenAI's continuous batching on the CPU, in the precision that OpenVINO takes by itself
or in float32 (quicker on processors whose bfloat16 products are slow).

    python run_openvino.py --model FOLDER --workload FILE [--mode default|f32] [--threads 2]

FOLDER: `optimum-cli export openvino --model HF_FOLDER --task text-generation-with-past
--weight-format fp32 FOLDER`.
"""

from driver import Query, Report, read_arguments

_CACHE_GIB = 2
_MOST_QUERIES = 256
_STEP_TOKENS = 256


def main() -> None:
    given = read_arguments(("default", "f32"))
    report = Report()
    import numpy as np
    import openvino
    import openvino_genai as genai

    schedule = genai.SchedulerConfig()
    schedule.cache_size, schedule.max_num_seqs = _CACHE_GIB, _MOST_QUERIES
    schedule.max_num_batched_tokens = _STEP_TOKENS
    schedule.dynamic_split_fuse, schedule.enable_prefix_caching = True, False
    properties: dict[str, int | str] = {"INFERENCE_NUM_THREADS": given.threads}
    if given.mode != "default":
        properties["INFERENCE_PRECISION_HINT"] = given.mode
    pipeline = genai.ContinuousBatchingPipeline(given.model, schedule, "CPU", properties)

    def add(number: int, query: Query) -> "genai.GenerationHandle":
        how = genai.GenerationConfig()
        how.max_new_tokens = how.min_new_tokens = query.output_tokens
        how.ignore_eos, how.do_sample = True, False
        tokens = openvino.Tensor(np.array([query.input_ids], dtype=np.int64))
        return pipeline.add_request(number, tokens, how)

    def work() -> None:
        while pipeline.has_non_finished_requests():
            pipeline.step()

    for number, query in enumerate(given.queries[:2]):  # the first steps also make kernels
        add(len(given.queries) + number, query._replace(output_tokens=4))
    work()
    report.begin()
    handles = [add(number, query) for number, query in enumerate(given.queries)]
    work()
    counts = [len(handle.read_all()[0].generated_ids) for handle in handles]
    report.end(genai.__version__, given.queries, counts)


if __name__ == "__main__":
    main()
