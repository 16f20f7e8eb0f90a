"""The catalog as tables for the terminal: models, clusters, devices, tasks."""

from __future__ import annotations

import textwrap

from xgpt.core import catalog
from xgpt.core.units import format_bytes
from xgpt.report.table import WIDTH, table


def catalog_tables() -> str:
    """All that job files may name."""
    return "\n\n".join((_models(), _clusters(), _devices(), _tasks()))


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
