"""The commands `xgpt schedule`, `explain`, `export` and `simulate`."""

from dataclasses import asdict
from pathlib import Path

import click

from xgpt.app.compare_systems import compare_systems, systems_screen
from xgpt.app.opened_job import in_order_of, open_file, open_job
from xgpt.app.plan_analysis import analyze_plan
from xgpt.app.remote_jobs import FORMATS
from xgpt.app.remote_jobs import export as export_job
from xgpt.app.schedule import default_horizon, job_with_times, plan_job
from xgpt.app.simulate import simulate_job, simulate_service
from xgpt.cli.options import (
    check_writable,
    job_arguments,
    print_json,
    run_arguments,
    verbose_option,
    with_seconds,
    within_seconds,
)
from xgpt.cli.terminal import Terminal, say, show
from xgpt.core.errors import InfeasibleError, MissingExtraError, nearest, wrong
from xgpt.core.schedule_file import load_schedule, plain, save_schedule, to_json
from xgpt.core.system.whole_file import read_object, write_atomically
from xgpt.core.systems import SYSTEMS
from xgpt.core.units import parse_share
from xgpt.job.job import LOCAL_CLUSTER, Job
from xgpt.job.job_file import load_job
from xgpt.launch.exports import vllm_command
from xgpt.report.chart import SUFFIXES, can_draw
from xgpt.report.figures import predicted_of
from xgpt.report.table import figures_of, schedule_details
from xgpt.run_folder.files import METRICS_FILE, newest_run_folder
from xscheduler.planner import Horizon, PlanOptions


def _share(_context: click.Context, _parameter: click.Parameter, text: str | None) -> float | None:
    if text is None:
        return None
    try:
        share = parse_share(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no share, such as 1% or 0.01") from None
    if not 0 <= share < 1:
        raise click.BadParameter(f"{text!r} is not between 0% and 100%")
    return share


def _systems(_context: click.Context, _parameter: click.Parameter,
             text: str | None) -> tuple[str, ...]:
    names = tuple(text.split(",")) if text else ()
    for name in names:
        if name not in SYSTEMS:
            raise click.BadParameter(nearest(name, [*SYSTEMS]))
    return names


def _times_of(job: Job) -> str:
    if job.profile is not None:
        return f"the profile {job.profile.name}"
    # on this machine they are measured with the job's engine
    return job.run.engine if job.cluster == LOCAL_CLUSTER else job.plan_engine


def _batch_files(job: Job) -> tuple[Path, Path]:
    """Paths of the requests and of the answers of an offline vLLM run: the job's file of requests
    if it is one of JSON lines."""
    paths = job.workload.requests.paths if job.workload.requests is not None else ()
    is_lines = len(paths) == 1 and paths[0].suffix == ".jsonl"
    return (paths[0] if is_lines else Path("requests.jsonl")), job.output / "vllm.jsonl"


@click.command()
@job_arguments
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Write the schedule (with --from, the recommended one) to FILE.")
@click.option("--price", "with_price", is_flag=True,
              help="Show the gain from 10 % more latency, one more GPU or node, or 10 % more "
              "memory.")
@click.option("--drift", "with_drift", is_flag=True,
              help="Sensitivity to output-length drift (takes a minute or two).")
@click.option("--prefixes", "with_prefixes", is_flag=True,
              help="Show what shared prefixes save, by the tokens of them that are kept.")
@click.option("--from", "from_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Compare with a deployed schedule: keep it, adjust it, or deploy another.")
@click.option("--gap", metavar="SHARE", callback=_share,
              show_default="until nothing better is expected",
              help="Optimality gap at which to stop.")
@click.option("--max-nodes", type=click.IntRange(min=1), metavar="N",
              help="Simulate at most N schedules in each round of the search.")
@click.option("--export", "form", type=click.Choice(["vllm", "vllm-serve"]),
              help="Print a script that runs vLLM by itself, near the schedule: `vllm` runs a file "
              "of OpenAI batch requests offline, `vllm-serve` starts a server.")
@click.option("--verbose", is_flag=True,
              help="Also print alternatives, bounds and stages, as `xgpt explain` does.")
@within_seconds
@click.option("--horizon", type=click.Choice(("job", "steady")),
              help="job: for the requests of the file (default if it has any). steady: for a job "
              "that never ends.")
def schedule(job_file: Path, overrides: tuple[str, ...], as_json: bool, out: Path | None,
             with_price: bool, with_drift: bool, with_prefixes: bool, from_file: Path | None,
             gap: float | None, max_nodes: int | None, max_seconds: float | None,
             horizon: Horizon | None, form: str | None, verbose: bool) -> None:
    """Find the schedule with the highest throughput under the job's latency limit."""
    check_writable(out, "--out")
    deployed = None if from_file is None else load_schedule(from_file)
    job = load_job(job_file, with_seconds(overrides, max_seconds))
    options = PlanOptions(gap=gap, max_nodes=max_nodes, horizon=horizon or default_horizon(job))
    opened = open_job(job, Terminal(is_verbose=verbose),
                      "lengths" if options.horizon == "job" else "shape")
    if opened.problem.arrivals is not None and (
            with_price or with_drift or with_prefixes or deployed is not None):
        raise click.UsageError("--price, --drift, --prefixes and --from are for batch jobs, which "
                               "have no workload.arrivals")
    answers = analyze_plan(opened, options, with_price=with_price, with_drift=with_drift,
                           with_prefixes=with_prefixes, deployed=deployed)
    if out is not None and (recommended := answers.recommended) is not None:
        save_schedule(recommended, out)
        say(f"schedule written to {out}")
    if not as_json and (text := str(answers)):
        show(text, err=form is not None)  # so that standard output is the script alone
        if verbose and answers.plan is not None:
            show(f"\n{answers.plan.details}", err=form is not None)
    if answers.infeasible is not None:
        refusal = InfeasibleError(f"{answers.infeasible}{answers.hint}")
        refusal.details = plain(answers.to_dict())
        raise refusal
    exported = None
    if form is not None and (found := answers.recommended) is not None:
        exported = vllm_command(found, answers.opened.problem, model=job.model,
                                times_of=_times_of(job),
                                files=_batch_files(job) if form == "vllm" else None)
    if as_json:
        also = {} if exported is None else {"export": plain(asdict(exported))}
        print_json(answers.to_dict() | also)
    elif exported is not None:
        show(str(exported))


@click.command()
@run_arguments
@within_seconds
def explain(where: Path | None, overrides: tuple[str, ...], as_json: bool,
            max_seconds: float | None) -> None:
    """Show why a job or a run has its schedule: alternatives, bounds, stages."""
    where = newest_run_folder() if where is None else where
    if where.is_dir():
        found = load_schedule(where / "schedule.json")
        of_job = predicted_of(read_object(where / METRICS_FILE))
    else:
        job = load_job(where, with_seconds(overrides, max_seconds))
        plan = plan_job(open_job(job, Terminal(), "lengths"))
        found, of_job = plan.schedule, figures_of(plan.prediction)
    if as_json:
        print_json(to_json(found))
    else:
        show(schedule_details(found, of_job))


@click.command()
@job_arguments
@click.option("--to", required=True, type=click.Choice(list(FORMATS)),
              help="Platform: a Kubernetes JobSet, or a SkyPilot task.")
@click.option("--image", required=True, help="Container image with xgpt.")
@click.option("--claim", default="xgpt", show_default=True,
              help="JobSet: persistent volume claim with the job file's folder.")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Write to FILE instead of printing.")
def export(job_file: Path, overrides: tuple[str, ...], as_json: bool, to: str, image: str,
           claim: str, out: Path | None) -> None:
    """Print the job as a Kubernetes JobSet or a SkyPilot task for the nodes of its schedule."""
    check_writable(out, "--out")
    text = export_job(load_job(job_file, overrides), overrides, Terminal(), to=to, image=image,
                      claim=claim)
    if out is not None:
        write_atomically(out, text)
    if as_json:
        print_json({"to": to, "text": text, "file": out})
    elif out is None:
        show(text, nl=False)


@click.command()
@job_arguments
@click.option("--schedule", "schedule_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Schedule to simulate (default: the control variables of the job's "
              "`schedule:`).")
@click.option("--timeline", "timeline_file", type=click.Path(path_type=Path), metavar="FILE",
              help="Draw the steady state to FILE (.html, .svg, .png or .pdf) and write "
              "FILE.trace.json.gz for Perfetto.")
@click.option("--systems", metavar="NAMES", callback=_systems,
              help=f"Compare systems of static batches with RRA and Sarathi instead: some of "
              f"{','.join(SYSTEMS)}.")
@within_seconds
@verbose_option
def simulate(job_file: Path, overrides: tuple[str, ...], as_json: bool,
             schedule_file: Path | None, timeline_file: Path | None, systems: tuple[str, ...],
             max_seconds: float | None, is_verbose: bool) -> None:
    """Estimate throughput, latency and memory of a schedule, and check them by a simulated run."""
    if systems and (schedule_file or timeline_file):
        raise click.UsageError("--systems compares schedules of its own: leave out --schedule and "
                               "--timeline")
    pictures = [] if timeline_file is None else _picture_files(timeline_file)
    for path in pictures if timeline_file is None else [timeline_file, *pictures]:
        check_writable(path, "--timeline")
    schedule = None if schedule_file is None else load_schedule(schedule_file)
    given = None if schedule is None else schedule.estimate
    opened, timing = job_with_times(open_file(
        job_file, with_seconds(overrides, max_seconds), Terminal(is_verbose=is_verbose),
        "lengths" if systems else "shape"), given)
    if systems:
        compared = compare_systems(opened, timing, systems)
        if as_json:
            print_json({"systems": compared})
        else:
            show(systems_screen(opened.problem, compared))
        return
    if opened.problem.arrivals is not None:
        if timeline_file is not None:
            raise click.UsageError("--timeline draws the steady state of a batch job")
        found = simulate_service(opened, timing, schedule)
        print_json(to_json(found)) if as_json else show(schedule_details(found))
        return
    simulation = simulate_job(opened if schedule is None else in_order_of(opened, schedule), timing,
                              given)
    if pictures:
        simulation.draw(*pictures)
    if as_json:
        print_json(simulation.to_dict())
        return
    show(str(simulation))
    if is_verbose:
        show(f"\n{simulation.details}")
    for path in pictures:
        say(f"written: {path}")


def _picture_files(path: Path) -> list[Path]:
    """Paths of the picture and of the trace of `--timeline FILE`: FILE.html where the name has no
    suffix, and FILE.trace.json.gz. Raises InputError for an unknown suffix."""
    if path.suffix not in ("", ".html", *SUFFIXES):
        raise wrong("command line", "--timeline", str(path),
                    f"a name that ends in .html, {', '.join(SUFFIXES)}, or has no ending")
    if path.suffix in SUFFIXES and not can_draw():
        raise MissingExtraError("matplotlib", "report", f"drawing a {path.suffix} (a name that "
                                "ends in .html needs jinja2 alone)")
    return [path.with_suffix(path.suffix or ".html"), path.with_suffix(".trace.json.gz")]
