"""Prepares a run before its ranks start: refuses what cannot be run, makes the ranks' plan, and
keeps the results of earlier runs."""

import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from xgpt.app.models import not_used_words
from xgpt.app.opened_job import OpenedJob
from xgpt.app.teller import Teller
from xgpt.core.cluster import Cluster
from xgpt.core.engines import IN_CHILDREN, OWN_ENGINE, VLLM
from xgpt.core.errors import Mistake, refuse, wrong
from xgpt.core.lengths import FloatArray
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.schedule_file import write_json
from xgpt.core.system.machine import detect, usable_cores, why_no_torch
from xgpt.core.system.whole_file import sync_folder, why_no_file, why_no_folder
from xgpt.job.job import LOCAL_CLUSTER, Job
from xgpt.job.resolve import dealt_queries, open_weight_dtypes, query_lengths
from xgpt.launch.launcher import allocation_here, threads_per_rank
from xgpt.report.table import paragraph
from xgpt.requests.formats import arrow
from xgpt.requests.request import Requests
from xgpt.requests.request_files import format_of
from xgpt.requests.spool import SpoolWriter, saved_header
from xgpt.run_folder.files import METRICS_FILE, RESULTS_FILE, free_path
from xgpt.run_folder.state import State, state_left
from xrunner.backends.engine import engine_of, mistake
from xrunner.checkpoint.identity import files_state, model_files, weights_whole
from xrunner.checkpoint.source import config_of, shape_to_make, write_random_model
from xrunner.checkpoint.tensors import check_weights
from xrunner.files.forecasts import keep_forecasts
from xrunner.files.generation import refuse_unsupported_rules
from xrunner.files.launcher_link import ADJUST_FILE, OBSERVED_FILE
from xrunner.files.lock import StopRequest, is_locked
from xrunner.files.order_file import save_order
from xrunner.files.result_line import spool_of
from xrunner.files.results import HELD_FILE, answered
from xrunner.files.runnable import save_runnable
from xrunner.files.spooled_requests import make_synthetic
from xrunner.files.tokenizer import TextTokenizer, eos_ids, start_token
from xrunner.plan import (
    PRIVATE_UMASK,
    RunPlan,
    saved_differences,
    saved_fingerprint,
    saved_model,
    with_earlier_limits,
)
from xrunner.rules.forecast import with_forecasts
from xrunner.rules.order import run_order
from xrunner.rules.steps import kv_budget, rules_for

_RANKS_PER_CORE = 4  # more would only take turns, and each loads its own libraries
# Keys that decide the answers, as a job file names them. Two more follow from the schedule together
# with the requests.
_IN_WORDS = {"requests_digest": "the requests", "is_chat": "workload.chat",
             "chat_template_kwargs": "workload.chat_template_kwargs",
             "max_tokens": "workload.max_tokens", "engine": "run.engine",
             "engine_version": "the engine's version",
             "query_kv_tokens": "the longest request that the schedule holds",
             "most_input_tokens": "the longest input that the schedule encodes", **{
                 name: f"run.{name}" for name in (
                     "dtype", "weight_dtype", "seed", "temperature", "top_k", "top_p", "stop",
                     "ignore_eos", "engine_args", "deterministic")}}


def shares_prefixes(problem: Problem, estimate: Estimate) -> bool:
    """Whether requests share prefixes under the schedule."""
    return estimate.shares_prefixes and problem.queries is not None and (
        problem.queries.prefixes is not None)


def uses_kv_blocks(opened: OpenedJob, estimate: Estimate) -> bool:
    """Whether the KV cache that the rules of `estimate` reserve is kept in blocks. Where prefixes
    are shared it is. On a GPU it is, unless the job says `rows`: reserved memory is used up there,
    while pages of a CPU that were never written are not. Raises InputError where the job's layout
    cannot be executed."""
    job, wish = opened.job, opened.job.run.kv_layout
    rules, is_encoder_decoder = rules_for(estimate), opened.problem.model.is_encoder_decoder
    if any(kv_budget(rule) is not None for rule in rules):
        if wish == "rows":
            raise wrong(job.source, "run.kv_layout", wish, f"auto or blocks with {estimate.policy}:"
                        " continuous batching leaves queries where they are, in blocks")
        return False  # those rules use blocks of their own
    is_placed = any(pool.placement for pool in estimate.all_pools)  # whose entries lie in rows
    is_able = not is_encoder_decoder and not is_placed and any(
        kv_budget(rule, in_blocks=True) is not None for rule in rules)
    if wish == "blocks" and not is_able:
        what = "an encoder-decoder model" if is_encoder_decoder else (
            "a placement" if is_placed else estimate.policy)
        raise wrong(job.source, "run.kv_layout", wish, f"auto or rows with {what}, whose entries "
                    "lie in rows alone")
    is_usual = opened.problem.cluster.device.kind == "gpu" or shares_prefixes(
        opened.problem, estimate)
    return is_able and (wish == "blocks" or (wish == "auto" and is_usual))


def refuse_what_cannot_run(job: Job, tell: Teller) -> None:
    """Raises InputError for a job that cannot be executed on this machine, by its file and the
    machine alone."""
    machine = detect() if job.cluster == LOCAL_CLUSTER else None
    gpus = machine if machine is not None and machine.device.kind == "gpu" else None
    engine = engine_of(job)
    refuse([*_refusals(job, gpus), *_ours_alone(job), *engine.refusals(job)])
    if gpus is not None and (job.run.ranks or 1) > gpus.num_devices:
        tell.say(f"note: {job.run.ranks} ranks share {gpus.num_devices} x {gpus.device.name}: each "
                 "has a part of a GPU's memory and waits for the others, which is no faster than "
                 "fewer ranks")
    engine.check_installed(job)


def refuse_what_no_machine_runs(job: Job) -> None:
    """Raises InputError for a job that cannot be executed on any machine, by its file alone."""
    refuse([*_without_requests(job), *_ours_alone(job), *engine_of(job).refusals(job)])


def _without_requests(job: Job) -> Iterator[Mistake]:
    if job.workload.requests is None and job.workload.count is None:
        yield mistake(job, "workload.requests", None,
                      "a run needs files of requests, or {count: N}")


def _ours_alone(job: Job) -> Iterator[Mistake]:
    """Yields keys of a job for another engine that only xgpt's own engine supports."""
    if job.run.engine == OWN_ENGINE:
        return
    if job.run.deterministic:
        yield mistake(job, "run.deterministic", True, f"only with `engine: {OWN_ENGINE}`: others "
                      "do not promise the same sums in every batch")
    if job.run.kv_layout != "auto":
        yield mistake(job, "run.kv_layout", job.run.kv_layout, f"only with `engine: {OWN_ENGINE}`:"
                      " others choose the layout of their cache")


def _refusals(job: Job, gpus: Cluster | None) -> Iterator[Mistake]:
    """`gpus`: this machine's, where the job runs on them."""
    if job.slurm is not None and allocation_here() is None:
        yield mistake(job, "slurm", None, "runs inside an allocation: `xgpt submit` submits the "
                      "job to Slurm; to run it on this machine use --set slurm=null")
    if job.cluster != LOCAL_CLUSTER:
        yield mistake(job, "cluster", job.cluster, "`local`: this version executes on this "
                      "machine's GPUs or, where it has none, cores; `xgpt schedule`, `simulate` "
                      "and `sweep` plan for any cluster")
    if gpus is not None and job.run.deterministic:
        yield mistake(job, "run.deterministic", True, "only on CPU ranks: cuBLAS chooses its "
                      "kernel by the number of rows; for CPU ranks set CUDA_VISIBLE_DEVICES to "
                      "nothing")
    if gpus is not None and job.run.engine not in IN_CHILDREN and (
            why := why_no_torch("gpu")) is not None:
        yield mistake(job, "cluster", job.cluster, f"this machine has GPUs, but {why}: install a "
                      "build with it or, to run on CPU ranks, set CUDA_VISIBLE_DEVICES to nothing")
    if gpus is not None and job.run.engine in IN_CHILDREN and (
            job.run.ranks or 1) > (there := gpus.num_devices * (len(job.run.hosts) or 1)):
        yield mistake(job, "run.ranks", job.run.ranks, f"at most {there}, as many as there are "
                      f"GPUs, with the engine {job.run.engine}")
    most = _RANKS_PER_CORE * usable_cores() * (len(job.run.hosts) or 1)
    if (job.run.ranks or 1) > most:
        where = "the hosts" if job.run.hosts else "this machine"
        yield mistake(job, "run.ranks", job.run.ranks,
                      f"at most {most} on {where}: {most // _RANKS_PER_CORE} cores")
    yield from _without_requests(job)


def check_model(opened: OpenedJob) -> None:
    """Raises InputError for broken or unsupported model files, before anything is measured."""
    files = opened.files
    assert files is not None, "a run needs the model's files"
    if (why := files.spec.planned_only) and opened.job.run.engine != VLLM:
        raise wrong(opened.job.source, "model", opened.job.model,
                    f"one that the engine {opened.job.run.engine} executes: {why} is only planned "
                    f"for; `run: {{engine: {VLLM}}}` runs it with vLLM")
    if opened.job.run.weights == "random" or shape_to_make(files.directory) is not None:
        return
    spare = check_weights(files.directory, files.spec, may_unpickle=opened.job.run.pickles)
    unused = not_used_words(files.spec, files.directory, spare)
    if unused and opened.job.run.engine == OWN_ENGINE:
        opened.tell.say(paragraph(f"note: not used of the model's files: {unused}"))
    TextTokenizer(files.directory)
    eos_ids(files.directory)
    if files.spec.is_encoder_decoder:
        start_token(files.directory)
    if not opened.job.workload.only_encodes:  # which chooses no tokens
        refuse_unsupported_rules(files.directory, opened.job.run.engine)


def make_folder(job: Job) -> None:
    """Makes the job's output folder and withdraws the request to stop that ended an earlier run,
    unless a user made it for this job inside its Slurm allocation. Raises InputError where the
    folder or the table of results cannot be written to."""
    try:
        if job.run.private:  # from here on, in this process and those it starts
            os.umask(PRIVATE_UMASK)
        job.output.mkdir(parents=True, exist_ok=True)
        if job.run.private:
            job.output.chmod(0o777 & ~PRIVATE_UMASK)
        (job.output / ".lock").touch()
        stop = StopRequest(job.output)
        if not is_locked(job.output) and not (stop.is_by_user and job.slurm is not None
                                              and allocation_here() is not None):
            stop.withdraw()
        allowed = why_no_folder(job.output)
    except OSError as cause:
        allowed = f"a folder that can be written to: {cause.strerror}"
    if allowed is not None:
        raise wrong(job.source, "output", str(job.output), allowed)
    # before the run, what would keep its table of results from being written after it
    if (results := job.results) is not None:
        if format_of(results) == "parquet":
            arrow(f"writing {results.name}")
        if (allowed := why_no_file(results)) is not None:
            raise wrong(job.source, "results", str(results), allowed)


def plan_for_ranks(opened: OpenedJob, schedule: Schedule | None, requests: Requests) -> RunPlan:
    """Makes the run plan that ranks read beside the schedule. `requests`: the job's, or those made
    for it. Without a schedule the plan is for no rank, only to compare with an earlier run."""
    job, files = opened.job, opened.files
    assert files is not None, "a run needs the model's files"
    if job.run.weights == "random":
        write_random_model(files.directory, files.spec, None if job.run.engine == OWN_ENGINE else
                           config_of(job.model, files.spec))
    estimate = None if schedule is None else schedule.estimate
    query_tokens, most_input = (0, 0) if estimate is None else (
        estimate.longest_query, estimate.longest_input)
    # limits above every request are left out: a run may go on by another schedule
    queries = query_lengths(requests, opened.problem.default_max_tokens, opened.problem.model)
    if queries is not None:
        query_tokens = min(query_tokens, int(queries.reserves.max(initial=1)))
        most_input = 0 if most_input >= queries.inputs.max(initial=1) else most_input
    run, arrivals = job.run, opened.problem.arrivals
    return RunPlan(
        name=job.name, output=job.output, model_dir=files.directory, model_name=job.model,
        served_by=files.served_by, requests=str(job.workload.requests or "synthetic"),
        requests_digest=requests.digest, model_files=model_files(files.directory),
        model_state=files_state(files.directory),
        weights_whole=weights_whole(files.directory) if run.verify else {},
        is_chat=job.workload.chat, max_tokens=opened.problem.default_max_tokens,
        chat_template_kwargs=dict(job.workload.chat_template_kwargs),
        dtype=opened.problem.dtype, weight_dtype=opened.problem.weight_dtype, seed=run.seed,
        temperature=run.temperature, top_k=run.top_k, top_p=run.top_p, stop=run.stop,
        ignore_eos=run.ignore_eos, threads_per_rank=threads_per_rank(job, opened.problem),
        query_kv_tokens=query_tokens, most_input_tokens=most_input, engine=run.engine,
        started_at=opened.started.timestamp(), arrives=arrivals is not None,
        concurrency=(arrivals and arrivals.concurrency) or 0, routing=job.adjustment.routing,
        mean_output_tokens=opened.problem.lengths.outputs.mean, private=run.private,
        device_kind=opened.problem.cluster.device.kind, sync_s=run.sync_s,
        deadline_s=opened.problem.constraint.limit_s("deadline"), deterministic=run.deterministic,
        kv_in_blocks=run.engine == OWN_ENGINE and estimate is not None and uses_kv_blocks(
            opened, estimate),
        shares_prefixes=estimate is not None and shares_prefixes(opened.problem, estimate),
        has_forms=bool(job.workload.requests and job.workload.requests.terms.form),
        offload=str(job.offload_folder) if estimate is not None and any(
            pool.placement for pool in estimate.all_pools) else "",
        cuda_graphs=run.cuda_graphs, engine_args=dict(run.engine_args),
        engine_python=run.engine_python or "", stall_timeout_s=run.stall_timeout_s,
        engine_version=identity(job) if (identity := engine_of(job).identity) else "",
        stage_model=run.stage_model if run.weights == "checkpoint" else "off")


def requests_of(opened: OpenedJob) -> tuple[Requests, SpoolWriter]:
    """The job's requests and their spool; made up where the job has only a count."""
    problem = opened.problem
    if opened.requests is None:
        assert problem.num_queries is not None, "a workload has requests or a count"
        dealt = dealt_queries(opened.job, problem.lengths)
        return make_synthetic(problem.lengths, problem.num_queries, opened.job.run.seed,
                              problem.model.vocab_size, None if dealt is None else dealt.prefixes)
    assert opened.spool is not None, "a run has its requests at hand"
    return opened.requests, opened.spool


def continued_plan(plan: RunPlan, schedule: Schedule) -> RunPlan | None:
    """Returns `plan` with the request limits of this job's unfinished run, since a new schedule may
    have room for longer ones; None where `schedule` has no room for all that run's requests, and
    `plan` itself where there is no unfinished run."""
    begun = with_earlier_limits(plan)
    if begun is plan or state_left(plan.output) is not State.STOPPED:
        return plan
    # where a schedule holds more than query_kv_tokens, that is the longest request
    holds_longest = plan.query_kv_tokens < schedule.estimate.longest_query
    holds_queries = holds_longest or begun.query_kv_tokens <= plan.query_kv_tokens
    holds_inputs = not plan.most_input_tokens or (  # 0: any input
        0 < begun.most_input_tokens <= plan.most_input_tokens)
    return begun if holds_queries and holds_inputs else None


def with_weight_digests(plan: RunPlan, tell: Teller) -> RunPlan:
    """Returns `plan` with the digests of whole weight files that an unfinished run in its folder
    has, where this command did not read them all."""
    before = saved_model(plan.output)
    if before is None or state_left(plan.output) is not State.STOPPED:
        return plan
    if plan.weights_whole and not before.weights_whole:
        tell.say(paragraph("note: the run in the folder started without `run.verify`, so its "
                           "weights were compared by samples; from now on every byte is compared"))
    return plan if plan.weights_whole else replace(plan, weights_whole=before.weights_whole)


def with_begun_weight_dtype(opened: OpenedJob) -> OpenedJob:
    """Returns the job with the weight type of the run in its folder, where the job leaves that type
    open: a new plan would choose it by the memory that is free now."""
    job, problem = opened.job, opened.problem
    before = saved_model(job.output)
    if before is None or job.run.weight_dtype != "auto" or before.weight_dtype not in (
            open_weight_dtypes(problem, job.run.engine)) or (
            state_left(job.output) not in (State.STOPPED, State.COMPLETE)):
        return opened
    return replace(opened, job=replace(job, run=replace(job.run, weight_dtype=before.weight_dtype)),
                   problem=replace(problem, weight_dtype=before.weight_dtype))


def keep_earlier_results(output: Path, plan: RunPlan, tell: Teller, table: Path | None = None,
              spool: SpoolWriter | None = None) -> bool:
    """Prepares `output` to continue a stopped run of this job, or renames the results of any other.
    Returns whether it is continued. `table`: the job's table of results, if any. `spool`: its
    requests. Raises InputError for a stopped run whose model, prompts or sampling have changed
    since."""
    results, state = output / RESULTS_FILE, state_left(output)
    if state is State.STOPPED:
        _refuse_another_job(output, plan)
        prompts = saved_header(output).get("prompts")
        if spool is not None and prompts not in (None, spool.prompts_digest):
            raise wrong(output, "the prompts", None,
                        "the tokens that the unfinished run in this folder started with. The "
                        "model's tokenizer or chat template now makes other tokens of the same "
                        "requests, as another version of transformers may. Restore it to continue, "
                        "or start again with `xgpt submit --again`, which keeps the answers")
        if (begun := spool_of(output)) is not None:
            _ = begun.prefixes  # raises where they do not fit it
    for name in ("measured.json", METRICS_FILE, "steps.jsonl", ADJUST_FILE, OBSERVED_FILE):
        (output / name).unlink(missing_ok=True)
    if saved_fingerprint(output) == plan.fingerprint and state in (State.NONE, State.STOPPED):
        if (count := answered(results).total) > 0:
            tell.say(f"continuing after the {count} queries an earlier run answered")
        return True
    for path in (results, output / HELD_FILE, *(() if table is None else (table,))):
        if path.is_file() and path.stat().st_size > 0:
            kept = free_path(path, path.stat().st_mtime)
            path.rename(kept)
            sync_folder(output)
            tell.say(f"results of an earlier run kept as {kept.name}")
    return False


def save_requests(opened: OpenedJob, plan: RunPlan, schedule: Schedule, requests: Requests,
                  spool: SpoolWriter, arrival_s: FloatArray | None, *, is_continued: bool) -> bool:
    """Saves the requests that can run, and the forecasts and order of a new run. Returns whether
    there are answers of an earlier one. `arrival_s`: [requests]; a continued run keeps its own."""
    problem, tell = opened.problem, opened.tell
    is_continued = is_continued and answered(plan.output / RESULTS_FILE).total > 0
    if is_continued and (begun := spool_of(plan.output)) and begun.arrival_s is not None:
        arrival_s = begun.arrival_s
    rows = save_runnable(requests, spool, plan, problem.model, arrival_s)
    queries = query_lengths(requests, problem.default_max_tokens, problem.model)
    assert queries is not None, "a run tokenises its requests"
    if note := keep_forecasts(plan.output, problem, queries, rows, is_continued=is_continued):
        tell.say(paragraph(note))
    if not is_continued:
        own = with_forecasts(problem.queries or queries, problem,
                             problem.adjustment.admission.forecast)
        order = schedule.order if problem.arrivals is None else "input"  # that of the arrivals
        save_order(plan.output, run_order(order, schedule.window, own.take(rows), problem.seed))
    return is_continued


def _refuse_another_job(output: Path, plan: RunPlan) -> None:
    """Raises InputError where the folder's run is of a job with other answers, which one file of
    results must not mix."""
    before = saved_model(output)
    changed = before.changed(plan.model_files, plan.weights_whole) if before else []
    if changed:
        raise wrong(plan.model_dir, ", ".join(changed), None,
                    f"the files that the unfinished run in {output} started with: these have "
                    "changed since. Restore them to continue, or start again with `--again`, which "
                    "keeps the answers")
    if changed := [_IN_WORDS[key] for key in saved_differences(plan) if key in _IN_WORDS]:
        raise wrong(output, ", ".join(changed), None,
                    "changed since the run in this folder started, and it is not finished. Restore "
                    "it to continue, or start again with `xgpt submit --again`, which keeps the "
                    "answers")


def write_job(opened: OpenedJob) -> None:
    """Writes the job's keys, and its identity (`asked`), to job.json."""
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
