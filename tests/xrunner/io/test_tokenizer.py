"""Chat templates: their environment is that of transformers, they are compiled once, and what they
do not read, or refuse, is said in words; copies of tokenizers are of the files and of the
version."""

import io
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_tokenizers import plain_folder
from transformers.utils import chat_template_utils as theirs

from xgpt.core.errors import XgptError
from xrunner.files.tokenizer import ChatTemplate, TextTokenizer

TEMPLATE = """{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{
raise_exception('no tools') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}{%
if add_generation_prompt %}<assistant>{% endif %}"""


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = plain_folder(tmp_path / "model", bos_token="<s>")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def test_what_a_template_refuses_is_said(directory):
    with pytest.raises(ValueError, match="no tools"):
        TextTokenizer(directory).render_chat([{"role": "tool", "content": "x"}])
    for wrong in ("{% if %}", "{{ messages.none.none }}", "{{ messages + 1 }}", "{{ 1 / 0 }}"):
        (directory / "chat_template.jinja").write_text(wrong)
        with pytest.raises(ValueError, match="chat template: "):
            TextTokenizer(directory).render_chat([{"role": "user", "content": "x"}])
    (directory / "chat_template.jinja").unlink()
    with pytest.raises(XgptError, match="has no chat template"):
        TextTokenizer(directory).render_chat([])


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}",
    "{{ raise_exception.__globals__.keys() }}", "{{ cycler.__init__.__globals__.os.popen('id') }}"])
def test_a_template_does_not_reach_pythons_objects(directory, template):
    (directory / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(ValueError, match=r"chat template: .*(unsafe|is undefined)"):
        print(TextTokenizer(directory).render_chat(messages))
    assert messages == [{"role": "user", "content": "x"}]


def test_a_template_that_is_no_text_is_refused_by_its_file(directory):
    (directory / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(XgptError, match=r"chat_template.jinja: .*can't decode"):
        TextTokenizer(directory)


def test_code_in_a_models_folder_is_never_run(tmp_path, monkeypatch):
    """transformers asks on the terminal whether to run it: a piped `y` did."""
    (tmp_path / "vocab.txt").write_text("[UNK]\n[PAD]\nword\n")
    (tmp_path / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.EvilConfig"}}')
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "EvilTokenizer", "auto_map": '
        '{"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}}')
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    with pytest.raises(XgptError, match="trust_remote_code"):
        TextTokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


READ = ("import sys, pathlib; from xrunner.files.tokenizer import TextTokenizer as T; "
        "t = T(pathlib.Path(sys.argv[1])); print(t.encode_many(['a dog'], special=True), "
        "t.render_chat([{'role': 'user', 'content': 'x'}]), 'transformers' in sys.modules)")


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return plain_folder(tmp_path / "model", bos_token="<s>",
                        chat_template="{{ bos_token }}{{ messages[0].content }}")


def copies(model: Path) -> list[str]:
    return sorted(path.name for path in (model.parent / "cache/xgpt/tokenizers").iterdir())


def test_two_that_make_the_same_copy_at_once_do_not_hurt_each_other(model):
    words = [sys.executable, "-c", READ, str(model)]
    both = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    told = {process.communicate(timeout=120)[0] for process in both}
    assert len(told) == 1 and len(copies(model)) == 1
    warm = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert warm == told.pop().replace("True", "False"), "it is read without transformers"


def test_a_copy_is_of_the_files_and_of_the_version(model, monkeypatch):
    TextTokenizer(model)
    first = copies(model)
    (model / "model.safetensors").write_bytes(b"weights")
    moved = model.rename(model.with_name("moved"))
    TextTokenizer(moved)
    assert copies(moved) == first, "neither its weights nor its place count"
    (moved / "special_tokens_map.json").write_text('{"bos_token": "</s>"}')
    assert TextTokenizer(moved).render_chat([{"role": "user", "content": "x"}]) == "</s>x"
    monkeypatch.setattr("importlib.metadata.version", lambda name: "9.9")
    TextTokenizer(moved)
    assert len(copies(moved)) == 3


def test_a_folder_without_a_vocabulary_has_no_tokenizer(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("x")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    for folder in (tmp_path, tmp_path / "not there"):
        assert not TextTokenizer(folder).is_there and TextTokenizer(folder).template is None


PLAIN = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
WITH_CALLS = PLAIN.replace("{% endfor", "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}"
                           "{% endfor %}{% endfor", 1)


TOLD = yaml.safe_load(Path(__file__).with_name("chat_templates.yaml").read_text("utf-8"))
USER = TOLD["user"]


def written(source: str) -> str:
    return source.replace("WITH_CALLS", WITH_CALLS).replace("PLAIN", PLAIN)


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


@pytest.mark.parametrize("source", TOLD["as_in_transformers"])
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


@pytest.mark.parametrize(("source", "messages", "left_out"), TOLD["left_out"])
def test_what_a_template_does_not_read_is_refused_by_name(source, messages, left_out):
    with pytest.raises(ValueError, match="would leave it out") as caught:
        template(written(source)).render(messages)
    assert str(caught.value).partition(":")[0].split(", ")[0] == left_out


@pytest.mark.parametrize(("source", "messages"), TOLD["read"])
def test_what_a_template_reads_is_rendered(source, messages):
    given = [{k: v for k, v in message.items() if v is not None} for message in messages]
    source = written(source)
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
