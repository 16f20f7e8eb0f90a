"""`xgpt models`: what the catalog knows."""

from __future__ import annotations

import textwrap

import click

from xgpt.cli.options import print_json
from xgpt.core import catalog
from xgpt.core.json_values import plain
from xgpt.core.units import format_bytes
from xgpt.report.table import WIDTH, table


@click.command()
@click.option("--json", "as_json", is_flag=True,
              help="Print one machine-readable object on stdout.")
def models(as_json: bool) -> None:
    """List the catalog: models, devices, clusters and tasks."""
    if as_json:
        print_json({
            "models": {n: plain(catalog.model(n)) for n in catalog.names("model")},
            "devices": {n: plain(catalog.device(n)) for n in catalog.names("device")},
            "clusters": {n: plain(catalog.cluster(n)) for n in catalog.names("cluster")},
            "tasks": {n: plain(catalog.task_row(n)) for n in catalog.names("task")},
        })
        return
    click.echo("\n\n".join((_models(), _clusters(), _devices(), _tasks())))


def _models() -> str:
    rows = []
    for name in catalog.names("model"):
        m = catalog.model(name)
        layers = f"{m.num_encoder_layers}+" if m.is_encoder_decoder else ""
        rows.append((name, f"{layers}{m.num_layers}", str(m.hidden_size), str(m.num_heads),
                     str(m.kv_heads), f"{m.num_params / 1e9:.2f} B"))
    return table(("model", "layers", "hidden", "heads", "KV heads", "parameters"), rows,
                 right=(1, 2, 3, 4, 5))


def _clusters() -> str:
    rows = []
    for name in catalog.names("cluster"):
        c = catalog.cluster(name)
        rows.append((name, f"{c.num_nodes} x {c.devices_per_node} {c.device.name}",
                     format_bytes(c.device.memory_bytes), c.intra_link.name, c.inter_link.name))
    rows.append(("local", "this machine's", "detected", "", ""))
    return table(("cluster", "nodes x devices", "memory", "in a node", "between nodes"), rows,
                 right=(2,))


def _devices() -> str:
    names = ", ".join(catalog.names("device"))
    return textwrap.fill(f"devices, for a cluster of your own: {names}", WIDTH,
                         subsequent_indent="  ", break_on_hyphens=False)


def _tasks() -> str:
    rows = []
    for name in catalog.names("task"):
        t = catalog.task_row(name)
        rows.append((name, t.description, *(f"{lengths.mean:g}, {lengths.std:g}, {lengths.max}"
                                            for lengths in (t.input_tokens, t.output_tokens))))
    return table(("task", "tokens: mean, std, max", "input", "output"), rows, right=())
