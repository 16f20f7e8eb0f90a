"""A closed loop of requests: times of steps add up, and no request is lost."""

from dataclasses import replace

import numpy as np
import pytest

import xgpt
from xgpt.app.opened_job import OpenedJob
from xgpt.app.schedule import job_with_times
from xgpt.core import catalog
from xgpt.core.problem import QueryLengths, QueryTimes
from xprofiler.roofline import Roofline
from xprofiler.timing import Operator
from xscheduler.evaluator import predict
from xsimulator.addresses import address_of
from xsimulator.closed_loop import ROUNDS, ClosedLoop, StepSeconds, simulate_loop
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.replicas import JobReplayer, replayer_of

MODEL, LINK = catalog.model("llama-3.1-8b"), catalog.link("nvlink4")
TIMING = Roofline(MODEL, catalog.device("H100"), "bfloat16")
STEPS = StepSeconds(MODEL, TIMING, LINK, "bfloat16", 2)
LOOP = ClosedLoop(concurrency=1, input_tokens=1000, output_tokens=11, step_tokens=8192, mixes=True,
            kv_tokens=1e6)
JOB = {"model": MODEL.name, "cluster": "2xH100", "plan": {"engine": "xgpt"},
       "workload": {"requests": {"count": 80}, "input_tokens": 4096, "output_tokens": 512}}


def step_s(*what: float) -> float:
    return STEPS.of(*what)


def test_one_request_at_a_time_takes_its_own_steps():
    found = simulate_loop(LOOP, STEPS)
    encode_s = step_s(1000, 1, 0, 0.0, STEPS.encode_attention_s(1000, 1))
    decode_s = 10 * step_s(0, 0, 1, 1001 + 4.5, 0.0)
    assert found.ttft_s == pytest.approx(encode_s)
    assert found.tpot_s * 10 == pytest.approx(decode_s)
    assert found.latency_s == pytest.approx(encode_s + decode_s)


def test_a_step_is_the_sum_of_its_operators():
    layers = MODEL.num_layers * (TIMING.operator_s(Operator.LAYER_REST, 40.0, tp_degree=2)
                                 + TIMING.operator_s(Operator.DECODE_ATTENTION, 40.0, 700.0,
                                                     tp_degree=2))
    ends = (TIMING.operator_s(Operator.HEAD, 40.0, tp_degree=2) + TIMING.facts.step_overhead_s)
    without_messages = float(layers + ends)
    assert without_messages < step_s(0, 0, 40, 700.0, 0.0) < 2 * without_messages


@pytest.mark.parametrize("mixes", [True, False])
def test_more_requests_at_a_time_take_longer_each_and_less_together(mixes):
    times = [simulate_loop(replace(LOOP, concurrency=n, output_tokens=100, mixes=mixes), STEPS)
             for n in (1, 4, 16, 64)]
    latencies = np.array([found.latency_s for found in times])
    assert (np.diff(latencies) > 0).all()
    assert (np.diff(latencies / [1, 4, 16, 64]) < 0).all()


def test_an_engine_that_encodes_first_keeps_its_users_waiting_for_the_first_token():
    loop = replace(LOOP, concurrency=32, output_tokens=128, input_tokens=4096)
    beside, before = (simulate_loop(replace(loop, mixes=mixes), STEPS) for mixes in (True, False))
    assert before.ttft_s > beside.ttft_s
    # the work is the same, so that a request takes about as long
    assert before.latency_s == pytest.approx(beside.latency_s, rel=0.2)


def test_requests_that_find_no_room_in_the_cache_wait():
    loop = replace(LOOP, concurrency=16, output_tokens=200)
    roomy, narrow = (simulate_loop(replace(loop, kv_tokens=tokens), STEPS)
                     for tokens in (1e6, 5000.0))
    assert narrow.ttft_s > 5 * roomy.ttft_s and narrow.latency_s > roomy.latency_s


def test_a_prompt_longer_than_a_step_is_encoded_in_pieces():
    whole, pieces = (simulate_loop(replace(LOOP, input_tokens=6000, step_tokens=tokens), STEPS)
                     for tokens in (8192, 1024))
    assert pieces.ttft_s > whole.ttft_s


def test_cached_input_tokens_are_attended_to_but_not_encoded():
    """Of an input of 1,000 tokens of which the cache holds 800, 200 are encoded. Their rows attend
    to all: 1 - 0.8^2 of the pairs."""
    found = simulate_loop(replace(LOOP, cached=0.8), STEPS)
    attention_s = (1 - 0.8**2) * STEPS.encode_attention_s(1000, 1)
    assert found.ttft_s == pytest.approx(step_s(200, 1, 0, 0.0, attention_s))
    assert found.tpot_s == pytest.approx(simulate_loop(LOOP, STEPS).tpot_s)


@pytest.mark.parametrize("array", [
    np.zeros((3, 4)), np.zeros((3, 4))[1:, ::2], np.zeros((3, 4)).T, np.zeros(2, np.int64),
    np.empty(0), np.array(1.0), np.broadcast_to(np.zeros(3), (2, 3))])
def test_addresses_are_numpys(array):
    array.flags.writeable = False
    assert address_of(array) == array.ctypes.data


@pytest.mark.parametrize(("policy", "inputs", "outputs", "clients"), [
    ("sarathi", 1000, 100, 1), ("sarathi", 1000, 500, 32), ("sarathi", 4096, 128, 32),
    ("sarathi", 1000, 100, 256), ("vllm", 1024, 256, 8), ("vllm", 4096, 256, 64)])
@pytest.mark.parametrize("shortest", [0.8, 1.0])
def test_the_replay_of_a_job_has_the_times_of_a_closed_loop(policy, inputs, outputs, clients,
                                                            shortest):
    """A job of ten times the requests that its schedule has at a time is the closed loop: a request
    is sent when an answer ends. Lengths are drawn twice, so that means differ by a few per cent."""
    loop = ClosedLoop(
        concurrency=clients, input_tokens=inputs, output_tokens=outputs, step_tokens=8192,
        mixes=policy == "sarathi", kv_tokens=1e6, shortest=shortest)
    expected = simulate_loop(loop, STEPS)
    replay = replay_of(policy, clients)
    drawn = np.random.default_rng(5).uniform(shortest, 1, (2, ROUNDS * clients))
    wanted = np.maximum((np.array([[inputs], [outputs]]) * drawn).astype(int), 1)
    found = replay.run(QueryLengths(inputs=wanted[0], outputs=wanted[1], most_outputs=wanted[1]))
    tpot_s = found.times.tpot_s(found.output_tokens).mean()
    assert found.loop_ttft_s(clients) == pytest.approx(expected.ttft_s, rel=0.06)
    assert tpot_s == pytest.approx(expected.tpot_s, rel=0.06)


def test_the_prediction_and_the_simulation_of_a_job_have_the_first_token_of_its_loop():
    job = job_of("sarathi", 16, count=160)
    simulation = xgpt.simulate(job)
    expected = simulate_loop(replace(LOOP, concurrency=16, input_tokens=4096, output_tokens=512),
                             STEPS)
    found = predict(simulation.problem, TIMING, simulation.estimate)
    assert found is not None and found.loop_ttft_s == simulation.figures.loop_ttft_s
    assert found.loop_ttft_s == pytest.approx(expected.ttft_s, rel=0.06)
    assert found.ttft_p50_s > 20 * found.loop_ttft_s, "waiting since the start of the job"
    assert "by 16 clients of a closed loop" in str(simulation)
    batches = xgpt.simulate(xgpt.load({**JOB, "schedule": {
        "policy": "rra", "encode_batch": 4, "decode_iterations": 16, "tp_degree": 2, "tp_gpus": 2,
        "replicas": 1}}))
    assert batches.figures.loop_ttft_s is None and "first token" not in str(batches)


def job_of(policy: str, clients: int, count: int) -> OpenedJob:
    return xgpt.load({**JOB, "workload": {**JOB["workload"], "requests": {"count": count}},
                      "schedule": {"policy": policy, "max_active": clients, "token_budget": 8192,
                                   "tp_degree": 2, "tp_gpus": 2, "replicas": 1}})


def replay_of(policy: str, clients: int) -> JobReplayer:
    job = job_of(policy, clients, count=1)
    opened, timing = job_with_times(job)
    assert timing.operator_s(Operator.HEAD, 1.0) == TIMING.operator_s(Operator.HEAD, 1.0)
    return replayer_of(opened.problem, timing, xgpt.simulate(job).estimate)


def test_the_first_token_of_a_closed_loop_counts_from_the_end_of_an_answer():
    """Two clients on one replica: the third request is sent at 3 s, when the first answer ends."""
    times = QueryTimes(
        arrival_s=np.zeros(4), start_s=np.array([0.0, 1.0, 3.0, 5.0]),
        first_token_s=np.array([1.0, 2.0, 4.5, 6.0]), last_token_s=np.array([3.0, 5.0, 8.0, 9.0]))
    found = ReplayResult(pools=(), handovers=(), times=times, preemptions=0,
                         output_tokens=np.full(4, 3))
    assert found.loop_ttft_s(2) == np.mean([1.0, 2.0, 1.5, 1.0])
    assert found.loop_ttft_s(9) == np.mean([1.0, 2.0, 4.5, 6.0])
    apart = replace(found, replicas=[np.array([0, 2]), np.array([1, 3])])
    assert apart.loop_ttft_s(1) == np.mean([1.0, 1.5, 2.0, 1.0]) and found.loop_ttft_s(None) is None
