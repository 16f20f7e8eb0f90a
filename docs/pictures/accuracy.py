"""Draws docs/pictures/accuracy.svg from accuracy.json: `python docs/pictures/accuracy.py`.

The points are those of benchmarks/validated.py: seconds of a request in closed loops that others
published, measured and predicted."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import draw  # noqa: E402

POINTS = HERE / "accuracy.json"
MAKE = "python docs/pictures/accuracy.py"
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "tensorrt-llm": "TensorRT-LLM"}
MARKERS = {"H100": "o", "H200": "^"}


def requests() -> list[dict[str, Any]]:
    """A mapping for each published run: gpu, engine, model, measured_s, and predicted_s by
    constants fitted without runs of its shape."""
    rows: list[dict[str, Any]] = json.loads(POINTS.read_text(encoding="utf-8"))["requests"]
    return rows


def errors(rows: list[dict[str, Any]]) -> np.ndarray:
    """|predicted / measured - 1| of the requests."""
    return np.array([abs(row["predicted_s"] / row["measured_s"] - 1) for row in rows])


def words_of(rows: list[dict[str, Any]]) -> str:
    found = errors(rows)
    return (f"Predicted against measured seconds of a request, {len(rows)} published runs of "
            "closed loops on H100 and H200 with vLLM, SGLang and TensorRT-LLM. Each was predicted "
            f"without runs of its model's shape. Mean error: {found.mean():.1%}; worst "
            f"{found.max():.0%}.")


def made_of() -> str:
    texts = (POINTS, Path(__file__))
    return hashlib.sha256(b"".join(path.read_bytes() for path in texts)).hexdigest()[:16]


def drawing() -> str:
    """Text of the SVG."""
    rows = requests()
    figure, (axes,) = draw._figure(1, height=4.0, heights=(1,))
    ends = np.array([min(row["measured_s"] for row in rows) * 0.8,
                     max(row["measured_s"] for row in rows) * 1.25])
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="#e9ebee", label="within 10 %")
    axes.plot(ends, ends, color="#626a74", linewidth=0.8)
    for (engine, name), colour in zip(ENGINES.items(), draw.LINES, strict=False):
        for gpu, marker in MARKERS.items():
            own = [row for row in rows if row["engine"].startswith(engine) and row["gpu"] == gpu]
            axes.scatter(
                [row["measured_s"] for row in own], [row["predicted_s"] for row in own], s=18,
                marker=marker, linewidths=0.8, edgecolors=colour, label=f"{name} on {gpu}",
                facecolors=colour)
    axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel="measured seconds",
             ylabel="predicted seconds", title="Time of a request, its shape left out")
    ticks = (0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
    shown = [tick for tick in ticks if ends[0] <= tick <= ends[1]]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=8)
    return draw._svg(figure, words_of(rows), made_of(), MAKE)


def main() -> None:
    (HERE / "accuracy.svg").write_text(drawing(), encoding="utf-8")
    print("docs/pictures/accuracy.svg")


if __name__ == "__main__":
    main()
