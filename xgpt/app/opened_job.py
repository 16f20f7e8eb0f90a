"""Opens a job: resolves its problem for the planner, reads its requests, and finds its model's
files as far as a command needs them. No other module opens the file of requests."""

import importlib.util
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from xgpt.app.teller import LogTeller, Teller
from xgpt.core import catalog
from xgpt.core.engines import OWN_ENGINE, VLLM
from xgpt.core.errors import InputError, MissingExtraError, XgptError, wrong
from xgpt.core.hf.values import gguf_in
from xgpt.core.model import ModelSpec
from xgpt.core.prefixes import Prefixes
from xgpt.core.problem import Problem
from xgpt.core.schedule import Schedule
from xgpt.core.units import format_bytes
from xgpt.job.answer_forms import most_tokens_of
from xgpt.job.job import LOCAL_CLUSTER, Job
from xgpt.job.job_file import load_job
from xgpt.job.resolve import known_model, resolve
from xgpt.job.schedule_section import OFF
from xgpt.launch.standby import Standby
from xgpt.report.table import WIDTH, paragraph
from xgpt.report.words import counted
from xgpt.requests.prefixes import is_worth_sharing
from xgpt.requests.request import Request, RequestError, Requests
from xgpt.requests.request_files import RequestFiles
from xgpt.requests.spool import SpoolWriter, saved_header
from xgpt.requests.spool_columns import ColumnsWriter
from xgpt.run_folder.files import standard_input, start_of
from xgpt.run_folder.state import State, state_left
from xrunner.checkpoint.source import SERVED_BY, ModelFiles, find_model, model_at_hand
from xrunner.files.forecasts import given_forecast
from xrunner.files.forms import Forms
from xrunner.files.runnable import (
    SPREAD,
    CharacterTokens,
    errors_of,
    runnable,
)
from xrunner.files.spooled_requests import ModelTokeniser, Tokenised, read_and_tokenise
from xrunner.files.tokenizer import TextTokenizer
from xrunner.plan import RunPlan
from xscheduler.ordering import in_chosen_order
from xsimulator.memory import least_weight_bytes

# What a command needs of the model: its shape; the lengths of the requests too, as far as files of
# this machine give them; or its files, downloaded if missing, to run it.
Need = Literal["shape", "lengths", "run"]
_MOST_TOLD = 3  # lines that cannot run and are shown


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedJob:
    """A job and its planning problem. `files`: None unless the model's files were needed.
    `requests`: None where the job only has a count. `spool`: the requests of a run, on disk.
    `tell`: takes messages. `standby`: processes that can become its ranks. `asked`: of a run, the
    identity of its job (xgpt.app.running.finished). `started`: when its first command began, in
    local time."""

    job: Job
    problem: Problem
    files: ModelFiles | None
    requests: Requests | None
    spool: SpoolWriter | None
    tell: Teller = field(default_factory=LogTeller, compare=False)
    standby: Standby | None = field(default=None, compare=False)
    asked: Mapping[str, Any] | None = field(default=None, compare=False)
    started: datetime = field(default_factory=datetime.now, compare=False)

    @property
    def is_local(self) -> bool:
        """Whether the job's cluster is this machine."""
        return self.job.cluster == LOCAL_CLUSTER


def in_order_of(opened: OpenedJob, schedule: Schedule) -> OpenedJob:
    """The job in the order of a schedule, which predictions of its run follow."""
    return replace(opened, problem=in_chosen_order(opened.problem, schedule))


def open_file(path: Path, overrides: Sequence[str] = (), tell: Teller | None = None,
              need: Need = "shape") -> OpenedJob:
    """Loads a job file with its `--set` overrides and opens it. Raises InputError."""
    return open_job(load_job(path, overrides), tell or LogTeller(), need)


def open_job(job: Job, tell: Teller, need: Need) -> OpenedJob:
    """Opens a job: reads its requests and finds the model as far as `need` says. Raises InputError,
    XgptError where the model cannot be had."""
    began = datetime.now()
    model, files, requests, spool = _Model(job, tell, need), job.workload.requests, None, None
    if files is not None:
        shares = job.adjustment.prefixes != OFF
        if need == "run":
            spool = SpoolWriter(ColumnsWriter(), model.now)
        tokens = spool or (SpoolWriter() if need == "lengths" and shares else None)
        stdin = standard_input(job, tell.say, is_kept=need == "run") if files.is_stdin else None
        delimiters = dict[Path, str]()
        asked = job.adjustment.admission.forecast
        requests = read_and_tokenise(
            files, model, tokens, stdin, delimiters.__setitem__,
            given_forecast(asked.kind) if asked.is_given else None)
        if need != "shape":
            tell_delimiters(delimiters, tell)
        if not requests:
            raise wrong(job.source, "workload.requests", str(files),
                        "holds no usable request" + _first(files, requests.bad_lines))
        if requests.bad_lines and need != "shape":
            first, total = requests.bad_lines[0], len(requests) + len(requests.bad_lines)
            tell.say(paragraph(
                f"note: {len(requests.bad_lines)} of {counted(total, 'entry')} cannot be used, "
                f"the first in {files.place(first.file, first.line)}: {first.error}"))
    choices, most = job.workload.choices, job.workload.max_tokens
    if need != "shape" and choices and most == most_tokens_of(choices):
        tell.say(f"note: max_tokens is {most}, the tokens of the longest choice")
    found = model.files()
    if requests is not None:
        requests = replace(requests, input_error=model.input_error)
        if tokens is not None and shares and not model.input_error:
            requests = replace(requests, prefixes=_shared_prefixes(requests, tokens))
    started = min(began, start_of(job.output, requests))
    problem = resolve(job, model=found.spec if found else None, requests=requests, start=started)
    if requests is not None and spool is not None:
        refuse_if_none_can_run(job, requests, spool, None, problem.model)
    if problem.model.stored_as and need != "shape" and job.run.weights != "random":
        tell.say(paragraph("note: " + stored_words(problem, job.plan_engine)))
    return OpenedJob(job=job, problem=problem, files=found, requests=requests, spool=spool,
                     tell=tell, started=started)


def _shared_prefixes(requests: Requests, spool: SpoolWriter) -> Prefixes | None:
    """The prefixes that the requests share; None if they save little, or have no tokens yet."""
    if requests.input_tokens is None or not requests.are_tokenised:
        return None
    found = spool.find_prefixes(requests.unusable)
    is_worth = found is not None and is_worth_sharing(found, requests.input_tokens)
    return found if is_worth else None


def stored_words(problem: Problem, engine: str) -> str:
    """A sentence on the type as which `engine` executes weights of few bits, and the memory planned
    for them."""
    model, held = problem.model, problem.weight_dtype
    planned = format_bytes(least_weight_bytes(problem))
    if engine.startswith(VLLM):
        return (f"the weights are stored as {model.stored_as}, which vLLM executes; the plan "
                f"reserves {planned} for them, as if they were {held}")
    return (f"the weights are stored as {model.stored_as} and executed as {held}: the plan "
            f"reserves {planned} for them")


def tell_delimiters(delimiters: Mapping[Path, str], tell: Teller) -> None:
    """Reports the delimiter that was found in table files whose suffix does not name it."""
    if delimiters:
        path, one = next(iter(delimiters.items()))
        others = len(delimiters) - 1
        more = f" (and so in {others} more of the files)" if others else ""
        tell.say(paragraph(f"note: the cells of {path.name} are divided by {one!r}, by its "
                           f"header{more}; the key `delimiter` beside `file` sets another"))


def refuse_if_none_can_run(job: Job, requests: Requests, spool: SpoolWriter,
                           plan: RunPlan | None, model: ModelSpec) -> None:
    """Raises InputError, with the first reasons, where none of a file's requests can run with the
    plan (None: with any plan)."""
    files, (queries, why) = job.workload.requests, runnable(requests, plan, model)
    if files is not None and not len(queries):
        raise wrong(job.source, "workload.requests", str(files), "holds no request that can run"
                    + _first(files, errors_of(requests, spool, why)))


def _first(files: RequestFiles, bad: Sequence[RequestError]) -> str:
    """Words for the errors of the first bad lines, and a hint at the likely cause."""
    if not bad:
        return ": it is empty"
    is_text = bad[0].error.startswith("not JSON")
    told = [f"; {files.place(one.file, one.line)}: {one.error}" for one in bad[:_MOST_TOLD]]
    more = f"; and {len(bad) - len(told)} more" if len(bad) > len(told) else ""
    return "".join(told) + more + (
        ". If a line is a prompt, say `requests: {file: ..., format: text}`" if is_text else "")


class _Model:
    """Finds the model's files when the first requests need them, so that mistakes in the file of
    requests are reported first."""

    def __init__(self, job: Job, tell: Teller, need: Need) -> None:
        self._job, self._tell, self._need = job, tell, need
        # a continued run renders its prompts with the date of its start
        is_begun = state_left(job.output) is State.STOPPED
        kept = saved_header(job.output).get("now") if is_begun else None
        self.now = datetime.fromisoformat(kept) if kept else datetime.now()
        self._is_random = job.run.weights == "random"
        is_unknown = gguf_in(Path(job.model)) is not None or (
            catalog.model_named(job.model) is None and not Path(job.model).is_absolute())
        self._is_needed = need == "run" or self._is_random or is_unknown
        self._files: ModelFiles | None = None
        self._known: ModelTokeniser | None = None
        self._is_sought = need == "lengths"
        self._estimate: CharacterTokens | None = None

    def files(self) -> ModelFiles | None:
        """The model's files; None where neither the job nor a request needs them."""
        job = self._job
        if self._is_needed and self._files is None and self._estimate is None:
            # a folder of random weights is written by execution
            self._files = self._find() if not self._is_random else (
                ModelFiles(directory=job.output / "model", spec=known_model(job),
                           served_by=SERVED_BY))
        return self._files

    def _find(self) -> ModelFiles | None:
        """Finds or downloads the files; None where planning can do without. Raises XgptError."""
        try:
            return find_model(self._job.model, self._tell.say)
        except InputError:
            raise
        except XgptError as cause:
            if self._need == "run":
                if isinstance(cause, MissingExtraError):
                    raise
                raise XgptError(
                    f"{cause}. If the hub cannot be reached, copy the model's folder here and give "
                    "its path (`--set model=FOLDER`), or set HF_ENDPOINT to a mirror") from cause
            if catalog.model_named(self._job.model) is None:
                raise XgptError(f"{cause}. To plan without its files, use a model of `xgpt "
                                "models`, or a folder with its config.json") from cause
            self._estimates(cause if isinstance(cause, MissingExtraError) else
                            "it is not on this machine, and the hub cannot be reached")
            return None

    def _estimates(self, why: object) -> None:
        self._estimate = CharacterTokens()
        self._tell.detail(textwrap.fill(  # the plan notes it, too
            f"note: no tokenizer of {self._job.model} ({why}). Prompt lengths are estimated from "
            f"their characters, {SPREAD:.0%} off either way; the margin covers that.",
            WIDTH, break_on_hyphens=False, break_long_words=False))

    def tokenise(self, requests: Sequence[Request]) -> list[Tokenised] | None:
        workload = self._job.workload
        texts = [request for request in requests if request.tokens is None]
        if self._is_random and texts:
            assert workload.requests is not None, "a request came of them"
            raise wrong(
                self._job.source, "run.weights", "random",
                "needs requests of tokens, or {count: N}: random weights come without a tokenizer, "
                f"and {workload.requests.place(texts[0].file, texts[0].line)} of "
                f"{workload.requests} is text")
        self._is_needed |= bool(texts) and workload.input_tokens.kind == "from_requests"
        if self._is_sought and texts and self.files() is None and self._estimate is None:
            self._seek()
        files = self.files()
        if self._estimate is not None:
            return self._estimate.tokenise(requests)
        if files is None:
            return None if texts or self._need == "shape" else [
                list(request.tokens or ()) for request in requests]
        try:
            self._known = self._known or self._made(files)
            if texts and self._need != "run" and not self._known.tokenizer.is_there:
                raise XgptError("its folder has no tokenizer")  # a run has errors in their places
            return self._known.tokenise(requests)
        except XgptError as cause:
            if self._need == "run":
                raise
            self._estimates(cause)
            return CharacterTokens().tokenise(requests)

    def _made(self, files: ModelFiles) -> ModelTokeniser:
        tokenizer, workload = TextTokenizer(files.directory, self.now), self._job.workload
        known = set[str]() if tokenizer.template is None else tokenizer.template.options
        if unknown := sorted(workload.chat_template_kwargs.keys() - known):
            raise wrong(self._job.source, f"workload.chat_template_kwargs.{unknown[0]}", None,
                        "left out: the model's chat template does not read it. It reads "
                        + (", ".join(sorted(known)) or "nothing of this kind"))
        is_own = self._need == "run" and self._job.run.engine == OWN_ENGINE
        vocab_size = files.spec.vocab_size
        return ModelTokeniser(tokenizer, workload.chat, vocab_size, workload.chat_template_kwargs,
                              Forms(files.directory, vocab_size) if is_own else None)

    @property
    def input_error(self) -> float:
        """Relative error of the input lengths: 0 where tokens are counted (xgpt.core.problem)."""
        return 0.0 if self._estimate is None else SPREAD

    def _seek(self) -> None:
        """Looks for the model on this machine, to count the tokens of requests."""
        self._is_sought, model = False, self._job.model
        needed = ("tokenizers", *(() if Path(model).is_absolute() else ("huggingface_hub",)))
        if all(importlib.util.find_spec(package) is not None for package in needed):
            self._files = model_at_hand(model)
        if self._files is None:
            self._tell.say("note: the model is not on this machine, so the lengths of the requests "
                           "are unknown: `xgpt submit`, which downloads it, may choose another "
                           "schedule")

    @property
    def vocab_size(self) -> int | None:
        return None if self._known is None else self._known.vocab_size
