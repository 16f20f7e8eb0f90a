"""Requests to prepared queries: chat template, tokens, limits. What cannot run becomes an error
record; the job goes on."""

from __future__ import annotations

from collections.abc import Sequence

from xgpt.core.errors import XgptError
from xgpt.core.model import ModelSpec
from xgpt.core.workload import Request, RequestError
from xrunner.io.tokenizer import TextTokenizer
from xrunner.plan import RunPlan
from xrunner.query import PreparedQuery, Sampling


def prepare(requests: Sequence[Request], tokenizer: TextTokenizer, plan: RunPlan,
            spec: ModelSpec, most_input_tokens: int | None = None,
            ) -> tuple[list[PreparedQuery], list[RequestError]]:
    """Queries in the requests' order, indexed from 0 without gaps, and those that cannot run.
    `most_input_tokens`: that the schedule can encode."""
    queries: list[PreparedQuery] = []
    errors: list[RequestError] = []
    for request, ids in zip(requests, tokenise(requests, tokenizer, plan.is_chat), strict=True):
        problem = ids if isinstance(ids, str) else _unusable(request, ids, plan, spec)
        if isinstance(ids, str) or problem is not None:
            errors.append(RequestError(line=request.line, id=request.id, error=str(problem)))
            continue
        query = _prepared(len(queries), request, ids, plan, spec)
        if query.reserve_tokens > plan.query_kv_tokens:
            errors.append(RequestError(line=request.line, id=request.id, error=(
                f"needs up to {query.reserve_tokens} tokens of KV cache ({len(ids)} of input); the "
                f"schedule was planned for {plan.query_kv_tokens}: lower max_tokens, or state the "
                "workload's longest lengths in the job")))
            continue
        if most_input_tokens is not None and len(ids) > most_input_tokens:
            errors.append(RequestError(line=request.line, id=request.id, error=(
                f"{len(ids)} input tokens; the schedule was planned to encode "
                f"{most_input_tokens} at a time: state the workload's longest lengths in the job")))
            continue
        queries.append(query)
    return queries, errors


def tokenise(requests: Sequence[Request], tokenizer: TextTokenizer,
             is_chat: bool) -> list[list[int] | str]:
    """Token ids of each request, or the sentence that says why there are none."""
    result: list[list[int] | str] = [list(r.tokens or ()) for r in requests]
    plain, chat = [], []
    for i, request in enumerate(requests):
        if request.tokens is not None:
            continue
        if request.messages is None and not (is_chat and tokenizer.has_chat_template):
            plain.append((i, request.prompt or ""))
            continue
        messages = request.messages or ({"role": "user", "content": request.prompt or ""},)
        try:
            chat.append((i, tokenizer.render_chat(messages)))
        except (ValueError, XgptError) as cause:
            result[i] = str(cause)
    for batch, special in ((plain, True), (chat, False)):  # a template brings its own specials
        tokens = tokenizer.encode_many([text for _, text in batch], special=special)
        for (i, _), ids in zip(batch, tokens, strict=True):
            result[i] = ids
    return result


def _unusable(request: Request, ids: list[int], plan: RunPlan, spec: ModelSpec) -> str | None:
    if not ids:
        return "the prompt has no tokens"
    wrong = next((t for t in ids if not 0 <= t < spec.vocab_size), None)
    if wrong is not None:
        return f"token {wrong} is outside the vocabulary (0..{spec.vocab_size - 1})"
    room = (spec.max_positions or len(ids) + plan.max_tokens) - len(ids)
    if room < 1:
        return (f"{len(ids)} input tokens leave no room in the model's "
                f"{spec.max_positions} positions")
    if request.forced_tokens is not None and request.forced_tokens > room:
        return (f"forced_tokens {request.forced_tokens} after {len(ids)} input tokens exceed the "
                f"model's {spec.max_positions} positions")
    return None


def _prepared(index: int, request: Request, ids: list[int], plan: RunPlan,
              spec: ModelSpec) -> PreparedQuery:
    room = (spec.max_positions or len(ids) + request.output_cap(plan.max_tokens)) - len(ids)

    def chosen(own: float | None, of_job: float) -> float:
        return of_job if own is None else own

    sampling = Sampling(
        temperature=chosen(request.temperature, plan.temperature),
        top_k=request.top_k if request.top_k is not None else plan.top_k,
        top_p=chosen(request.top_p, plan.top_p),
        # queries without a seed of their own must not all draw the same numbers
        seed=request.seed if request.seed is not None else plan.seed * 1_000_003 + request.line)
    return PreparedQuery(
        index=index, id=request.id, input_ids=tuple(ids),
        max_new_tokens=min(request.output_cap(plan.max_tokens), room),
        is_forced=request.forced_tokens is not None or plan.ignore_eos, sampling=sampling,
        stop=request.stop, is_openai=request.is_openai, is_chat=request.messages is not None)
