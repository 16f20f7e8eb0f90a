"""Reads and tokenises a job's requests, once, a few thousand lines at a time, into the spool. The
launcher decides by a schedule which of them can run; a rank reads those from the spool. A request
that cannot run becomes an error record, and the job goes on."""

from __future__ import annotations

import hashlib
import json
import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import numpy as np

from xgpt.core.errors import XgptError
from xgpt.core.lengths import IntArray, JointLengths
from xgpt.core.prefixes import Prefixes
from xgpt.requests.chat import has_form
from xgpt.requests.formats import Divided
from xgpt.requests.reader import read_requests
from xgpt.requests.request import (
    IN_TURN,
    Asked,
    Request,
    RequestError,
    Requests,
    synthetic_requests,
)
from xgpt.requests.request_files import RequestFiles
from xgpt.requests.spool import NUM_PROMPTS, Record, Spool, SpoolWriter
from xrunner.checkpoint.source import read_spec
from xrunner.files.forecasts import GivenForecast, load_forecasts
from xrunner.files.forms import Forms
from xrunner.files.generation import GenerationRules, generation_rules
from xrunner.files.tokenizer import TextTokenizer, eos_ids, start_token
from xrunner.plan import RunPlan
from xrunner.query import PreparedQuery, Sampling

_NO_RULES = GenerationRules()
_LINES_AT_A_TIME = 4096  # chosen
_CHARS_AT_A_TIME = 2**22  # chosen: characters (or 1/8 of tokens) in memory at once
NO_TOKENIZER = ("the model's folder has no tokenizer: give this request as `tokens`, or put the "
                "tokenizer.json of the model beside its weights")
_FILE_BITS = 40  # no file has more lines
_SAMPLE_SEED = 0x9E3779B97F4A7C15 >> 2  # difference between the seeds of a request's samples

# that an option may need
_MAY_LACK = ("forced_tokens", "forecast_tokens", "deadline_s", "arrival_s")
_ASKED = tuple(one.name for one in fields(Asked))


class Scored(NamedTuple):
    """A request to score: tokens to encode, and its targets, the last of which is not encoded."""

    ids: Sequence[int]
    targets: tuple[int, ...]


Tokenised = Scored | Sequence[int] | str  # or a sentence that says why there are none


class Tokeniser(Protocol):
    """Tokenises requests. The model may be fetched for the first ones that need it."""

    def tokenise(self, requests: Sequence[Request]) -> Sequence[Tokenised] | None:
        """Tokens of each request; None if their lengths are not needed."""

    @property
    def vocab_size(self) -> int | None: ...


def read_and_tokenise(files: RequestFiles, tokeniser: Tokeniser, spool: SpoolWriter | None = None,
            stdin: IO[bytes] | None = None, divided: Divided = lambda path, delimiter: None,
            forecast: GivenForecast | None = None) -> Requests:
    """Reads and tokenises the requests of a job's files; returns their numbers and bad lines.
    `spool`: where requests are stored, for a run. `stdin`: bytes of standard input, if that is the
    file. `divided`: see read_requests. `forecast`: of each request, if they bring their own."""
    rows, digests = _RequestColumns(spool, forecast), [hashlib.sha256() for _ in files.paths]
    bad_lines, are_tokenised, openai_files = list[RequestError](), True, set[int]()
    source = read_requests(files, lambda file, raw: digests[file].update(raw),
                           spool.columns if spool is not None else None, stdin, divided)
    while lines := _next_lines(source):
        bad_lines += [line for line in lines if isinstance(line, RequestError)]
        requests = [line for line in lines if isinstance(line, Request)]
        openai_files.update(line.file for line in lines if line.is_openai)
        tokenised: Sequence[Tokenised | None] | None = tokeniser.tokenise(
            requests) if requests else ()
        are_tokenised &= tokenised is not None
        if tokenised is None:
            tokenised = [request.tokens for request in requests]
        for request, ids in zip(requests, tokenised, strict=True):
            for sample in range(request.samples):
                rows.add(request, ids, tokeniser.vocab_size,
                         request.asked * request.samples + sample)
    # a bad line without a sign of its form has that of its file
    bad_lines = [line if line.is_openai is not None else replace(
        line, is_openai=line.file in openai_files) for line in bad_lines]
    found = tuple(digest.hexdigest() for digest in digests)
    return replace(rows.requests(), bad_lines=tuple(bad_lines), are_tokenised=are_tokenised,
                   digest=_digest(files, found), file_digests=found,
                   labels=files.labels if len(files.paths) > 1 else ())


def _next_lines(source: Iterator[Request | RequestError]) -> list[Request | RequestError]:
    """The next lines, fewer if they are long; empty at the end."""
    lines, size = list[Request | RequestError](), 0
    for line in islice(source, _LINES_AT_A_TIME):
        lines.append(line)
        if isinstance(line, Request):
            size += len(line.prompt or "") + 8 * len(line.tokens or ()) + sum(
                len(message.get("content", "")) for message in line.messages or ()) + len(
                    line.continuation or "")
        if size >= _CHARS_AT_A_TIME:
            break
    return lines


def _digest(files: RequestFiles, of_each: Sequence[str]) -> str:
    """Hash of the files and of the rules by which they are read."""
    if len(of_each) == 1 and not files.rules:
        return of_each[0]
    return hashlib.sha256("\n".join((files.rules, *of_each)).encode()).hexdigest()


def make_synthetic(lengths: JointLengths, count: int, seed: int, vocab_size: int,
                   prefixes: Prefixes | None = None) -> tuple[Requests, SpoolWriter]:
    """Makes requests of random tokens that share `prefixes`, with exact numbers of outputs."""
    spool, digest, sizes = SpoolWriter(), hashlib.sha256(), array("q")
    for i, (ids, outputs) in enumerate(synthetic_requests(
            lengths, count, seed, vocab_size, prefixes)):
        spool.add(Record(id=str(i), line=i + 1, is_forced=True), ids)
        digest.update(ids.tobytes())
        sizes.extend((len(ids), outputs))
    inputs, forced = np.array(sizes, np.int64).reshape(-1, 2).T
    digest.update(forced.tobytes())
    return Requests(input_tokens=inputs, caps=forced, forced=forced, digest=digest.hexdigest(),
                    may_stop=np.zeros(count, bool), prefixes=prefixes), spool


@dataclass(frozen=True, slots=True)
class ModelTokeniser:
    """Tokenises by the files of a model."""

    tokenizer: TextTokenizer
    is_chat: bool  # apply the chat template to prompts, if there is one
    vocab_size: int
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of the chat template
    forms: Forms | None = None  # of answers that our own engine is to give

    def tokenise(self, requests: Sequence[Request]) -> list[Tokenised]:
        """Token ids of each request, or a sentence that says why there are none."""
        result = self._inputs(requests)
        for i, request in enumerate(requests):
            ids = result[i]
            if isinstance(ids, (str, Scored)):
                continue
            if self.forms is not None and has_form(request.passed) and self.forms.refusal:
                result[i] = self.forms.refusal
                continue
            if request.continuation_tokens is not None:
                result[i] = _scored(ids, [*ids, *request.continuation_tokens])
        return result

    def _inputs(self, requests: Sequence[Request]) -> list[Tokenised]:
        result: list[Tokenised] = [list(r.tokens or ()) for r in requests]
        plain, chat = [], []
        is_chat = self.is_chat and self.tokenizer.template is not None
        for i, request in enumerate(requests):
            own = json.loads(request.chat_template_kwargs or "{}")
            is_plain = request.messages is None and not (is_chat and not request.is_openai)
            if own and (request.tokens is not None or is_plain):
                result[i] = "chat_template_kwargs: this prompt goes into no chat template"
                continue
            if request.tokens is not None:
                continue
            if not self.tokenizer.is_there:
                result[i] = NO_TOKENIZER
                continue
            # OpenAI's prompts are completed without a template: its chats are messages
            if is_plain:
                plain.append((i, request.prompt or ""))
                continue
            messages = request.messages or ({"role": "user", "content": request.prompt or ""},)
            try:
                chat.append((i, self.tokenizer.render_chat(
                    messages, json.loads(request.tools) if request.tools else None,
                    {**self.options, **own})))
            except (ValueError, XgptError) as cause:
                result[i] = str(cause)
        for batch, special in ((plain, True), (chat, False)):  # templates add their own specials
            tokens = self.tokenizer.encode_many([text for _, text in batch], special=special)
            whole = self.tokenizer.encode_many(
                [text + (requests[i].continuation or "") for i, text in batch],
                special=special) if any(requests[i].continuation for i, _ in batch) else tokens
            for (i, _), ids, all_ids in zip(batch, tokens, whole, strict=True):
                result[i] = ids if requests[i].continuation is None else _scored(ids, all_ids)
        return result


def _scored(before: Sequence[int], whole: Sequence[int]) -> Scored | str:
    """The request with its continuation's tokens as targets. These are the whole text's tokens
    beyond as many as the prompt's. A token across the border belongs to the prompt."""
    targets = tuple(whole[len(before):])
    if not before:
        return "the prompt has no tokens, so the continuation's first token cannot be scored"
    if not targets:
        return "the continuation adds no token to its prompt"
    return Scored(whole[:-1], targets)


class _RequestColumns:
    """Numbers of the requests so far, in columns."""

    def __init__(self, spool: SpoolWriter | None, forecast: GivenForecast | None) -> None:
        self._spool, self._forecast = spool, forecast
        self._lacking, self._forecasts = dict[str, tuple[int, int, int]](), array("i")
        # 4 bytes each: no file, line or number of tokens is larger (xgpt.requests.request.MAX_INT)
        self._inputs, self._caps, self._forced = array("i"), array("i"), array("i")
        self._may_stop, self._unusable = array("b"), dict[int, str]()
        self._deadlines_s, self._arrival_s, self._num_targets = array("d"), array("d"), 0

    def add(self, request: Request, ids: Tokenised | None, vocab_size: int | None,
            sample: int = 0) -> None:
        """Adds one request, or one of its samples."""
        row = len(self._caps)
        targets: tuple[int, ...] = ()
        if isinstance(ids, Scored):
            ids, targets = ids
            self._num_targets += len(targets)
            if (why := _why_unusable(targets, vocab_size)) is not None:
                self._unusable[row] = why
        if ids is not None and (why := _why_unusable(ids, vocab_size)) is not None:
            self._unusable[row] = why
        tokens = () if isinstance(ids, str) else ids
        if tokens is not None:
            # a future error record counts as one token in the plan
            self._inputs.append(max(len(tokens), 1))
        self._caps.append(request.output_cap(0))
        self._forced.append(request.forced_tokens or 0)
        self._may_stop.append(bool(request.stop))
        self._deadlines_s.append(request.deadline_s)
        if self._forecast is not None and tokens is not None:
            self._forecasts.extend(self._forecast(request, len(tokens)))
        lacking = [key for key in _MAY_LACK if getattr(request, key) in (None, math.inf)]
        if (own_s := request.arrival_s) is not None:
            if self._arrival_s and own_s < self._arrival_s[-1]:
                lacking.append(IN_TURN)
            self._arrival_s.append(own_s)
        for key in lacking:
            count, file, line = self._lacking.get(key, (0, request.file, request.line))
            self._lacking[key] = count + 1, file, line
        if self._spool is not None and tokens is not None:
            self._spool.add(_record(request, sample, targets, is_shown=row < NUM_PROMPTS), tokens)

    def requests(self) -> Requests:
        def column(values: array[int]) -> IntArray:
            return np.frombuffer(values, np.int32) if values else np.zeros(0, np.int32)

        are_known = len(self._inputs) == len(self._caps)
        deadlines_s = np.array(self._deadlines_s)
        return Requests(input_tokens=column(self._inputs).astype(np.int64) if are_known else None,
                        caps=column(self._caps), forced=column(self._forced),
                        deadlines_s=deadlines_s if np.isfinite(deadlines_s).any() else None,
                        may_stop=np.array(self._may_stop, bool), unusable=self._unusable,
                        forecasts=column(self._forecasts).reshape(-1, 3) if (
                            self._forecast is not None and are_known) else None,
                        arrival_s=np.array(self._arrival_s) if (
                            len(self._arrival_s) == len(self._caps)) else None,
                        lacking=self._lacking,
                        mean_targets=self._num_targets / max(len(self._caps), 1))


def _why_unusable(ids: Sequence[int] | str, vocab_size: int | None) -> str | None:
    """Why a request cannot run under any schedule; None if it can."""
    if isinstance(ids, str):
        return ids
    if not ids:
        return "the prompt has no tokens"
    if vocab_size is None or (min(ids) >= 0 and max(ids) < vocab_size):
        return None
    wrong = next(t for t in ids if not 0 <= t < vocab_size)
    return f"token {wrong} is outside the vocabulary (0..{vocab_size - 1})"


def _record(request: Request, sample: int, targets: tuple[int, ...], *, is_shown: bool) -> Record:
    own = {name: getattr(request, name) for name in _ASKED}
    own["prompt"] = request.text if is_shown else None
    if request.seed is not None:  # each input of a line is answered as if it were alone
        own["seed"] = request.seed - _SAMPLE_SEED * request.asked * request.samples
    return Record(**own, is_forced=request.forced_tokens is not None,
                  is_chat=request.messages is not None, sample=sample, targets=targets)


class SpooledQueries(Sequence[PreparedQuery]):
    """The job's requests by index, each read on access."""

    def __init__(self, spool: Spool, plan: RunPlan) -> None:
        self.spool, self._plan, kept = spool, plan, load_forecasts(plan.output)
        self._forecasts = None if kept is None else kept.admitted

    def __len__(self) -> int:
        return len(self.spool)

    def __getitem__(self, index: int) -> PreparedQuery:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        query = _prepared(self.spool, self._plan, index)
        return query if self._forecasts is None else replace(
            query, forecast=int(self._forecasts[index]))


def _prepared(spool: Spool, plan: RunPlan, index: int) -> PreparedQuery:
    record = spool.record(index)
    sampling = Sampling(
        temperature=plan.temperature if record.temperature is None else record.temperature,
        top_k=plan.top_k if record.top_k is None else record.top_k or None,
        top_p=plan.top_p if record.top_p is None else record.top_p,
        # requests without a seed of their own must draw different numbers
        seed=_SAMPLE_SEED * record.sample + (
            plan.seed * 1_000_003 + record.line + (record.file << _FILE_BITS)
            if record.seed is None else record.seed),
        top_logprobs=record.top_logprobs, targets=record.targets, pooled=record.pooled,
        passed=record.passed, **_ruled(spool, plan, index, record))
    return PreparedQuery(index=index, id=record.id, input_ids=spool.tokens(index),
                        max_new_tokens=spool.most_output_tokens(index),
                        is_forced=record.is_forced or (
                            plan.ignore_eos and not has_form(record.passed)), sampling=sampling,
                        stop=record.stop or (() if record.targets or record.pooled else plan.stop),
                        is_openai=record.is_openai, is_chat=record.is_chat,
                        sample=record.sample, tools=record.tools,
                        choices=record.choices, asked=record.asked,
                        expires_at=plan.expires_at(spool.deadlines_s, index))


def _ruled(spool: Spool, plan: RunPlan, index: int, record: Record) -> dict[str, Any]:
    """Fields of Sampling that hold fixed tokens, barred ends of sequence, and penalties. The
    request's settings precede those of the model's files. Empty if there are none."""
    rules: dict[str, Any] = {}
    if record.targets or record.pooled:  # no token is chosen
        return rules
    before, least, given = 0, record.min_tokens or 0, generation_rules(plan.model_dir)
    if record.repetition_penalty is not None:
        given = replace(given, repetition_penalty=record.repetition_penalty)
    if is_formed := has_form(record.passed):  # the form says what comes, and where it ends
        given = replace(given, first=None, last=None)
    if least or given != _NO_RULES:
        # an encoder-decoder model's positions count from the decoder's first token
        history = ((start_token(plan.model_dir),) if _is_encoder_decoder(plan.model_dir)
                else tuple(spool.tokens(index)))
        before = len(history)
        if record.min_tokens is None:
            least = given.least_after(before)
        if record.is_forced or plan.ignore_eos:
            given = replace(given, last=None)
        if given.no_repeat_size or given.repetition_penalty != 1:
            rules |= {"no_repeat_size": given.no_repeat_size, "history": history,
                      "repetition_penalty": given.repetition_penalty}
        if fixed := given.fixed(before, spool.most_output_tokens(index)):
            rules["fixed"] = fixed
    if least > 0 or is_formed:
        rules |= {"barred": tuple(sorted(_ends_of(plan.model_dir))),
                  "barred_until": before + least if least > 0 else 0}
    return rules


@lru_cache(4)
def _ends_of(model_dir: Path) -> frozenset[int]:
    return eos_ids(model_dir)


@lru_cache(4)
def _is_encoder_decoder(model_dir: Path) -> bool:
    return read_spec(model_dir, model_dir.name).is_encoder_decoder
