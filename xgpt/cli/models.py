"""`xgpt models`: what the catalog knows."""

from __future__ import annotations

import click

from xgpt import catalog
from xgpt.cli.options import plain, print_json
from xgpt.units import format_bytes


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
    click.echo("models" + " " * 15 + "layers  hidden  heads/kv  parameters")
    for name in catalog.names("model"):
        m = catalog.model(name)
        layers = f"{m.num_encoder_layers}+{m.num_layers}" if m.is_encoder_decoder else m.num_layers
        click.echo(f"  {name:<18} {layers:>6}  {m.hidden_size:>6}  {m.num_heads:>4}/{m.kv_heads:<4}"
                   f" {m.num_params / 1e9:9.2f} B")
    click.echo("clusters")
    for name in catalog.names("cluster"):
        c = catalog.cluster(name)
        click.echo(f"  {name:<18} {c.num_nodes} x {c.devices_per_node} {c.device.name} "
                   f"({format_bytes(c.device.memory_bytes)}), {c.intra_link.name} inside a node, "
                   f"{c.inter_link.name} between")
    click.echo("  local              this machine, detected")
    click.echo("devices (for an inline cluster)\n  " + ", ".join(catalog.names("device")))
    click.echo("tasks (mean, std, max tokens)")
    for name in catalog.names("task"):
        t = catalog.task_row(name)
        a, b = t.input_tokens, t.output_tokens
        click.echo(f"  {name:<4} {t.description}: input {a.mean:g}, {a.std:g}, {a.max}; "
                   f"output {b.mean:g}, {b.std:g}, {b.max}")
