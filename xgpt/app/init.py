"""Writes a job file, with comments that explain its keys, for a model, a file of prompts and this
machine."""

import csv
import importlib.util
import io
import itertools
import json
import math
import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from xgpt.app.models import ModelCheck, parameters_in_words
from xgpt.app.opened_job import open_job
from xgpt.app.teller import LogTeller
from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.errors import InputError, XgptError, wrong
from xgpt.core.model import ModelSpec
from xgpt.core.problem import output_room
from xgpt.core.system.machine import available_memory_bytes, detect, usable_cores
from xgpt.core.system.whole_file import write_atomically
from xgpt.core.units import format_bytes
from xgpt.job.job_file import load_job
from xgpt.report.table import paragraph
from xgpt.report.words import counted
from xgpt.requests.formats import USUAL, arrow, delimiter_of
from xgpt.requests.keys import CONTENTS
from xgpt.requests.reader import read_requests
from xgpt.requests.request import Request, RequestError, Terms
from xgpt.requests.request_files import SUFFIXES, TABLES, RequestFiles, opened
from xrunner.checkpoint.source import model_at_hand
from xscheduler.prefix_curve import SavedShare, saved_shares

MOST_READ = 50_000  # entries: enough for their lengths
_MOST_SAMPLED = 50  # rows, to describe a column
# Column names under which data sets keep prompts, the likeliest first.
_LIKELY = ("question", "instruction", "query", "text", "input", "content", "sentence", "article",
           "document", "review", "body")
USUAL_FILE = Path("job.yaml")
QUICKSTART_MODEL = "smollm2-135m"
USUAL_MOST_TOKENS, LEAST_MOST_TOKENS = 256, 32
_CHARS_A_TOKEN = 3  # of English about 4; of other languages fewer
_PLAIN = re.compile(r"[\w./-]+")
_TEMPLATE = """\
# A job for xgpt, written by `xgpt init` on {date}. docs/job-file.md lists every key.

#   xgpt schedule {job}    plans it, and says how long it takes
#   xgpt submit {job}      plans it, answers all prompts, and writes a report

# `--set constraint.latency_s=10` changes one key for one call.
name: {name}

# A name of `xgpt models`, a folder, or a hub id such as owner/name.
{about_model}
model: {model}

# `local` is this machine. A name of `xgpt models`, such as a100-16, plans for other machines.
{about_machine}
cluster: local

workload:
{about_prompts}
  requests: {requests}
{added}  # true sends each prompt as a chat message, if the model has a chat template.
  # false lets the model continue the text.
  chat: true
  # Most tokens of an answer. A token is about three quarters of an English word.
  # Longer answers are cut off. A cap that is too high costs memory, and so speed.
  {max_tokens}
  # `observe` learns the lengths of answers while the job runs. If you know them, write
  # {{mean: 54, std: 37, max: 160}}. The plan is then right from the start.
  output_tokens: observe

constraint:
  # Most time for one answer, such as 10 or '2 min', from the start of its prefill.
  # `inf` sets no limit. xgpt chooses the fastest schedule for the job within it.
  latency_s: {latency}

run:
  # 0 takes the likeliest token each time. Higher values draw tokens.
  temperature: 0

# The folder of results.jsonl (one answer a line, in the order of the prompts), of the
# report, and of what a stopped run needs to go on.
output: {output}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptColumn:
    """One column of a table, or key of JSON objects. `mean_chars`: of its texts; 0 without texts.
    `sample`: its first entry."""

    name: str
    mean_chars: float
    sample: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsLook:
    """Counts and lengths of the first MOST_READ entries of a file of prompts. Lengths are
    characters of the texts; 0 for prompts of tokens."""

    files: RequestFiles
    count: int
    is_all: bool
    mean_chars: float
    most_chars: int
    capped: int  # prompts with their own max_tokens, or a forced length
    most_cap: int
    errors: tuple[RequestError, ...]


def columns_of(path: Path) -> list[PromptColumn]:
    """The columns of a table, or the keys of a JSON file's objects; empty for a file of lines of
    text. Raises InputError for a file that cannot be read."""
    files = RequestFiles(paths=(path,))
    with opened(path, files, lambda raw: None) as (stream, known):
        if known == "text":
            return []
        rows = list(itertools.islice(_records(stream, known, path), _MOST_SAMPLED))
    names = dict.fromkeys(name for row in rows for name in row)
    return [_column(name, [row.get(name) for row in rows]) for name in names]


def needs_column(path: Path, columns: list[PromptColumn]) -> bool:
    """Whether the column of the prompts must be given, since none has a usual name."""
    names = {column.name for column in columns}
    return bool(columns) and not names & {*CONTENTS, "body"}


def likeliest(columns: list[PromptColumn]) -> PromptColumn | None:
    """The column most likely to have the prompts: by its name, else with the longest texts."""
    texts = [column for column in columns if column.mean_chars > 0]
    named = {column.name.lower(): column for column in texts}
    for name in _LIKELY:
        if name in named:
            return named[name]
    return max(texts, key=lambda column: column.mean_chars, default=None)


def look_at(path: Path, column: str | None, template: str = "") -> PromptsLook:
    """Reads the entries, with the prompts in `column` (None: the column `prompt`), or made by a
    `template` of columns. Raises InputError for a file that cannot be read, or has no such column.
    """
    files = RequestFiles(paths=(path,), prompt=column, terms=Terms(template=template))
    source = read_requests(files)
    entries = list(itertools.islice(source, MOST_READ + 1))
    is_all, entries = len(entries) <= MOST_READ, entries[:MOST_READ]
    requests = [entry for entry in entries if isinstance(entry, Request)]
    chars = [_chars(request) for request in requests]
    caps = [cap for request in requests if (cap := request.output_cap(0))]
    return PromptsLook(
        files=files, count=len(requests), is_all=is_all,
        mean_chars=sum(chars) / len(chars) if chars else 0.0, most_chars=max(chars, default=0),
        capped=len(caps), most_cap=max(caps, default=0),
        errors=tuple(entry for entry in entries if isinstance(entry, RequestError)))


def delimiters_of(path: Path) -> dict[Path, str]:
    """The delimiter of the file's cells, by path, if it is another than its suffix says."""
    found = dict[Path, str]()
    with suppress(InputError):  # of a header without prompts: their column is asked for next
        next(read_requests(RequestFiles(paths=(path,)), divided=found.__setitem__), None)
    return found


def files_here(folder: Path) -> list[Path]:
    """Paths of the folder's files whose names could be those of prompts, sorted."""
    ends = tuple(end + tail for ends in SUFFIXES.values() for end in ends for tail in ("", ".gz"))
    return sorted(path for path in folder.iterdir()
                  if path.is_file() and path.name.lower().endswith(ends)
                  and path.name not in ("requirements.txt", "constraints.txt", "package.json"))


def _records(stream: Any, known: str, path: Path) -> Iterator[dict[str, Any]]:
    """Yields the first rows of a table, or objects of a JSON file."""
    if known == "parquet":
        table = arrow(f"reading {path.name}").pq.ParquetFile(stream)
        batch = next(table.iter_batches(_MOST_SAMPLED), None)
        if batch is None or not batch.num_rows:
            yield dict.fromkeys(table.schema_arrow.names)
        else:
            yield from batch.to_pylist()
    elif known in TABLES:
        delimiter = delimiter_of(stream, USUAL[known])
        text = io.TextIOWrapper(stream, "utf-8-sig", "replace", newline="")
        reader = csv.DictReader(text, delimiter=delimiter)
        rows = list(itertools.islice(reader, _MOST_SAMPLED))
        yield from ({str(k).strip(): v for k, v in row.items() if k is not None} for row in rows)
        if not rows:
            yield dict.fromkeys(reader.fieldnames or ())
        text.detach()
    elif known == "json":
        value = _parsed(stream.read())
        yield from (item for item in value or () if isinstance(item, dict))
    else:
        for line in itertools.islice(stream, _MOST_SAMPLED):
            if isinstance(item := _parsed(line), dict):
                yield item


def _parsed(text: bytes) -> Any:
    """The value of a JSON text; None for other texts, which are refused later."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _column(name: str, values: list[Any]) -> PromptColumn:
    texts = [value for value in values if isinstance(value, str) and value.strip()]
    numbers = [text for text in texts if _is_number(text)]
    is_text = len(texts) > 2 * len(numbers)
    return PromptColumn(
        name=name, mean_chars=sum(map(len, texts)) / len(texts) if texts and is_text else 0.0,
        sample=" ".join(str(next((v for v in values if v not in (None, "")), "")).split()))


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _chars(request: Request) -> int:
    if request.messages is not None:
        return sum(len(message.get("content", "")) for message in request.messages)
    return len(request.prompt or "")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """Values of a new job file. `latency_s`: seconds, infinite for no limit. `max_tokens`: None for
    the tokens of the longest choice."""

    path: Path
    model: str
    check: ModelCheck
    look: PromptsLook
    max_tokens: int | None
    latency_s: float
    added: Mapping[str, Any] = field(default_factory=dict)  # keys of `workload` for every row

    @property
    def name(self) -> str:
        """The job's name: that of its file or, if the file has the default name, of the prompts."""
        if self.path.stem != USUAL_FILE.stem:
            return self.path.stem
        return self.look.files.paths[0].name.partition(".")[0] or USUAL_FILE.stem


def model_here() -> str:
    """Name of a model whose weights are on this machine, else the small one of the quickstart."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return QUICKSTART_MODEL
    names = [QUICKSTART_MODEL, *catalog.names("model")]
    return next((name for name in names if model_at_hand(name) is not None), QUICKSTART_MODEL)


def usual_max_tokens(spec: ModelSpec, look: PromptsLook) -> int:
    """The default max_tokens: at most 256, with room for the longest prompt in the model's
    positions."""
    if spec.max_positions is None:
        return USUAL_MOST_TOKENS
    room = int(output_room(spec, math.ceil(look.most_chars / _CHARS_A_TOKEN)))
    if room < LEAST_MOST_TOKENS:  # rather refuse that prompt than shorten all answers
        room = spec.max_positions // 2
    return min(USUAL_MOST_TOKENS, room)


def refuse_existing(path: Path) -> None:
    """Raises InputError where there is something at the path."""
    if os.path.exists(path):
        raise wrong("command line", "JOB.yaml", str(path), "there is such a file: give another "
                    "name, or --force to write over it")


def write_new_job(job: NewJob) -> None:
    """Writes the job file, and loads it as a check. Raises InputError where that fails, or the
    folder cannot be written to."""
    try:
        job.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(job.path, text_of(job))
    except OSError as cause:
        raise wrong("command line", "JOB.yaml", str(job.path),
                    f"a file that can be written: {cause.strerror}") from None
    load_job(job.path)


def shared_in(path: Path) -> Sequence[SavedShare]:
    """Shares of a job's input tokens that its prefixes save; () if prompts share none, or are texts
    whose model is not on this machine."""
    job = load_job(path)
    with suppress(XgptError):
        if catalog.model_named(job.model) is not None or model_at_hand(job.model) is not None:
            return saved_shares(open_job(job, LogTeller(), "lengths").problem)
    return ()


def text_of(job: NewJob) -> str:
    """The text of the job file."""
    look, spec = job.look, job.check.spec
    assert spec is not None, "a job is written for a model that is planned"
    file, column = _scalar(_shown(look.files.paths[0], job.path.parent)), look.files.prompt
    own = (f"\n{counted(look.capped, 'prompt')} name their own, up to {look.most_cap:,}."
           if look.capped else "")
    why = job.check.weights or "; ".join(why for _, why in job.check.engines)
    return _TEMPLATE.format(
        date=date.today().isoformat(), job=_shown(job.path, Path.cwd()), name=_scalar(job.name),
        about_model=_comment(f"{parameters_in_words(spec)}; {job.check.found}" + (
            "" if job.check.is_executed else
            f". It can be planned for, but not run here: {why}")),
        model=_scalar(_model(job)), about_machine=_comment(f"local: {_machine_words(detect())}"),
        about_prompts=_comment(_prompts_words(look) + own, "  "),
        requests=file if column in (None, "prompt") else
        f"{{file: {file}, prompt: {_scalar(column)}}}",
        max_tokens="# max_tokens: as much as the longest choice takes"
        if job.max_tokens is None else f"max_tokens: {job.max_tokens}",
        added=_added(job),
        latency="inf" if math.isinf(job.latency_s) else f"{job.latency_s:g}",
        output=_scalar(f"out/{job.name}"))


def _added(job: NewJob) -> str:
    """The lines of the keys that are asked for besides."""
    keys = {key: _shown(value, job.path.parent) if isinstance(value, Path) else value
            for key, value in job.added.items()}
    lines = yaml.safe_dump(keys, sort_keys=False, allow_unicode=True, width=90) if keys else ""
    about = "# The prompt and the answer of each row: docs/labels.md explains the keys.\n"
    return textwrap.indent(about + lines, "  ") if keys else ""


def _machine_words(cluster: Cluster) -> str:
    if cluster.device.kind == "gpu":
        return f"{counted(cluster.num_devices, 'GPU')}, {cluster.device.name}"
    return (f"{counted(usable_cores(), 'core')}, {format_bytes(available_memory_bytes())} of free "
            "memory, no GPU")


def _prompts_words(look: PromptsLook) -> str:
    count = counted(look.count, "prompt") if look.is_all else f"more than {look.count:,} prompts"
    text = count
    if look.most_chars:
        text += f", {look.mean_chars:,.0f} characters on average, the longest {look.most_chars:,}"
    if look.errors:
        text += f"; {counted(len(look.errors), 'entry')} cannot be used (see errors.jsonl)"
    return text + "."


def _model(job: NewJob) -> str:
    """The key `model`; a folder as a path from the job file's folder."""
    local = Path(job.model).expanduser()
    if not (local / "config.json").is_file():
        return job.model
    shown = _shown(local, job.path.parent)
    return shown if shown.startswith(("/", ".")) else f"./{shown}"


def _shown(path: Path, folder: Path) -> str:
    """The path relative to `folder` if it lies below or beside it; else absolute."""
    whole, base = Path(os.path.abspath(path)), Path(os.path.abspath(folder))
    near = os.path.relpath(whole, base)
    return str(whole) if near.startswith(os.path.join("..", "..")) else near


def _comment(text: str, indent: str = "") -> str:
    lines = paragraph(text, 90 - len(indent)).splitlines()
    return "\n".join(f"{indent}# {line}" for line in lines)


def _scalar(text: str) -> str:
    """A text in YAML, quoted where YAML would read it as another value."""
    if _PLAIN.fullmatch(text) and yaml.safe_load(text) == text:
        return text
    return json.dumps(text, ensure_ascii=False)
