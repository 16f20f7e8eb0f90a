"""The weights of a whole model, read by a rank that waits for its run while that is planned. Where
the schedule has it hold something else they are let go of."""

from contextlib import suppress

import torch

from xgpt.core.errors import XgptError
from xrunner.checkpoint.source import read_spec
from xrunner.loading import Shelf, read_stage
from xrunner.models.shard import WHOLE
from xrunner.ops import invariant
from xrunner.ops.linear import lays_out_for_any_threads
from xrunner.read_ahead import ReadAhead, whole_model


def read(word: str, shelf: Shelf) -> None:
    """Puts them on the shelf. What is wrong with them is found again, and told, when the run reads
    them."""
    wanted = ReadAhead.of(word)
    torch.set_num_threads(_threads(wanted))
    with suppress(XgptError, OSError, RuntimeError, ValueError, KeyError, MemoryError):
        invariant.ask(wanted.is_deterministic)
        spec = read_spec(wanted.model_dir, wanted.model_name)
        shelf.put(wanted.key(spec), read_stage(
            wanted, whole_model(spec), WHOLE, torch.device("cpu"), "both", is_sampled=True))


def _threads(wanted: ReadAhead) -> int:
    """The run's where products are laid out, or tried, for their number. Else one: the launcher
    plans on another core meanwhile, and threads that spin for one whose core is taken make a second
    of copying four (SmolLM2-135M, two cores that others work on, too)."""
    is_free = lays_out_for_any_threads(getattr(torch, wanted.weight_dtype))
    return 1 if is_free and not wanted.is_deterministic else wanted.threads
