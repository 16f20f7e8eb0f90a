"""Which engines execute a schedule (`run: {engine: NAME}`), and where the row of each is (an
xrunner.backends.engine.Engine). Other packages add theirs by the entry point group `xgpt.engines`:
name = module:attribute.

`rows_of_others` and `load_row` serve every table that other packages add rows to."""

from importlib import import_module
from typing import Any

from xgpt.core.errors import UnknownNameError


def rows_of_others(group: str) -> dict[str, str]:
    """Name -> "module:attribute" of every entry point of the group."""
    # takes a tenth of a second: only who asks for such a row pays for it
    from importlib.metadata import entry_points

    return {point.name: point.value for point in entry_points(group=group)}


def load_row(place: str) -> Any:
    """What "module:attribute" names."""
    module, attribute = place.split(":")
    return getattr(import_module(module), attribute)


OWN_ENGINE, VLLM = "xgpt", "vllm"
_GROUP = "xgpt.engines"
_ROWS = {OWN_ENGINE: "xrunner.backends.engine:OWN",
         "deepspeed": "xrunner.backends.deepspeed:ENGINE",
         VLLM: "xrunner.backends.vllm.row:ENGINE"}
# Engines of one process, whatever that starts itself: all cores of a machine are one rank's, unless
# the job names ranks, over which the engine divides each layer.
ONE_PROCESS = (VLLM,)
# What an engine gives of a request besides plain sampling: log-likelihoods of chosen tokens, a
# least number of them, a penalty of those said, answers held to a form, and its own sampler's
# parameters (xgpt.requests.chat).
_GIVES = {OWN_ENGINE: frozenset({"logprobs", "min_tokens", "penalty", "form"}),
          VLLM: frozenset({"logprobs", "min_tokens", "penalty", "form", "passed"})}


def gives(engine: str | None, what: str) -> bool:
    """Whether an engine, None being ours, gives something beyond plain sampling."""
    return what in _GIVES.get(engine or OWN_ENGINE, ())


def engine_names() -> tuple[str, ...]:
    """Names of all engines, ours first."""
    return tuple({**_ROWS, **rows_of_others(_GROUP)})


def engine_place(name: str) -> str:
    """"module:attribute" of the engine's row. Raises UnknownNameError."""
    place = _ROWS.get(name) or rows_of_others(_GROUP).get(name)
    if place is None:
        raise UnknownNameError("engine", name, engine_names())
    return place
