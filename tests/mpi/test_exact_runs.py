"""Greedy float32 tokens equal transformers' `generate` under real mpiexec: every family on 1 to 4
ranks, single and in tensor-parallel groups, which may exceed the KV heads; and what ranks say to
each other. One launch runs many
cases. Schedules without the command around them, of one copy, of several, and of unlike ones: each
copy takes the steps of its queries' replay, and each rank reads its slice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import toys
from given_runs import given, run, toy_plan
from job_folder import as_requests
from mpi_runs import answered, check_steps, json_of
from mpi_runs import launched as launch
from replays import estimated, problem_for

from xgpt.core.errors import XgptError
from xgpt.launch.launcher import LocalLauncher, RankProgram
from xrunner.rules.routing import window_of

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
WAA_CASES = [("opt", (1,), (1, 1), 2, 4), ("gpt2", (1, 1), (2,), 3, 2),
             ("llama", (2,), (1, 1), 1, 4), ("t5", (1,), (2,), 1, 9)]
# with two KV heads: four ranks of a group hold copies of them
COPIED = "two KV heads"
COPIED_CASES = [(COPIED, (4,), 2, 4, 5), (COPIED, (4,), 1, 9, 3)]
# whose decode pools encode inputs, too: on two and four ranks
POOL_CHUNK_CASES = [("opt", (1,), (1,), 2, 1), ("llama", (1,), (2, 1), 1, 1)]
# whose encode pools hear of who joins the decode pool
AHEAD_CASES = [("gpt2", (1,), (1,), 2, 1), ("t5", (1,), (1,), 3, 2)]
Models = dict[str, tuple[Path, dict[str, Any]]]
Case = dict[str, Any]
Launched = dict[str, tuple[list[Case], list[Any]]]
SAID = "what ranks say to each other"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(directory, transformers' answers) by family."""
    found = {}
    for family in (*FAMILIES, COPIED):
        directory = tmp_path_factory.mktemp("model")
        model = (toys.make_modern("qwen2", directory, num_attention_heads=4)
                 if family == COPIED else toys.make_model(family, directory))
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
                                                    int]], **more: str | int) -> list[Case]:
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
    ahead = waa_cases(models, AHEAD_CASES, kv_tokens=60, admission="future-peak")
    parts = {"layouts": rra_cases(models, [*RRA_CASES, *COPIED_CASES]),
             "pools": [*waa_cases(models, WAA_CASES), *ahead],
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
    in the place of NCCL; two pools, also with look-ahead; decode pools that encode inputs."""
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


COUNT = 30
PHASE = {"encode_batch": 6, "decode_iterations": 4}
GROUP = {"tp_degree": 2, "tp_gpus": 2}


def slow(*case, name):
    return pytest.param(*case, marks=pytest.mark.slow, id=name)


# family; policy, devices and variables of each shape; copies of each
@pytest.mark.parametrize(("family", "shapes", "copies"), [
    pytest.param("llama", [("rra", 1, PHASE)], 2, id="two copies of a rank"),
    # of inputs of up to 20 tokens: parts of one, of two queries, whole ones
    *(slow("llama", [("rra", 2, {**PHASE, "encode_chunk": chunk})], 1, name=f"chunks of {chunk}")
      for chunk in (3, 11, 64)),
    slow("t5", [("rra", 3, PHASE | GROUP)], 1, name="a group and a rank alone"),
    slow("llama", [("rra", 2, PHASE | GROUP)], 2, name="two groups"),
    slow("llama", [("waa-c", 2, {"encode_batch": 2})], 2, name="two times two pools"),
    slow("llama", [("rra", 2, {"encode_batch": 9, "decode_iterations": 4}),
                   ("sarathi", 1, {"max_active": 24, "token_budget": 16})], 1, name="unlike")])
def test_ranks_answer_as_generate_does_by_the_replays_steps(tmp_path, family, shapes, copies):
    out, directory = tmp_path / "out", tmp_path / "model"
    out.mkdir()
    reference, queries = toys.make_model(family, directory), toys.random_queries(COUNT, seed=8)
    outputs = [len(toys.generate(reference, q)) for q in queries]
    ones = [estimated(policy, problem_for(directory, queries, outputs, devices),
                      **variables).changed(kv_tokens=20_000)
            for policy, devices, variables in shapes]
    problem = problem_for(directory, queries, outputs, shapes[0][1])
    whole = ones[0].in_copies(copies) if copies > 1 else ones[0]
    whole = whole.beside(tuple(ones[1:])) if ones[1:] else whole
    given(whole, problem, out / "schedule.json")
    # A copy's window holds its whole share, which it keeps: with a smaller one, a copy whose next
    # queries come late because the other was not let run decodes on without them, and no replay of
    # its queries knows when.
    assert all(max(window_of(one).waiting, window_of(one).present) >= 0.6 * COUNT for one in ones
               if len(ones) * copies > 1 and one.policy != "waa-c")
    run(directory, out, as_requests(queries), ranks=whole.num_devices)
    results = answered(out, queries, reference)

    measured = json_of(out / "measured.json")
    assert (measured["queries"], measured["state"]) == (COUNT, "done")
    stages = [(copy, len(stage.ranks)) for copy, one in enumerate(ones * copies)
              for stage in one.deployment.stages]
    first = [sum(count for _, count in stages[:place]) for place in range(len(stages))]
    assert [(s["stage"], s.get("replica", 0), s["ranks"]) for s in measured["stages"]] == [
        (place, copy, [*range(first[place], first[place] + count)])
        for place, (copy, count) in enumerate(stages)]
    size = (directory / "model.safetensors").stat().st_size
    if all(devices > 1 and policy == "rra" for policy, devices, _ in shapes):
        assert max(rank["bytes_read"] for rank in measured["ranks"]) < 0.8 * size
    steps = check_steps(out, problem, ones * copies, queries, results)
    chunk = max(variables.get("encode_chunk", 0) for *_, variables in shapes)
    assert not chunk or max(tokens for kind, *_, tokens in steps if kind == "mixed") > 1


@pytest.mark.slow
def test_another_number_of_ranks_than_planned_is_refused(llama, tmp_path):
    queries = toys.random_queries(3)
    problem = problem_for(llama[0], queries, [q.max_new_tokens for q in queries], devices=2)
    given(estimated("rra", problem, **PHASE), problem, tmp_path / "schedule.json")
    plan = toy_plan(llama[0], tmp_path, query_kv_tokens=200)
    (tmp_path / "requests.jsonl").write_text('{"tokens": [7]}\n')
    toys.write_spool(plan, tmp_path / "requests.jsonl")
    with pytest.raises(XgptError, match="launcher started 1"):
        LocalLauncher().run(
            RankProgram(module="xrunner.rank.worker", argument=plan.save(), count=1),
            watch=lambda: None)
