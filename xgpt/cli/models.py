"""The commands `xgpt models` and `xgpt doctor`."""

import math
import os
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from xgpt.app.doctor import Remedy, compare_on_gpu, examine, examine_nodes, remedies
from xgpt.app.models import UnsupportedModel, check_model_named, of_own_loops
from xgpt.cli.options import JOB_FILE, job_options, json_option, print_json, verbose_option
from xgpt.cli.terminal import show
from xgpt.core import catalog
from xgpt.core.catalog.releases import engine_rows
from xgpt.core.errors import XgptError
from xgpt.core.units import format_bytes
from xgpt.job.job_file import load_job
from xgpt.report.table import fact, paragraph, shown_width, table


@click.command()
@click.option("--check", "checked", metavar="DIR|ID",
              help="Check one model: a folder, a catalog name or a hub id.")
@click.option("--accuracy", is_flag=True,
              help="Show the errors of computed times, by GPU and engine.")
@click.option("--measured", type=click.Path(path_type=Path, exists=True, dir_okay=False),
              metavar="FILE.csv", help="With --accuracy: also show them for closed loops that you "
              "measured (docs/accuracy.md).")
@json_option
@verbose_option
def models(checked: str | None, accuracy: bool, measured: Path | None, as_json: bool,
           is_verbose: bool) -> None:
    """List the catalog: models, devices, clusters and tasks."""
    if (checked is not None and accuracy) or (measured is not None and not accuracy):
        raise click.UsageError("--accuracy goes without --check, and --measured with --accuracy")
    if accuracy:
        _accuracy(measured, as_json)
        return
    if checked is not None:
        _check(checked, as_json)
        return
    if as_json:
        print_json({
            "models": {n: catalog.model(n) for n in catalog.names("model")},
            "devices": {n: catalog.device(n) for n in catalog.names("device")},
            "clusters": {n: catalog.cluster(n) for n in catalog.names("cluster")},
            "tasks": {n: catalog.task_row(n) for n in catalog.names("task")},
            "run": {"models": {n: catalog.run_of("model", n) for n in catalog.names("model")},
                    "devices": {n: catalog.run_of("device", n) for n in catalog.names("device")}}})
        return
    show(_tables() if is_verbose else _names())


def _names() -> str:
    """The text of all catalog names, those that xgpt has run first."""
    rows = list[tuple[str, Sequence[str]]]()
    for kind in ("model", "device"):
        names = catalog.names(kind)
        run = [name for name in names if catalog.run_of(kind, name) != "planned only"]
        rows += [(f"{kind}s, run", run), ("planned", [one for one in names if one not in run])]
    rows += [("clusters", catalog.names("cluster")), ("tasks", catalog.names("task"))]
    return "\n".join([*(fact(label, ", ".join(names)) for label, names in rows),
                      "Sizes and links: xgpt models --verbose"])


def _check(name: str, as_json: bool) -> None:
    check = check_model_named(name)
    if not as_json:
        show(str(check))
    if not check.is_planned:
        raise UnsupportedModel(check)
    if as_json:
        print_json(check.to_dict())


def _accuracy(measured: Path | None, as_json: bool) -> None:
    own = None if measured is None else of_own_loops(measured)
    found = catalog.accuracy()
    if as_json:
        print_json({**found, "engines": engine_rows(), "measured": own})
        return
    if own is not None:
        show(f"{measured}: computed times against yours\n{_errors(own)}\n")
    engines = table(("engine (plan.engine)", "releases", "published", "cases", "off in the mean"), [
        (str(row["engine"]), ", ".join(row["releases"]).replace("+", " and later"), row["date"],
         f"{row['cases']:,}", "never compared" if row["error"] is None else f"{row['error']:.1%}")
        for row in engine_rows()], right=(3, 4))
    show(f"engines that times are computed for, by release\n{engines}\n")
    show(f"computed times of requests, by what was measured\n{_levels(found)}\n\n" + paragraph(
        "Each group was predicted by constants fitted without it. left out: mean of |computed / "
        "measured - 1|; fitted: with them; 90%: measured over computed time that so many runs do "
        "not exceed, which is the margin at that confidence.") + "\n")
    show(f"computed times against published measurements\n{_errors(found)}\n\n" + paragraph(
        "mean and P90: of |computed / measured - 1|; bias: below 0 where computed times are too "
        "short. A GPU or engine without a row was never compared (docs/accuracy.md)."))


def _levels(found: Mapping[str, Any]) -> str:
    """The tables of the levels of doubt, and of promised and kept confidences."""
    chances = [chance for chance, _ in next(iter(found["levels"].values()))["quantiles"]]
    shown = [f"{chance:.0%}" for chance in chances]
    levels = table(("level", "runs", "fitted", "left out", "bias", *shown), [
        (name, f"{row['cases']:,}", f"{row['fitted']:.1%}", f"{row['mean']:.1%}",
         f"{row['bias']:+.0%}", *(f"{math.exp(log):.2f}" for _, log in row["quantiles"]))
        for name, row in found["levels"].items()], right=range(1, 5 + len(shown)))
    kept = table(("kept where left out was", *shown), [
        (name, *(f"{share:.0%}" for _, share in rows)) for name, rows in found["kept"].items()],
        right=range(1, 1 + len(shown)))
    return f"{levels}\n\n{kept}"


def _errors(found: Mapping[str, Any]) -> str:
    """The table of errors by GPU, engine and operator, and lines on the choices made with computed
    times."""
    rows = sorted(found["rows"], key=lambda row: (row["gpu"], row["engine"]))
    lines = [table(("GPU", "engine", "of", "cases", "mean", "bias", "P90"), [
        (row["gpu"], row["engine"], row["operator"] + f", {row['left_out']} left out" * bool(
            row["left_out"]), f"{row['cases']:,}", f"{row['mean']:.1%}", f"{row['bias']:+.0%}",
         f"{row['p90']:.1%}")
        for row in rows if row["left_out"] in ("", "shape")], right=range(3, 7))]
    lines += [paragraph(_chosen(one)) for one in found["choosers"]]
    return "\n".join(lines)


def _chosen(one: Mapping[str, Any]) -> str:
    of = f", {one['left_out']} left out" if one["left_out"] else ""
    return (f"the fastest configuration within a latency limit{of}, chosen {one['cases']} times, "
            f"margin {one['margin']}: none found {one['none']:.1%}, limit missed "
            f"{one['broken']:.1%}, throughput lost {one['regret']:.1%}")


def _tables() -> str:
    """The text of the catalog's tables."""
    devices = catalog.names("device")
    known = ", ".join(name if catalog.run_of("device", name) != "yes" else f"{name} (run)"
                      for name in devices)
    return "\n\n".join((
        table(("model", "layers", "hidden", "heads/KV", "params", "run"),
              [_model(name) for name in catalog.names("model")], right=range(1, 5)),
        paragraph("run: the weights with which xgpt has executed a model of this size. Tests "
                  "execute small models of every family but gpt-oss, which only vLLM executes."),
        table(("cluster", "nodes x devices", "memory", "in a node", "between nodes"),
              [*map(_cluster, catalog.names("cluster")),
               ("local", "this machine's", "detected", "", "")], right=(2,)),
        textwrap.fill(f"devices, for clusters such as 8xH100 (planned only, except those marked): "
                      f"{known}", shown_width(),
                      subsequent_indent="  ", break_on_hyphens=False),
        table(("task", "tokens: mean, std, max", "input", "output"),
              [_task(name) for name in catalog.names("task")], right=())))


def _model(name: str) -> tuple[str, ...]:
    m = catalog.model(name)
    layers = f"{m.num_encoder_layers}+" if m.is_encoder_decoder else ""
    return (name, f"{layers}{m.num_layers}", str(m.hidden_size), f"{m.num_heads}/{m.kv_heads}",
            f"{m.num_params / 1e9:.2f} B", catalog.run_of("model", name))


def _cluster(name: str) -> tuple[str, ...]:
    c = catalog.cluster(name)
    return (name, f"{c.num_nodes} x {c.devices_per_node} {c.device.name}",
            format_bytes(c.device.memory_bytes), c.intra_link.name, c.inter_link.name)


def _task(name: str) -> tuple[str, ...]:
    t = catalog.task_row(name)
    return (name, t.description, *(f"{lengths.mean:g}, {lengths.std:g}, {lengths.max}"
                                   for lengths in (t.input_tokens, t.output_tokens)))


@click.command()
@click.option("--gpu", is_flag=True, help="Compare every CUDA kernel with torch on this machine's "
              "GPU, time it, and write xgpt-doctor-CARD.json.")
@click.option("--slurm", "through_slurm", is_flag=True, help="Run a small task on each node that "
              "Slurm gives (of JOB.yaml: as many as it asks for), and show what is missing where.")
@click.argument("job_file", type=JOB_FILE, required=False, metavar="[JOB.yaml]")
@job_options
def doctor(gpu: bool, through_slurm: bool, job_file: Path | None, overrides: tuple[str, ...],
           as_json: bool) -> None:
    """Check this machine, or the nodes of a job: hardware, packages, and how to fix what is
    missing."""
    if through_slurm:
        _nodes(job_file, overrides, as_json)
        return
    if job_file is not None:
        raise click.UsageError("a job file goes with --slurm")
    if not gpu:
        found = examine()
        missing = remedies(found)
        if as_json:
            print_json({**found, "missing": [asdict(remedy) for remedy in missing]})
        else:
            show("\n".join(fact(label, words) for label, words in found.items()))
            show("\n" + _verdict(missing))
        return
    file = compare_on_gpu(Path.cwd())
    if as_json:
        print_json({"file": file})
    else:
        show(paragraph(f"all kernels agree with torch. Written: {file.name}. Please send it to the "
                       "project, which collects the cards that work."))


def _nodes(path: Path | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Shows what the nodes have in a table, and each part that some lack. Raises XgptError then."""
    job = None if path is None else load_job(path, overrides)
    nodes, gpus = int(os.environ.get("SLURM_JOB_NUM_NODES", "1")), None
    if job is not None and job.slurm is not None:
        layout = import_module("xgpt.app.remote_jobs").layout_of(job)
        nodes, gpus = layout.nodes, layout.gpus_per_node
    reports = examine_nodes(job, overrides, nodes, gpus)
    lacking = defaultdict[Any, list[str]](list)
    for node, own in reports.items():
        for missing in own["lacking"].items():
            lacking[missing].append(node)
    if not as_json:
        parts = ("GPUs", "memory", "/dev/shm", "local disk", "engine")
        show(table(("node", *parts), [(node, *(own["facts"].get(part, "") for part in parts))
                                      for node, own in reports.items()], right=()))
        show("\n" + ("\n".join(fact("missing", f"{part} on {', '.join(names)}: {why}")
                               for (part, why), names in lacking.items()) or "nothing is missing"))
    if lacking:
        error = XgptError(f"the nodes lack {', '.join(sorted({part for part, _ in lacking}))}")
        error.details = {"nodes": reports}
        raise error
    if as_json:
        print_json({"nodes": reports})


def _verdict(missing: Sequence[Remedy]) -> str:
    """Words for what to install, with commands on unbroken lines, so that they can be copied."""
    needed = [remedy for remedy in missing if remedy.is_needed]
    lines = ["Jobs run here: xgpt init writes one for your prompts." if not needed else
             "No job runs here yet."]
    for group, title in ((needed, "Needed"), ([r for r in missing if not r.is_needed], "Better")):
        for remedy in group:
            lines += ["", fact(title, remedy.why), f"    {remedy.command}"]
    return "\n".join(lines)
