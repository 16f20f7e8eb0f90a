"""A query whose logits are no numbers ends with an error, the others as if it were not there."""

from dataclasses import replace

import pytest
import torch
from toy_runs import run_in_process, run_waa_in_process, toy_waa_rules, waa_pools
from toys import make_model, random_queries

POISON = 5  # a token whose embedding overflows in the first norm


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("poisoned")
    model = make_model("gpt2-untied", folder)
    with torch.no_grad():
        model.transformer.wte.weight[POISON] = 3e38
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("policy", ["one stage", "two stages", "tensor parallel", "waa"])
def test_one_query_fails_and_the_others_keep_their_tokens(policy, poisoned):
    queries = [replace(query, input_ids=tuple(token if token != POISON else 6
                                              for token in query.input_ids))
               for query in random_queries(8)]
    bad = replace(queries[3], input_ids=(*queries[3].input_ids[:-1], POISON))
    answers = []
    for given in (queries, [*queries[:3], bad, *queries[4:]]):
        if policy == "waa":
            sink, _ = run_waa_in_process(poisoned, given, waa_pools(poisoned, [1], [1]),
                                         toy_waa_rules(1))
        else:
            sink, _ = run_in_process(
                poisoned, given, num_groups=2 if policy == "two stages" else 1,
                degrees={"one stage": [1], "two stages": [1, 1], "tensor parallel": [2]}[policy])
        answers.append({result.query.index: result for result in sink.results})
    clean, mixed = answers
    assert mixed.keys() == clean.keys() == set(range(8))
    failed = {index for index, result in mixed.items() if result.error is not None}
    # who draws the poisoned token itself fails where it is fed back
    assert failed == {3} | {index for index, result in clean.items() if result.error is not None}
    assert mixed[3].finish_reason == "error" and mixed[3].output_ids == ()
    assert "logits not finite" in str(mixed[3].error)
    for index in set(range(8)) - {3}:
        assert mixed[index].output_ids == clean[index].output_ids
