"""Steps of an engine that are timed as wholes are taken apart into what they are made of."""


import pytest

pytest.importorskip("torch", reason="what measures needs the extra `run`")
from xprofiler.measure.vllm_worker import VllmBench
from xrunner.backends.vllm.protocol import Loaded, Step, Token
from xrunner.query import Sampling

LAYERS = 10
TOKEN_S, PAIR_S, HEAD_S, READ_S, FIXED_S = 1e-3, 1e-7, 2e-3, 1e-6, 1e-2


class Timed:
    """A core whose steps take known times: by the token, by pairs of tokens that attend, by
    queries that get a token, by tokens of context read, and a fixed part."""

    loaded = Loaded(max_pass=10_000, max_tokens=10_000)

    def __init__(self) -> None:
        self.now_s, self.num_steps, self.tokens, self.slower = 0.0, 0, 0, 1.0
        self._held: dict[str, tuple[int, int]] = {}  # input tokens, tokens so far

    def clock(self) -> float:
        return self.now_s

    def step(self, step: Step) -> dict[str, Token]:
        for name in step.ended:
            del self._held[name]
        for new in step.added:
            # those that are filled have all but their last token already
            inputs = len(new.tokens)
            self._held[new.name] = inputs, inputs - 1 if not new.name.isdecimal() else 0
        if not (tokens := dict(step.wanted)):
            return {}
        seconds = FIXED_S + HEAD_S * len(tokens)
        for name, count in tokens.items():
            inputs, held = self._held[name]
            seconds += TOKEN_S * count + (
                PAIR_S * count**2 if count > 1 else READ_S * held)
            self._held[name] = inputs, held + count
        self.now_s += self.slower * seconds
        self.num_steps += 1
        self.tokens += sum(tokens.values())
        return {}


def bench() -> tuple[Timed, VllmBench]:
    core = Timed()
    return core, VllmBench(core, LAYERS, Sampling(), clock=core.clock,
                           head_share=HEAD_S / (FIXED_S + TOKEN_S + HEAD_S))


@pytest.mark.parametrize("lengths", [[300], [64] * 4, [8] * 260])
def test_an_encode_steps_parts_are_those_it_is_made_of(lengths):
    _, made = bench()
    parts = made.encode(lengths)()
    whole_s = FIXED_S + sum(TOKEN_S * n + PAIR_S * n**2 + HEAD_S for n in lengths)
    assert parts.whole_s == pytest.approx(whole_s)
    assert LAYERS * (parts.rest_s + parts.attention_s) + parts.head_s == pytest.approx(whole_s)
    assert parts.head_s == pytest.approx(HEAD_S * len(lengths), rel=0.1)


def test_a_decode_steps_attention_is_what_its_context_adds():
    _, made = bench()
    parts = made.decode([500] * 20)()
    assert LAYERS * parts.attention_s == pytest.approx(20 * 500 * READ_S, rel=0.02)
    assert parts.head_s == pytest.approx(20 * HEAD_S, rel=0.1)
    rest_s = FIXED_S + 20 * TOKEN_S
    assert LAYERS * parts.rest_s == pytest.approx(rest_s, rel=0.05)


def test_the_head_of_many_queries_costs_few_tokens_of_encoding():
    core, made = bench()
    assert made.head_s(260) == pytest.approx(260 * HEAD_S, rel=0.05)
    assert core.tokens <= 5 * 260 * 3, "a step that takes up, one that decodes, one of as many rows"
    before = core.num_steps
    assert made.head_s(260) > 0 and core.num_steps == before


def test_what_is_compared_is_of_the_same_minute():
    """A machine that becomes a quarter slower has no larger head for it."""
    core, made = bench()
    made.head_s(1)
    core.slower = 1.25
    assert made.head_s(100) == pytest.approx(1.25 * 100 * HEAD_S, rel=0.05)


def test_rest_and_head_of_mixed_sizes_are_those_of_steps_of_their_own():
    """128 rows of which few get a token: neither part is the other's."""
    _, made = bench()
    rest_s, head_s = made._rest_s(128), made.head_s(128)
    assert rest_s == pytest.approx(FIXED_S + 128 * TOKEN_S, rel=0.05)
    assert head_s == pytest.approx(128 * HEAD_S, rel=0.05)
