"""`schedule.ep_degree` and `schedule.attention_dp`: planned, exported to vLLM, else refused."""

import re

import numpy as np
import pytest

from xgpt.app.library import load, plan
from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import InputError, XgptError
from xgpt.core.model import layer_params_of_rank, refuse_tp_degree, routed_params
from xgpt.launch.exports import vllm_command
from xsimulator.memory import kv_bytes, weight_bytes

QWEN = "qwen3-235b-a22b"  # 128 experts, 64 heads, 4 KV heads
WHOLE = {"ep_degree": 8, "attention_dp": 8}


def opened(schedule, model=QWEN, **others):
    job = {"model": model, "cluster": "8xH200", "plan": {"engine": "vllm"}, "output": "out",
           "run": {"weight_dtype": "fp8"}, "schedule": schedule, "workload": {
               "input_tokens": {"mean": 500, "std": 0, "max": 500},
               "output_tokens": {"mean": 100, "std": 0, "max": 100}, "requests": {"count": 200}}}
    return load({**job, **others})


def problem(**split):
    return opened({"tp_degree": 8, **split}).problem


def test_experts_take_as_much_memory_and_attention_more_on_each_rank():
    """Whole experts or a part of each: a rank holds an eighth. Each part holds all of attention."""
    plain, whole, parts = problem(), problem(ep_degree=8), problem(attention_dp=8)
    assert layer_params_of_rank(whole.model, 8) == layer_params_of_rank(plain.model, 8)
    rest = plain.model.decoder_layer_params - routed_params(plain.model)
    assert layer_params_of_rank(parts.model, 8) == pytest.approx(
        rest + routed_params(plain.model) / 8)
    stage = StageAssignment(index=0, ranks=tuple(range(8)), first_layer=0, num_layers=94)
    held = [weight_bytes(one.model, (stage,), one.dtype, one.weight_dtype)[0]
            for one in (plain, whole, parts)]
    assert held[0] == held[1] < held[2]


def test_caches_of_own_requests_hold_no_copies_of_heads():
    """Four KV heads on eight ranks: each head is copied, unless a rank attends to its own."""
    stage = StageAssignment(index=0, ranks=tuple(range(8)), first_layer=0, num_layers=94)
    copied, own, pairs = (kv_bytes(one, (stage,), 1000.0)[0] for one in (
        problem(), problem(attention_dp=8), problem(attention_dp=2)))
    assert own == pairs == copied / 2


def test_degrees_are_multiples_and_one_part_may_have_more_heads_than_divide_over_all():
    model = problem(**WHOLE).model
    assert refuse_tp_degree(model, 8) is None
    assert "no multiple of ep_degree 8" in refuse_tp_degree(model, 4)
    assert "no multiple of ep_degree 8" in refuse_tp_degree(model, 1)


@pytest.mark.parametrize(("asked", "flags"), [
    (WHOLE, {"--tensor-parallel-size": "1", "--data-parallel-size": "8"}),
    ({"ep_degree": 8, "attention_dp": 2},
     {"--tensor-parallel-size": "4", "--data-parallel-size": "2"}),
    ({"ep_degree": 8}, {"--tensor-parallel-size": "8"}),
    ({"attention_dp": 8}, {"--tensor-parallel-size": "1", "--data-parallel-size": "8"})])
def test_what_is_planned_is_said_in_vllms_flags(asked, flags):
    found = plan(opened({"policy": "sarathi", "max_active": 160, "token_budget": 1024, **asked}))
    screen = re.sub(r"\s+", " ", str(found))
    assert "1 replica x 8 devices (TP 8, PP 1)" in screen
    assert "xgpt submit" not in screen
    assert f"EP {asked.get('ep_degree', 1)}, attention DP {asked.get('attention_dp', 1)}" in screen
    words = vllm_command(found.schedule, found.opened.problem, model=QWEN, times_of="vllm",
                         files=None).words
    own = dict(zip(words, words[1:], strict=False))
    assert ("--enable-expert-parallel" in words) == ("ep_degree" in asked)
    assert {key: own.get(key) for key in ("--tensor-parallel-size", "--data-parallel-size")} == {
        "--data-parallel-size": None, **flags}
    parts = asked.get("attention_dp", 1)  # limits are each engine's
    assert own["--max-num-seqs"] == str(160 // parts)
    assert own["--max-num-batched-tokens"] == str(1024 // parts)


def test_vllm_divides_experts_over_all_devices_or_none_and_replicas_are_servers_of_their_own():
    fixed = {"policy": "sarathi", "max_active": 160, "token_budget": 1024}
    found = plan(opened({**fixed, "tp_degree": 8, "ep_degree": 4}))
    with pytest.raises(XgptError, match=r"experts on 4 parts of 8 devices.*ep_degree=8"):
        vllm_command(found.schedule, found.opened.problem, model=QWEN, times_of="vllm", files=None)
    two = plan(opened({**fixed, "replicas": 2, "tp_degree": 4, "tp_gpus": 4, "ep_degree": 4}))
    command = vllm_command(two.schedule, two.opened.problem, model=QWEN, times_of="vllm",
                           files=None)
    assert "--data-parallel-size" not in command.words
    assert any("One replica of 2" in note for note in command.notes)


def test_pools_have_groups_of_one_split_and_open_policies_are_those_of_flags():
    """WAA's two pools, each on a node; no device is left outside a group."""
    nodes = {"device": "H200", "num_nodes": 2, "devices_per_node": 8, "intra_link": "nvlink4",
             "inter_link": "ib-400g"}
    found = plan(opened({**WHOLE, "policy": "waa-m"}, cluster=nodes), horizon="steady")
    assert [len(pool.stages) for pool in found.schedule.deployment.pools] == [1, 1]
    assert {stage.tp_degree for stage in found.schedule.deployment.stages} == {8}
    assert not {"ft", "dsi", "waa-m", "waa-c"} & {*opened(WHOLE).problem.fixed.policies}
    assert opened(WHOLE).problem.fixed.policies


def test_parts_that_attend_to_their_own_are_faster_where_heads_would_be_copied():
    fixed = {"policy": "sarathi", "max_active": 200, "token_budget": 4096, "tp_degree": 8,
             "tp_gpus": 8, "replicas": 1}
    seconds = [plan(opened({**fixed, **split})).prediction.wall_s for split in (
        {}, {"ep_degree": 8}, WHOLE)]
    assert (np.diff(seconds) < 0).all()


@pytest.mark.parametrize(("changed", "key", "said"), [
    ({"schedule": {"ep_degree": 3}}, "ep_degree", "a divisor of the 128 experts"),
    ({"schedule": {"ep_degree": 3, "tp_degree": 8}}, "ep_degree", "a divisor of tp_degree = 8"),
    ({"schedule": {"ep_degree": 0}}, "ep_degree", "whole number"),
    ({"schedule": {"attention_dp": 4}, "model": "llama-3.1-70b"}, "attention_dp",
     "no mixture of experts"),
    ({"schedule": WHOLE, "plan": {"engine": "xgpt"}}, "ep_degree", "No runner under xgpt does"),
    ({"schedule": WHOLE, "plan": {"engine": "deepspeed"}}, "attention_dp", "vllm"),
    ({"schedule": WHOLE, "cluster": "local", "plan": {}, "run": {}}, "ep_degree",
     "No runner under xgpt does"),
    ({"schedule": WHOLE, "cluster": "local", "plan": {}, "run": {"engine": "vllm"}},
     "attention_dp", "replicas of vLLM divide columns alone")])
def test_a_split_that_is_not_executed_is_refused_by_file_key_and_value(changed, key, said):
    with pytest.raises(InputError) as refused:
        opened(**{"schedule": {}, **changed})
    found = {mistake.key: mistake for mistake in refused.value.mistakes}
    mistake = found[f"schedule.{key}"]
    assert "job.yaml" in mistake.file and said in mistake.allowed
    assert mistake.value == changed["schedule"][key]


@pytest.mark.parametrize(("key", "value"), [("ep_degree", 16), ("attention_dp", 3)])
def test_a_split_that_no_group_here_can_have_is_refused_by_key_and_value(key, value):
    with pytest.raises(InputError) as refused:
        plan(opened({key: value}))
    (mistake,) = refused.value.mistakes
    assert (mistake.key, mistake.value) == (f"schedule.{key}", value)
    assert mistake.allowed == "a divisor of a group's degree: 1, 2, 4, 8 on 8 devices"
