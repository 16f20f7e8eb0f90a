"""Native replays of several replicas under each routing rule, and of closed loops, equal those of
the event kernel to the bit."""

from dataclasses import replace

import numpy as np
import pytest
from both_replays import TIMES, arriving, drawn, same_both_ways
from compiled import has_compiler

from xgpt.core.controls import ARRIVAL_ROUTINGS, DEFERRED, Adjustment
from xsimulator.replay.service_replay import ServiceReplayer

pytestmark = pytest.mark.skipif(not has_compiler(), reason="there is no compiler")
CONFIGS = {"sarathi": {"max_active": 9, "token_budget": 90},
           "vllm": {"max_active": 9, "token_budget": 600}, "orca": {"max_active": 9},
           "rra": {"encode_batch": 5, "decode_iterations": 8},
           "ft": {"encode_batch": 6, "decode_micro_batches": 1}, "waa-c": {"encode_batch": 2}}


def service_of(rng, policy, routing):
    """(service on up to five replicas, equal ones or of two shapes, its requests, their arrival,
    and its clients or None)."""
    problem, timing, one, lengths = drawn(
        rng, "opt-13b", policy, (20, 60), plans=[(1, 0), (2, 4)] if policy != "waa-c" else [(1, 0)],
        **CONFIGS[policy])
    problem = replace(problem, adjustment=Adjustment(routing=routing))
    estimate = one.in_copies(int(rng.integers(1, 4)))
    if rng.random() < 0.3:
        estimate = estimate.beside((one.in_copies(2),))
    clients = int(rng.integers(1, 30)) if rng.random() < 0.4 else None
    arrival_s = arriving(rng, timing, len(lengths.inputs))
    return ServiceReplayer(problem, timing, estimate), lengths, arrival_s, clients


@pytest.mark.parametrize("routing", ARRIVAL_ROUTINGS)
@pytest.mark.parametrize("policy", CONFIGS)
def test_replicas(monkeypatch, policy, routing):
    # who waits at the router meets most moments at which several things happen
    for seed in range(8 if routing == DEFERRED else 1):
        service, lengths, arrival_s, clients = service_of(
            np.random.default_rng(seed), policy, routing)
        found = [same_both_ways(monkeypatch, lambda service=service, lengths=lengths,
                                arrival_s=arrival_s, clients=clients: service.run(
                                    lengths, arrival_s, concurrency=clients))]
        found.append(service.run(lengths, arrival_s, concurrency=clients, has_steps=False))
        assert not found[1].pools and found[0].preemptions == found[1].preemptions
        for name in TIMES:
            np.testing.assert_array_equal(*(getattr(one.times, name) for one in found))
