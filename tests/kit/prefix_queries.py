"""Requests that begin alike, and the forest of what they share."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
from toys import VOCAB

from xgpt.core.prefixes import Prefixes
from xrunner.query import PreparedQuery, Sampling


def forest_of(parents: Sequence[int], ends: Sequence[int], nodes: Sequence[int],
              block_tokens: int = 128) -> Prefixes:
    return Prefixes(parents=np.array(parents), ends=np.array(ends), nodes=np.array(nodes),
                    block_tokens=block_tokens)


def nested(end: int, count: int = 14, seed: int = 1, block_tokens: int = 128,
           ) -> tuple[list[PreparedQuery], Prefixes]:
    """Requests in any order behind prefixes of three levels, the first of which ends at `end`,
    behind another one, and behind none."""
    rng = random.Random(seed)
    parents, ends = [-1, 0, 1, 0, -1], [end, end + 21, end + 30, end + 1, 40]
    texts: list[list[int]] = []
    for parent, last in zip(parents, ends, strict=True):
        before = texts[parent] if parent >= 0 else []
        texts.append([*before, *_drawn(rng, last - len(before))])
    queries, nodes = list[PreparedQuery](), list[int]()
    for index in range(count):
        nodes.append(rng.choice([-1, 0, 0, 1, 2, 2, 3, 4]))
        own = _drawn(rng, rng.randint(1, 12))
        queries.append(PreparedQuery(
            index=index, id=f"q{index}", max_new_tokens=rng.randint(1, 14),
            input_ids=(*(texts[nodes[-1]] if nodes[-1] >= 0 else []), *own)))
    return queries, forest_of(parents, ends, nodes, block_tokens)


def sampled(query: PreparedQuery, count: int) -> tuple[list[PreparedQuery], Prefixes]:
    """Several answers to one request, which all but its last token is shared for."""
    queries = [replace(query, index=index, id=f"s{index}", sample=index, sampling=Sampling(
        temperature=2.0, seed=index)) for index in range(count)]
    return queries, forest_of([-1], [len(query.input_ids) - 1], [0] * count)


def continuations(queries: Sequence[PreparedQuery], prefixes: Prefixes,
                  ) -> tuple[list[PreparedQuery], Prefixes]:
    """Four to score of each prompt, of one to seven tokens, which are encoded for each."""
    found, nodes = list[PreparedQuery](), list[int]()
    for query, own in product(queries, range(4)):
        targets, place = tuple(range(10 + own, 11 + 3 * own)), len(found)
        found.append(replace(query, index=place, id=f"c{place}", max_new_tokens=1, is_forced=True,
                             input_ids=(*query.input_ids, *targets[:-1]),
                             sampling=Sampling(targets=targets)))
        nodes.append(int(prefixes.nodes[query.index]))
    return found, replace(prefixes, nodes=np.array(nodes))


def _drawn(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(6, VOCAB) for _ in range(count)]
