"""Greedy float32 tokens of the encoder-decoder families beside T5 equal transformers' `generate`,
by RRA and by WAA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from examples import some
from toy_runs import run_in_process, run_waa_in_process, toy_waa_rules, waa_pools
from toys import ENCODER_DECODER_FAMILIES, T5_FAMILIES

from xrunner.query import PreparedQuery

Made = Callable[[str], tuple[Path, Any]]
Answered = Callable[[str], tuple[list[PreparedQuery], dict[int, list[int]]]]

FAMILIES = [family for family in ENCODER_DECODER_FAMILIES if family not in T5_FAMILIES]
# tensor-parallel degree of each stage, and micro-batches, encode_batch, decode_iterations
QUICK = ((2, 1), 2, 3, 4)
CASES = [QUICK, ((1,), 1, 3, 2), ((1, 1), 2, 4, 5), ((1, 1, 1), 3, 9, 30), ((2,), 1, 4, 3)]
# degrees of the encode and the decode pool's stages, decode groups
QUICK_POOLS = ((2,), (1, 1), 2)
POOLS = [QUICK_POOLS, ((1,), (1,), 1), ((1,), (2,), 2), ((1, 1), (1,), 3)]


@pytest.mark.parametrize(("family", "degrees", "groups", "batch", "iterations"), some(
    [(family, *case) for family in FAMILIES for case in CASES],
    lambda case: case[1:] == QUICK and case[0] != "mbart"))  # its pools hand over below
def test_tokens_equal_generate(made: Made, answered: Answered, family: str,
                               degrees: tuple[int, ...], groups: int, batch: int,
                               iterations: int) -> None:
    queries, expected = answered(family)
    sink, _ = run_in_process(made(family)[0], queries, degrees=degrees, num_groups=groups,
                             encode_batch=batch, decode_iterations=iterations)
    assert {r.query.index: list(r.output_ids) for r in sink.results} == expected
    assert max(map(len, expected.values())) > 10


@pytest.mark.parametrize(("family", "encode", "decode", "groups"), some(
    [(family, *case) for family in FAMILIES for case in POOLS],
    lambda case: case[1:] == QUICK_POOLS))
def test_tokens_equal_generate_where_pools_hand_over(
        made: Made, answered: Answered, family: str, encode: tuple[int, ...],
        decode: tuple[int, ...], groups: int) -> None:
    queries, expected = answered(family)
    directory, _ = made(family)
    sink, _ = run_waa_in_process(directory, queries, waa_pools(directory, encode, decode),
                                 toy_waa_rules(len(encode), num_groups=groups))
    assert {r.query.index: list(r.output_ids) for r in sink.results} == expected
