"""What is told beside tokens is transformers' own, over stages, tensor-parallel groups and rules:
embeddings, the last hidden states or their mean; log-likelihoods of chosen and of given tokens.
`min_tokens` bars the end as transformers does."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import toy_runs
import toys
from examples import some
from holding import rule_of

from xrunner.files.result_line import result_line
from xrunner.query import FinishedQuery, PreparedQuery, Sampling

QUERIES = toys.random_queries(12)


def embedded(pooled: str) -> list[PreparedQuery]:
    return [replace(query, max_new_tokens=1, is_forced=True, sampling=Sampling(pooled=pooled))
            for query in QUERIES]


def expected(model: Any, query: PreparedQuery) -> list[float]:
    with torch.no_grad():
        states = model.base_model(torch.tensor([list(query.input_ids)])).last_hidden_state[0]
    pooled = states[-1] if query.sampling.pooled == "last" else states.mean(dim=0)
    return pooled.tolist()


LAYOUTS = [((1,), False), ((1, 1), True), ((2,), False), ((1, 2), False), ((1, 1, 1), True)]


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize(("degrees", "is_static", "pooled"), some(
    [(*layout, pooled) for layout in LAYOUTS for pooled in ("last", "mean")],
    lambda case: LAYOUTS.index(case[:2]) in ((2, 4) if case[2] == "last" else (0, 3))))
def test_embeddings_are_transformers_last_hidden_states(made, family, degrees, is_static, pooled):
    folder, model = made(family)
    rule = rule_of("ft", groups=2, batch=5) if is_static else None
    sink, _ = toy_runs.run_in_process(folder, embedded(pooled), degrees=degrees, num_groups=2,
                                      rule=rule)
    assert sorted(result.query.index for result in sink.results) == list(range(12))
    for result in sink.results:
        query = embedded(pooled)[result.query.index]
        assert result.error is None and result.text == ""
        assert result.embedding == pytest.approx(expected(model, query), abs=2e-4, rel=1e-4)


def test_what_is_no_number_is_an_error_of_its_own(tmp_path):
    model = toys.make_model("gpt2-untied", tmp_path)
    with torch.no_grad():
        model.transformer.wte.weight[7] = 3e38  # overflows in the first norm
    model.save_pretrained(tmp_path)
    queries = embedded("mean")
    queries[4] = replace(queries[4], input_ids=(3, 7, 3))
    sound = {q.index for q in queries if 7 not in q.input_ids}
    sink, _ = toy_runs.run_in_process(tmp_path, queries, degrees=(1,))
    assert {one.query.index for one in sink.results if one.error is None} == sound
    bad = next(one for one in sink.results if one.query.index == 4)
    assert result_line(bad, "toy", str)["embedding"] == []


def log_softmax(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, V] of transformers: row i is of the token after the first i + 1."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([list(tokens)])).logits[0].float(), dim=-1)


def check_chosen(model: Any, result: FinishedQuery) -> None:
    query, ids = result.query, result.output_ids
    if query.sampling.top_logprobs is None:
        assert result.likelihoods == ()
        return
    rows = log_softmax(model, [*QUERIES[query.index].input_ids, *ids])
    first = len(QUERIES[query.index].input_ids) - 1
    assert len(result.likelihoods) == len(ids)
    for place, (token, told) in enumerate(zip(ids, result.likelihoods, strict=True)):
        row = rows[first + place]
        assert told.logprob == pytest.approx(float(row[token]), abs=1e-4)
        likeliest = torch.topk(row, query.sampling.top_logprobs)
        assert [token for token, _ in told.top] == likeliest.indices.tolist()
        assert [value for _, value in told.top] == pytest.approx(
            likeliest.values.tolist(), abs=1e-4)


def asking() -> list[PreparedQuery]:
    """Some ask for likelihoods, of several numbers of tokens; some draw; some have no end before
    so many tokens."""
    found = []
    for query in QUERIES:
        i = query.index
        sampling = Sampling(
            temperature=0.8 if i % 4 == 3 else 0.0, seed=i,
            top_logprobs=(None, 0, 2, 5)[i % 4],
            barred=(toys.EOS,) if i % 3 == 0 else (),
            barred_until=len(query.input_ids) + 7 if i % 3 == 0 else 0)
        found.append(replace(query, sampling=sampling))
    return found


@pytest.mark.parametrize("degrees", some([((1,),), ((1, 1),), ((2,),), ((1, 2),)],
                                         lambda case: case in (((1,),), ((1, 2),))))
def test_what_is_told_of_chosen_tokens_is_transformers_own(llama, degrees):
    folder, model = llama
    sink, _ = toy_runs.run_in_process(folder, asking(), degrees=degrees, num_groups=2)
    assert len(sink.results) == len(QUERIES)
    for result in sink.results:
        check_chosen(model, result)
        if not result.query.sampling.is_drawn:
            assert list(result.output_ids) == _generated(model, result.query)


def _generated(model: Any, query: PreparedQuery) -> list[int]:
    """As transformers, which bars the end from the first `min_new_tokens`."""
    return toys.greedily(
        model, QUERIES[query.index].input_ids, query.max_new_tokens, pad_token_id=0,
        min_new_tokens=min(7, query.max_new_tokens) if query.sampling.barred else 0,
        eos_token_id=toys.EOS)


def scored(count: int = 12) -> list[PreparedQuery]:
    """Continuations of one to seven tokens."""
    found = []
    for query in toys.random_queries(count, seed=5, longest=25):
        ids = [*query.input_ids, 7, 11]
        own = min(1 + query.index % 7, len(ids) - 1)
        found.append(replace(query, input_ids=tuple(ids[:-1]), max_new_tokens=1, is_forced=True,
                             sampling=Sampling(targets=tuple(ids[-own:]))))
    return found


@pytest.mark.parametrize(("degrees", "is_static"), some([
    ((1,), False), ((1, 1), False), ((2,), True), ((1, 2), False), ((1, 1, 1), True)],
    lambda case: case in (((1, 2), False), ((1, 1, 1), True))))
def test_given_tokens_are_as_likely_as_transformers_finds_them(llama, degrees, is_static):
    folder, model = llama
    rule = rule_of("ft", groups=2, batch=5) if is_static else None
    sink, _ = toy_runs.run_in_process(folder, scored(), degrees=degrees, num_groups=2, rule=rule)
    assert sorted(result.query.index for result in sink.results) == list(range(12))
    for result in sink.results:
        query, targets = scored()[result.query.index], result.query.sampling.targets
        rows = log_softmax(model, [*query.input_ids, targets[-1]])[-len(targets) - 1:-1]
        assert [one.logprob for one in result.likelihoods] == pytest.approx(
            rows.gather(1, torch.tensor(targets)[:, None])[:, 0].tolist(), abs=1e-4)
        assert [one.top[0][0] for one in result.likelihoods] == rows.argmax(dim=1).tolist()
