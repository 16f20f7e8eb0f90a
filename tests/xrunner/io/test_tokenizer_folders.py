"""Folders of tokenizers, in the forms that models are published with and each key alone
(tokenizer_folders.yaml): texts, chats and answers are as transformers has them, or are refused by
name."""

import json
from pathlib import Path
from typing import Any

import chat_templates
import pytest
import yaml
from small_tokenizers import begun_with, older_files, trained, write_folder
from transformers import AutoTokenizer

from xrunner.files.tokenizer import TextTokenizer

TOLD = ("bos_token", "eos_token", "unk_token", "pad_token")
TEMPLATES = {
    **{name: text for name, text in vars(chat_templates).items() if name.isupper()},
    "FALCON": chat_templates.OLMO.replace("{{ bos_token }}", ""),
    "SAY": "|".join(f"{{{{ {name} }}}}" for name in TOLD)
           + "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"}


def named(value: Any) -> Any:
    """Templates in the places of their names."""
    if isinstance(value, dict):
        return {key: named(own) for key, own in value.items()}
    if isinstance(value, list):
        return [named(own) for own in value]
    return TEMPLATES.get(value, value) if isinstance(value, str) else value


def folders() -> dict[str, dict[str, Any]]:
    """Each folder's files."""
    told = yaml.safe_load(Path(__file__).with_name("tokenizer_folders.yaml").read_text("utf-8"))
    rows: dict[str, dict[str, Any]] = {}
    for name, row in (told["families"] | told["keys"]).items():
        base = rows.get(row.get("like", "" if "kind" in row else "nothing"), {})
        rows[name] = {**base, **row, **{part: base.get(part, {}) | row.get(part, {})
                                        for part in ("settings", "files")}}
    return {name: files_of(row) for name, row in rows.items()}


def files_of(row: dict[str, Any]) -> dict[str, Any]:
    specials, template = tuple(row["specials"]), named(row.get("template"))
    text = trained(row["kind"], specials)
    text = begun_with(text, row["begun"]) if "begun" in row else text
    settings = named(row["settings"])
    if "class" in row:
        settings["tokenizer_class"] = row["class"]
    if "added" in row:
        settings["added_tokens_decoder"] = {str(place): {
            "content": token, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": True} for place, token in enumerate(specials)}
    files = {"tokenizer.json": padded(text) if "padded" in row else text,
             "config.json": {"model_type": row["type"]}, "tokenizer_config.json": settings,
             **(older_files(text) if "older" in row else {}), **named(row["files"])}
    if template is not None:
        (settings if "legacy" in row else files)[
            "chat_template" if "legacy" in row else "chat_template.jinja"] = template
    left_out = [*row.get("without", ()), *(
        ["tokenizer.json"] if row.get("older") == "instead" else [])]
    return {name: content for name, content in files.items() if name not in left_out}


def padded(text: str) -> str:
    own = json.loads(text)
    own["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst",
                         "stride": 0}
    own["padding"] = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None,
                      "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}
    return json.dumps(own)


FOLDERS = folders()
TEXTS = ["How many roads, he said ?", " <x> the <added> one<more>", "<s>[INST] x</s> <tail>", "",
         "Größe 你好\n\n  do n't", "<|im_start|>user <|eot_id|> <image><new><extra_id_1>"]
USER, MODEL = {"role": "user", "content": " How many? "}, {"role": "assistant", "content": "Two."}
SYSTEM = {"role": "system", "content": "Be short."}
CALL = {"role": "assistant", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": {
    "name": "weather", "arguments": {"city": "Köln", "days": [1, {"a": None}]}}}]}
RESULT = {"role": "tool", "content": "rain", "tool_call_id": "abcdefghi", "name": "weather"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}}}}}]
CHATS: list[tuple[list[dict[str, Any]], Any, dict[str, Any]]] = [
    ([USER], None, {}), ([SYSTEM, USER], None, {}), ([USER, MODEL, USER], None, {}),
    ([USER], TOOLS, {}), ([USER, CALL, RESULT], TOOLS, {}), ([USER, CALL, RESULT, USER], None, {}),
    ([USER], None, {"enable_thinking": False}), ([USER], None, {"thinking": True}),
    ([USER], None, {"date_string": "1 May 2020"}), ([USER], None, {"bos_token": "<other>"}),
    ([USER, {**MODEL, "reasoning_content": "hm"}, USER], None, {}),
    ([USER, {**MODEL, "reasoning_content": "hm"}], None, {})]
# Chats that are refused for what the template leaves out, and transformers renders without it.
LEAVE_OUT = "would leave it out"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", FOLDERS)
def test_texts_chats_and_answers_are_those_of_transformers(name, tmp_path):
    folder = write_folder(tmp_path / "model", FOLDERS[name])
    theirs, ours = AutoTokenizer.from_pretrained(folder), TextTokenizer(folder)
    assert ours.encode_many(TEXTS, special=True) == [theirs(text)["input_ids"] for text in TEXTS]
    answers = [[*range(12)], *ours.encode_many(TEXTS, special=False), [0, 419, 3, 2, 1]]
    assert [ours.decode(ids) for ids in answers] == [
        theirs.decode(ids, skip_special_tokens=True) for ids in answers]
    assert [ours.token_text(i) for i in range(30)] == [theirs.decode([i]) for i in range(30)]
    assert (ours.template is None) == (theirs.chat_template is None)
    for messages, tools, options in CHATS if theirs.chat_template is not None else ():
        def told(render: Any) -> tuple[str, Any]:
            try:
                return "", render()
            except Exception as cause:
                return str(cause), None
        why, text = told(lambda: ours.render_chat(messages, tools, options))  # noqa: B023
        their_why, their_text = told(lambda: theirs.apply_chat_template(  # noqa: B023
            messages, tools, add_generation_prompt=True, tokenize=False, **options))  # noqa: B023
        if LEAVE_OUT in why:
            assert not their_why and left_out(theirs, messages, tools, options, why)
            continue
        assert bool(why) == bool(their_why), (why, their_why)
        assert text == their_text
        assert text is None or ours.encode_many([text], special=False) == [
            theirs.apply_chat_template(messages, tools, add_generation_prompt=True, **options)[
                "input_ids"]]


def left_out(theirs: Any, messages: Any, tools: Any, options: Any, why: str) -> bool:
    """Whether transformers' own text is the same without what is named as left out."""
    text = theirs.apply_chat_template(messages, tools, tokenize=False, **options)
    messages = json.loads(json.dumps(messages))
    for place in why.removeprefix("chat template: ").partition(": the model's")[0].split(", "):
        if place == "tools":
            tools = None
        elif place.startswith("chat_template_kwargs."):
            options = {k: v for k, v in options.items() if k != place.partition(".")[2]}
        else:
            number, key = place.removeprefix("messages[").split("].", 1)
            assert key.partition("[")[0].partition(".")[0] in messages[int(number)], place
            messages[int(number)][key.partition("[")[0].partition(".")[0]] = "another"
    try:
        return theirs.apply_chat_template(messages, tools, tokenize=False, **options) == text
    except Exception:
        return False
