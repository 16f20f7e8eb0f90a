"""CTranslate2: decoder-only models by its Generator, T5 by its Translator, in static batches sorted
by input length; a batch shrinks as its queries are done.

    python run_ctranslate2.py --model FOLDER --workload FILE [--dtype float32] [--threads 2]

FOLDER: `ct2-transformers-converter --model HF_FOLDER --output_dir FOLDER` (`--quantization
bfloat16` for that dtype). One whose name has no "t5" in it is taken for decoder-only.
"""

import json
import os
from pathlib import Path

from driver import Query, Report, read_arguments

_BATCH = 32


def main() -> None:
    given = read_arguments()
    report = Report()
    import ctranslate2

    folder = Path(given.model)
    is_t5 = "t5" in folder.name
    vocabulary = json.loads(next(folder.glob("*vocabulary*.json")).read_text(encoding="utf-8"))
    model = (ctranslate2.Translator if is_t5 else ctranslate2.Generator)(
        os.fspath(folder), device="cpu", compute_type=given.dtype, inter_threads=1,
        intra_threads=given.threads)

    def generate(queries: list[Query]) -> list[int]:
        """Tokens of each query."""
        inputs = [[vocabulary[token] for token in query.input_ids] for query in queries]
        most, counts = max(query.output_tokens for query in queries), [0] * len(queries)

        def is_done(step: "ctranslate2.GenerationStepResult") -> bool:
            counts[step.batch_id] += 1
            return counts[step.batch_id] >= queries[step.batch_id].output_tokens

        if is_t5:
            model.translate_batch(inputs, beam_size=1, max_batch_size=0, callback=is_done,
                                  min_decoding_length=most, max_decoding_length=most)
        else:
            model.generate_batch(inputs, beam_size=1, max_batch_size=0, callback=is_done,
                                 min_length=most, max_length=most, include_prompt_in_result=False)
        return counts

    generate([query._replace(output_tokens=2) for query in given.queries[:2]])
    order = sorted(range(len(given.queries)), key=lambda i: len(given.queries[i].input_ids))
    counts = [0] * len(order)
    report.begin()
    for start in range(0, len(order), _BATCH):
        places = order[start:start + _BATCH]
        for place, count in zip(places, generate([given.queries[i] for i in places]), strict=True):
            counts[place] = count
    report.end(f"{ctranslate2.__version__} {model.compute_type}", given.queries, counts)


if __name__ == "__main__":
    main()
