"""Rotary positions by a `config.json`: transformers 5 writes `rope_parameters` (of Gemma 3 one a
kind of layer), 4 `rope_theta` and `rope_scaling`, and each states a part of a head to rotate."""

from typing import Any, NamedTuple

from xgpt.core.model import RopeValue
from xgpt.core.model_file import ConfigValues

FULL, WINDOWED = "full_attention", "sliding_attention"  # transformers' names
_ORIGINAL = "original_max_position_embeddings"
# kinds of rotary positions: the numbers that each needs, those it may have, what are no numbers
_KINDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "default": ((), (), ()), "linear": (("factor",), (), ()), "dynamic": (("factor",), (), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL), (), ()),
    "yarn": (("factor",), ("attention_factor", "beta_fast", "beta_slow", "mscale",
                           "mscale_all_dim"), (_ORIGINAL, "truncate")),
    "longrope": ((), ("factor", "attention_factor"), (_ORIGINAL, "short_factor", "long_factor"))}


class Rope(NamedTuple):
    """`share` of a head's elements is rotated; `local_theta`: of layers with a window;
    `most_positions`: beyond them the kind would change its frequencies in the middle of a query."""

    theta: float
    scaling: tuple[tuple[str, RopeValue], ...] | None
    share: float = 1.0
    local_theta: float | None = None
    most_positions: int | None = None
    unknown: list[str] = []  # noqa: RUF012 (a NamedTuple's field is never changed here)


def read_rope(config: ConfigValues, local_theta: float | None = None) -> Rope:
    """What a config states; a kind that we do not know is among `unknown`. `local_theta`: of layers
    with a window where the config says none; None of a family that has one base for all."""
    rope = config.section("rope_scaling")
    if not rope.values or local_theta is not None:
        rope = config.section("rope_parameters")
    if local_theta is not None:
        rope, local_theta = _of_full_layers(config, rope, local_theta)
    theta = (rope if "rope_theta" in rope.values else config).number("rope_theta", 10000.0)
    place = rope if "partial_rotary_factor" in rope.values else config
    is_phi3 = config.get("model_type") == "phi3"
    if not is_phi3:  # others' code turns whole heads
        place.only("partial_rotary_factor", 1.0)
    share = place.number("partial_rotary_factor", 1.0)
    key = "rope_type" if "rope_type" in rope.values else "type"
    kind = str(rope.get(key, "default"))
    if is_phi3 and kind in ("su", "yarn"):
        kind = "longrope"  # as older files of Phi-3 call it
    plain = Rope(theta, None, share, local_theta)
    if kind not in _KINDS:
        return plain._replace(unknown=[f"rotary positions of {key} {kind!r}"])
    if kind == "dynamic":
        config.size("max_position_embeddings")
    needed, possible, others = _KINDS[kind]
    if (original := config.size_or_none(_ORIGINAL)) is not None and _ORIGINAL in needed + others:
        rope.values[_ORIGINAL] = original  # as in transformers, over that of the section
    scaling = {k: v for k in ("rope_type", "type", *needed, *possible, *others)
               if (v := rope.get(k)) is not None}
    for number in needed + possible:
        if number in needed and number not in rope.values:
            rope.reject(number, f"missing: a number above 0, which {key} {kind} needs")
        elif number in needed or number in scaling:
            rope.number(number, 1.0)
    if kind in ("default", "dynamic"):  # the latter is as the former up to its positions
        return plain
    return _scaled(config, rope, kind, scaling, plain)


def _of_full_layers(config: ConfigValues, both: ConfigValues,
                    local_theta: float) -> tuple[ConfigValues, float]:
    """Of Gemma 3: what layers that attend to all are rotated by, and the base of the others."""
    rope, local = both.section(FULL), both.section(WINDOWED)
    scaling = config.section("rope_scaling")
    rope.values.update({key: scaling.get(key) for key in scaling.values})
    local.only("rope_type" if "rope_type" in local.values else "type", "default")
    local.only("partial_rotary_factor", 1.0)
    return rope, (local.number("rope_theta", local_theta) if "rope_theta" in local.values else
                  config.number("rope_local_base_freq", local_theta))


def _scaled(config: ConfigValues, rope: ConfigValues, kind: str, scaling: dict[str, Any],
            plain: Rope) -> Rope:
    given = {k: v for k, v in scaling.items() if k not in ("type", "rope_type")}
    if kind in ("yarn", "longrope"):
        positions = config.size_or_none("max_position_embeddings")
        original = given.get(_ORIGINAL) or positions
        if not isinstance(original, int) or original < 1:
            rope.reject(_ORIGINAL, f"missing: a whole number >= 1, which rope_type {kind} needs")
            return plain
        given[_ORIGINAL] = original
        if kind == "longrope":
            factors = rope.get("short_factor")
            if not isinstance(factors, list) or not all(
                    isinstance(f, (int, float)) and f > 0 for f in factors):
                rope.reject("short_factor", "a list of numbers above 0, one for each rotated pair")
                return plain
            given["short_factor"] = tuple(float(f) for f in factors)
            given.pop("long_factor", None)
            given["factor"] = given.get("factor") or (positions or original) / original
            plain = plain._replace(most_positions=original)
    given["rope_type"] = kind
    return plain._replace(scaling=tuple(sorted(given.items())))
