"""How ORCA, vLLM and Sarathi fill their steps: what a group holds, and what of it a step works.

ORCA and Sarathi encode beside decoding, so a query takes D + 1 steps; vLLM's steps do either, and
its decoding queries wait while others are encoded. Where KV in blocks or a token budget binds, how
many run is walked out (continuous.paged_walk)."""

from collections.abc import Callable, Sequence

import numpy as np

from xgpt.core.lengths import BoolArray, FloatArray
from xrunner.rules.paged import WATERMARK
from xsimulator.policies.continuous import cohorts
from xsimulator.policies.continuous import load as loads
from xsimulator.policies.continuous.in_flight import Intervals
from xsimulator.policies.continuous.load import Load
from xsimulator.policies.continuous.paged_walk import Walk, WalkedQueries
from xsimulator.policies.continuous.query_sizes import SIZES, QuerySizes
from xsimulator.policies.continuous.walk_table import shared_table
from xsimulator.policies.continuous.waves import encode_steps

DEFAULT_TOKEN_BUDGET = 2048  # of one step; vLLM's default, and never less than the longest input
MEMORY_BINDS = 0.98  # share of the slots below which memory, not slots, decides who is present


def _every_step(d: int, load: Load, between: Intervals) -> FloatArray:
    """[configs] seconds of a query's `d` decode iterations. Every step of a group gives a token to
    all its queries: steps in which more of them decode are seen by more."""
    beside, alone = load.share * load.beside, (1 - load.share) * load.alone
    seen = beside * between.encode_s + alone * between.plain_s
    return (d + load.waits) * np.where(
        beside + alone > 0, seen / np.maximum(beside + alone, 1e-12), between.any_s)


class OrcaFilling:
    """ORCA encodes one query a step at most, and reserves its KV at admission."""

    name = "orca"
    encodes_one = True  # query a step at most
    alternates = False  # whether a step that encodes is followed by one that decodes, in each group
    budgets: tuple[int, ...] = (0,)  # token budgets worth a look; 0: it has none
    decode_latency = staticmethod(_every_step)

    def __init__(self, queries: QuerySizes) -> None:
        self._queries = queries

    def budget_of(self, token_budget: int) -> int:
        """The token budget that the engine has where this one is asked for (0: its default)."""
        return 0

    def load(self, slots: FloatArray, kv_tokens: FloatArray, budget: FloatArray,
             groups: FloatArray) -> Load:
        """What each of so many groups holds with its slots, KV tokens and tokens a step, all
        [configs]."""
        present = self._queries.present
        iterations = present.iterations
        places = self.most_present(slots, kv_tokens)
        share = loads.one_at_a_time(places, iterations, in_step=self._queries.are_equal)
        decoding = share * iterations
        alone = np.where(share < 1, np.maximum(places, decoding), decoding)
        beside = loads.beside(decoding, alone, share)
        ones = np.ones((len(slots), SIZES))
        none = np.zeros(len(slots))
        return Load(
            per_step=share, share=share, tokens=self._queries.input_sizes * ones, encoded=ones,
            beside=beside, alone=alone, ended=share, decoding=decoding, present=decoding + share,
            in_step=np.full(len(slots), float(self._queries.are_equal)), falls=none,
            filled=np.ones(len(slots)), apart=np.ones(len(slots)), together=np.ones(len(slots)),
            encode_steps=np.ones(len(slots)), between=none, waits=none, after=none)

    def most_present(self, slots: FloatArray, kv_tokens: FloatArray) -> FloatArray:
        """Slots and KV tokens would hold so many queries [configs] if all were at their mean."""
        present = self._queries.present
        return loads.most_that_fit(slots, kv_tokens, present.reserve, present.reserve_std)

    def step_tokens(self, slots: FloatArray, budget: FloatArray) -> FloatArray:
        """The most tokens [configs] that one step works decide on the room for activations."""
        return self._queries.lengths.inputs.max + slots


class VllmFilling:
    """vLLM keeps KV in blocks, reserves none for the output, and encodes whatever has room before
    it decodes on."""

    name, alternates, encodes_one = "vllm", True, False

    def __init__(self, queries: QuerySizes) -> None:
        self._queries, self._paged = queries, _Paged(queries, is_chunked=False)
        self._longest = queries.lengths.inputs.max
        self.budgets = tuple(sorted({max(budget, self._longest) for budget in (
            512, 1024, 2048, 4096, 8192, 16384)}))

    def budget_of(self, token_budget: int) -> int:
        return token_budget or max(DEFAULT_TOKEN_BUDGET, self._longest)

    def load(self, slots: FloatArray, kv_tokens: FloatArray, budget: FloatArray,
             groups: FloatArray) -> Load:
        return self._paged.load(cohorts.whole, (slots, kv_tokens, budget, groups),
                                self._scattered)

    def _scattered(self, slots: FloatArray, kv_tokens: FloatArray, budget: FloatArray,
                   groups: FloatArray) -> Load:
        queries, paged, inputs = self._queries, self._paged, self._queries.lengths.inputs
        decoding = queries.decoding_share
        # the input that a step has no room left for is length-biased, and finds half of it free
        filled = np.maximum(budget - (inputs.mean + inputs.std**2 / inputs.mean) / 2, inputs.mean)
        if decoding <= 0:
            return paged.encoded_alone(slots, kv_tokens, filled)
        # only queries of more than one token decode; for each that leaves, more are encoded
        iterations = max(paged.iterations, decoding)
        present = paged.most_present(slots, kv_tokens)
        chance, counts = loads.ends_per_step(present, np.full(len(slots), decoding / iterations))
        counts = counts / decoding
        tokens, waits = queries.batch_tokens(counts), np.zeros(len(slots))
        rate = present / iterations
        rows = np.flatnonzero((present < MEMORY_BINDS * slots) | (iterations < 4))
        if rows.size:
            walk = paged.walks(slots[rows], kv_tokens[rows], budget[rows], groups[rows])
            present[rows], rate[rows] = walk.running, paged.rate(walk)
            chance[rows], tokens[rows], counts[rows] = loads.scaled(walk, rate[rows], inputs.mean)
            waits[rows] = paged.waits(walk, rate[rows], groups[rows])
            if decoding < 1:  # a walk's queries all decode
                counts[rows] *= (tokens[rows].mean(axis=1) / counts[rows].mean(axis=1)
                                 / inputs.mean)[:, None]
        steps = encode_steps(tokens, counts, decoding, budget, filled)
        encodes = chance * steps.number  # per decode step
        share = encodes / (1 + encodes)
        return Load(
            per_step=rate * (1 - share), share=share, tokens=steps.tokens, encoded=steps.queries,
            ended=rate, beside=np.zeros(len(slots)), alone=present, decoding=present,
            present=present, encode_steps=np.ones(len(slots)), between=encodes, waits=waits,
            after=steps.after, in_step=np.zeros(len(slots)),
            falls=np.zeros(len(slots)), filled=np.ones(len(slots)), apart=np.ones(len(slots)),
            together=np.ones(len(slots)))

    def most_present(self, slots: FloatArray, kv_tokens: FloatArray) -> FloatArray:
        return self._paged.most_present(slots, kv_tokens)

    def step_tokens(self, slots: FloatArray, budget: FloatArray) -> FloatArray:
        return np.asarray(np.maximum(np.maximum(budget, slots), self._queries.longest))

    def decode_latency(self, d: int, load: Load, between: Intervals) -> FloatArray:
        if d == 0:
            return np.zeros(len(load.present))
        others = np.maximum(1 - 1 / load.present, 0.0)  # none of them is its own encoding
        encodes = others * load.between * between.encode_s
        return ((d + load.waits) * between.plain_s + (d - 1 + load.waits) * encodes
                + load.after * between.encode_s)


class SarathiFilling:
    """Sarathi keeps KV in blocks, reserves none for the output, and fills every step to its token
    budget with chunks of waiting inputs."""

    name, alternates, encodes_one = "sarathi", False, False
    decode_latency = staticmethod(_every_step)
    budgets: tuple[int, ...] = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)

    def __init__(self, queries: QuerySizes) -> None:
        self._queries, self._paged = queries, _Paged(queries, is_chunked=True)

    def budget_of(self, token_budget: int) -> int:
        return token_budget or DEFAULT_TOKEN_BUDGET

    def load(self, slots: FloatArray, kv_tokens: FloatArray, budget: FloatArray,
             groups: FloatArray) -> Load:
        held = np.minimum(slots, budget), kv_tokens, budget, groups
        return self._paged.load(cohorts.chunked, held, self._scattered)

    def _scattered(self, slots: FloatArray, kv_tokens: FloatArray, budget: FloatArray,
                   groups: FloatArray) -> Load:
        paged, mean = self._paged, self._queries.lengths.inputs.mean
        if self._queries.decoding_share <= 0:
            return paged.encoded_alone(slots, kv_tokens, budget)
        iterations = paged.iterations
        present = paged.most_present(slots, kv_tokens)
        rate = present / (iterations + 1)
        chance, counts = loads.ends_per_step(present, rate / present)
        tokens = self._queries.batch_tokens(counts)
        waits, steps = np.zeros(len(slots)), np.ones(len(slots))
        decoding = rate * iterations
        alone, beside = present.copy(), loads.beside(decoding, present, chance)
        is_full = tokens.max(axis=1) > budget - rate * iterations
        rows = np.flatnonzero((present < MEMORY_BINDS * slots) | is_full)
        if rows.size:
            walk = paged.walks(slots[rows], kv_tokens[rows], budget[rows], groups[rows])
            # few queries end in a walk of large inputs: no more than steps have tokens for, nor,
            # where next to none decodes, than it encodes
            each = mean * (1 + walk.again)
            rate[rows] = np.minimum(paged.rate(walk), budget[rows] / (each + paged.decoded(walk)))
            if iterations < 1:
                rate[rows] = np.minimum(rate[rows], walk.share * walk.tokens.mean(axis=1) / each)
            running = rate[rows] * paged.decoded(walk)
            chance[rows], tokens[rows], counts[rows] = loads.scaled(walk, rate[rows], mean)
            chance[rows], tokens[rows] = loads.no_more_than(
                budget[rows] - running, chance[rows], tokens[rows])
            waits[rows] = paged.waits(walk, rate[rows], groups[rows])
            steps[rows] = walk.chunks
            decoding[rows] = alone[rows] = beside[rows] = running
        return Load(
            per_step=rate, share=chance, tokens=tokens, encoded=counts, beside=beside,
            alone=alone, ended=rate, decoding=decoding, present=decoding + rate,
            encode_steps=steps, between=np.zeros(len(slots)), waits=waits,
            after=np.zeros(len(slots)), in_step=np.zeros(len(slots)),
            falls=np.zeros(len(slots)), filled=np.ones(len(slots)), apart=np.ones(len(slots)),
            together=np.ones(len(slots)))

    def most_present(self, slots: FloatArray, kv_tokens: FloatArray) -> FloatArray:
        return self._paged.most_present(slots, kv_tokens)

    def step_tokens(self, slots: FloatArray, budget: FloatArray) -> FloatArray:
        return budget


class _Paged:
    """Engines share this whose KV lies in blocks, none of it reserved for the output."""

    def __init__(self, queries: QuerySizes, *, is_chunked: bool) -> None:
        self._queries, self._is_chunked = queries, is_chunked
        self.iterations = max(queries.present.iterations, 1e-9)
        # tokens in blocks of a query present, before a step adds one
        self._tokens_held = float(loads.blocks_tokens(queries.present.context - 1))
        self.walks = shared_table(WalkedQueries(
            iterations=self.iterations, held=self._tokens_held, is_chunked=is_chunked,
            input_sizes=queries.input_sizes, last_sizes=queries.last_sizes), SIZES)

    def most_present(self, slots: FloatArray, kv_tokens: FloatArray) -> FloatArray:
        """Slots and blocks would hold so many queries [configs] if blocks did not scatter."""
        inputs, held = self._queries.lengths.inputs, self._tokens_held
        waiting = (inputs.std**2 + inputs.mean**2) / inputs.mean  # the one that finds no room
        room = kv_tokens * (1 - WATERMARK) - waiting / 2
        return loads.most_that_fit(slots, np.maximum(room, held), held,
                                   self._queries.present.context_std)

    def load(self, cycle_of: cohorts.CycleOf, held: Sequence[FloatArray],
             scattered: Callable[..., Load]) -> Load:
        """The load of `held`: cohorts, where all queries are of one length, else `scattered`."""
        if not self._queries.are_equal or self._queries.decoding_share <= 0:
            return scattered(*held)
        return cohorts.load(cycle_of, self._queries.lengths.inputs.max, round(self.iterations),
                            held, scattered)

    def encoded_alone(self, slots: FloatArray, kv_tokens: FloatArray,
                      filled: FloatArray) -> Load:
        """The load where no query decodes: each step encodes as many as slots, KV and the `filled`
        tokens of a step hold, and all leave with it; of longer inputs parts, where these are."""
        inputs, none = self._queries.lengths.inputs, np.zeros(len(slots))
        room = np.maximum(kv_tokens * (1 - WATERMARK), 1.0)
        held = loads.most_that_fit(slots, room, float(loads.blocks_tokens(inputs.mean)),
                                   inputs.std)
        if not self._is_chunked:  # one is always taken, however long
            held = np.minimum(held, filled / inputs.mean)
        tokens = self._queries.batch_tokens(np.maximum(held, 1.0)[:, None] * np.ones(SIZES))
        tokens = np.minimum(tokens, filled[:, None]) if self._is_chunked else tokens
        rate = tokens.mean(axis=1) / inputs.mean
        return Load(
            per_step=rate, share=np.ones(len(slots)), tokens=tokens,
            encoded=rate[:, None] * np.ones(SIZES), beside=none, alone=none, ended=rate,
            decoding=none, present=rate, encode_steps=self._parts(filled, rate < 0.99 * held),
            between=none, waits=none, after=none, in_step=none, falls=none,
            filled=np.ones(len(slots)), apart=np.ones(len(slots)),
            together=np.ones(len(slots)))

    def _parts(self, filled: FloatArray, is_full: BoolArray) -> FloatArray:
        """Steps [configs] that an input's encoding takes, which begins anywhere in one that is
        full."""
        if not self._is_chunked:
            return np.ones(len(filled))
        sizes = self._queries.input_sizes
        own = np.ceil(sizes / filled[:, None]).mean(axis=1)
        return np.asarray(np.where(is_full, 1 + (sizes.mean() - 1) / filled, own))

    def rate(self, walk: Walk) -> FloatArray:
        """So many queries [configs] end per step."""
        return walk.running / self.decoded(walk)

    def waits(self, walk: Walk, rate: FloatArray, groups: FloatArray) -> FloatArray:
        """Steps that evictions cost a query [configs], by Little's law, where `rate` end per step:
        whoever waits is taken by the first of so many groups that has room, a turn later at least,
        and is then encoded again in a step that yields a token as well."""
        return (walk.evicted / rate - walk.evictions) / groups

    def decoded(self, walk: Walk) -> FloatArray:
        """A query takes so many decode iterations [configs]; encoding one again yields a token
        too."""
        return np.maximum(self.iterations - walk.evictions, self.iterations / 2)


Filling = OrcaFilling | VllmFilling | SarathiFilling  # how an engine fills the steps of a group
