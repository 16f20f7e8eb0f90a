"""Writes the JSON schema of every file: `python docs/schema/make.py`.

A job file's comes from the dataclasses that it is checked by, those of schedule, profile, steps and
progress from their types, the others from the tables here. Tests make them anew, and hold real
files to them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, get_args

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from of_types import NUMBER, of_fields, of_keys, of_type  # noqa: E402

from xgpt.app.running.forecast_figures import ForecastFigures  # noqa: E402
from xgpt.app.running.metrics import Attribution  # noqa: E402
from xgpt.core.constraint import BoundKind, Metric  # noqa: E402
from xgpt.core.model import ModelSpec  # noqa: E402
from xgpt.core.placement import TIERS  # noqa: E402
from xgpt.core.schedule import Estimate, Schedule  # noqa: E402
from xgpt.core.schedule_file import PLACED_VERSION, SCHEDULE_VERSION, SERVED_VERSION  # noqa: E402
from xgpt.job.job_file import job_schema  # noqa: E402
from xgpt.job.sweep_file import AXES as AXES_OF_SWEEP  # noqa: E402
from xgpt.report.lanes import KINDS  # noqa: E402
from xgpt.report.lanes import VERSION as EXPECTED_VERSION  # noqa: E402
from xgpt.report.sweep_rows import COLUMNS  # noqa: E402
from xprofiler.profile import LearnedSteps, Peaks, ProfileMetadata  # noqa: E402
from xprofiler.profile_file import AXES, PROFILE_VERSION  # noqa: E402
from xrunner.files.sink import Progress  # noqa: E402
from xrunner.offload.report import TERMS, OffloadReport  # noqa: E402
from xrunner.step_record import StepRecord  # noqa: E402

Json = dict[str, Any]
_NONE = {"type": "null"}


def whole(words: str) -> Json:
    return {"description": words, "type": "integer", "minimum": 0}


def number(words: str) -> Json:
    return {"description": words, **NUMBER}


def text(words: str) -> Json:
    return {"description": words, "type": "string"}


def or_none(schema: Json) -> Json:
    return {"anyOf": [schema, _NONE]}


def array(items: Json) -> Json:
    return {"type": "array", "items": items}


FINISH = {"enum": ["stop", "length", "error"]}
TIMES = {"latency_s": number("from the arrival, else from the start of its encoding, to its last "
                             "token"),
         "encode_start_s": number("since the run's start"),
         "ttft_s": number("to the first token, from the arrival, else from the run's start"),
         "tpot_s": or_none(number("mean of each token after the first; null for a single one"))}
REPLICA = {"replica": whole("of the model, which answered it, where there are several"),
           "arrival_s": number("since the run's start, where requests arrive over time")}
LIKELIHOODS = {
    "sample": whole("of a request of several, from 1; 0 is left out"),
    "logprobs": array(or_none(number("log-likelihood of each token of the answer, or of the "
                                     "continuation"))),
    "top_logprobs": array(array({"type": "array"})),
    "continuation_ids": array(whole("token that is scored")),
    "log_likelihood": or_none(number("of the continuation: the sum of its logprobs")),
    "is_greedy": {"type": "boolean", "description": "whether each token of it is the likeliest"}}
EMBEDDING = {"embedding": array(number("of the pooled last hidden states"))}
RESULT = of_keys({
    "id": text("of the request"), "index": whole("place in the file, from 0"),
    "text": text("the answer"), "output_ids": array(whole("token")),
    "input_tokens": whole("of the prompt"), "output_tokens": whole("of the answer"),
    "finish_reason": FINISH, **TIMES, **REPLICA, **LIKELIHOODS, **EMBEDDING,
    "error": text("why there is no answer")},
    words="A result, or one that is held back until those before it are done.",
    without=("error", *REPLICA, *LIKELIHOODS, *EMBEDDING))
OPENAI_FIGURES = {"index": RESULT["properties"]["index"],
                  "output_ids": RESULT["properties"]["output_ids"], **TIMES, **REPLICA}
OF_SEVERAL = {"sample": whole("of the choices of a response, from 0"),
              "of": whole("how many choices it has"),
              "input": whole("which input of the line it answers, from 0"),
              "input_tokens": whole("of this input")}
CHOICE = of_keys({**OPENAI_FIGURES, **OF_SEVERAL, "output_tokens": whole("of the choice")},
                 without=(*REPLICA,))
OPENAI_RESULT = of_keys({
    "id": text("of the batch request"), "custom_id": text("of the request"),
    "error": or_none({"type": "object"}), "response": or_none({"type": "object"}),
    "xgpt": {"anyOf": [
        of_keys({**OPENAI_FIGURES, **OF_SEVERAL}, without=(*REPLICA, *OF_SEVERAL),
                words="Of one choice; with `of`: of one that is held back until all are there."),
        of_keys({"index": OPENAI_FIGURES["index"], "choices": array(CHOICE)},
                words="Of several choices (`n`, lists of inputs): the index of the first one.")]}},
    words="A batch response object of OpenAI's format, with our figures under `xgpt`.")
REQUEST_ERROR = of_keys({"line": whole("of the file of requests, from 1"),
                         "id": or_none(text("of the request, where it has one")),
                         "file": text("where there are several"),
                         "error": text("why it cannot run"), "code": {"const": "expired"}},
                        without=("file", "code"))
OPENAI_ERROR = of_keys({
    "id": text("of the batch request"), "custom_id": or_none(text("of the request")),
    "error": or_none({"type": "object"}), "response": or_none({"type": "object"}),
    "xgpt": of_keys({key: REQUEST_ERROR["properties"][key] for key in ("line", "file")},
                    without=("file",))},
    words="A line of the file of errors of OpenAI's batch format, with its place under `xgpt`.")
ROLE = {"enum": ["both", "encode", "decode"]}
PLACE = {"stage": whole("its number, over all replicas"),
         "replica": whole("of the model, from 0"), "pool": text("its pool"), "role": ROLE}
WORK = {"busy_s": number("at work"),
        "load_s": number("to load the model's part"),
        "bytes_read": whole("of the model"), "rows_compacted": whole("moved in the cache"),
        "peak_memory_bytes": whole("most that was in use"),
        "kv_bytes": whole("set aside on each rank for KV entries"),
        "kv_peak_bytes": whole("of these, what queries had at most"),
        "handover_bytes": whole("KV entries sent or received (WAA)"),
        "handover_s": number("until they had left (WAA, who encodes)")}
WAA_ONLY = ("handover_bytes", "handover_s")
STAGE = of_keys({**PLACE, "ranks": array(whole("rank")), **WORK}, without=WAA_ONLY)
PLANNED = {"kv_planned_bytes": or_none(whole("KV entries that the schedule lets each rank hold"))}
METRICS_STAGE = of_keys({**PLACE, "ranks": array(whole("rank")), **WORK, **PLANNED},
                        without=WAA_ONLY)
RANK = of_keys({"rank": whole("its number"), **PLACE, **WORK, "offload": of_type(OffloadReport)},
               without=(*WAA_ONLY, "offload"))
OFFLOAD = of_keys({
    "terms": array(of_keys({
        "term": {"enum": list(TERMS)}, "measured_s": number("of all ranks; terms overlap"),
        "predicted_s": or_none(NUMBER), "measured_bytes": whole("copied"),
        "predicted_bytes": or_none(NUMBER)})),
    "tiers": array(of_keys({
        "tier": {"enum": list(TIERS)}, "peak_bytes": whole("most that a rank held"),
        "planned_bytes": whole("most that the schedule lets a rank hold")})),
    "waited_s": number("of computing, for copies"), "io": text("how the page cache was passed")},
    words="Work below the devices, of a schedule with a placement.")
PERCENTILES = tuple(f"{name}_{which}_s" for name in ("latency", "ttft", "tpot")
                    for which in ("p50", "p99"))
LOADED = {"loaded_bytes": whole("of the model, by all ranks")}
COUNTS = {"queries_before": whole("answered by earlier runs"),
          "queries_held": whole("done, while one before them is not"),
          "errors": whole("requests that cannot run"), "failed": whole("queries without an answer")}
DEADLINES = {"with_deadline": whole("requests with a deadline that ended or expired"),
             "in_time": whole("of these"), "expired": whole("that did not begin")}
PAIR = of_keys({"measured": or_none(NUMBER), "predicted": or_none(NUMBER)},
               words="`predicted` is null where nothing was predicted of what was run.")
PAIRS = ("throughput_qps", "output_tokens_per_s", *PERCENTILES, "wall_s", "load_s",
         "overhead_share")
OF_REPLICA = {"replica": whole("its number"), "node": text("its host"),
              "devices": text("`GPU 3`, or `cores 0-1`"), "restarts": whole("of its engine"),
              "load_s": number("of its slowest rank")}
REPLICA_PAIRS = ("queries", "output_tokens", "wall_s", "output_tokens_per_s")
MEASURED_REPLICA = of_keys({
    **OF_REPLICA, "queries": whole("answered by it"), "output_tokens": whole("written"),
    "wall_s": number("to its last token"), "output_tokens_per_s": or_none(NUMBER)})
METRICS_REPLICA = of_keys({**OF_REPLICA, **dict.fromkeys(REPLICA_PAIRS, PAIR)})
MEASURED = of_keys({
    "version": {"const": 1}, "state": {"enum": ["done", "stopped"]},
    "queries": whole("answered by this run"), **COUNTS, "wall_s": number("of the run"),
    "throughput_qps": or_none(NUMBER), "output_tokens": whole("written"),
    "output_tokens_per_s": or_none(NUMBER), **{name: or_none(NUMBER) for name in PERCENTILES},
    "load_s": number("of the slowest rank"), **LOADED, "operators": or_none(text("whose served")),
    "overhead_share": or_none(number("of the time, that even the busiest stage waited")),
    "changes": array({"type": "object"}), "stages": array(STAGE), "ranks": array(RANK),
    "replicas": array(MEASURED_REPLICA),
    "began_s": number("from the job's first command to the first step"), **DEADLINES},
    words="measured.json: the ranks' own account.", without=("began_s", "replicas", *DEADLINES))
METRICS = of_keys({
    "version": {"const": 1}, "name": text("of the job"), "status": {"enum": ["done", "stopped"]},
    "engine": text("what executed it"), "queries": whole("answered by all runs"), **COUNTS,
    **dict.fromkeys(PAIRS, PAIR), "steady_state_qps": number("of the schedule"),
    "load_bytes_per_s": or_none(NUMBER), **LOADED, "operators": or_none(text("whose served")),
    "model_source": text("where the model came from"), "weights": text("checkpoint, or random"),
    "ranks": whole("processes"), "dtype": text("of the run"),
    "weight_dtype": text("of the weights"),
    "date": text("ISO 8601"), "machine": {"type": "object"}, "stages": array(METRICS_STAGE),
    "others_cpu_share": or_none(number("what other processes used of the cores")),
    "start_s": or_none(number("that ranks took besides the run, to be at work and to end")),
    "beginning": or_none(text("why it began with a schedule that does not keep the bound")),
    "agreement": or_none({"type": "object"}), "rescheduling": array({"type": "object"}),
    "is_predicted_for_lengths": {"type": "boolean", "description": (
        "whether the predictions are for the output lengths that came: none were known before")},
    "bound_kept": or_none({"type": "boolean", "description": "whether every bound was that can be "
                                                             "judged"}),
    "bounds": array(of_keys({
        "metric": {"enum": [*get_args(Metric), "attainment"]}, "limit_s": number("of the bound"),
        "kind": {"enum": list(get_args(BoundKind))}, "quantile": number("of the queries"),
        "is_kept": or_none({"type": "boolean"}), "over": whole("queries over it"),
        "of": whole("queries that count"), "share_over": number("of these"),
        "worst_s": or_none(number("of all")), "sentence": text("the same in words")})),
    "forecast": or_none(of_fields(ForecastFigures, sentence=text("the same in words"))),
    "attribution": or_none(of_fields(Attribution, sentence=text("the same in words"))),
    "replicas": array(METRICS_REPLICA), "offload": OFFLOAD, "attainment": PAIR,
    "served": {"type": "object", "additionalProperties": PAIR,
               "description": "figures of requests that arrive over time"},
    **DEADLINES},
    words="metrics.json: what a run measured, beside what was predicted.",
    without=("replicas", "offload", "attainment", "served", *DEADLINES))
BOX = {"type": "array", "prefixItems": [{"enum": list(KINDS)}, NUMBER, NUMBER,
                                        {"type": "integer"}], "minItems": 4, "maxItems": 4,
       "description": "kind, start and end in seconds since the job began, micro-batch"}
EXPECTED = of_keys({
    "version": {"const": EXPECTED_VERSION},
    "stages": array(of_keys({"label": text("its name"), "pool": text("its pool"),
                             "steps": array(BOX)})),
    "done": array({"type": "array", "prefixItems": [NUMBER, NUMBER], "minItems": 2, "maxItems": 2,
                   "description": "second, queries done until then"}),
    "latency_s": array(number("quantiles of all queries, from 0 to 1")),
    "ttft_s": array(number("the same of times to first token"))},
    words="expected.json: what a replay of the job expected of its run.")
PROGRESS = of_type(Progress)
STATUS = of_keys({
    "output": text("folder"), **PROGRESS["properties"], "is_alive": or_none({"type": "boolean"}),
    "results": text("file"), "num_results": whole("lines of it"),
    "num_held": whole("results held back"),
    "sign_of_life_s": or_none(number("age of the oldest of the ranks' last signs of life")),
    "ranks": array({"type": "object"}), "slurm": or_none({"type": "object"})},
    words="What `xgpt status --json` prints.",
    without=tuple(set(PROGRESS["properties"]) - {"state"}))
MISTAKE = of_keys({"file": text("where"), "line": or_none(whole("from 1")), "key": text("dotted"),
                   "value": {}, "allowed": text("what may stand there")})
FAILURE = {**of_keys({"error": text("the message"), "message": text("of a run that stopped"),
                      "status": text("stopped"), "exit_code": whole("of the command"),
                      "mistakes": array(MISTAKE)},
                     words="What `--json` prints where a command fails or stops.",
                     without=("error", "message", "status", "mistakes")),
           "additionalProperties": True}


def schedule_schema() -> Json:
    """A section for each part; the estimate's stand beside the others."""
    own = of_fields(Schedule)["properties"]
    estimate = of_fields(Estimate)["properties"]
    return of_keys({"version": {"enum": [SCHEDULE_VERSION, PLACED_VERSION, SERVED_VERSION]},
                    "policy": text("its name"),
                    **estimate, **{key: own[key] for key in own if key != "estimate"}},
                   words=" ".join((Schedule.__doc__ or "").split()),
                   without=("reordered", "placed", "served"))


def sweep_schema(job: Json) -> Json:
    """`job`: the schema of a job file, of which the base need not have all that is required."""
    value: Json = {"type": ["string", "number", "integer", "boolean", "object", "array", "null"]}
    axes = {"type": "object", "additionalProperties": False,
            "description": "axis -> a value, or a list of values",
            "properties": {axis.name: {"description": axis.title, **value}
                           for axis in AXES_OF_SWEEP},
            "patternProperties": {r"^[a-z]\w*(\.\w+)*$": value}}
    return of_keys({
        "name": text("by default the file's name"),
        "base": {"anyOf": [text("a job file"), {**job, "required": []}]},
        "cases": array(axes), "grid": axes, "horizon": {"enum": ["steady", "job"]},
        "margin": {"type": "boolean"}, "output": text("a folder")},
        words="A sweep file: a base job, cases, and a grid.",
        without=("name", "cases", "grid", "horizon", "margin", "output"))


def sweep_row() -> Json:
    kinds: dict[str, Json] = {"text": {"type": "string"}, "whole": {"type": "integer"},
                              "number": NUMBER}
    return {**of_keys({column.name: {"description": " ".join(filter(None, (
        column.title, f"({column.unit})" if column.unit else ""))),
        **or_none(kinds[column.kind])} for column in COLUMNS},
        words="A line of sweep.jsonl: a point. Other axes have a key of their own."),
        "additionalProperties": True}


def profile_schema() -> Json:
    marks = {"type": "object", "additionalProperties": False, "properties": {
        "date": text("of its measurement"),
        "missing": number("share of the machine that was missing meanwhile"),
        "tries": whole("sessions that measured it, of which the best is kept")}}
    point = {"type": "array", "prefixItems": [NUMBER, NUMBER, array(NUMBER), marks], "minItems": 3,
             "maxItems": 4}
    names = "|".join(AXES)
    return of_keys({
        "version": {"const": PROFILE_VERSION}, "metadata": of_fields(ProfileMetadata),
        "verdict": text("how noisy it is"), "spent_s": number("of measuring"),
        "refused": {"type": "object", "description": "tensor-parallel degree -> why it has none"},
        "model": or_none(of_fields(ModelSpec)), "peaks": or_none(of_fields(Peaks)),
        "learned": array(of_fields(LearnedSteps)),
        "units": {"type": "object"}, "columns": array(text("of a point")),
        "tables": {"type": "object", "additionalProperties": False, "patternProperties": {
            rf"^({names}) tp=[1-9]\d*( link=\S.*)?$": array(point)}}},
        words="A profile: measured seconds of operators, a table for each.")


def schemas() -> dict[str, Json]:
    """By the file's name."""
    steps = of_fields(StepRecord, stage=whole("its number, over all replicas"),
                      replica=whole("of the model"), rank=whole("its first rank"),
                      pool=text("its pool"), role=ROLE)
    job = job_schema()
    return {"job": job, "sweep": sweep_schema(job), "sweep-line": sweep_row(),
            "schedule": schedule_schema(),
            "profile": profile_schema(),
            "results-line": {"anyOf": [RESULT, OPENAI_RESULT]}, "errors-line": {"anyOf": [
                REQUEST_ERROR, OPENAI_ERROR]},
            "steps-line": steps, "metrics": METRICS, "measured": MEASURED, "progress": PROGRESS,
            "expected": EXPECTED,
            "status-json": STATUS, "failure-json": FAILURE}


def as_text(name: str, schema: Json) -> str:
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"xgpt: {name}"}
    return json.dumps({**head, **schema}, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    for name, schema in schemas().items():
        (HERE / f"{name}.schema.json").write_text(as_text(name, schema), encoding="utf-8")
        print(f"docs/schema/{name}.schema.json")


if __name__ == "__main__":
    main()
