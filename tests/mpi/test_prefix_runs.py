"""Real ranks that share prefixes: tokens equal those without, each copy takes the steps of its
replay and encodes what is not shared; killed and gone on with, every line is answered once."""

import random
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import toys
from faults import FAULTS, RRA, ToyJob, await_lines, below, end
from given_runs import given, run
from job_folder import as_requests
from mpi_runs import answered, check_steps, json_of
from prefix_queries import nested
from replays import estimated, problem_for

from xgpt.core.prefixes import in_blocks
from xgpt.core.schedule import Estimate
from xgpt.requests.spool import Spool
from xrunner.query import PreparedQuery

pytestmark = pytest.mark.mpi
COUNT = 30
POLICIES: dict[str, dict[str, Any]] = {
    "rra": {"encode_batch": 5, "decode_iterations": 4},
    "rra in chunks": {"encode_batch": 2, "decode_iterations": 9, "encode_chunk": 50},
    "orca": {"max_active": 7}, "vllm": {"max_active": 9, "token_budget": 300},
    "sarathi": {"max_active": 9, "token_budget": 64}}
# devices of a copy, degree of its stages, copies
LAYOUTS = {"a rank": (1, 1, 1), "two stages": (2, 1, 1), "a group": (2, 2, 1),
           "two copies": (1, 1, 2)}
QUICK = [("rra", "two copies", 128)]


def estimate_of(name: str, layout: str, directory: Path, queries: Sequence[PreparedQuery],
                outputs: Sequence[int]) -> tuple[Any, Estimate, Estimate]:
    """(problem of a copy, its estimate, that of all copies). Memory is short."""
    devices, degree, copies = LAYOUTS[layout]
    problem = problem_for(directory, queries, outputs, devices)
    tp = {"tp_degree": degree, "tp_gpus": degree} if degree > 1 else {}
    one = estimated(name.split()[0], problem, **POLICIES[name], **tp)
    one = one.changed(kv_tokens=208 + 64 * one.deployment.num_groups)
    return problem, one, one.in_copies(copies) if copies > 1 else one


@pytest.mark.parametrize(("name", "layout", "end"), [pytest.param(
    *case, id=", ".join(map(str, case)), marks=() if case in QUICK else pytest.mark.slow)
    for case in product(POLICIES, LAYOUTS, (127, 128, 129))])
def test_ranks_answer_as_generate_does_by_the_replays_steps(tmp_path, name, layout, end):
    out, directory = tmp_path / "out", tmp_path / "model"
    out.mkdir()
    reference = toys.make_modern("llama", directory, max_position_embeddings=256)
    queries, _ = nested(end, COUNT)
    outputs = [len(toys.generate(reference, query)) for query in queries]
    problem, one, whole = estimate_of(name, layout, directory, queries, outputs)
    given(whole, problem, out / "schedule.json")
    run(directory, out, as_requests(queries), ranks=whole.num_devices, shares_prefixes=True,
        kv_in_blocks=True)
    results = answered(out, queries, reference)
    prefixes = in_blocks(Spool(out).prefixes, 128)
    copies = whole.num_devices // one.num_devices
    check_steps(out, problem, [one] * copies, queries, results, prefixes)
    counted = json_of(out / "measured.json")["prefixes"]
    assert counted["encoded_tokens"] + counted["shared_tokens"] == (
        counted["input_tokens"] + counted["encoded_again_tokens"])
    assert counted["shared_tokens"] > counted["input_tokens"] / 2


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_two_kills_while_prefixes_live_lose_no_line_and_double_none(tmp_path, ranks):
    count, answers = 1000, []
    for prefixes in ("auto", "off"):
        job = ToyJob(folder=tmp_path / prefixes, ranks=ranks, count=count, shared=60,
                     schedule=f"{RRA}, prefixes: {prefixes}").write()
        for lines in (30, 130) if prefixes == "auto" else ():
            process = job.start()
            assert await_lines(job, process, lines), process.communicate()
            own = below(process.pid)
            FAULTS["kill the launcher"](job, process, own, random.Random(0))
            end(process, own)
            assert len(job.lines()) < count
        done = job.run_to_end()
        assert done.returncode == 0, done.stderr
        assert ("prefixes" in json_of(job.output / "measured.json")) == (prefixes == "auto")
        answers.append(job.answers())
    assert [line for line, _ in answers[0]] == [f"q{i}" for i in range(count)]
    assert answers[0] == answers[1]
