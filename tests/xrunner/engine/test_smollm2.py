"""The quickstart's real model on its real prompts: tokens equal transformers' `generate`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from replays import answers_of
from toy_runs import run_in_process

from xgpt.core.errors import XgptError
from xrunner.checkpoint.source import find_model
from xrunner.files.tokenizer import TextTokenizer, eos_ids
from xrunner.query import PreparedQuery

PROMPTS = Path(__file__).resolve().parents[3] / "jobs" / "prompts" / "quickstart.jsonl"
NUM_PROMPTS, MAX_NEW_TOKENS = 3, 8


@pytest.fixture(scope="module")
def smollm2():
    from transformers import AutoModelForCausalLM

    try:
        files = find_model("smollm2-135m", say=lambda message: None)
    except XgptError as cause:
        pytest.skip(f"the model is not to be had here: {cause}")
    return files.directory, AutoModelForCausalLM.from_pretrained(files.directory,
                                                                 dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def queries(smollm2):
    tokenizer = TextTokenizer(smollm2[0])
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines[::len(lines) // NUM_PROMPTS]]
    texts = [tokenizer.render_chat([{"role": "user", "content": p}]) for p in prompts[:NUM_PROMPTS]]
    # lengths differ, so that batches shrink and are compacted on the way
    return [PreparedQuery(index=i, id=str(i), input_ids=tuple(ids),
                          max_new_tokens=MAX_NEW_TOKENS - 2 * i)
            for i, ids in enumerate(tokenizer.encode_many(texts, special=False))]


@pytest.fixture(scope="module")
def expected(smollm2, queries):
    directory, model = smollm2
    answers = {}
    for query in queries:
        ids = torch.tensor([query.input_ids])
        with torch.no_grad():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                 max_new_tokens=query.max_new_tokens,
                                 eos_token_id=sorted(eos_ids(directory)), pad_token_id=2)
        answers[query.index] = out[0, len(query.input_ids):].tolist()
    return answers


# toys have every number of stages; the real model is large
@pytest.mark.slow  # toys of its family in every layout: test_exactness*.py
@pytest.mark.parametrize("num_stages", [2, 1, 3])
def test_greedy_tokens_equal_generate(smollm2, queries, expected, num_stages):
    # toys.EOS is an ordinary token of this model; forcing the length shuts it out
    forced = [replace(q, is_forced=True, max_new_tokens=len(expected[q.index])) for q in queries]
    sink, _ = run_in_process(smollm2[0], forced, num_stages=num_stages, num_groups=num_stages,
                             encode_batch=3, decode_iterations=6)
    assert answers_of(sink) == expected


def test_the_chat_template_equals_transformers(smollm2):
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(smollm2[0]), TextTokenizer(smollm2[0])
    for messages in ([{"role": "user", "content": "Hello, wörld! <|im_end|>"}],
                     [{"role": "system", "content": "Be brief."},
                      {"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"},
                      {"role": "user", "content": "2+2?"}]):
        text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert ours.render_chat(messages) == text
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode_many([text], special=False) == [ids]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
