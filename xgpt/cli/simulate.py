"""`xgpt simulate`: a given schedule's Estimate by closed form, and the replay that checks it."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from pathlib import Path

import click
import numpy as np

from xgpt.cli.options import job_arguments, print_json
from xgpt.cli.session import Session, open_session, timing_of
from xgpt.errors import InputError, Mistake
from xgpt.report.table import estimate_table
from xgpt.schedule import Estimate, load_schedule
from xprofiler.interpolation import REFUSED_BEYOND
from xsimulator.policies.rra import Rra, RraConfig
from xsimulator.replay.predict import predict_job

_REPLAYED_QUERIES = 4000  # of a job without a number of its own: enough to be near steady state


@click.command()
@job_arguments
@click.option("--schedule", "schedule_file", type=click.Path(path_type=Path), metavar="FILE",
              help="A schedule.json; default: the control variables of the job's `schedule:`.")
def simulate(job_file: Path, overrides: tuple[str, ...], as_json: bool,
             schedule_file: Path | None) -> None:
    """Estimate a given schedule: throughput, latency, memory; replayed as a check."""
    session = open_session(job_file, overrides, fetch=False)
    timing = timing_of(session)
    config = _configuration(session, schedule_file)
    rra = Rra(session.problem, timing, padded=timing.is_padded)
    found = rra.estimate(config)
    if math.isinf(found.latency_s):
        raise InputError([Mistake(
            file=str(session.job.source), line=None, key="schedule", value=None,
            allowed=f"within {REFUSED_BEYOND:g} times the sizes that the profile measured: {words}")
            for words in rra.beyond(config, REFUSED_BEYOND)])
    count = session.problem.num_queries or _REPLAYED_QUERIES
    replayed = predict_job(session.problem, timing, found, count,
                           np.random.default_rng(session.job.run.seed),
                           inputs=session.input_lengths, padded=timing.is_padded)
    if as_json:
        print_json({**asdict(found), "replay": {"queries": count, **asdict(replayed)}})
        return
    click.echo(f"times: {timing.provenance()}")
    click.echo(estimate_table(found, session.problem.constraint.quantile))
    click.echo(f"replay of {count} queries, start and end included: {replayed.throughput_qps:.4g} "
               f"queries/s, {replayed.output_tokens_per_s:.4g} tokens/s,\n"
               f"  latency p50 {replayed.latency_p50_s:.3g} s, p99 {replayed.latency_p99_s:.3g} s, "
               f"wall {replayed.wall_s:.4g} s")


def _configuration(session: Session, schedule_file: Path | None) -> RraConfig:
    if schedule_file is not None:
        given: Estimate = load_schedule(schedule_file).estimate
        return RraConfig(encode_batch=given.encode_batch, tp_gpus=given.tp_gpus,
                             decode_iterations=given.decode_iterations, tp_degree=given.tp_degree)
    fixed = replace(session.problem.fixed, tp_degree=session.problem.fixed.tp_degree or 1)
    needed = ("encode_batch", "decode_iterations")
    missing = [name for name in needed if getattr(fixed, name) is None]
    if fixed.tp_degree != 1 and fixed.tp_gpus is None:
        missing.append("tp_gpus")
    if missing:
        raise InputError([Mistake(
            file=str(session.job.source), line=None, key=f"schedule.{name}", value=None,
            allowed="simulate needs it (or --schedule FILE, from `xgpt schedule --out FILE`)")
            for name in missing])
    assert fixed.encode_batch is not None and fixed.decode_iterations is not None
    return RraConfig(encode_batch=fixed.encode_batch, tp_degree=fixed.tp_degree or 1,
                         decode_iterations=fixed.decode_iterations, tp_gpus=fixed.tp_gpus or 0)
