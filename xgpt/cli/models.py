"""`xgpt models`: what the catalog knows."""

import click

from xgpt.cli.options import print_json
from xgpt.core import catalog
from xgpt.core.json_values import plain
from xgpt.report.catalog_tables import catalog_tables


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
    click.echo(catalog_tables())
