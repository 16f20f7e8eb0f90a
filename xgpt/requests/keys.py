"""Keys of a request, one row each, for lines of OpenAI's batch format and for our own.

A key that is set but not supported is refused by name, for an answer without it would look like one
with it; a neutral value (a penalty of 0) is fine. In an OpenAI body every key counts. Our own lines
may have other columns: there only the keys here count."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from xgpt.core.engines import OWN_ENGINE, supports
from xgpt.core.errors import shorten
from xgpt.core.lengths import MAX_LENGTH_TOKENS
from xgpt.requests.arrival_times import WORDS as ARRIVAL_WORDS
from xgpt.requests.arrival_times import arrival_of
from xgpt.requests.chat import BadRecord
from xgpt.requests.deadlines import WORDS, is_deadline

# Places of a key: OpenAI's endpoints; our own lines, that are answered or only read
CHAT, COMPLETION, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
OWN, READ = "our own lines", "our own lines of jobs that score or embed"
_OPENAI = frozenset({CHAT, COMPLETION, EMBEDDINGS})
_ANSWERED = frozenset({CHAT, COMPLETION, OWN})
_CHOSEN = _ANSWERED | {READ}  # the choice of tokens does not matter where none is written

MAX_INT = 2**31 - 1
MAX_STOPS, MAX_STOP_CHARS = 64, 1000


class Values(NamedTuple):
    """Values allowed for a key. `of_text`: converts a CSV cell; None: the cell is JSON."""

    words: str
    has: Callable[[Any], bool]
    of_text: Callable[[str], Any] | None = None


_ANY = Values("of its own form", lambda value: True)  # checked where it is used, if it is


class Key(NamedTuple):
    """A key of requests. `given`: places that support it. `needs`: feature that the engine must
    support for it (core.engines). `neutral`: values without effect, like null. `other`: (places,
    values allowed there, if they differ). `is_column`: in our own lines an ordinary column."""

    values: Values
    given: frozenset[str] = frozenset()
    needs: str = ""
    neutral: tuple[object, ...] = ()
    other: tuple[frozenset[str], Values] = (frozenset(), _ANY)
    is_column: bool = False


def _whole(least: int, most: int) -> Values:
    return Values(f"a whole number from {least} to {most}",
                  lambda value: type(value) is int and least <= value <= most, int)


def _number(least: float, most: float, *, is_above: bool = False) -> Values:
    words = f"above {least} and at most {most}" if is_above else f"from {least} to {most}"
    return Values(f"a number {words}", lambda value: type(value) in (int, float)
                  and least <= value <= most and not (is_above and value == least), float)


_FLAG = Values("true or false", lambda value: isinstance(value, bool))
_TEXT = Values("text", lambda value: isinstance(value, str), str)
_LIST = Values("a list", lambda value: isinstance(value, list))
_OBJECT = Values("an object", lambda value: isinstance(value, dict))
_STOPS = Values(f"a text of 1 to {MAX_STOP_CHARS} characters, or a list of at most {MAX_STOPS}",
                lambda value: len(texts := value if isinstance(value, list) else [value])
                <= MAX_STOPS and all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS
                                     for text in texts), str)
_DEADLINE = Values(WORDS, is_deadline, lambda cell: cell if ":" in cell else float(cell))
_ARRIVAL = Values(ARRIVAL_WORDS, lambda value: arrival_of(value) is not None, str)
_BIAS = Values("an object of token ids, and numbers from -100 to 100", lambda value: isinstance(
    value, dict) and all(token.isdecimal() and _number(-100, 100).has(bias)
                         for token, bias in value.items()))
CONTENTS = ("prompt", "messages", "tokens")  # in a table with several, the first is used
_ROWS = {
    "prompt": Key(_ANY, _CHOSEN - {CHAT}),
    "messages": Key(_ANY, _CHOSEN - {COMPLETION}),
    "tokens": Key(_ANY, _CHOSEN - {CHAT}),
    "input": Key(_ANY, frozenset({EMBEDDINGS}), is_column=True),
    "max_tokens max_completion_tokens": Key(_whole(1, MAX_INT), _CHOSEN),
    "forced_tokens": Key(_whole(1, MAX_LENGTH_TOKENS), _CHOSEN),
    "forecast_tokens": Key(_whole(1, MAX_LENGTH_TOKENS), frozenset({OWN})),
    "min_tokens": Key(_whole(0, MAX_INT), _CHOSEN, "min_tokens", neutral=(0,)),
    "deadline_s": Key(_DEADLINE, frozenset({OWN, READ})),
    "arrival_s": Key(_ARRIVAL, frozenset({OWN, READ})),
    "seed": Key(_whole(-2**63, 2**63 - 1), _CHOSEN),
    "temperature": Key(_number(0, MAX_INT), _CHOSEN, other=(_OPENAI, _number(0, 2))),
    "top_k": Key(_whole(-1, MAX_INT), _CHOSEN),  # 0 and -1: all tokens, whatever the job says
    "top_p": Key(_number(0, 1, is_above=True), _CHOSEN),
    "stop": Key(_STOPS, _CHOSEN),
    "n": Key(_whole(1, 128), frozenset({CHAT, COMPLETION}), neutral=(1,)),
    "samples": Key(_whole(1, 128), frozenset({OWN}), neutral=(1,)),
    "logprobs": Key(_whole(0, 20), _ANSWERED, "logprobs", (False,), (frozenset({CHAT}), _FLAG)),
    "top_logprobs": Key(_whole(0, 20), frozenset({CHAT}), "logprobs", (0,)),
    "tools": Key(_LIST, frozenset({CHAT}), neutral=([],)),
    "chat_template_kwargs": Key(_OBJECT, frozenset({CHAT, OWN, READ}), neutral=({},)),
    "repetition_penalty": Key(_number(0, 2, is_above=True), _CHOSEN, "penalty", (1,)),
    "min_p": Key(_number(0, 1), _ANSWERED, "passed", (0,)),
    "logit_bias": Key(_BIAS, _ANSWERED, "passed", ({},)),
    "response_format": Key(_OBJECT, _ANSWERED, "form", ({"type": "text"},)),
    "structured_outputs": Key(_ANY, _ANSWERED, "form"),
    # these concern the service, not the answer; the job's model is used
    "model user service_tier safety_identifier prompt_cache_key prompt_cache_retention": Key(
        _TEXT, _OPENAI, is_column=True),
    "metadata": Key(_OBJECT, _OPENAI, is_column=True),
    "store": Key(_FLAG, _OPENAI, is_column=True),
    # supported nowhere: keys of OpenAI, vLLM and transformers
    "frequency_penalty presence_penalty": Key(_number(-2, 2), neutral=(0,)),
    "encoding_format": Key(_TEXT, neutral=("float",), is_column=True),
    "dimensions audio prediction moderation prompt_cache_options": Key(_ANY, is_column=True),
    "tool_choice function_call": Key(_ANY, neutral=("none", "auto")),
    "suffix": Key(_TEXT, neutral=("",)),
    "modalities": Key(_LIST, neutral=(["text"],)),
    "verbosity": Key(_TEXT, neutral=("medium",)),
    "stream echo ignore_eos include_stop_str_in_output use_beam_search early_stopping "
    "continue_final_message return_token_ids return_tokens_as_token_ids": Key(
        _FLAG, neutral=(False,)),
    "parallel_tool_calls skip_special_tokens spaces_between_special_tokens detokenize "
    "add_generation_prompt": Key(_FLAG, neutral=(True,)),
    "functions stop_token_ids stop_sequences stop_strings bad_words bad_words_ids suppress_tokens "
    "begin_suppress_tokens logits_processors": Key(_LIST, neutral=([],)),
    "top_a xtc_probability dry_multiplier mirostat mirostat_mode min_length no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff diversity_penalty penalty_alpha": Key(
        _ANY, neutral=(0,)),
    "best_of length_penalty typical_p tfs tfs_z repeat_penalty num_beams num_beam_groups "
    "num_return_sequences guidance_scale": Key(_ANY, neutral=(1,)),
    "reasoning_effort stream_options web_search_options allowed_token_ids prompt_logprobs "
    "truncate_prompt_tokens structural_tag guided_json guided_choice guided_regex guided_grammar "
    "guided_whitespace_pattern guided_decoding_backend "
    "chat_template enable_thinking thinking_token_budget add_special_tokens do_sample max_length "
    "max_output_tokens sequence_bias forced_bos_token_id forced_eos_token_id generation_config "
    "sampling_params extra_body": Key(_ANY)}
KEYS: dict[str, Key] = {name: row for names, row in _ROWS.items() for name in names.split()}
_UNKNOWN = Key(_ANY, is_column=True)
# keys that count in our own lines besides their content; and those of them that are supported
OWN_KEYS = tuple(key for key, row in KEYS.items() if not row.is_column and key not in CONTENTS)
OPTIONS = tuple(key for key in OWN_KEYS if OWN in KEYS[key].given)


def asked_of(body: Mapping[str, Any], place: str, engine: str | None = None) -> dict[str, Any]:
    """The supported keys that a request sets at a place, with their values, without null and
    neutral ones. `engine` None: our own. Raises BadRecord for a wrong value, or naming all keys
    that are set but not supported."""
    asked, missing = dict[str, Any](), list[str]()
    for key, value in body.items():
        row = KEYS.get(key, _UNKNOWN)
        if value is None or (row.is_column and place not in _OPENAI):
            continue
        values = row.other[1] if place in row.other[0] else row.values
        is_one = values.has(value)
        if is_one and place in row.given and (not row.needs or supports(engine, row.needs)):
            asked[key] = float(value) if values.of_text is float else value
        elif not any(value == one and isinstance(value, bool) == isinstance(one, bool)
                     for one in row.neutral):  # 1 and true are equal to Python
            if not is_one:
                raise BadRecord(f"{key} must be {values.words}")
            missing.append(key)
    if missing:
        names = ", ".join(key if key.isidentifier() and len(key) < 60 else shorten(key)
                          for key in sorted(missing)[:20])
        by = f" with the engine {engine or OWN_ENGINE}" if all(
            key in KEYS and place in KEYS[key].given for key in missing) else ""
        column = "" if place in _OPENAI else (
            "; of a column like any other say `options: false` beside the file")
        raise BadRecord(f"{names}: not supported{by}, and an answer without would look like one "
                        f"with; leave it out to have the line answered{column}")
    return asked
