"""A job file written for somebody who has a model, a file of prompts and this machine. Its comments
say what each key does, so that the next job can be written without."""

import importlib.util
import math
import os
import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import yaml

from xgpt.app.model_check import ModelCheck, parameters_in_words
from xgpt.app.prompts_look import PromptsLook
from xgpt.core import catalog
from xgpt.core.cluster import Cluster
from xgpt.core.errors import wrong
from xgpt.core.model import ModelSpec
from xgpt.core.problem import output_room
from xgpt.core.system.machine import available_memory_bytes, detect, usable_cores
from xgpt.core.system.whole_file import write_atomically
from xgpt.core.units import format_bytes, format_seconds
from xgpt.job.job_file import load_job
from xgpt.report.table import paragraph
from xgpt.report.words import counted
from xrunner.checkpoint.source import model_at_hand

USUAL_FILE = Path("job.yaml")
QUICKSTART_MODEL = "smollm2-135m"
USUAL_MOST_TOKENS, LEAST_MOST_TOKENS = 256, 32
_CHARS_A_TOKEN = 3  # of English about 4; of other languages fewer
_PLAIN = re.compile(r"[\w./-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class NewJob:
    """What is asked of somebody who begins. `latency_s` infinite: no bound."""

    path: Path
    model: str
    check: ModelCheck
    look: PromptsLook
    max_tokens: int
    latency_s: float

    @property
    def name(self) -> str:
        """That of the job file or, where this is called as it is by default, of the prompts."""
        if self.path.stem != USUAL_FILE.stem:
            return self.path.stem
        return self.look.files.paths[0].name.partition(".")[0] or USUAL_FILE.stem


def model_here() -> str:
    """A model whose weights are on this machine, else the quickstart's, which is small."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return QUICKSTART_MODEL
    names = [QUICKSTART_MODEL, *catalog.names("model")]
    return next((name for name in names if model_at_hand(name) is not None), QUICKSTART_MODEL)


def usual_max_tokens(spec: ModelSpec, look: PromptsLook) -> int:
    """A cap on answers that leaves room for the longest prompt in the model's positions."""
    if spec.max_positions is None:
        return USUAL_MOST_TOKENS
    room = int(output_room(spec, math.ceil(look.most_chars / _CHARS_A_TOKEN)))
    if room < LEAST_MOST_TOKENS:  # that prompt may be refused: the others should not suffer
        room = spec.max_positions // 2
    return min(USUAL_MOST_TOKENS, room)


def refuse_existing(path: Path) -> None:
    """Raises InputError where there is something at the path."""
    if os.path.exists(path):
        raise wrong("command line", "JOB.yaml", str(path), "there is such a file: give another "
                    "name, or --force to write over it")


def write_new_job(job: NewJob) -> None:
    """Writes the file and reads it again, as every command does. Raises InputError where that
    fails, or the folder cannot be written to."""
    try:
        job.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(job.path, text_of(job))
    except OSError as cause:
        raise wrong("command line", "JOB.yaml", str(job.path),
                    f"a file that can be written: {cause.strerror}") from None
    load_job(job.path)


def text_of(job: NewJob) -> str:
    """The job file."""
    shown = _shown(job.path, Path.cwd())
    cluster = detect()
    parts = [
        _comment(f"A job for xgpt, written by `xgpt init` on {date.today().isoformat()}. Change "
                 "what you like; docs/job-file.md has every key."),
        f"#   xgpt schedule {shown}\n#     says what would run, and how fast; nothing is executed",
        f"#   xgpt submit {shown}\n#     measures, plans, answers all prompts, writes a report",
        "# One key can be changed for one call:  --set constraint.latency_s=10",
        f"name: {_scalar(job.name)}", "",
        _comment(_model_words(job.check)),
        f"model: {_scalar(_model(job))}", "",
        _comment(f"local: this machine, {_machine_words(cluster)}. A name of `xgpt models`, such "
                 "as a100-16, plans for machines that are not here."),
        "cluster: local", "",
        "workload:", *_workload(job), "",
        "constraint:",
        _comment(_bound_words(job.latency_s), "  "),
        f"  latency_s: {_seconds(job.latency_s)}", "",
        "run:",
        "  # 0: the likeliest word each time; 0.7 is livelier",
        "  temperature: 0", "",
        _comment("Where results go: results.jsonl (one answer a line, in the order of the "
                 "prompts), report.html, and what a stopped run needs to go on."),
        f"output: {_scalar('out/' + job.name)}"]
    return "\n".join(parts) + "\n"


def _workload(job: NewJob) -> list[str]:
    look = job.look
    file = _scalar(_shown(look.files.paths[0], job.path.parent))
    has_column = look.files.prompt not in (None, "prompt")
    requests = (f"{{file: {file}, prompt: {_scalar(look.files.prompt or '')}}}"
                if has_column else file)
    lines = [_comment(_prompts_words(look), "  "), f"  requests: {requests}",
             _comment("true: a prompt is put to the model as a chat message, where its files have "
                      "a template for that; false: the model goes on with the text as it is", "  "),
             "  chat: true"]
    cap = ("Most tokens of an answer (a token is about three quarters of an English word). One "
           "that is longer is cut off there; a high cap that is never reached costs memory, and "
           "so speed.")
    if look.capped:
        cap += f" {counted(look.capped, 'prompt')} name their own, up to {look.most_cap:,}."
    lines += [_comment(cap, "  "), f"  max_tokens: {job.max_tokens}",
              _comment("How long answers really are is learned while the job runs. If you know "
                       "it, say so, and the schedule is right from the start: {mean: 54, std: 37, "
                       "max: 160}", "  "),
              "  output_tokens: observe"]
    return lines


def _model_words(check: ModelCheck) -> str:
    spec = check.spec
    assert spec is not None, "a job is written for a model that is planned"
    text = f"{parameters_in_words(spec)}; {check.found}."
    if not check.is_executed:
        why = check.weights or "; ".join(why for _, why in check.engines)
        text += f" It can be planned for, but not run here: {why}"
    return text + " A catalog name (`xgpt models`), a folder, or a hub id owner/name."


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


def _bound_words(latency_s: float) -> str:
    general = ("How long one answer may take, from the moment its prompt is taken up. Of all "
               "schedules that keep this, the fastest for the whole job is chosen.")
    if math.isinf(latency_s):
        return general + " inf: it does not matter. Try 10, or '2 min'."
    return general + f" Here {format_seconds(latency_s)}; inf if it does not matter."


def _seconds(latency_s: float) -> str:
    return "inf" if math.isinf(latency_s) else f"{latency_s:g}"


def _model(job: NewJob) -> str:
    """A folder is named from the job file's own."""
    local = Path(job.model).expanduser()
    if not (local / "config.json").is_file():
        return job.model
    shown = _shown(local, job.path.parent)
    return shown if shown.startswith(("/", ".")) else f"./{shown}"


def _shown(path: Path, folder: Path) -> str:
    """The path from the folder, where it lies below it or beside it; else the whole."""
    whole, base = Path(os.path.abspath(path)), Path(os.path.abspath(folder))
    near = os.path.relpath(whole, base)
    return str(whole) if near.startswith(os.path.join("..", "..")) else near


def _comment(text: str, indent: str = "") -> str:
    lines = paragraph(text, 90 - len(indent)).splitlines()
    return "\n".join(f"{indent}# {line}" for line in lines)


def _scalar(text: str) -> str:
    """A text as YAML, quoted where it would be read as something else."""
    if _PLAIN.fullmatch(text) and yaml.safe_load(text) == text:
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{quoted}"'
