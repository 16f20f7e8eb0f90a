"""A stand-in for vLLM's engine, which answers by all tokens of a request."""

from collections import deque
from collections.abc import Mapping, Sequence

from toys import VOCAB

from xrunner.backends.vllm.protocol import Added, Load, SharedStart, Step, Token, passes
from xrunner.query import PreparedQuery


def next_token(tokens: Sequence[int]) -> int:
    return (7 * sum(tokens) + len(tokens)) % VOCAB


def expected(query: PreparedQuery) -> list[int]:
    """Its answer to a query."""
    tokens = list(query.input_ids)
    for _ in range(query.max_new_tokens):
        tokens.append(next_token(tokens))
    return tokens[len(query.input_ids):]


class CountingCore:
    """Answers by all tokens of a request, and holds each pass to what vLLM would allow."""

    def __init__(self, max_pass: int, longest: int = 10_000) -> None:
        self.max_pass, self._longest = max_pass, longest
        self._requests: dict[str, tuple[list[int], int]] = {}  # tokens, and how many are computed
        self._writers: dict[int, tuple[str, int]] = {}  # of prefixes: request, and prefix's end
        self._kept: dict[int, list[int]] = {}  # tokens of each prefix that is encoded
        self._starts: dict[str, SharedStart] = {}
        self._underway = deque[dict[str, Token]]()  # tokens of the steps that have begun
        self.largest, self.most_requests, self.shared, self.passes = 0, 0, 0, 0
        self.most_underway = 0

    def load(self, load: Load) -> None:
        """Nothing is started."""

    def await_ready(self, wait_s: float = 0.0) -> bool:
        return True

    def send(self, step: Step) -> None:
        assert not any(name in given for given in self._underway for name, _ in step.wanted), (
            "vLLM feeds a token back once it is known")
        for name in step.ended:
            del self._requests[name]
        self._release(step.released)
        for new in step.added:
            self._add(new)
        given = dict[str, Token]()
        for wanted in passes(step.wanted, self.max_pass):
            given |= self._pass(wanted)
            self.passes += 1
        self._underway.append(given)
        self.most_underway = max(self.most_underway, len(self._underway))

    def finish(self) -> dict[str, Token]:
        return self._underway.popleft()

    def _add(self, new: Added) -> None:
        assert new.name not in self._requests and new.generated < len(new.tokens)
        self._requests[new.name] = list(new.tokens), 0
        if new.start is not None:
            self._writers |= {node: (new.name, end) for node, end in new.start.writes}
            self._starts[new.name] = new.start

    def _release(self, nodes: Sequence[int]) -> None:
        for node in nodes:
            assert node in self._writers or node in self._kept
            self._writers.pop(node, None)
            self._kept.pop(node, None)

    def _begin(self, name: str) -> int:
        """Tokens that are there when the request is first computed."""
        start = self._starts.pop(name, None)
        if start is None or not start.first:
            return 0
        known = self._kept.get(start.node)
        if known is None:
            writer, end = self._writers[start.node]
            tokens, computed = self._requests[writer]
            known = tokens[:min(end, computed)]
        assert len(known) >= start.first
        assert known[:start.first] == self._requests[name][0][:start.first]
        self.shared += start.first
        return start.first

    def _pass(self, tokens: Mapping[str, int]) -> dict[str, Token]:
        self.largest = max(self.largest, sum(tokens.values()))
        self.most_requests = max(self.most_requests, len(self._requests))
        assert 0 < sum(tokens.values()) <= self.max_pass
        given = {}
        for name, more in tokens.items():
            known, computed = self._requests[name]
            computed = computed or self._begin(name)
            assert 0 < more <= len(known) - computed, f"{name = } {more = }"
            self._requests[name] = known, computed + more
            if computed + more == len(known):
                known.append(next_token(known))
                given[name] = Token(known[-1], is_end=len(known) >= self._longest)
        for node, (name, end) in list(self._writers.items()):
            known, computed = self._requests[name]
            if computed >= end:
                self._kept[node] = known[:end]
                del self._writers[node]
        for name, token in given.items():
            if token.is_end:
                del self._requests[name]
        return given
