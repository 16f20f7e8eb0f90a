"""Greedy float32 tokens equal transformers' `generate` under real mpiexec: every family on 1 to 4
ranks, single and in tensor-parallel groups; and what ranks say to each other. One launch runs many
cases."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import toys
from mpi_runs import launched as launch

pytestmark = pytest.mark.mpi
FAMILIES = ("llama", "opt", "gpt2", "t5")
LAYOUTS = ((1,), (2,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2),
           (1, 1, 1, 1))
QUERIES = 6
# each family on four ranks and on some of the others, all layouts together
RRA_CASES = [(family, layout, 1 + (place + i // 4) % 4, (4, 1, 9)[i % 3],
              (3, 1, 5, 30)[(place + i // 4) % 4])
             for place, family in enumerate(FAMILIES)
             for i, layout in enumerate(LAYOUTS) if (i + place) % 4 == 0]
GLOO_CASES = [("llama", (2,), 2, 4, 3), ("t5", (1, 2), 2, 4, 3), ("opt", (2, 1), 1, 9, 5)]
# encoded in chunks beside decoding
CHUNK_CASES = [("llama", (1, 1), 2, 4, 6), ("opt", (2,), 1, 5, 4)]
WAA_CASES = [("llama", (1,), (1,), 2, 3), ("opt", (1,), (1, 1), 2, 4), ("gpt2", (1, 1), (2,), 3, 2),
             ("llama", (2,), (1, 1), 1, 4), ("t5", (1, 1), (1, 1), 2, 3), ("t5", (1,), (2,), 1, 9)]
# whose decode pools encode inputs, too: on two, three and four ranks
POOL_CHUNK_CASES = [("llama", (1,), (1,), 1, 2), ("opt", (1,), (1, 1), 2, 1),
                    ("gpt2", (1, 1), (1,), 2, 2), ("llama", (1,), (2, 1), 1, 1)]
Models = dict[str, tuple[Path, dict[str, Any]]]
Case = dict[str, Any]
Launched = dict[str, tuple[list[Case], list[Any]]]
SAID = "what ranks say to each other"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(directory, transformers' answers) by family."""
    found = {}
    for family in FAMILIES:
        directory = tmp_path_factory.mktemp(family)
        model = toys.make_model(family, directory)
        found[family] = directory, {
            str(q.index): toys.generate(model, q) for q in toys.random_queries(QUERIES)}
    return found


def rra_cases(models: Models, cases: Sequence[tuple[str, tuple[int, ...], int, int, int]],
              **more: str | int) -> list[Case]:
    """`cases`: family, degree of each stage, micro-batches, encode batch, decode iterations.
    `more`: for all of them, as runs_script.py has it."""
    return [{"directory": str(models[family][0]), "degrees": degrees, "num_groups": groups,
             "encode_batch": batch, "decode_iterations": iterations, "queries": QUERIES, **more}
            for family, degrees, groups, batch, iterations in cases]


def waa_cases(models: Models, cases: Sequence[tuple[str, tuple[int, ...], tuple[int, ...], int,
                                                    int]], **more: int) -> list[Case]:
    """`cases`: family, degrees of the encode and the decode stages, decode groups, encode batch.
    `more`: for all of them."""
    return [{"directory": str(models[family][0]), "encode": encode, "decode": decode,
             "num_groups": groups, "encode_batch": batch, "queries": QUERIES, **more}
            for family, encode, decode, groups, batch in cases]


def check(models: Models, cases: Sequence[Case], answers: Sequence[Any]) -> None:
    expected = {str(directory): tokens for directory, tokens in models.values()}
    for case, answer in zip(cases, answers, strict=True):
        assert answer == expected[case["directory"]], f"{case = }"


@pytest.fixture(scope="module")
def launched(models, tmp_path_factory):
    """Name of a test -> (its cases, their answers): one launch serves them all."""
    parts = {"layouts": rra_cases(models, RRA_CASES), "pools": waa_cases(models, WAA_CASES),
             "gloo": rra_cases(models, GLOO_CASES, group="gloo"),
             "chunks": rra_cases(models, CHUNK_CASES, encode_chunk=7),
             "chunks in pools": waa_cases(models, POOL_CHUNK_CASES, encode_chunk=7)}
    answers, said = launch(tmp_path_factory.mktemp("launch"),
                           [case for cases in parts.values() for case in cases],
                           checks=("mpi", "gloo"))
    found: Launched = {SAID: ([], [said])}
    first = 0
    for name, cases in parts.items():
        found[name] = cases, answers[first:first + len(cases)]
        first += len(cases)
    return found


def test_every_layout_answers_as_generate_does(models, launched):
    assert {case[1] for case in RRA_CASES} == set(LAYOUTS)
    assert {case[2] for case in RRA_CASES} == {1, 2, 3, 4}
    assert {case[0] for case in RRA_CASES if sum(case[1]) == 4} == set(FAMILIES)
    check(models, *launched["layouts"])


@pytest.mark.parametrize("what", ["chunks", "gloo", "pools", "chunks in pools"])
def test_other_ways_answer_as_generate_does(models, launched, what):
    """Chunks beside decoding; sums over torch.distributed, as groups of GPUs take them, with gloo
    in the place of NCCL; two pools; decode pools that encode inputs."""
    check(models, *launched[what])


def test_every_rank_holds_the_same_sum_and_the_first_one_every_part(launched):
    """And programs that are none of ours are refused: of two ranks, and of three."""
    _, (said,) = launched[SAID]
    for what in (r"read: b'\x80\x04", "a valid integer", "b'Other' is no kind of message",
                 "a tensor [-1] of 'int64'", "1099511627776 bytes was announced, 8 came"):
        assert said.count(what) == 2, what
    for over in ("mpi", "gloo"):
        for ranks in (2, 3):
            assert said.count(f"{over} over {ranks} ok") == ranks


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_and_number_of_micro_batches(models, tmp_path, family):
    cases = rra_cases(models, [
        (family, layout, groups, batch, iterations) for layout, groups, (batch, iterations)
        in product(LAYOUTS, (1, 2, 3, 4), ((1, 1), (4, 5), (9, 30)))])
    check(models, cases, launch(tmp_path, cases)[0])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_two_pools(models, tmp_path, family):
    pools = [(1,), (2,), (1, 1), (2, 1), (1, 2), (1, 1, 1)]
    cases = waa_cases(models, [
        (family, encode, decode, groups, batch)
        for encode, decode in product(pools, pools) if sum(encode) + sum(decode) <= 4
        for groups, batch in ((1, 3), (2, 1), (3, 9))])
    check(models, cases, launch(tmp_path, cases)[0])
