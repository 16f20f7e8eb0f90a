"""`xgpt simulate`: a given schedule's Estimate by closed form, and the replay that checks it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from xgpt.app.replays import names_of, replay_steady, steady_timeline
from xgpt.app.session import Session, find, open_session, timing_of
from xgpt.cli.options import job_arguments, print_json, writable_file
from xgpt.cli.terminal import Terminal, say
from xgpt.core.errors import InfeasibleError, InputError, Mistake
from xgpt.core.job import FixedSchedule
from xgpt.core.policies import baselines, searched_policies
from xgpt.core.schedule import Estimate
from xgpt.core.schedule_file import estimate_keys, load_schedule
from xgpt.report.replay_table import ReplayFigures, policies_table, replay_table
from xgpt.report.table import estimate_table
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import TimingSource
from xscheduler.search import find_schedule
from xsimulator.policies import make_config, make_policy
from xsimulator.replay.perfetto import write_trace
from xsimulator.replay.records import ReplayResult
from xsimulator.replay.steady import SteadyFigures


@click.command()
@job_arguments
@click.option("--schedule", "schedule_file", type=click.Path(path_type=Path), metavar="FILE",
              help="A schedule.json; default: the control variables of the job's `schedule:`.")
@click.option("--timeline", "timeline_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Draw the replay's steady state: FILE.svg, and FILE.trace.json.gz for Perfetto.")
@click.option("--baselines", is_flag=True,
              help="Show the best of RRA, WAA, FT, DSI, ORCA, vLLM and Sarathi within the bound.")
def simulate(job_file: Path, overrides: tuple[str, ...], as_json: bool,
             schedule_file: Path | None, timeline_file: Path | None, baselines: bool) -> None:
    """Estimate a given schedule: throughput, latency, memory; replayed as a check."""
    if timeline_file is not None:
        for path in (timeline_file, *_picture_files(timeline_file)):
            writable_file(path, "--timeline")
    session = open_session(job_file, overrides, Terminal(), fetch=False)
    timing = timing_of(session)
    found = _estimate(session, timing, schedule_file)
    result, steady = replay_steady(session, timing, found,
                                   session.problem.num_queries)
    figures = _figures(result, steady)
    others = _baselines(session, timing, found.policy) if baselines else {}
    files = _draw(session, found, result, _picture_files(timeline_file))
    if as_json:
        print_json({**estimate_keys(found), "replay": asdict(figures),
                    **({"baselines": {name: None if e is None else estimate_keys(e)
                                      for name, e in others.items()}} if baselines else {})})
        return
    constraint = session.problem.constraint
    click.echo(f"times: {timing.provenance()}")
    click.echo(estimate_table(found, constraint))
    click.echo(replay_table(found, figures))
    if baselines:
        click.echo("\n" + policies_table([(found.policy, found), *others.items()], constraint))
    for path in files:
        say(f"written: {path}")


def _estimate(session: Session, timing: TimingSource, schedule_file: Path | None) -> Estimate:
    fixed, problem = session.problem.fixed, session.problem
    given = load_schedule(schedule_file).estimate if schedule_file is not None else None
    if given is None and fixed == FixedSchedule():
        return find(session, timing).estimate
    name = given.policy if given is not None else fixed.policy or "rra"
    source = given if given is not None else replace(fixed, tp_degree=fixed.tp_degree or 1)
    config, missing = make_config(name, source)
    if given is None and fixed.tp_degree not in (None, 1) and fixed.tp_gpus is None:
        missing.append("tp_gpus")
    policy: Any = make_policy(name, problem, timing)
    if missing and given is None and replace(fixed, policy=None) == FixedSchedule():
        return _best_or_refused(session, timing, name)
    if missing:
        raise InputError([Mistake(
            file=str(session.job.source), line=None, key=f"schedule.{variable}", value=None,
            allowed="simulate needs it where others are given (without any, the best is found)")
            for variable in missing])
    estimate: Estimate = policy.estimate(config)
    if math.isinf(estimate.figures.latency_s):
        words = policy.beyond(config, REFUSED_BEYOND) if hasattr(policy, "beyond") else [
            "a size of this schedule lies beyond that"]
        raise InputError([Mistake(
            file=str(session.job.source), line=None, key="schedule", value=None,
            allowed=f"within {REFUSED_BEYOND:g} times the sizes that the profile measured: {why}")
            for why in words])
    return estimate


def _figures(result: ReplayResult, steady: SteadyFigures | None) -> ReplayFigures:
    p50, p99 = np.quantile(result.latency_s, [0.5, 0.99])
    count, wall_s = len(result.latency_s), result.makespan_s
    return ReplayFigures(
        queries=count, throughput_qps=count / wall_s, wall_s=wall_s,
        output_tokens_per_s=float(result.output_tokens.sum()) / wall_s,
        latency_p50_s=float(p50), latency_p99_s=float(p99),
        steady_throughput_qps=steady.throughput_qps if steady else None,
        steady_latency_s=steady.latency_s if steady and not math.isnan(steady.latency_s) else None,
        utilisation=tuple((steady.utilisation if steady else result.utilisation()).tolist()),
        kv_peak_tokens=max(int(pool.memory_tokens.max(initial=0)) for pool in result.pools),
        preemptions=result.preemptions)


def _baselines(session: Session, timing: TimingSource,
               shown: str) -> dict[str, Estimate | None]:
    """The best of every policy, but for the searched one that is shown already."""
    found = {}
    for name in (*(name for name in searched_policies() if name != shown), *baselines()):
        say(f"looking for the best {name} ...")
        found[name] = _best(session, timing, name)
    return found


def _best_or_refused(session: Session, timing: TimingSource, name: str) -> Estimate:
    found = _best(session, timing, name)
    if found is None:
        bound_s = session.problem.constraint.latency_s
        raise InputError([Mistake(
            file=str(session.job.source), line=None, key="constraint.latency_s", value=bound_s,
            allowed=f"no configuration of {name} fits and keeps it")])
    return found


def _best(session: Session, timing: TimingSource, name: str) -> Estimate | None:
    """The best within the bound, RRA's and WAA's by the search, baselines' by their grids; without
    a margin, so that all are measured alike."""
    problem = session.problem
    if name in searched_policies():
        try:
            return find_schedule(replace(problem, fixed=FixedSchedule(policy=name)),
                                 timing).estimate
        except InfeasibleError:
            return None
    from xscheduler.spaces.grid import best

    policy: Any = make_policy(name, problem, timing)
    found: Estimate | None = best(policy, problem.constraint.latency_s)
    return found


def _picture_files(path: Path | None) -> list[Path]:
    """[picture, trace] of `--timeline FILE`: FILE.svg and FILE.trace.json.gz, whatever dots FILE
    has."""
    if path is None:
        return []
    stem = path.name.removesuffix(".svg")
    return [path.parent / f"{stem}.svg", path.parent / f"{stem}.trace.json.gz"]


def _draw(session: Session, estimate: Estimate, result: ReplayResult,
          files: Sequence[Path]) -> Sequence[Path]:
    """The steady state as SVG, the whole replay as a trace."""
    if files:
        picture, trace = files
        steady_timeline(session, estimate, result).write(picture)
        write_trace(result, trace, names_of(session, estimate))
    return files
