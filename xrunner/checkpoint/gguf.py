"""A GGUF file of the Llama architecture as a plain Hugging Face directory.

transformers and gguf do the reading and dequantising; what is added here is a save it refuses to
do for a model that came quantised.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

from xgpt.core.errors import MissingExtraError


def convert_gguf(gguf: Path, target: Path) -> None:
    """Writes config.json, model.safetensors (float32), tokenizer and generation_config.json."""
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything needed is in the file
    # saving imports DeepSpeed where it is installed, which else greets on standard output
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import gguf as _gguf  # noqa: F401
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging
    except ImportError as cause:
        raise MissingExtraError(str(cause.name), "run", "reading a GGUF model") from None
    quiet: Any = logging  # its functions carry no annotations
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars of the dequantiser
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name,
                                                      dtype=torch.float32)
    values = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path", "transformers_version"):
        values.pop(key, None)
    # save_pretrained refuses a model loaded from GGUF; a fresh one takes its tensors
    model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.generation_config.eos_token_id = values.get("eos_token_id")
    model.generation_config.pad_token_id = values.get("pad_token_id")
    model.generation_config.bos_token_id = values.get("bos_token_id")
    with contextlib.redirect_stderr(io.StringIO()):
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)
