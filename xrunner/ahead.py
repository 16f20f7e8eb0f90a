"""The weights of a whole model, read by a rank that waits for its run while that is planned. Where
the schedule has it hold something else they are let go of."""

from contextlib import suppress

import torch

from xgpt.core.errors import XgptError
from xrunner.checkpoint.source import read_spec
from xrunner.loading import Shelf, read_stage
from xrunner.models.shard import WHOLE
from xrunner.ops import invariant
from xrunner.read_ahead import ReadAhead, whole_model


def read(word: str, shelf: Shelf) -> None:
    """Puts them on the shelf. What is wrong with them is found again, and told, when the run reads
    them."""
    wanted = ReadAhead.of(word)
    torch.set_num_threads(wanted.threads)  # as the run will: products' weights are laid out for it
    with suppress(XgptError, OSError, RuntimeError, ValueError, KeyError, MemoryError):
        invariant.ask(wanted.is_deterministic)
        spec = read_spec(wanted.model_dir, wanted.model_name)
        shelf.put(wanted.key(spec), read_stage(
            wanted, whole_model(spec), WHOLE, torch.device("cpu"), "both", is_sampled=True))
