"""Draws of vLLM's that are given up, on CPUs.

Of an input that is encoded in chunks vLLM draws a token after each chunk, and gives all but the
last up: it sets the request's generator back, which CPU generators cannot do and which would end
the engine. Until an input is encoded nothing that was drawn counts, so the beginning is where to go
back to.

Imported in vLLM's interpreter, in each of its processes."""

from typing import Any

import torch


class FromTheStart(torch.Generator):
    """A CPU generator that goes back, by whatever offset it is told, to its seed."""

    def get_offset(self) -> int:
        return 0

    def set_offset(self, offset: int) -> torch.Generator:
        """Draws again what it drew first."""
        return self.manual_seed(self.initial_seed())


def rewind_draws(worker: Any) -> None:
    """Has this worker's requests draw by generators that can be set back."""
    batch = worker.model_runner.input_batch
    add = batch.add_request

    def add_request(request: Any) -> Any:
        if request.generator is not None and not isinstance(request.generator, FromTheStart):
            seed = request.generator.initial_seed()
            request.generator = FromTheStart()
            request.generator.manual_seed(seed)
        return add(request)

    batch.add_request = add_request
