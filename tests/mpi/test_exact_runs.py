"""Greedy float32 tokens equal transformers' `generate` under real mpiexec: every family on 1 to 4
ranks, single and in tensor-parallel groups. One launch runs many cases."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="ranks need the extra `run`")
import toys  # noqa: E402
from job_folder import SUPPORT  # noqa: E402

from xgpt.launch.local import find_mpiexec  # noqa: E402

pytestmark = pytest.mark.mpi
SCRIPT = SUPPORT / "runs_script.py"
FAMILIES = ("llama", "opt", "gpt2", "t5")
LAYOUTS = ((1,), (2,), (1, 1), (2, 1), (1, 2), (2, 2), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2),
           (1, 1, 1, 1))
QUERIES = 9


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """(directory, transformers' answers) by family."""
    found = {}
    for family in FAMILIES:
        directory = tmp_path_factory.mktemp(family)
        model = toys.make_model(family, directory)
        found[family] = directory, {
            str(q.index): toys.generate(model, q) for q in toys.random_queries(QUERIES)}
    return found


def check(models: dict[str, tuple[Path, dict[str, Any]]], folder: Path,
          cases: Sequence[tuple[str, tuple[int, ...], int, int, int]], timeout_s: float,
          **more: str) -> None:
    """`cases`: family, degree of each stage, micro-batches, encode batch, decode iterations.
    `more`: for all of them, as runs_script.py has it."""
    values = [{"directory": str(models[family][0]), "degrees": degrees, "num_groups": groups,
               "encode_batch": batch, "decode_iterations": iterations, "queries": QUERIES, **more}
              for family, degrees, groups, batch, iterations in cases]
    launch(models, folder, cases, values, max(sum(case[1]) for case in cases), timeout_s)


def check_waa(models: dict[str, tuple[Path, dict[str, Any]]], folder: Path,
              cases: Sequence[tuple[str, tuple[int, ...], tuple[int, ...], int, int]],
              timeout_s: float) -> None:
    """`cases`: family, degrees of the encode and the decode stages, decode groups, encode batch."""
    values = [{"directory": str(models[family][0]), "encode": encode, "decode": decode,
               "num_groups": groups, "encode_batch": batch, "queries": QUERIES}
              for family, encode, decode, groups, batch in cases]
    ranks = max(sum(case[1]) + sum(case[2]) for case in cases)
    launch(models, folder, cases, values, ranks, timeout_s)


def launch(models: dict[str, tuple[Path, dict[str, Any]]], folder: Path, cases: Sequence[Any],
           values: Sequence[dict[str, Any]], ranks: int, timeout_s: float) -> None:
    (folder / "cases.json").write_text(json.dumps(values))
    done = subprocess.run(
        [find_mpiexec(), "-n", str(ranks), sys.executable, "-m", "mpi4py", str(SCRIPT),
         str(folder / "cases.json"), str(folder / "answers.json")],
        capture_output=True, text=True, timeout=timeout_s, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    answers = json.loads((folder / "answers.json").read_text())
    assert len(answers) == len(cases)
    for case, answer in zip(cases, answers, strict=True):
        assert answer == models[case[0]][1], f"{case = }"


def test_every_layout_answers_as_generate_does(
        models: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    """Each family on four ranks and on some of the others, all layouts together."""
    cases = [(family, layout, 1 + (place + i) % 4, (4, 1, 9)[i % 3], (3, 1, 5, 30)[(place + i) % 4])
             for place, family in enumerate(FAMILIES)
             for i, layout in enumerate(LAYOUTS) if sum(layout) == 4 or (i + place) % 3 == 0]
    assert {case[1] for case in cases} == set(LAYOUTS) and {case[2] for case in cases} == {
        1, 2, 3, 4}
    check(models, tmp_path, cases, timeout_s=200)


def test_sums_over_torch_distributed_answer_the_same(
        models: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    """The way that groups of GPUs take, with gloo in the place of NCCL."""
    cases = [("llama", (2,), 2, 4, 3), ("t5", (1, 2), 2, 4, 3), ("opt", (2, 1), 1, 9, 5)]
    check(models, tmp_path, cases, timeout_s=100, group="gloo")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_and_number_of_micro_batches(
        models: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path, family: str) -> None:
    cases = [(family, layout, groups, batch, iterations) for layout, groups, (batch, iterations)
             in product(LAYOUTS, (1, 2, 3, 4), ((1, 1), (4, 5), (9, 30)))]
    check(models, tmp_path, cases, timeout_s=280)


WAA_CASES = [("llama", (1,), (1,), 2, 3), ("opt", (1,), (1, 1), 2, 4), ("gpt2", (1, 1), (2,), 3, 2),
             ("llama", (2,), (1, 1), 1, 4), ("t5", (1, 1), (1, 1), 2, 3), ("t5", (1,), (2,), 1, 9)]


def test_two_pools_answer_as_generate_does(
        models: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path) -> None:
    check_waa(models, tmp_path, WAA_CASES, timeout_s=100)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_of_two_pools(
        models: dict[str, tuple[Path, dict[str, Any]]], tmp_path: Path, family: str) -> None:
    pools = [(1,), (2,), (1, 1), (2, 1), (1, 2), (1, 1, 1)]
    cases = [(family, encode, decode, groups, batch)
             for encode, decode in product(pools, pools) if sum(encode) + sum(decode) <= 4
             for groups, batch in ((1, 3), (2, 1), (3, 9))]
    check_waa(models, tmp_path, cases, timeout_s=280)
