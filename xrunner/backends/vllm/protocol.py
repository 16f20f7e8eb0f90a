"""Messages between a rank and the process that holds its vLLM engine, each a pickle on a socket of
their own. The rank asks, and each request but Step has one answer, in order. Needs the standard
library alone: the two processes run in interpreters with different packages, and perhaps of
different versions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from xrunner.query import Sampling, TokenLikelihood

PREFIX = "filled-"  # of requests whose inputs count as encoded (filled.py)
VERSION = 1  # of these messages; the first one that the engine's process sends


class SharedStart(NamedTuple):
    """How a request begins that shares prefixes. Its `first` tokens lie in the blocks of prefix
    `node` (-1: none). `writes`: (prefix, its end in tokens) of those that it encodes for others."""

    first: int
    node: int
    writes: tuple[tuple[int, int], ...] = ()


class Added(NamedTuple):
    """A request that joins. `generated`: how many of its last tokens are its own output, from
    before an eviction."""

    name: str
    tokens: Sequence[int]
    sampling: Sampling
    generated: int = 0
    start: SharedStart | None = None


class Check(NamedTuple):
    """Asks whether vLLM can answer a request: an Answer with the reason why not, or None.
    `arguments`: of vLLM's engine, as far as they are known before it loads."""

    arguments: Mapping[str, Any]
    tokens: Sequence[int]
    sampling: Sampling
    max_tokens: int


class Load(NamedTuple):
    """Loads the model: Loaded. `arguments`: of vLLM's engine. `environment`: variables that it
    reads. `adapter`: folder of the LoRA adapter of all answers."""

    arguments: Mapping[str, Any]
    environment: Mapping[str, str]
    adapter: str | None = None


class Loaded(NamedTuple):
    """The model is loaded. `max_pass`: tokens of one pass. `max_tokens`: of one request."""

    max_pass: int
    max_tokens: int


class Step(NamedTuple):
    """Begins a step, without an answer. First, requests end, prefixes are released, and requests
    join. `wanted`: (request, number of tokens), in order."""

    wanted: Sequence[tuple[str, int]]
    added: Sequence[Added] = ()
    ended: Sequence[str] = ()
    released: Sequence[int] = ()


class Token(NamedTuple):
    """One request's next token. `is_finite`: its logits were finite. `is_end`: the request is full
    and gone. `likelihood`: where asked for."""

    value: int
    is_finite: bool = True
    is_end: bool = False
    likelihood: TokenLikelihood | None = None


class Finish(NamedTuple):
    """Ends the oldest step that has begun: Tokens."""


class Tokens(NamedTuple):
    """The next token of each request whose input a step ended; `special`: of these, with more than
    a value (a message of plain numbers is quicker)."""

    values: Mapping[str, int]
    special: Mapping[str, Token]

    @classmethod
    def of(cls, tokens: Mapping[str, Token]) -> "Tokens":
        return cls({name: token.value for name, token in tokens.items()},
                   {name: token for name, token in tokens.items() if token != (
                       token.value, True, False, None)})

    @property
    def by_name(self) -> dict[str, Token]:
        return {name: Token(value) for name, value in self.values.items()} | dict(self.special)


class FindCalls(NamedTuple):
    """Finds tool calls in an output: an Answer with (other text, (name, arguments) of each call);
    None without any."""

    parser: str
    model_dir: str
    tools: str
    output_ids: Sequence[int]


class PeakMemory(NamedTuple):
    """Asks for the peak memory of all processes together: an Answer in bytes."""


class Answer(NamedTuple):
    value: Any


class Failed(NamedTuple):
    """Why a request failed. `is_final`: it would fail again."""

    words: str
    is_final: bool = False


Request = Check | Load | Step | Finish | FindCalls | PeakMemory


def passes(wanted: Sequence[tuple[str, int]], most: int) -> Iterator[dict[str, int]]:
    """Divides the `wanted` tokens of each request, in order, into passes of at most `most`
    tokens."""
    current: dict[str, int] = {}
    for name, tokens in wanted:
        while tokens:
            taken = min(tokens, most - sum(current.values()))
            current[name] = taken
            tokens -= taken
            if sum(current.values()) == most:
                yield current
                current = {}
    if current:
        yield current
