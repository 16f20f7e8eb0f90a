"""`xgpt profile`: time the model's layers on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from xgpt.cli.options import job_arguments, print_json
from xgpt.cli.session import local_profile, open_session
from xgpt.errors import InputError, Mistake
from xgpt.units import format_seconds
from xprofiler.profile import Profile, save_profile


@click.command()
@job_arguments
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE",
              help="Also write the profile to FILE.")
@click.option("--again", is_flag=True, help="Measure even if the cache has this profile.")
def profile(job_file: Path, overrides: tuple[str, ...], as_json: bool, out: Path | None,
            again: bool) -> None:
    """Time the model's layers on this machine (kept in a cache)."""
    session = open_session(job_file, overrides, fetch=False)
    if not session.is_local or session.problem.cluster.device.kind != "cpu":
        raise InputError([Mistake(
            file=str(session.job.source), line=None, key="cluster", value=session.job.cluster,
            allowed="`local`, a machine without GPUs: this version measures CPU ranks; other "
            "clusters are planned from the roofline of their device")])
    found = local_profile(session, again=again)
    if out is not None:
        save_profile(found, out)
    if as_json:
        print_json({"metadata": found.metadata, "verdict": found.verdict(), "tables": {
            name: [{"x": p.x, "y": p.y, "median_s": p.median_s, "spread": p.spread} for p in points]
            for name, points in found.tables.items()}})
        return
    click.echo(profile_table(found))


def profile_table(profile: Profile) -> str:
    """Medians per operator, a line each of at most 79 columns."""
    lines = []
    for name, points in profile.tables.items():
        lines.append(f"{name} (x{', y' if any(p.y for p in points) else ''}: median)")
        cells = [f"{p.x:g}{f',{p.y:g}' if p.y else ''}: {format_seconds(p.median_s)}"
                 for p in points]
        lines += ["  " + "".join(f"{cell:<19}" for cell in cells[i:i + 4]).rstrip()
                  for i in range(0, len(cells), 4)]
    return "\n".join(lines)
