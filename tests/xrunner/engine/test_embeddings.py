"""Embeddings of texts are transformers' last hidden states, the last token's or their mean, over
stages, tensor-parallel groups and policies."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from examples import some

pytest.importorskip("torch", reason="the runner needs the extra `run`")
import torch
import toy_runs
import toys

from xrunner.io.result_line import result_line
from xrunner.query import FinishedQuery, PreparedQuery, Sampling
from xrunner.rules.static import StaticRule

QUERIES = toys.random_queries(12)


@pytest.fixture(scope="module", params=["llama", "gpt2", "opt"])
def toy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory,
        ) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, toys.make_model(request.param, folder)


def embedded(pooled: str) -> list[PreparedQuery]:
    return [replace(query, max_new_tokens=1, is_forced=True, sampling=Sampling(pooled=pooled))
            for query in QUERIES]


def expected(model: Any, query: PreparedQuery) -> list[float]:
    with torch.no_grad():
        states = model.base_model(torch.tensor([list(query.input_ids)])).last_hidden_state[0]
    pooled = states[-1] if query.sampling.pooled == "last" else states.mean(dim=0)
    values: list[float] = pooled.tolist()
    return values


LAYOUTS = [((1,), False), ((1, 1), True), ((2,), False), ((1, 2), False), ((1, 1, 1), True)]


@pytest.mark.parametrize(("degrees", "is_static", "pooled"), some(
    [(*layout, pooled) for layout in LAYOUTS for pooled in ("last", "mean")],
    lambda case: LAYOUTS.index(case[:2]) in ((2, 4) if case[2] == "last" else (0, 3))))
def test_embeddings_are_transformers_last_hidden_states(
        toy: tuple[Path, Any], degrees: tuple[int, ...], is_static: bool, pooled: str) -> None:
    folder, model = toy
    rule = StaticRule(encode_batch=5, num_groups=2, encode_micro_batches=2,
                      kv_tokens=10_000) if is_static else None
    sink, _ = toy_runs.run_in_process(folder, embedded(pooled), degrees=degrees, num_groups=2,
                                      rule=rule)
    assert sorted(result.query.index for result in sink.results) == list(range(12))
    for result in sink.results:
        query = embedded(pooled)[result.query.index]
        assert result.error is None and result.text == ""
        assert result.embedding == pytest.approx(expected(model, query), abs=2e-4, rel=1e-4)


def test_what_is_no_number_is_an_error_of_its_own(tmp_path: Path) -> None:
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


def test_openais_line_has_an_embedding_of_length_one() -> None:
    types = pytest.importorskip("openai.types", reason="its types are in the extra `dev`")
    query = replace(embedded("last")[0], is_openai=True, id="a")
    line = result_line(FinishedQuery(
        query=query, output_ids=(0,), finish_reason="stop", text="", encode_start_s=0.0,
        first_token_s=1.0, last_token_s=1.0, embedding=(3.0, 0.0, -4.0)), "toy", str)
    body = line["response"]["body"]
    types.CreateEmbeddingResponse.model_validate(body, strict=True)
    assert body["data"][0]["embedding"] == [0.6, 0.0, -0.8]
    assert body["usage"]["prompt_tokens"] == len(query.input_ids)
    own = result_line(FinishedQuery(
        query=replace(query, is_openai=False), output_ids=(0,), finish_reason="stop", text="",
        encode_start_s=0.0, first_token_s=1.0, last_token_s=1.0,
        embedding=(3.0, math.pi, -4.0)), "toy", str)
    assert own["embedding"] == [3.0, 3.14159265, -4.0] and own["output_tokens"] == 0
