"""Schedules on real ranks without the command around them, of one copy, of several, and of unlike
ones: tokens equal `generate`, each copy takes the steps of its queries' replay, and each rank reads
its slice."""

import pytest
import toys
from given_runs import given, run, toy_plan
from job_folder import as_requests
from mpi_runs import answered, check_steps, json_of
from replays import estimated, problem_for

from xgpt.core.errors import XgptError
from xgpt.launch.launcher import LocalLauncher, RankProgram
from xrunner.rules.routing import window_of

pytestmark = pytest.mark.mpi
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
