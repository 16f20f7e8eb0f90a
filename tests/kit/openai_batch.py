"""One file of OpenAI's batch format with all that a line may ask for and do wrong, a model that can
answer it, and what OpenAI promises of every line, by the types of the package `openai`.

The promises (platform.openai.com/docs/api-reference/batch, "request output object"): a line has
`id`, `custom_id`, `response` (`status_code`, `request_id`, `body`) and `error`; a request that was
answered has a response of status 200, whose body is the endpoint's own; one that the endpoint
refuses has a response of its status, whose body is that refusal; `error` is of what never was a
request, with `code` and `message`. Lines may come in any order: they are known by `custom_id`."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

END = 256  # after the 256 bytes
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
TEMPLATE = """{% if tools %}{% for t in tools %}{{ t.function.name }};{% endfor %}{% endif %}{%
for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{%
if add_generation_prompt %}<assistant>{% endif %}"""
_TOOL = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}
# The byte-level alphabet has its printable bytes first, 188 of them. Random weights like white
# space, of which JSON takes any amount.
_NO_SPACES = {str(188 + byte): -100 for byte in b"\t\n\r "}
_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]},
                                           "is_big": {"type": "boolean"}},
          "required": ["colour", "is_big"], "additionalProperties": False}


def write_model(folder: Path) -> None:
    """A Llama of random weights whose tokens are bytes, of heads that vLLM's CPU kernels take."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    letters = sorted(ByteLevel.alphabet())
    backend = Tokenizer(BPE(vocab={one: place for place, one in enumerate(letters)}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = Decoder()
    backend.add_special_tokens(["<end>"])
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>",
                            chat_template=TEMPLATE).save_pretrained(folder)
    LlamaForCausalLM(LlamaConfig(
        vocab_size=END + 1, hidden_size=128, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        initializer_range=0.3, bos_token_id=None, eos_token_id=END,
        pad_token_id=END)).eval().save_pretrained(folder)


def _chat(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": {
        "model": "toy", "messages": [{"role": "user", "content": f"Hello {name}"}],
        "max_tokens": 12, **body}}


def _completion(name: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": COMPLETION, "body": {
        "model": "toy", "prompt": "Once upon", "max_tokens": 9, **body}}


def _held_to(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}


# Asked and given by every engine that has log-likelihoods.
PLAIN = [
    _chat("chat"), _chat("tools", tools=[_TOOL]), _chat("logprobs", logprobs=True, top_logprobs=3),
    _completion("completion", logprobs=2), _chat("least", min_tokens=12, temperature=1.0, seed=3),
    _chat("two", n=2, temperature=1.0, seed=5)]
# By vLLM's own sampler alone.
PASSED = [
    _chat("schema", response_format=_held_to(SCHEMA), logit_bias=_NO_SPACES, max_tokens=60),
    _chat("choice", structured_outputs={"choice": ["yes", "no"]}, logprobs=True),
    _chat("pattern", structured_outputs={"regex": "[0-9]{3}-[0-9]{4}"}),
    _chat("bias", logit_bias={"65": 100}, min_p=0.1, repetition_penalty=1.0),
    _chat("call", tools=[_TOOL], structured_outputs={"choice": [_CALL]}, max_tokens=99)]
NO_SCHEMA = _chat("no schema", response_format=_held_to({"type": "a pear"}))
# custom_id -> (the line, words of why it is refused); by every engine
REFUSED = {
    "penalty": (_chat("penalty", frequency_penalty=0.5), "frequency_penalty"),
    "empty": (_chat("empty", messages=[]), "messages"),
    "elsewhere": ({**_chat("elsewhere"), "url": "/v1/embeddings"}, "/v1/embeddings"),
    "long": (_completion("long", prompt="x" * 300), "positions")}


def write_lines(path: Path) -> None:
    """All of them, then a second `chat`, and a line that is no JSON."""
    lines = [*PLAIN, *PASSED, NO_SCHEMA, *(line for line, _ in REFUSED.values()), _chat("chat")]
    texts = [json.dumps(line) for line in lines]
    texts.insert(3, '{"custom_id": "broken", ')
    path.write_text("\n".join(texts) + "\n")


def checked(out: Path) -> dict[str, dict[str, Any]]:
    """The lines of a run's results and errors by their custom_id, each held to what OpenAI promises
    of it."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletion
    from openai.types.shared import ErrorObject

    results, errors = ([json.loads(line) for line in (out / name).read_text().splitlines()]
                       for name in ("results.jsonl", "errors.jsonl"))
    assert len({line["id"] for line in [*results, *errors]}) == len(results) + len(errors)
    for line in [*results, *errors]:
        assert line.keys() == {"id", "custom_id", "response", "error", "xgpt"}
        assert (line["response"] is None) != (line["error"] is None)
        if line["error"] is not None:
            assert line["error"].keys() == {"code", "message"} and all(line["error"].values())
            continue
        response = line["response"]
        assert response.keys() == {"status_code", "request_id", "body"}
        if response["status_code"] != 200:
            assert response["status_code"] == 400 and response["body"].keys() == {"error"}
            ErrorObject.model_validate(response["body"]["error"], strict=True)
            continue
        kind = ChatCompletion if response["body"]["object"] == "chat.completion" else Completion
        kind.model_validate(response["body"], strict=True)
    assert not [line for line in errors if (line["response"] or {}).get("status_code") == 200]
    names = Counter(line["custom_id"] for line in [*results, *errors])
    expected = Counter(line["custom_id"] for line in [*PLAIN, *PASSED, NO_SCHEMA])
    assert names == expected + Counter([*REFUSED, "chat", None])
    by_name = {line["custom_id"]: line for line in [*errors, *results]}
    twice, = (line for line in errors if line["custom_id"] == "chat")
    assert twice["error"]["code"] == "duplicate_custom_id"
    assert by_name[None]["error"]["code"] == "invalid_json_line"
    assert by_name["elsewhere"]["error"]["code"] == "invalid_url"
    for name, (_, words) in REFUSED.items():
        assert words in why_not(by_name[name])
    return by_name


def why_not(line: dict[str, Any]) -> str:
    """Why a line has no answer."""
    error = line["error"] or line["response"]["body"]["error"]
    assert isinstance(error["message"], str)
    return error["message"]


def choice_of(line: dict[str, Any]) -> dict[str, Any]:
    """The only choice of an answered line."""
    assert line["response"]["status_code"] == 200
    choice, = line["response"]["body"]["choices"]
    assert isinstance(choice, dict)
    return choice


def check_plain(by_name: dict[str, dict[str, Any]]) -> None:
    """What PLAIN asks for is in its answers."""
    for line in PLAIN:
        answer, asked = by_name[line["custom_id"]], line["body"]
        body, count = answer["response"]["body"], asked.get("n", 1)
        choices, usage = body["choices"], body["usage"]
        assert [choice["index"] for choice in choices] == [*range(count)]
        assert all(choice["finish_reason"] in ("stop", "length") for choice in choices)
        assert usage["completion_tokens"] <= count * asked["max_tokens"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    told = choice_of(by_name["logprobs"])["logprobs"]["content"]
    tokens = by_name["logprobs"]["response"]["body"]["usage"]["completion_tokens"]
    assert len(told) == tokens and all(len(one["top_logprobs"]) == 3 for one in told)
    for one in told:  # greedily
        assert one["logprob"] == one["top_logprobs"][0]["logprob"] <= 0
        assert one["token"] == one["top_logprobs"][0]["token"]
    told = choice_of(by_name["completion"])["logprobs"]
    assert len(told["tokens"]) == len(told["token_logprobs"]) == len(told["top_logprobs"])
    assert by_name["least"]["response"]["body"]["usage"]["completion_tokens"] == 12
