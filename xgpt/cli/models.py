"""`xgpt models`: what the catalog knows; with `--check`, what xgpt can do with a model."""

import textwrap

import click

from xgpt.app.model_check import UnsupportedModel, check_model_named
from xgpt.cli.options import json_option, print_json
from xgpt.cli.terminal import show
from xgpt.core import catalog
from xgpt.core.units import format_bytes
from xgpt.report.table import shown_width, table


@click.command()
@click.option("--check", "checked", metavar="DIR|ID",
              help="What xgpt can do with one model: a folder, a catalog name or a hub id.")
@json_option
def models(checked: str | None, as_json: bool) -> None:
    """List the catalog: models, devices, clusters and tasks."""
    if checked is not None:
        _check(checked, as_json)
        return
    if as_json:
        print_json({
            "models": {n: catalog.model(n) for n in catalog.names("model")},
            "devices": {n: catalog.device(n) for n in catalog.names("device")},
            "clusters": {n: catalog.cluster(n) for n in catalog.names("cluster")},
            "tasks": {n: catalog.task_row(n) for n in catalog.names("task")}})
        return
    show(_tables())


def _check(name: str, as_json: bool) -> None:
    check = check_model_named(name)
    if not as_json:
        show(str(check))
    if not check.is_planned:
        raise UnsupportedModel(check)
    if as_json:
        print_json(check.to_dict())


def _tables() -> str:
    """All that job files may name."""
    devices = ", ".join(catalog.names("device"))
    return "\n\n".join((
        table(("model", "layers", "hidden", "heads", "KV heads", "parameters"),
              [_model(name) for name in catalog.names("model")], right=range(1, 6)),
        table(("cluster", "nodes x devices", "memory", "in a node", "between nodes"),
              [*map(_cluster, catalog.names("cluster")),
               ("local", "this machine's", "detected", "", "")], right=(2,)),
        textwrap.fill(f"devices, for a cluster of your own: {devices}", shown_width(),
                      subsequent_indent="  ", break_on_hyphens=False),
        table(("task", "tokens: mean, std, max", "input", "output"),
              [_task(name) for name in catalog.names("task")], right=())))


def _model(name: str) -> tuple[str, ...]:
    m = catalog.model(name)
    layers = f"{m.num_encoder_layers}+" if m.is_encoder_decoder else ""
    return (name, f"{layers}{m.num_layers}", str(m.hidden_size), str(m.num_heads),
            str(m.kv_heads), f"{m.num_params / 1e9:.2f} B")


def _cluster(name: str) -> tuple[str, ...]:
    c = catalog.cluster(name)
    return (name, f"{c.num_nodes} x {c.devices_per_node} {c.device.name}",
            format_bytes(c.device.memory_bytes), c.intra_link.name, c.inter_link.name)


def _task(name: str) -> tuple[str, ...]:
    t = catalog.task_row(name)
    return (name, t.description, *(f"{lengths.mean:g}, {lengths.std:g}, {lengths.max}"
                                   for lengths in (t.input_tokens, t.output_tokens)))
