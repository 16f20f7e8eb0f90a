"""Keys that a job adds to each request: a prompt of columns, a system message, an answer's form."""

import json
from typing import Any

import pytest

from xgpt.core.errors import InputError
from xgpt.job.answer_forms import form_of_answers
from xgpt.requests import spool_columns
from xgpt.requests.chat import BadRecord
from xgpt.requests.reader import read_requests
from xgpt.requests.request import Request, RequestError, Terms, read_record
from xgpt.requests.request_files import RequestFiles

TEMPLATE = "{{Q}} {title}: {text}"


@pytest.mark.parametrize(("name", "content"), [
    ("t.csv", "id,title,text,stars\n1,A,{text},5\n2,,b,6\n3,,,7\n"),
    ("t.jsonl", '{"id": "1", "title": "A", "text": "{text}", "stars": 5}\n'
     '{"id": "2", "title": null, "text": "b", "prompt": "c"}\n'
     '{"id": "3", "title": "", "text": " "}'),
    ("t.parquet", {"id": ["1", "2", "3"], "title": ["A", None, None],
                   "text": ["{text}", "b", ""]})])
def test_a_template_is_filled_with_columns_which_are_kept(tmp_path, name, content):
    path = tmp_path / name
    if isinstance(content, dict):
        pa = pytest.importorskip("pyarrow", reason="Parquet needs the extra `parquet`")
        pytest.importorskip("pyarrow.parquet").write_table(pa.table(content), path)
    else:
        path.write_text(content)
    columns = spool_columns.ColumnsWriter()
    files = RequestFiles(paths=(path,), terms=Terms(template=TEMPLATE))
    first, second, third = read_requests(files, columns=columns)
    assert isinstance(first, Request) and first.prompt == "{Q} A: {text}", "put in once"
    assert isinstance(second, Request) and (second.id, second.prompt) == ("2", "{Q} : b")
    assert isinstance(third, RequestError) and third.error.endswith("are empty: title, text")
    (tmp_path / "spool").mkdir()
    columns.save(tmp_path / "spool")
    kept = spool_columns.Columns(tmp_path).segments[0].names()
    assert {"title", "text"} <= {*kept} and "id" not in kept


def test_a_template_without_its_column_is_refused_by_those_that_are_there(tmp_path):
    def read_by(name: str, content: str) -> Any:
        (tmp_path / name).write_text(content)
        return next(read_requests(RequestFiles(
            paths=(tmp_path / name,), terms=Terms(template="a {texd}"))))

    with pytest.raises(InputError, match=r"\{texd\}.*did you mean 'text'\? columns there: id"):
        read_by("t.csv", "id,text\n1,x\n")
    for name, content in (("t.jsonl", '{"id": 1, "text": "x"}\n'), ("t.txt", "x\n"),
                          ("t.json", '["x"]')):
        found = read_by(name, content)
        assert isinstance(found, RequestError) and "no column 'texd'" in found.error
    openai = {"custom_id": "o", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
    assert "OpenAI's format" in read_by("o.jsonl", json.dumps(openai)).error


def test_a_system_message_goes_before_prompts_and_messages_that_bring_none():
    def asked(**content: Any) -> Any:
        return read_record(content, 1, "a", terms=Terms(system="Be brief.")).messages

    user = {"role": "user", "content": "Hi"}
    own = {"role": "system", "content": "Own."}
    assert asked(prompt="Hi") == asked(messages=[user]) == (
        {"role": "system", "content": "Be brief."}, user)
    assert asked(messages=[own, user]) == (own, user)
    with pytest.raises(BadRecord, match=r"workload\.system goes before a chat; this tokens"):
        asked(tokens=[1])


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_the_form_of_a_job_is_passed_on_unless_a_line_has_its_own(engine):
    """As vLLM's `structured_outputs` has it, by either engine; a penalty stays beside it."""
    terms = Terms(engine=engine, form=form_of_answers(None, ["a", "b"]))

    def passed(**keys: Any) -> Any:
        return json.loads(read_record({"prompt": "x", **keys}, 1, "a", terms=terms).passed)

    assert passed() == passed(response_format={"type": "text"}) == {
        "structured_outputs": {"choice": ["a", "b"]}}
    assert passed(response_format={"type": "json_object"}) == {
        "structured_outputs": {"json_object": True}}
    if engine == "vllm":
        assert passed(min_p=0.5) == {"min_p": 0.5, "structured_outputs": {"choice": ["a", "b"]}}
    with pytest.raises(BadRecord, match="min_tokens goes with no form"):
        passed(min_tokens=2)
