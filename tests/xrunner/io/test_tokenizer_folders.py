"""Folders of tokenizers, in the forms that models are published with and each key alone: texts,
chats and answers are as transformers has them, or are refused by name."""

import json
from typing import Any

import pytest
from chat_templates import (
    BRACKETS,
    CHATML,
    GENERATION,
    GRANITE,
    HEADERS,
    KINDS,
    MISTRAL,
    OLMO,
    PARTS,
    PHI3,
    PHI4,
    THINKING,
    TURNS,
)
from small_tokenizers import begun_with, older_files, trained, write_folder
from transformers import AutoTokenizer

from xrunner.files.tokenizer import TextTokenizer

FAST = "PreTrainedTokenizerFast"

IM = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THREE = ("<unk>", "<s>", "</s>")
EOT = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
       "<|eot_id|>")


def of(kind: str, specials: tuple[str, ...], model_type: str, class_name: str,
       template: str | None = None, *, begun: str = "", **settings: Any) -> dict[str, Any]:
    """The files of a folder."""
    text = trained(kind, specials)
    own = {"tokenizer_class": class_name, **settings}
    return {"tokenizer.json": begun_with(text, begun) if begun else text,
            "config.json": {"model_type": model_type}, "tokenizer_config.json": own,
            **({} if template is None else {"chat_template.jinja": template})}


def legacy(files: dict[str, Any]) -> dict[str, Any]:
    """The template where it stood until 2025."""
    files = dict(files)
    files["tokenizer_config.json"] = {**files["tokenizer_config.json"],
                                      "chat_template": files.pop("chat_template.jinja")}
    return files


def without(files: dict[str, Any], *names: str, **more: Any) -> dict[str, Any]:
    return {name: value for name, value in {**files, **more}.items() if name not in names}


def decoder(*tokens: str) -> dict[str, Any]:
    return {str(place): {"content": token, "lstrip": False, "normalized": False, "rstrip": False,
                         "single_word": False, "special": True}
            for place, token in enumerate(tokens)}


def families() -> dict[str, dict[str, Any]]:
    llama2 = legacy(of(
        "pieces", THREE, "llama", "LlamaTokenizer", BRACKETS, add_bos_token=True,
        add_eos_token=False, bos_token="<s>", eos_token="</s>", unk_token="<unk>", legacy=False,
        pad_token=None, clean_up_tokenization_spaces=False, model_max_length=4096,
        sp_model_kwargs={}, use_default_system_prompt=False, padding_side="right",
        added_tokens_decoder=decoder(*THREE)))
    llama3 = of("bytes", EOT, "llama", FAST, HEADERS, begun=EOT[0], bos_token=EOT[0],
                eos_token=EOT[4], clean_up_tokenization_spaces=True, model_max_length=131072,
                model_input_names=["input_ids", "attention_mask"],
                added_tokens_decoder=decoder(*EOT))
    qwen = {"add_bos_token": False, "add_prefix_space": False, "bos_token": None,
            "eos_token": IM[2], "pad_token": IM[0], "unk_token": None, "errors": "replace",
            "split_special_tokens": False, "additional_special_tokens": [*IM[1:]],
            "clean_up_tokenization_spaces": False, "added_tokens_decoder": decoder(*IM)}
    qwen3 = of("bytes", IM, "qwen3", "Qwen2Tokenizer", THINKING, **qwen)
    gemma = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
    gpt2 = trained("bytes", ("<|endoftext|>",))
    opt = trained("bytes", ("</s>", "<pad>", "<unk>"))
    bart = trained("bytes", ("<s>", "<pad>", "</s>", "<unk>", "<mask>"))
    mistral = of("pieces", (*THREE, "[INST]", "[/INST]"), "mistral", "LlamaTokenizer", MISTRAL,
                 begun="<s>", add_bos_token=True, add_eos_token=False, bos_token="<s>",
                 eos_token="</s>", unk_token="<unk>", legacy=False)
    t5 = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "extra_ids": 3,
          "additional_special_tokens": [f"<extra_id_{i}>" for i in range(3)]}
    t5_tokens = ("<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_1>", "<extra_id_2>")
    return {
        "Llama 2": llama2, "Llama 3": llama3, "Mistral 7B": mistral, "Qwen3": qwen3,
        "Llama 3.2, legacy": legacy(llama3),
        "Mistral v0.1": legacy({**mistral, "chat_template.jinja": BRACKETS}),
        "Mixtral": {**mistral, "config.json": {"model_type": "mixtral"}},
        "Qwen2.5": legacy({**qwen3, "config.json": {"model_type": "qwen2"}}),
        "Qwen2, older files": {**without(qwen3, "tokenizer.json"), **older_files(
            qwen3["tokenizer.json"]), "config.json": {"model_type": "qwen2"}},
        "Qwen3-MoE": {**qwen3, "config.json": {"model_type": "qwen3_moe"}},
        **{f"Gemma {number}": of(
            "pieces", gemma, f"gemma{number}", "GemmaTokenizer", template, begun="<bos>",
            add_bos_token=True, add_eos_token=False, bos_token="<bos>", eos_token="<eos>",
            pad_token="<pad>", unk_token="<unk>", spaces_between_special_tokens=False,
            additional_special_tokens=["<start_of_turn>", "<end_of_turn>"], **more)
            for number, template, more in (
                ("2", TURNS, {}), ("3_text", PARTS, {
                    "boi_token": "<start_of_image>", "extra_special_tokens": {
                        "boi_token": "<start_of_image>"}}))},
        "Phi-3": legacy(of(
            "pieces", (*THREE, "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"), "phi3",
            "LlamaTokenizer", PHI3, add_bos_token=False, add_eos_token=False, bos_token="<s>",
            eos_token="<|end|>", pad_token="</s>", unk_token="<unk>", legacy=False)),
        "Phi-4": of("bytes", ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>",
                              "<|end|>"), "phi3", "GPT2Tokenizer", PHI4, add_bos_token=False,
                    bos_token="<|endoftext|>", eos_token="<|endoftext|>",
                    pad_token="<|endoftext|>", unk_token="<|endoftext|>"),
        "SmolLM2": of("bytes", IM, "llama", "GPT2Tokenizer", CHATML, bos_token=IM[1],
                      eos_token=IM[2], pad_token=IM[2], unk_token=IM[0], add_prefix_space=False,
                      additional_special_tokens=[*IM[1:]], vocab_size=49152),
        "SmolLM3": of("bytes", IM, "smollm3", FAST, GENERATION, bos_token=None, eos_token=IM[2],
                      pad_token=IM[2], fast=False, model_input_names=["input_ids"]),
        "OLMo 2": of("bytes", ("<|endoftext|>", "<|pad|>"), "olmo2", "GPT2Tokenizer", OLMO,
                     bos_token="<|endoftext|>", eos_token="<|endoftext|>", pad_token="<|pad|>",
                     unk_token="<|endoftext|>"),
        "Granite": of("bytes", ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"),
                      "granite", "GPT2Tokenizer", GRANITE, bos_token="<|end_of_text|>",
                      eos_token="<|end_of_text|>", pad_token="<|end_of_text|>",
                      additional_special_tokens=["<|start_of_role|>", "<|end_of_role|>"]),
        "Falcon 3": of("bytes", ("<|endoftext|>", "<|pad|>"), "llama", FAST, OLMO.replace(
            "{{ bos_token }}", ""), eos_token="<|endoftext|>", pad_token="<|pad|>"),
        "OPT": {**older_files(opt), "config.json": {"model_type": "opt"},
                "special_tokens_map.json": {"bos_token": "</s>", "eos_token": "</s>",
                                            "unk_token": "</s>", "pad_token": "<pad>"},
                "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "errors": "replace",
                                          "add_bos_token": True, "bos_token": {
                                              "__type": "AddedToken", "content": "</s>",
                                              "lstrip": False, "normalized": True,
                                              "rstrip": False, "single_word": False}}},
        "GPT-2": {"tokenizer.json": gpt2, **older_files(gpt2), "config.json": {
            "model_type": "gpt2"}, "tokenizer_config.json": {"model_max_length": 1024}},
        "GPT-2, older files": {**older_files(gpt2), "config.json": {"model_type": "gpt2"}},
        "T5": of("unigram", t5_tokens, "t5", "T5Tokenizer", **t5),
        "mT5": of("unigram", t5_tokens, "mt5", "T5Tokenizer", **{**t5, "extra_ids": 0}),
        "BART": {**older_files(bart), "config.json": {"model_type": "bart"}, "tokenizer.json": bart,
                 "tokenizer_config.json": {"tokenizer_class": "BartTokenizer"}},
        "mBART": of("unigram", ("<s>", "<pad>", "</s>", "<unk>", "en_XX", "ro_RO"), "mbart",
                    "MBartTokenizer", src_lang="en_XX", tgt_lang="ro_RO",
                    additional_special_tokens=["en_XX", "ro_RO"]),
        "BERT's words": of("words", ("[PAD]", "[UNK]", "[CLS]", "[SEP]"), "bert", "BertTokenizer",
                           do_lower_case=True, clean_up_tokenization_spaces=True),
    }


def keys() -> dict[str, dict[str, Any]]:
    """Each key alone."""
    named = ("bos_token", "eos_token", "unk_token", "pad_token")
    say = ("|".join(f"{{{{ {name} }}}}" for name in named)
           + "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}")
    plain = of("bytes", ("<s>", "</s>", "<x>"), "llama", FAST, say)

    def but(**settings: Any) -> dict[str, Any]:
        return {**plain, "tokenizer_config.json": {**plain["tokenizer_config.json"], **settings}}

    return {
        "nothing": plain, "no tokenizer_config.json": without(plain, "tokenizer_config.json"),
        **{f"{name} null": but(**{name: None}) for name in named},
        **{f"{name} text": but(**{name: "<x>"}) for name in named},
        "bos_token object": but(bos_token={"content": "<x>", "__type": "AddedToken"}),
        "a token that is in no vocabulary": but(bos_token="<new>", eos_token="<newer>"),
        "special_tokens_map.json alone": {**plain, "special_tokens_map.json": {
            "bos_token": "<s>", "eos_token": {"content": "<tail>", "lstrip": True},
            "additional_special_tokens": ["<more>"]}},
        "added_tokens.json alone": {**plain, "added_tokens.json": {"<added>": 420}},
        "added_tokens_decoder alone": but(added_tokens_decoder={"420": {
            "content": "<added>", "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": True}}),
        "added_tokens_decoder, no special": but(added_tokens_decoder={"420": {
            "content": "<added>", "lstrip": False, "normalized": True, "rstrip": True,
            "single_word": False, "special": False}}),
        "additional_special_tokens": but(additional_special_tokens=["<more>", "<most>"]),
        "extra_special_tokens named": but(extra_special_tokens={"image_token": "<image>"}),
        "extra_special_tokens listed": but(extra_special_tokens=["<more>"]),
        "a token of its own name": but(image_token="<image>"),
        **{f"{name} {value}": but(bos_token="<s>", eos_token="</s>", **{name: value})
           for name in ("add_bos_token", "add_eos_token") for value in (True, False)},
        **{f"clean_up_tokenization_spaces {value}": but(clean_up_tokenization_spaces=value)
           for value in (True, False)},
        "clean up a byte-pair encoding": but(
            clean_up_tokenization_spaces=True,
            clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True),
        "split_special_tokens": but(split_special_tokens=True, additional_special_tokens=["<x>"]),
        "padding and truncation": {**plain, "tokenizer.json": padded(plain["tokenizer.json"])},
        "chat_template.json": {**without(plain, "chat_template.jinja"),
                               "chat_template.json": {"chat_template": CHATML}},
        "chat_template in both places": {**plain, **without(legacy(plain), "chat_template.jinja"),
                                         "chat_template.jinja": CHATML},
        "templates by name": legacy({**plain, "chat_template.jinja": [
            {"name": "default", "template": CHATML}, {"name": "tool_use", "template": THINKING}]}),
        "templates by name, none the default": legacy({**plain, "chat_template.jinja": [
            {"name": "rag", "template": CHATML}]}),
        "additional_chat_templates": {
            **plain, "additional_chat_templates/tool_use.jinja": THINKING},
        "no template": without(plain, "chat_template.jinja"),
        "an empty template": {**plain, "chat_template.jinja": ""},
        "what a template may do": {**plain, "chat_template.jinja": KINDS},
        "legacy true": of("pieces", THREE, "llama", "LlamaTokenizer", say, legacy=True,
                          bos_token="<s>", eos_token="</s>"),
        "add_prefix_space": but(add_prefix_space=True),
        "GPT-2's add_prefix_space": of("bytes", ("<|endoftext|>",), "gpt2", "GPT2Tokenizer",
                                       add_prefix_space=True),
        "Llama's class over bytes": of("bytes", EOT, "llama", "LlamaTokenizer", HEADERS,
                                       bos_token=EOT[0], eos_token=EOT[4]),
    }


def padded(text: str) -> str:
    own = json.loads(text)
    own["truncation"] = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst",
                         "stride": 0}
    own["padding"] = {"strategy": {"Fixed": 9}, "direction": "Left", "pad_to_multiple_of": None,
                      "pad_id": 0, "pad_type_id": 0, "pad_token": "<s>"}
    return json.dumps(own)


FOLDERS = families() | keys()
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


def test_there_are_sixty():
    assert len(FOLDERS) >= 60


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
