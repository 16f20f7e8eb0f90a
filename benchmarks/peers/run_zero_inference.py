"""DeepSpeed's ZeRO-Inference: parameters on disk by its own asynchronous reads (ZeRO stage 3,
`offload_param: nvme`), keys and values in memory.

    python run_zero_inference.py --model FOLDER --workload FILE [--threads 2]

DS_ACCELERATOR=cpu. Its operator async_io is compiled at first use and needs libaio's header. It
writes the parameters into FOLDER/zero. Loading holds the model in memory; the limit of the group in
$GROUP_LIMIT (FILE=BYTES) is therefore set once it is loaded. All queries of the file are one batch.
"""

import ctypes
import gc
import os
import shutil
from pathlib import Path
from typing import Any

from driver import Arguments, Report, read_arguments
from run_transformers import generate

# each holds the largest parameter (the embedding); five, its default, do not fit into 1 GiB
_BUFFERS = int(os.environ.get("ZERO_BUFFERS", "2"))


def main() -> None:
    given = read_arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(given.threads))
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"),
                        ("LOCAL_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"),
                        ("MASTER_PORT", "29511"), ("DS_ACCELERATOR", "cpu")):
        os.environ.setdefault(name, value)
    report = Report()
    import deepspeed

    model = loaded(given)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if "GROUP_LIMIT" in os.environ:
        file, limit = os.environ["GROUP_LIMIT"].split("=")
        Path(file).write_text(limit, encoding="ascii")
    report.begin()
    generate(model, given.queries)
    report.end(deepspeed.__version__, given.queries,
               [query.output_tokens for query in given.queries])  # `generate` has looked
    shutil.rmtree(Path(given.model) / "zero", ignore_errors=True)
    for path in Path("/dev/shm").glob("deepspeed_allreduce_buffer_*_29511_*"):
        path.unlink(missing_ok=True)  # DeepSpeed leaves it


def loaded(given: Arguments) -> Any:
    """The model with its parameters on disk."""
    import deepspeed
    import torch
    import transformers
    from transformers.integrations import HfDeepSpeedConfig

    torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(given.model, trust_remote_code=False)
    hidden, inner = config.hidden_size, config.intermediate_size
    folder = Path(given.model) / "zero"
    shutil.rmtree(folder, ignore_errors=True)
    how = {
        "train_micro_batch_size_per_gpu": 1, given.dtype.replace("bfloat16", "bf16"): {
            "enabled": True},
        "zero_optimization": {
            "stage": 3, "stage3_prefetch_bucket_size": 2 * hidden * inner,
            "stage3_max_live_parameters": 2 * hidden * inner,
            "stage3_param_persistence_threshold": hidden,
            "offload_param": {"device": "nvme", "nvme_path": str(folder), "pin_memory": False,
                              "buffer_count": _BUFFERS,
                              "buffer_size": config.vocab_size * hidden}},
        "aio": {"block_size": 2**23, "queue_depth": 16, "intra_op_parallelism": 2,
                "single_submit": False, "overlap_events": True}}
    deepspeed.init_distributed("gloo")
    kept = HfDeepSpeedConfig(how)  # while it lives, from_pretrained divides what it loads
    model = transformers.AutoModelForCausalLM.from_pretrained(
        given.model, dtype=getattr(torch, given.dtype), attn_implementation="sdpa",
        trust_remote_code=False).eval()
    engine = deepspeed.initialize(model=model, config=how)[0]
    assert kept is not None
    return engine.module.eval()


if __name__ == "__main__":
    main()
