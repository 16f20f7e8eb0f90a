"""Which engines execute a schedule (`run: {engine: NAME}`), and where the row of each is (an
xrunner.backends.engine.Engine). Other packages add theirs by the entry point group `xgpt.engines`:
name = module:attribute."""

from xgpt.core.errors import UnknownNameError
from xgpt.core.plugins import rows_of_others

OWN_ENGINE, VLLM = "xgpt", "vllm"
_GROUP = "xgpt.engines"
_ROWS = {OWN_ENGINE: "xrunner.backends.engine:OWN",
         "deepspeed": "xrunner.backends.deepspeed:ENGINE",
         VLLM: "xrunner.backends.vllm.row:ENGINE"}
# Engines of one process, whatever that starts itself: all cores of a machine are one rank's, unless
# the job names ranks, over which the engine divides each layer.
ONE_PROCESS = (VLLM,)
# What an engine gives of a request besides plain sampling: log-likelihoods of chosen tokens, a
# least number of them, a penalty of those said, and its own sampler's (xgpt.core.passed).
_GIVES = {OWN_ENGINE: frozenset({"logprobs", "min_tokens", "penalty"}),
          VLLM: frozenset({"logprobs", "min_tokens", "penalty", "passed"})}


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
