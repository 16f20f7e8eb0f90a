"""RRA in chunks, executed: greedy float32 tokens equal transformers' `generate`, and the replay
takes the run's steps, one for one."""

from __future__ import annotations

import numpy as np
import pytest
from replayed import problem_of
from toy_runs import run_in_process

from xgpt.core.job import FixedSchedule
from xgpt.core.queries import QueryLengths
from xgpt.core.schedule import Estimate
from xprofiler.roofline import Roofline
from xrunner.rules.steps import rules_for
from xsimulator.replay.job import replay_job
from xsimulator.rough.forms import fixed_estimate


@pytest.mark.parametrize(("family", "degrees", "chunk", "batch", "iterations", "is_tight"), [
    ("llama", (1,), 5, 4, 6, False), ("llama", (1, 1), 13, 6, 4, False),
    ("llama", (1, 1), 1000, 5, 3, True), ("opt", (1,), 13, 3, 1, False),
    ("gpt2", (1, 1), 5, 9, 12, True), ("qwen2", (2, 1), 9, 5, 4, False)])
def test_chunks_answer_as_generate_does_and_are_replayed(answered, made, family, degrees, chunk,
                                                         batch, iterations, is_tight):
    """`is_tight`: the budget holds two or three queries a group, so that chunks wait for room."""
    directory, (queries, answers) = made(family)[0], answered(family)
    lengths = QueryLengths(
        inputs=np.array([len(q.input_ids) for q in queries]),
        outputs=np.array([len(answers[q.index]) for q in queries]),
        most_outputs=np.array([q.max_new_tokens for q in queries]))
    problem = problem_of(directory, np.stack([lengths.inputs, lengths.outputs], axis=1),
                         sum(degrees))
    timing = Roofline(problem.model, problem.cluster.device, problem.dtype)
    estimate: Estimate = fixed_estimate("rra", problem, timing, FixedSchedule(
        encode_batch=batch, decode_iterations=iterations, encode_chunk=chunk,
        tp_degree=max(degrees), tp_gpus=max(degrees) if max(degrees) > 1 else 0))
    most = max(q.reserve_tokens for q in queries)
    estimate = estimate.changed(
        kv_tokens=estimate.deployment.num_groups * most * (2 if is_tight else 40))
    sink, executors = run_in_process(directory, queries, stages=estimate.deployment.stages,
                                     rule=rules_for(estimate)[0])
    assert {r.query.index: list(r.output_ids) for r in sink.results} == answers
    pool = replay_job(problem, timing, estimate, lengths).pools[0]
    expected = [(step.kind.value, step.group, step.phase, step.iteration, encoded + decoded,
                 tokens + decoded) for step, encoded, decoded, tokens in zip(
        pool.steps, pool.encoded.tolist(), pool.decoded.tolist(), pool.tokens.tolist(),
        strict=True)]
    for executor in executors:
        assert [record[:6] for record in executor.log] == expected
    kinds = {step.kind.value for step in pool.steps}
    assert "mixed" in kinds and max(pool.tokens) <= chunk
    assert any(part.first for step in pool.steps for part in step.chunks) == (chunk < 1000)
