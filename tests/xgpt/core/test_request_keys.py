"""One table says what a request may ask: in OpenAI's lines and in ours the same key is given, asks
for nothing, or is refused by its name; and docs/requests.md says the same."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from xgpt.core.engines import OWN_ENGINE, VLLM, supports
from xgpt.requests.chat import BadRecord
from xgpt.requests.keys import CHAT, COMPLETION, CONTENTS, EMBEDDINGS, KEYS, OWN, OWN_KEYS, Key
from xgpt.requests.reader import read_requests
from xgpt.requests.request import Request, RequestError, Terms, read_record
from xgpt.requests.request_files import RequestFiles
from xgpt.requests.spool_columns import ColumnsWriter

PAGE = Path(__file__).resolve().parents[3] / "docs/requests.md"
ENGINES = (OWN_ENGINE, VLLM, "deepspeed")
CONTENT: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]}, COMPLETION: {"prompt": "Hi"},
    EMBEDDINGS: {"input": "Hi"}, OWN: {"prompt": "Hi"}}
OPENAI = (CHAT, COMPLETION, EMBEDDINGS)


def asked(place: str, engine: str | None = None, **keys: Any) -> Request:
    """A line there that asks so; raises BadRecord."""
    terms = Terms(engine=engine, pooled="last" if place == EMBEDDINGS else "")
    content = {**CONTENT[place], **keys}
    return read_record(content if place == OWN else {
        "custom_id": "a", "url": place, "body": {"model": "m", **content}}, 1, "a", terms=terms)


def refusal(place: str, engine: str | None = None, **keys: Any) -> str:
    with pytest.raises(BadRecord) as caught:
        asked(place, engine, **keys)
    return str(caught.value)


ASKED_AND_NOT_GIVEN: list[tuple[str, Any]] = [
    ("frequency_penalty", 0.5), ("presence_penalty", -1), ("logit_bias", {"7": -100}),
    ("min_p", 0.1), ("best_of", 3),
    ("tool_choice", "required"), ("functions", [{}]), ("stop_token_ids", [7]), ("echo", True),
    ("ignore_eos", True), ("stream", True), ("reasoning_effort", "high"), ("suffix", "x"),
    ("parallel_tool_calls", False), ("skip_special_tokens", False), ("enable_thinking", False),
    ("num_beams", 4), ("no_repeat_ngram_size", 3), ("guided_json", "{}"), ("bad_words", ["x"]),
    ("prompt_logprobs", 0), ("allowed_token_ids", [3]), ("do_sample", False)]


@pytest.mark.parametrize("place", [CHAT, COMPLETION, OWN])
@pytest.mark.parametrize(("key", "value"), ASKED_AND_NOT_GIVEN)
def test_what_is_asked_for_and_not_given_is_named(place, key, value):
    """In our own lines these were columns like any other, and ignored."""
    assert refusal(place, **{key: value}).startswith(f"{key}: not supported")


@pytest.mark.parametrize("key", ["a_key_of_tomorrow", "max_new_token", "extra"])
def test_an_openai_key_that_nobody_knows_is_refused_unless_it_is_null(key):
    for value in (False, 0, "", [], {}, 1, "x"):
        for place in OPENAI:
            assert key in refusal(place, **{key: value})
    for place in OPENAI:
        asked(place, **{key: None})


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("place", [CHAT, COMPLETION, OWN])
def test_values_that_ask_for_nothing_pass_in_both_forms_with_every_engine(place, engine):
    nothing = {key: value for key, row in KEYS.items() for value in row.neutral}
    nothing |= {"top_k": 0, "repetition_penalty": 1.0, "frequency_penalty": 0.0, "tools": []}
    for key, value in nothing.items():
        request = asked(place, engine, **{key: value})
        assert (request.samples, request.tools, request.passed) == (1, "", "")
    for key in OWN_KEYS:
        asked(place, engine, **{key: None})


def test_what_our_lines_and_openais_take_otherwise():
    assert [asked(OWN, top_k=k).top_k for k in (0, -1, 5, None)] == [0, 0, 5, None]
    assert asked(OWN, temperature=9).temperature == 9.0
    assert "from 0 to 2" in refusal(COMPLETION, temperature=9)
    assert asked(CHAT, logprobs=True, top_logprobs=3).top_logprobs == 3
    assert asked(CHAT, logprobs=False).top_logprobs is None
    assert asked(COMPLETION, logprobs=3).top_logprobs == asked(OWN, logprobs=3).top_logprobs == 3
    for value in (1, 0, 1.0, "true"):
        assert refusal(CHAT, logprobs=value) == "logprobs must be true or false"
    assert refusal(COMPLETION, logprobs=True) == "logprobs must be a whole number from 0 to 20"
    assert "needs logprobs" in refusal(CHAT, top_logprobs=2)
    assert "top_logprobs" in refusal(OWN, top_logprobs=2)
    for place in OPENAI:
        assert refusal(place, model=None).startswith("model is missing")
        assert "model" in refusal(place, model="") and "model" in refusal(place, model=7)
    assert asked(OWN, model=7).prompt == "Hi"  # a column like any other


RANGES: list[tuple[str, list[Any], list[Any]]] = [
    ("temperature", [0, 2, 0.5], [2.1, 9, -1, True, "1", [], float("nan"), float("inf"), 10**400]),
    ("top_p", [0.1, 1], [0, 1.1, True, "x"]), ("n", [2, 128], [0, 129, 1.5, True, "2"]),
    ("max_tokens", [1, 2**31 - 1], [0, -1, 2**31, 5.0, True, "5", [5], {}]),
    ("max_completion_tokens", [1], [0, 2.0]), ("seed", [-2**63, 2**63 - 1], [2**63, 1.5, True]),
    ("stop", ["x", ["a"] * 64, []], ["", 3, ["a"] * 65, [""], [3], "x" * 1001, {}]),
    ("frequency_penalty", [0], [2.5, "x", True]), ("presence_penalty", [0.0], [-3, [], {}]),
    ("repetition_penalty", [0.5, 2], [0, 2.5, "1", True]), ("min_tokens", [0, 5], [-1, 1.0, "1"]),
    ("stream", [False], ["no", 0, 1, {}]), ("top_k", [1, -1], [-2, 1.5, True, "1"]),
    ("metadata", [{}, {"a": "b"}], ["x", []]), ("user", ["me"], [5, {}]), ("store", [True], [1])]


@pytest.mark.parametrize(("key", "good", "bad"), RANGES, ids=[key for key, *_ in RANGES])
def test_every_value_is_held_to_its_range(key, good, bad):
    for place in (CHAT, COMPLETION):
        for value in good:
            asked(place, **{key: value})
        for value in bad:
            assert refusal(place, **{key: value}).startswith(f"{key} must be ")


@pytest.mark.parametrize(("line", "code"), [
    ({"custom_id": None}, "missing_required_parameter"), ({}, "missing_required_parameter"),
    ({"custom_id": 26}, "invalid_type"), ({"custom_id": ["a"]}, "invalid_type"),
    ({"custom_id": ""}, None)])
def test_an_openai_line_without_a_name_is_no_request(tmp_path, line, code):
    body = {"url": COMPLETION, "body": {"model": "m", "prompt": "Hi"}}
    path = tmp_path / "r.jsonl"
    path.write_text("\n" * 25 + json.dumps({**body, **line}) + "\n")
    found, = read_requests(RequestFiles(paths=(path,)))
    assert isinstance(found, RequestError) and "custom_id" in found.error
    assert (found.line, found.id, found.code, found.is_openai) == (26, None, code, True)


def test_lists_of_inputs_are_as_many_requests_of_one_line():
    def inputs(place: str, **body: Any) -> list[Any]:
        first = asked(place, **body)
        whole = [first, *first.others]
        assert [one.asked for one in whole] == [*range(len(whole))]
        assert {one.choices for one in whole} == {len(whole) * first.samples}
        return [one.prompt or one.tokens for one in whole]

    for place, key in ((COMPLETION, "prompt"), (EMBEDDINGS, "input")):
        assert inputs(place, **{key: ["hello"]}) == ["hello"]
        assert inputs(place, **{key: ["a", "b"]}) == ["a", "b"]
        assert inputs(place, **{key: [3, 4]}) == [(3, 4)]
        assert inputs(place, **{key: [[3, 4], [5]]}) == [(3, 4), (5,)]
        for bad in ([], [[]], [""], ["a", 3], [3, "a"], [["a"]], [True], [-1], {}, 5, [{"a": 1}]):
            assert key in refusal(place, **{key: bad})
        assert "3000 answers" in refusal(place, **{key: ["a"] * 3000})
    assert inputs(COMPLETION, prompt=["a", "b"], n=3) == ["a", "b"]
    assert "2560 answers" in refusal(COMPLETION, prompt=["a"] * 20, n=128)


def of_file(path: Path, text: str, **said: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    """(requests and errors, what the results take over) of a file."""
    path.write_text(text)
    carried: list[dict[str, Any]] = []

    class Columns(ColumnsWriter):
        def add(self, values: Any) -> None:
            carried.append(dict(values))

    return [*read_requests(RequestFiles(paths=(path,), **said), columns=Columns())], carried


@pytest.mark.parametrize("named", [{}, {"prompt": "prompt"}])
def test_in_our_lines_a_sampling_key_counts_and_other_columns_are_carried(tmp_path, named):
    rows = [{"prompt": "a", "topic": "x", "presence_penalty": 0}, {"prompt": "b", "tools": [{}]},
            {"prompt": "c", "samples": 2, "logprobs": 1}]
    found, carried = of_file(tmp_path / "r.jsonl", "\n".join(map(json.dumps, rows)), **named)
    assert isinstance(found[1], RequestError) and found[1].error.startswith("tools: not supported")
    assert "options: false" in found[1].error
    assert (found[2].samples, found[2].top_logprobs) == (2, 1)
    assert carried[0] == {"topic": "x", "presence_penalty": 0}
    found, carried = of_file(tmp_path / "r.jsonl", json.dumps(rows[1]), has_options=False, **named)
    assert found[0].prompt == "b" and carried == [{"tools": [{}]}]


def test_cells_of_a_table_ask_as_the_keys_of_an_object_do(tmp_path):
    text = ("prompt,frequency_penalty,logit_bias,stream,top_k,samples,topic\n"
            "a,0.0,{},false,-1,2,x\nb,0.5,,,,,y\nc,,\"{\"\"7\"\": 1}\",,,,z\nd,,,,two,,\ne,,,,,,\n")
    found, carried = of_file(tmp_path / "r.csv", text)
    assert (found[0].top_k, found[0].samples, found[4].prompt) == (0, 2, "e")
    said = [one.error.split(":")[0] for one in found if isinstance(one, RequestError)]
    assert said == ["frequency_penalty", "logit_bias",
                    "top_k must be a whole number from -1 to 2147483647"]
    assert carried[0] == {"prompt": "a", "frequency_penalty": "0.0", "stream": "false",
                          "topic": "x"}
    found, _ = of_file(tmp_path / "r.csv", text, has_options=False)
    assert all(isinstance(one, Request) for one in found)


def test_the_table_has_every_key_of_openais_own_types():
    types = pytest.importorskip("openai.types", reason="its types are in the extra `dev`")
    from openai.types.chat import completion_create_params as chats

    for kind in (chats.CompletionCreateParamsNonStreaming, types.EmbeddingCreateParams,
                 types.completion_create_params.CompletionCreateParamsNonStreaming):
        keys = {*kind.__annotations__, *(key for base in kind.__mro__[1:]
                                         for key in getattr(base, "__annotations__", ()))}
        assert {"model"} < keys <= KEYS.keys()


def given(place: str, row: Key) -> str:
    """Which engines give a key there."""
    able = [name for name in ENGINES if not row.needs or supports(name, row.needs)]
    named = "yes" if len(able) == len(ENGINES) else " and ".join(f"`{name}`" for name in able)
    return named if place in row.given else "no"


def tables() -> list[str]:
    """The lines of both tables of the page."""
    lines, nowhere = list[str](), defaultdict[str, list[str]](list)
    for key, row in KEYS.items():
        if key in CONTENTS or row.is_column:
            continue
        neutral = " or ".join(f"`{json.dumps(value)}`" for value in row.neutral)
        if not row.given:
            nowhere[neutral].append(f"`{key}`")
            continue
        places, other = row.other
        more = f"; in {'chats' if COMPLETION not in places else 'OpenAI lines'} {other.words}"
        where = " | ".join(given(place, row) for place in (CHAT, COMPLETION, OWN))
        lines.append(f"| `{key}` | {row.values.words}{more * bool(places)} | {where} | {neutral} |")
    return [*lines, *(f"| {neutral} | {', '.join(keys)} |" for neutral, keys in nowhere.items())]


def test_the_page_of_requests_has_the_same_tables():
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert not [line for line in tables() if line not in page], "\n" + "\n".join(tables())
