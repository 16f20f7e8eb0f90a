"""Keys that a job adds to each of its requests: the prompt's template, a system message, and the
form that answers must have."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from xgpt.core.engines import supports
from xgpt.job.job import Job
from xgpt.job.sections import absolute
from xgpt.job.typed import Reading
from xgpt.requests.chat import form_text
from xgpt.requests.forms import why_wrong

CHOICES = 'a list of different texts, none empty; "true" and "1.5" in quotes'


def json_schema_of(value: Any, folder: Path) -> dict[str, Any]:
    """The JSON schema in the job file, or in the file that it names. Raises ValueError, naming the
    wrong part by its path in the schema."""
    where = ""
    if isinstance(value, str):
        path = absolute(value, folder)
        where = f"{path.name}: "
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as cause:
            raise ValueError(f"the file of a JSON schema, {path}: {cause}") from None
    if not isinstance(value, dict):
        raise ValueError
    if why := why_wrong("json", value):
        raise ValueError(where + why.removeprefix(".").removeprefix(": "))
    return value


def choices_of(value: Any) -> tuple[str, ...]:
    """The texts of a list; whole numbers are written out. Raises ValueError."""
    if not isinstance(value, list) or not all(type(one) in (str, int) for one in value):
        raise ValueError  # YAML reads true and 1.5 as something else
    texts = tuple(map(str, value))
    if not texts or not all(text.strip() and text.isprintable() for text in texts):
        raise ValueError
    if twice := [text for place, text in enumerate(texts) if text in texts[:place]]:
        raise ValueError(f"{CHOICES}; {twice[0]!r} is there twice")
    return texts


def form_of_answers(schema: Mapping[str, Any] | None, choices: Sequence[str]) -> str:
    """The form of answers as a request has it (xgpt.requests.chat); "" for none."""
    if schema is None and not choices:
        return ""
    return form_text("choice", [*choices]) if choices else form_text("json", schema)


def most_tokens_of(choices: Sequence[str]) -> int | None:
    """Most tokens that an answer can have, with its end; None without choices. A model may write a
    text byte by byte."""
    return max((len(text.encode()) for text in choices), default=0) + 1 if choices else None


def check_asked(job: Job, reading: Reading) -> None:
    """Records these keys where they contradict others."""
    work, engine = job.workload, job.run.engine
    files = work.requests
    why = ("left out where continuations are scored, or texts embedded" if work.only_encodes else
           "left out where requests are made of random tokens" if work.count is not None else "")
    for key in ("prompt", "system", "json_schema", "choices"):
        if why and reading.has(f"workload.{key}"):
            reading.reject(f"workload.{key}", why)
    if files is None:
        return
    if files.terms.template and (files.prompt or files.messages):
        reading.reject("workload.prompt", "left out beside workload.requests.prompt or .messages: "
                       "it names the columns itself")
    if files.terms.system and not work.chat:
        reading.reject("workload.system", "left out with chat: false, where no message is sent")
    if reading.has("workload.json_schema") and work.choices:
        reading.reject("workload.choices", "left out beside workload.json_schema: an answer has "
                       "one form")
    elif files.terms.form and not supports(engine, "form"):
        reading.reject("workload.choices" if work.choices else "workload.json_schema",
                       f"left out with run.engine {engine}, which holds no answer to a form")
