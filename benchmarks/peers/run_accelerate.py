"""accelerate with weights on disk: each is read from its file when its module computes, through the
page cache; keys and values stay in memory.

    python run_accelerate.py --model FOLDER --workload FILE [--mode all|layers|prepare]
                             [--threads 2]

`all`: `disk_offload`, as its documents show it. `layers`: `dispatch_model` with the layers on disk
and the embedding, which is also the head, in memory. `prepare` writes the weights once, as
`disk_offload` keeps them, into FOLDER/accelerate; it would otherwise hold the whole model in memory
to write them. All queries of the file are one batch, padded to the longest input, and run to the
longest output.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from driver import Arguments, Report, read_arguments
from run_transformers import generate


def main() -> None:
    given = read_arguments(("all", "layers", "prepare"))
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", str(given.threads))
    if given.mode == "prepare":
        prepare(Path(given.model))
        return
    report = Report()
    import accelerate
    import torch

    torch.set_num_threads(given.threads)
    model = offloaded(given)
    report.begin()
    generate(model, given.queries)
    report.end(accelerate.__version__, given.queries,
               [query.output_tokens for query in given.queries])  # `generate` has looked


def offloaded(given: Arguments) -> Any:
    """The model without weights, which hooks read as each module computes."""
    import accelerate
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    config = transformers.AutoConfig.from_pretrained(given.model, trust_remote_code=False)
    with accelerate.init_empty_weights(include_buffers=False):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, given.dtype), attn_implementation="sdpa",
            trust_remote_code=False)
    model.tie_weights()
    target = Path(given.model) / "accelerate"
    if given.mode == "all":
        return accelerate.disk_offload(model.eval(), str(target),
                                       execution_device=torch.device("cpu"))
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu",
              "lm_head": "cpu", "model.layers": "disk"}
    keep(model, target)
    return accelerate.dispatch_model(model.eval(), places, offload_dir=str(target))


def keep(model: Any, target: Path) -> None:
    """Reads what lies outside the layers."""
    from accelerate.utils import OffloadedWeightsLoader, set_module_tensor_to_device

    weights = OffloadedWeightsLoader(save_folder=str(target))
    for name in ("model.embed_tokens.weight", "model.norm.weight"):
        set_module_tensor_to_device(model, name, "cpu", value=weights[name])
    model.tie_weights()


def prepare(folder: Path) -> None:
    from accelerate.utils import offload_weight, save_offload_index
    from safetensors import safe_open

    target, index = folder / "accelerate", dict[str, Any]()
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  a safe_open cannot be iterated
                index = offload_weight(tensors.get_tensor(name), name, str(target), index)
    if json.loads((folder / "config.json").read_text("utf-8")).get("tie_word_embeddings"):
        index["lm_head.weight"] = index["model.embed_tokens.weight"]
        os.link(target / "model.embed_tokens.weight.dat", target / "lm_head.weight.dat")
    save_offload_index(index, str(target))


if __name__ == "__main__":
    main()
