"""How much of a job's input tokens shared prefixes save, by the tokens of them that are kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from xgpt.core.prefixes import Prefixes
from xgpt.core.problem import Problem
from xrunner.rules.order import run_order
from xrunner.rules.prefixes import SharedPrefixes
from xrunner.rules.steps import Chunk

KEPT_TOKENS = (16_384, 65_536, 262_144, None)  # chosen; None: all


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedShare:
    """Shares of the input tokens that are not encoded, if prefixes of at most `kept_tokens` (None:
    all) are in the cache and requests run one by one: in the input's order, and in that of
    prefixes."""

    kept_tokens: int | None
    in_input_order: float
    in_prefix_order: float


def saved_shares(problem: Problem) -> Sequence[SavedShare]:
    """The saving for each of KEPT_TOKENS; empty for a job that shares none."""
    known = problem.queries
    if known is None or known.prefixes is None:
        return ()
    orders = [known.prefixes, known.prefixes[run_order("prefix", 0, known, problem.seed)]]
    total = int(known.inputs.sum())
    found = []
    for kept in KEPT_TOKENS:
        own, sorted_ = (_saved_tokens(order, kept) / total for order in orders)
        found.append(SavedShare(kept_tokens=kept, in_input_order=own, in_prefix_order=sorted_))
    return found


def _saved_tokens(prefixes: Prefixes, kept: int | None) -> int:
    """Tokens of requests, in this order, that lie in the cache when they begin."""
    cache, queries, saved = SharedPrefixes(prefixes), range(len(prefixes.nodes)), 0
    for query in queries:
        cache.submit(query)
    for query in queries:
        if not cache.make_room(query, lambda tokens: kept is None or tokens <= kept):
            cache.withdraw(query)
            continue
        cache.admit(query)
        saved += cache.first.get(query, 0)
        cache.encode(Chunk(query=query, first=0, tokens=cache.shared(query)))
        cache.finish(query)
        cache.end_step()
    return saved
