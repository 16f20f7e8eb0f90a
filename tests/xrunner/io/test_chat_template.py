"""Chat templates: their environment is that of transformers, and what they do not read is refused
by name."""

from datetime import datetime
from typing import Any

import pytest
from transformers.utils import chat_template_utils as theirs

from xrunner.files.tokenizer import ChatTemplate

USER = {"role": "user", "content": "x"}
CALLS = [{"id": "1", "type": "function", "function": {"name": "w", "arguments": {"city": "Bonn"}}},
         {"id": "2", "type": "function", "function": {"name": "v", "arguments": {}}}]
RESULTS = [{"role": "tool", "content": "rain", "tool_call_id": "1", "name": "w"},
           {"role": "tool", "content": "sun", "tool_call_id": "2"}]
PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
WITH_CALLS = PLAIN.replace("{% endfor", "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
                           "{% endfor %}{% endfor", 1)


def template(source: Any, **special: str) -> ChatTemplate:
    return ChatTemplate(source, special, datetime(2026, 5, 1, 12, 30))


def test_the_environment_is_that_of_transformers():
    ours, known = template("")._environment, theirs._compile_jinja_template("").environment
    for name in ("filters", "tests", "globals"):
        assert getattr(ours, name).keys() == getattr(known, name).keys()
    for name in ("trim_blocks", "lstrip_blocks", "keep_trailing_newline", "autoescape",
                 "undefined", "block_start_string", "line_statement_prefix", "newline_sequence"):
        assert getattr(ours, name) == getattr(known, name)
    assert sorted(tag for one in ours.extensions.values() for tag in one.tags) == sorted(
        tag for one in known.extensions.values() for tag in one.tags)
    assert type(ours).__mro__[0] is type(known).__mro__[0]


@pytest.mark.parametrize("source", [
    "{{ namespace(_a=1) }}", "{% set n = namespace(a=1) %}{% set n._b = 2 %}",
    "{% set n = namespace({'self': 1}, b=2) %}{{ n.self }}{{ n.b }}", "{{ dict(a=1).a }}",
    "{{ dict.__class__ }}", "{{ dict.fromkeys('ab') }}", "{{ raise_exception('no') }}",
    "{{ {'b': 'ä<', 'a': [1]} | tojson }}", "{{ {'b': 1, 'a': 2} | tojson(sort_keys=true) }}",
    "{{ [1] | tojson(true, 2) }}", "{{ 1 | tojson(default=3) }}", "{{ messages.append(1) }}",
    "{% for i in range(4) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}",
    "{% generation %}{% set x = 1 %}a{{ messages[0].content }}{% endgeneration %}{{ x }}",
    "{% generation %}", "{{ nothing }}{{ nothing.more }}", "{{ tools is none }}{{ documents }}"])
def test_what_a_template_does_is_what_it_does_in_transformers(source):
    def told(render: Any) -> str:
        try:
            return str(render())
        except Exception:
            return "refused"
    source = "{{ messages[0].content }}" + source
    assert told(lambda: template(source).render([USER])) == told(
        lambda: theirs.render_jinja_template([[USER]], chat_template=source)[0][0])


def test_a_template_is_told_the_moment_of_its_job():
    source = "{{ strftime_now('%d %B %Y %H:%M') }}" + PLAIN
    assert template(source).render([USER]).startswith("01 May 2026 12:30")


@pytest.mark.parametrize(("source", "messages", "left_out"), [
    (PLAIN, [USER, {"role": "assistant", "tool_calls": CALLS}], "messages[1].tool_calls"),
    (PLAIN, [{**USER, "name": "Bob"}], "messages[0].name"),
    (PLAIN, [{"role": "tool", "content": "rain", "tool_call_id": "7"}], "messages[0].tool_call_id"),
    (PLAIN, [{**USER, "reasoning_content": "hm"}], "messages[0].reasoning_content"),
    (PLAIN, [{**USER, "whatever": {"a": 1}}], "messages[0].whatever"),
    # named elsewhere in the template, in words or of another thing
    (PLAIN + "{# name #}{{ 'name' }}{{ dict(name=1).name }}", [{**USER, "name": "B"}],
     "messages[0].name"),
    # whose message is dropped
    ("{{ messages[-1].content }}", [USER, USER], "messages[0].content"),
    ("{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
     [{"role": "system", "content": "y"}, USER], "messages[0].content"),
    # it is only asked whether there are calls, or what they are called
    (PLAIN + "{{ messages[0].tool_calls | length }}", [{**USER, "tool_calls": CALLS[:1]}],
     "messages[0].tool_calls[0].function"),
    (PLAIN + "{{ messages[0].tool_calls[0].function.name }}",
     [{**USER, "tool_calls": CALLS[:1]}], "messages[0].tool_calls[0].function.arguments"),
    # results in another order than the calls need their ids
    (WITH_CALLS, [{"role": "assistant", "content": "", "tool_calls": CALLS}, *RESULTS[::-1]],
     "messages[1].tool_call_id")])
def test_what_a_template_does_not_read_is_refused_by_name(source, messages, left_out):
    with pytest.raises(ValueError, match="would leave it out") as caught:
        template(source).render(messages)
    assert str(caught.value).partition(":")[0].split(", ")[0] == left_out


@pytest.mark.parametrize(("source", "messages"), [
    (WITH_CALLS, [{"role": "assistant", "content": "", "tool_calls": CALLS}, *RESULTS]),
    ("{{ messages | tojson }}", [{**USER, "a": {"b": [{"c": 1}]}, "tool_calls": CALLS}]),
    ("{{ messages }}", [{**USER, "a": {"b": [{"c": 1}]}}]),
    ("{% for m in messages %}{% for k, v in m.items() %}{{ k }}{{ v }}{% endfor %}{% endfor %}",
     [{**USER, "name": "Bob", "weight": {"a": {"b": 2}}}]),
    ("{% for m in messages %}{{ dict(m, content='y') }}{% endfor %}", [{**USER, "name": "Bob"}]),
    # asks for nothing
    (PLAIN, [{**USER, "name": "", "tool_calls": [], "refusal": None, "prefix": False}]),
    # of a thought the template decides what becomes of it, whatever the key is called
    (PLAIN + "{% if messages[0].thinking and false %}{% endif %}", [{**USER, "reasoning": "hm"}])])
def test_what_a_template_reads_is_rendered(source, messages):
    given = [{k: v for k, v in message.items() if v is not None} for message in messages]
    assert template(source).render(messages) == theirs.render_jinja_template(
        [given], chat_template=source, add_generation_prompt=True)[0][0]


def test_options_and_tools_that_a_template_does_not_read_are_refused_by_name():
    thinking = template(PLAIN + "{{ enable_thinking }}{{ bos_token }}", bos_token="<s>")
    assert thinking.options == {"enable_thinking", "bos_token"}
    assert thinking.render([USER], options={"enable_thinking": False}).endswith("False<s>")
    for options in ({"enable_thinkin": 1}, {"messages": []}, {"strftime_now": 1}, {"tools": []},
                    {"add_generation_prompt": False}):
        with pytest.raises(ValueError, match=rf"^chat_template_kwargs.{next(iter(options))}: "):
            thinking.render([USER], options=options)
    with pytest.raises(ValueError, match=r"^tools: the model's chat template does not read"):
        thinking.render([USER], [{"name": "w"}])


def test_the_template_for_tools_is_taken_where_there_are_tools():
    two = template({"default": PLAIN, "tool_use": PLAIN + "{{ tools | length }}"})
    assert two.render([USER], [{"name": "w"}]) == two.render([USER]) + "1"
    with pytest.raises(ValueError, match="none is the default; there are rag"):
        template({"rag": PLAIN}).render([USER])
