"""A Profile as a file: versioned JSON, one point a line, so that two can be compared with diff."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from xgpt.core.errors import InputError, Mistake
from xgpt.core.model import ModelSpec, model_from_dict
from xgpt.core.system.whole_file import read_text, write_atomically
from xprofiler.points import judge
from xprofiler.profile import LearnedSteps, Peaks, Profile, ProfileMetadata, Sample, TableKey
from xprofiler.timing import Operator

PROFILE_VERSION = 5  # others are refused

# name -> (x, y) in words; every value is in seconds
AXES = {
    Operator.ENCODE_ATTENTION.value: ("tokens of a query", "queries encoded together"),
    Operator.DECODE_ATTENTION.value: ("queries", "context tokens"),
    Operator.CROSS_ATTENTION.value: ("queries", "encoder tokens"),
    Operator.LAYER_REST.value: ("tokens", ""), Operator.ENCODER_REST.value: ("tokens", ""),
    Operator.DECODE_REST.value: ("tokens", ""),
    Operator.CROSS_KV.value: ("tokens", ""), Operator.EMBED.value: ("tokens", ""),
    Operator.HEAD.value: ("queries", ""), Operator.KV_COMPACTION.value: ("rows moved", "tokens"),
    Operator.HOST_ATTENTION.value: ("queries", "context tokens"),
    Operator.UNPACK.value: ("elements", ""), "copy": ("bytes", ""), "streamed": ("tokens", ""),
    "all_reduce": ("bytes", ""), "transfer": ("bytes", ""), "kv_handover": ("bytes", ""),
    "kv_handover_direct": ("bytes", ""), "step_overhead": ("", ""),
    "engine_start": ("engines at once", "")}
Faults = list[tuple[str, object, str]]  # key, value, what is allowed
_COLUMNS = ["x", "y", "samples_s", "date, missing and tries, where known"]
_MOST_SIZE = 1e18  # bytes, tokens, queries
_MOST_S = 86_400.0  # a day: no operator of one layer, no message takes as long
_Size = Annotated[float, Field(ge=0, le=_MOST_SIZE)]
_Samples = Annotated[tuple[Annotated[float, Field(ge=0, le=_MOST_S)], ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class _Marks:
    """The optional fields of a point's line in the file."""

    date: str = ""
    missing: Annotated[float, Field(ge=0, le=1)] = 0.0
    tries: Annotated[int, Field(ge=1, le=_MOST_SIZE)] = 1


_ROWS: Any = tuple[tuple[_Size, _Size, _Samples] | tuple[_Size, _Size, _Samples, _Marks], ...]
# key -> its type, and its default where a file lacks it (None: required, or null is allowed)
_HEAD: Mapping[str, tuple[Any, Any]] = {
    "metadata": (ProfileMetadata, None), "model": (ModelSpec | None, None),
    "peaks": (Peaks | None, None), "spent_s": (_Size, 0.0),
    "learned": (tuple[LearnedSteps, ...], ())}
# Imported formulas leave out embedding and head, and attention to nothing is free; the matrix
# products of a layer never are.
_NEVER_ZERO = (Operator.LAYER_REST.value, Operator.DECODE_REST.value,
               Operator.ENCODER_REST.value)
_COUNTS = ("num_layers", "hidden_size", "num_heads", "vocab_size", "intermediate_size")


def save_profile(profile: Profile, path: Path) -> None:
    """Writes `profile` to `path`, whole or not at all."""
    head = {"version": PROFILE_VERSION, "metadata": asdict(profile.metadata),
            "verdict": judge(profile).sentence, "spent_s": round(profile.spent_s, 1),
            "refused": {str(degree): why for degree, why in profile.refused.items()},
            "model": asdict(profile.model) if profile.model else None,
            "peaks": asdict(profile.peaks) if profile.peaks else None,
            "learned": [asdict(own) for own in profile.learned],
            "units": {name: {"x": AXES[name][0], "y": AXES[name][1], "samples_s": "seconds"}
                      for name in sorted({key.name for key in profile.tables})},
            "columns": _COLUMNS}
    rows = ",\n".join(
        f'  "{key}": [\n' + ",\n".join(f"   {_line(p)}" for p in points) + "\n  ]"
        for key, points in profile.tables.items() if points)
    text = json.dumps(head, indent=1)[:-2] + ',\n "tables": {\n' + rows + "\n }\n}\n"
    write_atomically(path, text)


def load_profile(path: Path) -> Profile:
    """The Profile in the file `path`. Raises InputError, naming every fault, for a file that is no
    profile of this version."""
    try:
        raw = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as cause:
        raise _bad(path, [("", None, f"not a readable profile: {cause}")]) from None
    if not isinstance(raw, dict):
        raise _bad(path, [("", type(raw).__name__, "a profile is a JSON object")])
    version = raw.get("version")
    if type(version) is not int or version != PROFILE_VERSION:
        raise _bad(path, [("version", version, f"this xgpt reads version {PROFILE_VERSION}: "
                           "measure anew, `xgpt profile JOB --out FILE`")])
    faults: Faults = []
    head = {kind: _read(kind, raw, faults) for kind in _HEAD}
    tables = {key: points for name, rows in _mapping(raw, "tables", faults).items()
              if (key := _key(name, faults)) is not None
              and (points := _points(name, rows, faults))}
    refused = {int(k): str(v) for k, v in _mapping(raw, "refused", faults).items()
               if k.isascii() and k.isdigit()}
    faults += [(f"model.{name}", value, "a whole number >= 1") for name in _COUNTS
               if head["model"] is not None and (value := getattr(head["model"], name)) < 1]
    if faults:
        raise _bad(path, faults)
    if head["model"] is not None:  # with the numbers of the file: 8192 is not 8192.0
        head["model"] = model_from_dict(raw["model"])
    return Profile(tables=tables, refused=refused, **head)


def _read(key: str, raw: Mapping[str, Any], faults: Faults) -> Any:
    """The value of one of the head's keys; None where it is wrong, with what is wrong added to
    `faults`."""
    kind, default = _HEAD[key]
    if key not in raw and default is not None:
        return default
    try:
        return _checked(kind, raw.get(key))
    except ValidationError as cause:
        for one in cause.errors(include_url=False):
            value = None if one["type"].startswith("missing") else one["input"]
            faults.append((".".join(map(str, (key, *one["loc"][1:2]))), value,
                           one["msg"].removeprefix("Input should be ")))
    except RecursionError:
        faults.append((key, None, "nested too deeply"))
    return None


def _checked(kind: Any, value: object) -> Any:
    """`value` converted to the type `kind`. Raises ValidationError, RecursionError."""
    return _adapter(kind).validate_json(json.dumps([value]))[0]


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(tuple[kind], config=ConfigDict(strict=True, extra="forbid"))


def _line(point: Sample) -> str:
    def short(value: float) -> float | int:
        return int(value) if value == int(value) else value

    samples_s = [float(f"{s:.4g}") for s in point.samples_s]
    marks = {**({"date": point.date} if point.date else {}),
             **({"missing": round(point.missing, 3)} if point.missing else {}),
             **({"tries": point.tries} if point.tries > 1 else {})}
    return json.dumps([short(point.x), short(point.y), samples_s, *([marks] if marks else [])])


def _mapping(raw: Mapping[str, Any], key: str, faults: Faults) -> dict[str, Any]:
    value = raw.get(key, {} if key == "refused" else None)
    if not isinstance(value, dict):
        faults.append((key, value, "an object"))
        return {}
    return value


def _key(text: str, faults: Faults) -> TableKey | None:
    name, *rest = text.split(" ", 2)
    parts = dict(part.split("=", 1) for part in rest if "=" in part)
    degree = parts.get("tp", "")
    is_degree = degree.isascii() and degree.isdigit() and degree[0] != "0" and len(degree) < 6
    if name not in AXES or not is_degree or set(parts) - {"tp", "link"}:
        faults.append((f"tables.{text}", None, "NAME tp=DEGREE [link=LINK] with NAME one of "
                                               + ", ".join(AXES)))
        return None
    return TableKey(name, int(degree), parts.get("link", ""))


def _points(name: str, rows: object, faults: Faults) -> tuple[Sample, ...]:
    given: list[Any] = rows if isinstance(rows, list) else [rows]
    read: tuple[Any, ...] = ()
    try:
        read = _checked(_ROWS, given)
    except (ValidationError, RecursionError) as cause:
        told = cause.errors() if isinstance(cause, ValidationError) else []
        faults += [(f"tables.{name}", given[place], "points [x, y, [seconds, ...]], with {date, "
                    "missing, tries} behind them where they are known, sizes of at most "
                    f"{_MOST_SIZE:.0e}, seconds of at most {_MOST_S:.0f}")
                   for place in sorted({int(one["loc"][1]) for one in told if one["loc"]}) or [0]]
    points = [Sample(x=x, y=y, samples_s=samples_s, **(asdict(marks[0]) if marks else {}))
              for x, y, samples_s, *marks in read]
    if name.split(" ")[0] in _NEVER_ZERO and any(min(p.samples_s) == 0 for p in points):
        faults.append((f"tables.{name}", 0, "seconds above 0: nothing takes no time"))
    if name.startswith(Operator.ENCODE_ATTENTION.value) and any(p.x == 0 for p in points):
        faults.append((f"tables.{name}", 0, "x above 0: tokens of a query"))
    if len({(p.x, p.y) for p in points}) < len(points):
        faults.append((f"tables.{name}", None, "one line a point (x, y)"))
    return tuple(points)


def _bad(path: Path, faults: Faults) -> InputError:
    return InputError([Mistake(file=str(path), line=None, key=key, value=value, allowed=allowed)
                       for key, value, allowed in faults])
