"""Columns that a job needs of its requests: deadlines, forecasts and times of arrival."""

import math
from collections.abc import Iterator

from xgpt.core.controls import CAP, COLUMN, KNOWN, SHARING_ORDERS
from xgpt.core.errors import Mistake
from xgpt.core.model import ModelSpec
from xgpt.job.job import ArrivalSpec, Job
from xgpt.requests.request import IN_TURN, Requests


def wrong_columns(job: Job, model: ModelSpec, requests: Requests | None) -> Iterator[Mistake]:
    """Yields what forecasts, admission, order and arrivals lack, of the requests or the model."""
    admission, files = job.adjustment.admission, job.workload.requests
    asked = admission.forecast

    def mistake(key: str, value: object, allowed: str) -> Mistake:
        return Mistake(file=str(job.source), line=None, key=key, value=value, allowed=allowed)

    if model.is_encoder_decoder and admission.may_overflow:
        yield mistake("schedule.admission", admission.rule, "reserve, or future-peak with "
                      f"`forecast: {CAP}`, for an encoder-decoder model: a request is not encoded "
                      "again with its output")
    if model.is_encoder_decoder and job.adjustment.batches and asked.may_be_outgrown:
        yield mistake("schedule.forecast", asked.kind, f"{CAP} or {KNOWN}, with batches of an "
                      "encoder-decoder model: a request is not encoded again with its output")
    if model.is_encoder_decoder and job.adjustment.order in SHARING_ORDERS:
        yield mistake("schedule.order", job.adjustment.order, "another for an encoder-decoder "
                      "model: no prefix is shared there")
    if asked.is_given and requests is None:
        yield mistake("schedule.forecast", asked.kind, "another kind without a file of requests")
    is_due = job.adjustment.order == "deadline" and math.isinf(job.constraint.limit_s("deadline"))
    if is_due and requests is None:
        yield mistake("schedule.order", "deadline", "another without constraint.deadline_s")
    for key, value, needed in (
            ("schedule.forecast", asked.kind, "forced_tokens" if asked.needs_outputs else (
                "forecast_tokens" if asked.kind == COLUMN else "")),
            ("schedule.order", "deadline", "deadline_s" if is_due else ""),
            *(("workload.arrivals", "from_requests", needed)
              for needed in ("arrival_s", IN_TURN) if job.workload.arrivals == ArrivalSpec())):
        if requests is not None and files is not None and needed in requests.lacking:
            count, file, line = requests.lacking[needed]
            yield mistake(key, value, f"of requests that all have {needed}: {count:,} of "
                          f"{len(requests):,} do not, the first in {files.place(file, line)}")
    if requests and requests.deadlines_s is not None and job.workload.arrivals is not None:
        yield mistake("workload.arrivals", None, "left out where requests have a deadline_s of "
                      "their own: constraint.deadline_s is the limit on all that arrive")
