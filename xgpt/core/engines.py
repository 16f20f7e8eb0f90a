"""Engines that execute a schedule (`run: {engine: NAME}`), by the place of each one's row (an
xrunner.backends.engine.Engine). Other packages add theirs by the entry point group `xgpt.engines`:
name = module:attribute.

`rows_of_others` and `load_row` serve every table that other packages add rows to."""

from importlib import import_module
from typing import Any

from xgpt.core.errors import UnknownNameError


def rows_of_others(group: str) -> dict[str, str]:
    """Name -> "module:attribute" of every entry point of the group."""
    # takes a tenth of a second: imported only where such a row is asked for
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=group)}


def load_row(place: str) -> Any:
    """The object that "module:attribute" names, imported."""
    module, attribute = place.split(":")
    return getattr(import_module(module), attribute)


OWN_ENGINE, VLLM = "xgpt", "vllm"
SHARING_ENGINES = (OWN_ENGINE, VLLM)  # that encode a shared prefix once
ARRIVING_ENGINES = (OWN_ENGINE, VLLM)  # whose requests may arrive over time
_GROUP = "xgpt.engines"
_ROWS = {OWN_ENGINE: "xrunner.backends.engine:OWN",
         "deepspeed": "xrunner.backends.deepspeed:ENGINE",
         VLLM: "xrunner.backends.vllm.row:ENGINE"}
# Engines that run in child processes of ranks, by an interpreter of their own. `run.ranks` counts
# their devices. The cores of a machine are one device, unless the job names more.
IN_CHILDREN = (VLLM,)
# Features of requests beyond plain sampling: log-probabilities of chosen tokens, a least number of
# tokens, repetition penalty, answers in a form, and options of the engine's own sampler
# (xgpt.requests.chat).
_GIVES = {OWN_ENGINE: frozenset({"logprobs", "min_tokens", "penalty", "form"}),
          VLLM: frozenset({"logprobs", "min_tokens", "penalty", "form", "passed"})}


def supports(engine: str | None, feature: str) -> bool:
    """Whether an engine (None: our own) supports a feature of requests beyond plain sampling."""
    return feature in _GIVES.get(engine or OWN_ENGINE, ())


def engine_names() -> tuple[str, ...]:
    """Names of all engines, ours first."""
    return tuple({**_ROWS, **rows_of_others(_GROUP)})


def engine_place(name: str) -> str:
    """The "module:attribute" of the engine's row. Raises UnknownNameError."""
    place = _ROWS.get(name) or rows_of_others(_GROUP).get(name)
    if place is None:
        raise UnknownNameError("engine", name, engine_names())
    return place
