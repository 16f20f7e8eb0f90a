"""The output folder of a run before its ranks start: what they are told, and what stays of earlier
runs."""

from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from xgpt.app.kv_layout import lies_in_blocks
from xgpt.app.opened import OpenedJob
from xgpt.app.run_files import METRICS_FILE, RESULTS_FILE, is_half_done, is_told_done
from xgpt.app.telling import Teller
from xgpt.core.errors import wrong
from xgpt.core.json_values import write_json
from xgpt.core.positions import has_room, output_room
from xgpt.core.problem import open_weight_dtypes
from xgpt.core.queries import Requests
from xgpt.core.schedule import Schedule
from xgpt.core.spool import SpoolWriter, num_queries, saved_header
from xgpt.core.whole_file import sync_folder
from xgpt.launch.launcher import threads_per_rank
from xgpt.report.table import paragraph
from xrunner.backends.engine import engine_of
from xrunner.checkpoint.identity import files_state, model_files, weights_whole
from xrunner.checkpoint.source import write_random_model
from xrunner.files.intake import make
from xrunner.files.launcher_link import ADJUST_FILE, OBSERVED_FILE
from xrunner.files.results import HELD_FILE, answered
from xrunner.plan import RunPlan, as_begun, saved_differences, saved_fingerprint, saved_model
from xrunner.rules.order import window_of

# What decides the answers, as a job file has it. Two more follow from the schedule and the requests
# together.
_IN_WORDS = {"requests_digest": "the requests", "is_chat": "workload.chat",
             "chat_template_kwargs": "workload.chat_template_kwargs",
             "max_tokens": "workload.max_tokens", "engine": "run.engine",
             "engine_version": "the engine's version",
             "query_kv_tokens": "the longest request that the schedule holds",
             "most_input_tokens": "the longest input that the schedule encodes", **{
                 name: f"run.{name}" for name in (
                     "dtype", "weight_dtype", "seed", "temperature", "top_k", "top_p", "stop",
                     "ignore_eos", "engine_args", "deterministic")}}


def plan_for_ranks(opened: OpenedJob, schedule: Schedule | None, requests: Requests) -> RunPlan:
    """What the ranks are told besides the schedule. `requests`: the job's, or those made for it.
    Without a schedule no rank is told it: it is `as_begun` that tells what was run."""
    job, files = opened.job, opened.files
    assert files is not None, "a run needs the model's files"
    if job.run.weights == "random":
        write_random_model(files.directory, files.spec)
    estimate = None if schedule is None else schedule.estimate
    query_tokens, most_input = (0, 0) if estimate is None else (
        estimate.longest_query, estimate.longest_input)
    # what no request needs decides nothing: a run may go on by another schedule
    if (longest := _longest(opened, requests)) is not None:
        longest_input, longest_reserve = longest
        query_tokens = min(query_tokens, longest_reserve)
        most_input = 0 if most_input >= longest_input else most_input
    state = files_state(files.directory)
    return RunPlan(
        name=job.name, output=job.output, model_dir=files.directory, model_name=job.model,
        served_by=files.served_by, requests=str(job.workload.requests or "synthetic"),
        requests_digest=requests.digest,
        model_files=model_files(files.directory), model_state=state,
        weights_whole=weights_whole(files.directory) if job.run.verify else {},
        is_chat=job.workload.chat, max_tokens=opened.problem.default_max_tokens,
        chat_template_kwargs=dict(job.workload.chat_template_kwargs),
        dtype=opened.problem.dtype, weight_dtype=opened.problem.weight_dtype, seed=job.run.seed,
        temperature=job.run.temperature,
        top_k=job.run.top_k, top_p=job.run.top_p, stop=job.run.stop,
        ignore_eos=job.run.ignore_eos,
        threads_per_rank=threads_per_rank(job, opened.problem),
        query_kv_tokens=query_tokens, most_input_tokens=most_input, engine=job.run.engine,
        shuffle_window=1 if estimate is None else window_of(
            job.adjustment.shuffle, estimate.figures.encode_batch),
        routing=job.adjustment.routing,
        mean_output_tokens=opened.problem.lengths.outputs.mean,
        device_kind=opened.problem.cluster.device.kind,
        kv_in_blocks=estimate is not None and lies_in_blocks(opened, estimate),
        cuda_graphs=job.run.cuda_graphs,
        engine_version=identity(job) if (identity := engine_of(job).identity) else "",
        engine_args=dict(job.run.engine_args),
        deterministic=job.run.deterministic, private=job.run.private,
        sync_s=job.run.sync_s)


def _longest(opened: OpenedJob, requests: Requests) -> tuple[int, int] | None:
    """The most tokens that the input of any request has that can be answered, and the most that any
    reserves; None where lengths are not known. The other requests become error records whatever the
    schedule is."""
    if (inputs := requests.input_tokens) is None:
        return None
    room = output_room(opened.problem.model, inputs)
    reserves = inputs + np.minimum(
        requests.output_caps(opened.problem.default_max_tokens), room)
    fits = has_room(opened.problem.model, inputs, requests.forced)
    fits[list(requests.unusable)] = False
    return int(inputs[fits].max(initial=1)), int(reserves[fits].max(initial=1))


def requests_of(opened: OpenedJob) -> tuple[Requests, SpoolWriter]:
    """The job's requests, made where it names only their number."""
    problem = opened.problem
    if opened.requests is None:
        assert problem.num_queries is not None, "a workload has requests or a count"
        return make(problem.lengths, problem.num_queries, opened.job.run.seed,
                    problem.model.vocab_size)
    assert opened.spool is not None, "a run has its requests at hand"
    return opened.requests, opened.spool


def going_on(plan: RunPlan, schedule: Schedule) -> RunPlan | None:
    """The plan for the very requests of the unfinished run of this job that is in its folder: a new
    schedule may hold longer ones. None where this schedule does not hold them all. The plan itself
    where there is no such run."""
    before, total = answered(plan.output / RESULTS_FILE), num_queries(plan.output)
    begun = as_begun(plan)
    if begun is plan or not before.total or (total is not None and before.total >= total):
        return plan
    # where a schedule holds more than query_kv_tokens, that is the longest request
    holds_longest = plan.query_kv_tokens < schedule.estimate.longest_query
    holds_queries = holds_longest or begun.query_kv_tokens <= plan.query_kv_tokens
    holds_inputs = not plan.most_input_tokens or (  # 0: any input
        0 < begun.most_input_tokens <= plan.most_input_tokens)
    return begun if holds_queries and holds_inputs else None


def with_what_was_read(plan: RunPlan, tell: Teller) -> RunPlan:
    """The plan, with what an unfinished run in its folder knows of every byte of its weights, where
    this one did not read them all."""
    before = saved_model(plan.output) if is_half_done(plan.output) else None
    if before is None:
        return plan
    if plan.weights_whole and not before.weights_whole:
        tell.say(paragraph("note: the run in the folder was begun without `--verify`: that these "
                           "are its weights is known by samples of them; from here on, by every "
                           "byte"))
    return plan if plan.weights_whole else replace(plan, weights_whole=before.weights_whole)


def as_its_weights_were_held(opened: OpenedJob) -> OpenedJob:
    """The job by the type of weights that a run in its folder was begun with, unless it is told
    done, where the job leaves that open: what is found depends on the memory that is free."""
    job, problem = opened.job, opened.problem
    has_begun = answered(job.output / RESULTS_FILE).total > 0 and not is_told_done(job.output)
    before = saved_model(job.output) if has_begun else None
    if before is None or job.run.weight_dtype != "auto" or before.weight_dtype not in (
            open_weight_dtypes(problem, job.run.engine)):
        return opened
    return replace(opened, job=replace(job, run=replace(job.run, weight_dtype=before.weight_dtype)),
                   problem=replace(problem, weight_dtype=before.weight_dtype))


def make_room(output: Path, plan: RunPlan, tell: Teller, table: Path | None = None,
              spool: SpoolWriter | None = None) -> None:
    """A stopped run of the same job goes on; any other results are kept under another name.
    `table`: the file that the job wants its results in besides. `spool`: its requests. Raises
    InputError for a run that was stopped and whose model, prompts or sampling have changed since.
    """
    results = output / RESULTS_FILE
    before, total = answered(results), num_queries(output)
    if is_half_done(output):
        _refuse_another_job(output, plan)
        prompts = saved_header(output).get("prompts")
        if spool is not None and prompts not in (None, spool.prompts_digest):
            raise wrong(output, "the prompts", None,
                        "the tokens with which the run in this folder was begun, and not finished. "
                        "The model's tokenizer or its chat template makes others of the same "
                        "requests today, as another version of transformers may. Put that back to "
                        "go on, or begin anew with `xgpt submit --again`, which keeps what was "
                        "answered")
    for name in ("measured.json", METRICS_FILE, "steps.jsonl", ADJUST_FILE, OBSERVED_FILE):
        (output / name).unlink(missing_ok=True)
    if saved_fingerprint(output) == plan.fingerprint and (total is None or before.total < total):
        if before.total:
            tell.say(f"going on after the {before.total} queries an earlier run answered")
        return
    for path in (results, output / HELD_FILE, *(() if table is None else (table,))):
        if path.is_file() and path.stat().st_size > 0:
            kept = _free_name(path)
            path.rename(kept)
            sync_folder(output)
            tell.say(f"results of an earlier run kept as {kept.name}")


def _refuse_another_job(output: Path, plan: RunPlan) -> None:
    """Answers of two jobs in one file would look like those of one. Raises InputError."""
    before = saved_model(output)
    changed = before.changed(plan.model_files, plan.weights_whole) if before else []
    if changed:
        raise wrong(plan.model_dir, ", ".join(changed), None,
                    f"the files with which the run in {output} was begun, and not finished: these "
                    "have changed since. Put them back to go on, or begin anew with `--again`, "
                    "which keeps what was answered")
    if changed := [_IN_WORDS[key] for key in saved_differences(plan) if key in _IN_WORDS]:
        raise wrong(output, ", ".join(changed), None,
                    "changed since the run in this folder was begun, and it is not finished. Put "
                    "it back as it was to go on, or begin anew with `xgpt submit --again`, which "
                    "keeps what was answered")


def _free_name(path: Path) -> Path:
    """Names the results by the time of their last line, and like no other file: earlier results are
    never written over."""
    stamp = datetime.fromtimestamp(path.stat().st_mtime).strftime("%Y%m%d-%H%M%S")
    free, count = path.with_name(f"{path.stem}-{stamp}{path.suffix}"), 1
    while free.exists():
        count += 1
        free = path.with_name(f"{path.stem}-{stamp}-{count}{path.suffix}")
    return free


def write_job(opened: OpenedJob) -> None:
    """Leaves what the job asks in job.json."""
    job, bound = opened.job, opened.job.constraint.latency
    fixed, constraint = asdict(job.schedule), asdict(job.constraint)
    del fixed["others"], constraint["bounds"]  # their parts are keys of their own, as in a job file
    write_json(job.output / "job.json", {
        "name": job.name, "model": job.model, "cluster": job.cluster,
        "workload": {**asdict(job.workload), "requests": None if job.workload.requests is None
                     else str(job.workload.requests)}, "results": job.results,
        "quote_formulas": job.quote_formulas,
        "constraint": {"latency_s": bound.limit_s, "kind": bound.kind, "quantile": bound.quantile,
                       **constraint},
        "schedule": {**fixed, **dict(job.schedule.others)}, "adjustment": job.adjustment,
        "run": job.run, "output": job.output, "source": job.source, "asked": opened.asked})
