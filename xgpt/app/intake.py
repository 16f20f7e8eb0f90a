"""A job's requests and its model's files, as far as a command needs them: the only place where the
file of requests is opened."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from xgpt.core import catalog
from xgpt.core.errors import wrong
from xgpt.core.job import Job
from xgpt.core.problem import Problem, known_model
from xgpt.core.requests import Requests
from xgpt.core.spool import SpoolWriter
from xgpt.core.workload import Request
from xrunner.checkpoint.random_model import SERVED_BY
from xrunner.checkpoint.source import ModelFiles, find_model, model_at_hand
from xrunner.io.intake import ModelTokeniser, Tokenised, make, take_in
from xrunner.io.tokenizer import TextTokenizer

# What a command needs of the model: its shape; the lengths of the requests too, as far as what is
# on this machine tells them; or its files, fetched if need be, to run it.
Need = Literal["shape", "lengths", "run"]


class Intake(NamedTuple):
    """`files`: only where the model was fetched. `spool`: only of a run, whose requests are in a
    file."""

    files: ModelFiles | None
    requests: Requests | None
    spool: SpoolWriter | None


def intake_of(job: Job, say: Callable[[str], None], need: Need) -> Intake:
    """What there is of the job's requests and of its model. Raises InputError."""
    model, path = _Model(job, say, need), job.workload.requests
    if path is None:
        return Intake(model.files(), None, None)
    spool = SpoolWriter() if need == "run" else None
    requests = take_in(path, model, spool)
    if not requests:
        bad = requests.bad_lines
        raise wrong(job.source, "workload.requests", str(path), "holds no usable request" + (
            f"; line {bad[0].line}: {bad[0].error}" if bad else ""))
    return Intake(model.files(), requests, spool)


def made(problem: Problem, seed: int) -> tuple[Requests, SpoolWriter]:
    """The requests of a job that names only their number."""
    assert problem.num_queries is not None, "a workload has requests or a count"
    return make(problem.lengths, problem.num_queries, seed, problem.model.vocab_size)


class _Model:
    """Finds the model's files when the first requests need them: what is wrong with the file of
    requests comes before what is wrong with the model."""

    def __init__(self, job: Job, say: Callable[[str], None], need: Need) -> None:
        self._job, self._say, self._need = job, say, need
        self._is_random = job.run.weights == "random"
        self._is_needed = need == "run" or self._is_random or _is_unknown_shape(job)
        self._files: ModelFiles | None = None
        self._known: ModelTokeniser | None = None
        self._is_sought = need == "lengths"

    def files(self) -> ModelFiles | None:
        """The model's files; None where neither the job nor a request needs them."""
        if self._is_needed and self._files is None:
            self._files = _random_model(self._job) if self._is_random else find_model(
                self._job.model, self._say)
        return self._files

    def tokenise(self, requests: Sequence[Request]) -> list[Tokenised] | None:
        texts = [request for request in requests if request.tokens is None]
        if self._is_random and texts:
            raise wrong(
                self._job.source, "run.weights", "random",
                "needs requests of tokens, or {count: N}: random weights come without a tokenizer, "
                f"and line {texts[0].line} of {self._job.workload.requests} is text")
        self._is_needed |= bool(texts) and self._job.workload.input_tokens.kind == "from_requests"
        if self._is_sought and texts and self.files() is None:
            self._seek()
        files = self.files()
        if files is None:
            return None if texts or self._need == "shape" else [
                list(request.tokens or ()) for request in requests]
        self._known = self._known or ModelTokeniser(
            TextTokenizer(files.directory), self._job.workload.chat, files.spec.vocab_size)
        return self._known.tokenise(requests)

    def _seek(self) -> None:
        """Looks on this machine for what would tell the lengths."""
        self._files, self._is_sought = _at_hand(self._job.model), False
        if self._files is None:
            self._say("note: the model is not on this machine, so nobody knows how long the "
                      "requests are: `xgpt submit`, which fetches it, may choose another schedule")

    @property
    def vocab_size(self) -> int | None:
        return None if self._known is None else self._known.vocab_size


def _at_hand(model: str) -> ModelFiles | None:
    needed = ("tokenizers", *(() if Path(model).is_absolute() else ("huggingface_hub",)))
    if any(importlib.util.find_spec(package) is None for package in needed):
        return None
    return model_at_hand(model)


def _random_model(job: Job) -> ModelFiles:
    """A folder that execution will write."""
    return ModelFiles(directory=job.output / "model", spec=known_model(job), served_by=SERVED_BY)


def _is_unknown_shape(job: Job) -> bool:
    hub_ids = {catalog.model(name).hub_id for name in catalog.names("model")}
    return (job.model not in catalog.names("model") and job.model not in hub_ids
            and not Path(job.model).is_absolute())
