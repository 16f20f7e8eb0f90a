"""What keeps a job from being run: found before anything is planned or measured for it."""

import os
from collections.abc import Iterator
from pathlib import Path

from xgpt.app.model_check import not_used_words
from xgpt.app.opened import OpenedJob
from xgpt.app.telling import Teller
from xgpt.core.cluster import Cluster
from xgpt.core.engines import ONE_PROCESS, OWN_ENGINE, VLLM
from xgpt.core.errors import InputError, Mistake, wrong
from xgpt.core.job import Job
from xgpt.core.local import detect, usable_cores, why_no_torch
from xgpt.core.request_files.files import format_of
from xgpt.core.request_files.parquet import arrow
from xgpt.core.run_section import LOCAL_CLUSTER
from xgpt.core.whole_file import why_no_file, why_no_folder
from xgpt.launch.launcher import allocation_here
from xgpt.report.table import paragraph
from xrunner.checkpoint.source import shape_to_make
from xrunner.checkpoint.tensors import check_weights
from xrunner.engines.engine import engine_of, mistake
from xrunner.io.generation import refuse_given_tokens
from xrunner.io.lock import is_locked
from xrunner.io.stop import StopRequest
from xrunner.io.tokenizer import TextTokenizer, eos_ids, start_token
from xrunner.plan import OWN_ALONE

_RANKS_PER_CORE = 4  # more would only take turns, and each loads its own libraries


def refuse_what_cannot_run(job: Job, tell: Teller) -> None:
    """Raises InputError for a job that this version plans, but does not execute, by its file and
    this machine alone."""
    machine = detect() if job.cluster == LOCAL_CLUSTER else None
    gpus = machine if machine is not None and machine.device.kind == "gpu" else None
    engine = engine_of(job)
    mistakes = [*_refusals(job, gpus), *_ours_alone(job), *engine.refusals(job)]
    if mistakes:
        raise InputError(mistakes)
    if gpus is not None and (job.run.ranks or 1) > gpus.num_devices:
        tell.say(f"note: {job.run.ranks} ranks share {gpus.num_devices} x {gpus.device.name}: each "
                 "has a part of a GPU's memory and waits for the others' turns, which is no faster "
                 "than fewer ranks")
    engine.check_installed(job)


def refuse_what_no_machine_runs(job: Job) -> None:
    """Raises InputError for a job that is executed nowhere, by its file alone."""
    mistakes = [*_without_requests(job), *_ours_alone(job), *engine_of(job).refusals(job)]
    if mistakes:
        raise InputError(mistakes)


def _without_requests(job: Job) -> Iterator[Mistake]:
    if job.workload.requests is None and job.workload.count is None:
        yield mistake(job, "workload.requests", None,
                      "a run needs files of requests, or {count: N}")


def _ours_alone(job: Job) -> Iterator[Mistake]:
    """What is asked of another engine and can only be had of ours."""
    if job.run.engine == OWN_ENGINE:
        return
    if job.run.deterministic:
        yield mistake(job, "run.deterministic", True, f"only with `engine: {OWN_ENGINE}`: what "
                      "another's products depend on is not known")
    if job.run.kv_layout != "auto":
        yield mistake(job, "run.kv_layout", job.run.kv_layout, f"only with `engine: {OWN_ENGINE}`:"
                      " another lays out its cache itself")


def _refusals(job: Job, gpus: Cluster | None) -> Iterator[Mistake]:
    """gpus: this machine's, where the job is to run on them."""
    if job.slurm is not None and allocation_here() is None:
        yield mistake(job, "slurm", None, "runs inside an allocation: `xgpt submit` hands the job "
                      "in; to run it on this machine use --set slurm=null")
    if job.cluster != LOCAL_CLUSTER:
        yield mistake(job, "cluster", job.cluster, "`local`: this version executes on this "
                      "machine's GPUs or, where it has none, cores; `xgpt schedule`, `simulate` "
                      "and `sweep` plan for any cluster")
    if gpus is not None and job.run.deterministic:
        yield mistake(job, "run.deterministic", True, "on CPU ranks alone: cuBLAS chooses by the "
                      "number of rows; to run on those set CUDA_VISIBLE_DEVICES to nothing")
    if gpus is not None and (why := why_no_torch("gpu")) is not None:
        yield mistake(job, "cluster", job.cluster, f"this machine has GPUs, but {why}: install a "
                      "build with it or, to run on CPU ranks, set CUDA_VISIBLE_DEVICES to nothing")
    if gpus is not None and job.run.engine in ONE_PROCESS and (
            job.run.ranks or 1) > gpus.num_devices:
        yield mistake(job, "run.ranks", job.run.ranks, f"at most {gpus.num_devices}, as many as "
                      f"there are GPUs, with the engine {job.run.engine}")
    most = _RANKS_PER_CORE * usable_cores() * (len(job.run.hosts) or 1)
    if (job.run.ranks or 1) > most:
        where = "the hosts" if job.run.hosts else "this machine"
        yield mistake(job, "run.ranks", job.run.ranks,
                      f"at most {most} on {where}: {most // _RANKS_PER_CORE} cores")
    yield from _without_requests(job)


def check_model(opened: OpenedJob) -> None:
    """Raises InputError where the model's files are broken, before anything is measured for it."""
    files = opened.files
    assert files is not None, "a run needs the model's files"
    if (why := files.spec.planned_only) and opened.job.run.engine != VLLM:
        raise wrong(opened.job.source, "model", opened.job.model,
                    f"one that is executed: {why} is planned for and not executed by the engine "
                    f"{opened.job.run.engine}; `run: {{engine: {VLLM}}}` hands it to vLLM")
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
        refuse_given_tokens(files.directory, opened.job.run.engine)


def make_folder(job: Job) -> None:
    """The job's output folder, without the request to stop that ended an earlier run; but of a job
    inside an allocation a user may ask as soon as it has one. Raises InputError where the folder
    cannot be written to."""
    try:
        if job.run.private:  # from here on, in this process and those it starts
            os.umask(OWN_ALONE)
        job.output.mkdir(parents=True, exist_ok=True)
        if job.run.private:
            job.output.chmod(0o777 & ~OWN_ALONE)
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
    if job.results is not None:
        _make_place(job, job.results)


def _make_place(job: Job, results: Path) -> None:
    """Finds before the run what would keep its table of results from being written after it."""
    if format_of(results) == "parquet":
        arrow(f"writing {results.name}")
    if (allowed := why_no_file(results)) is not None:
        raise wrong(job.source, "results", str(results), allowed)
