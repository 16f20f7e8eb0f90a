"""Ways to spoil an input, for benchmarks/fuzz.py: of bytes, of words of a text, of the values of a
JSON document. Each draws from the generator that it is given, and from nothing else."""

from __future__ import annotations

import json
import random
from typing import Any

NUMBERS = ("9223372036854775807", "-9223372036854775808", "18446744073709551616", "1e308", "-1e308",
           "1e-320", "0", "-1", "-0.0", "1.5", ".nan", "NaN", "Infinity", "-.inf", "9" * 400)
WORDS = (*NUMBERS, "null", "true", "[]", "{}", "''", "~", "- - -", "&a [*a]", "*a",
         "!!python/name:os", "!!binary aGk=", "<<: {}", "\x00", "\x1b[31m", "\u202e", "\ufeff",
         "\ud800", "../../etc/passwd", "/dev/zero", "/dev/null", "/proc/self/mem", "%s%n",
         "{{7*7}}", "[" * 300, "{a: " * 200, "a" * 5000, "\r", "\t", "'", '"', "#", "|", ">",
         "---\n", "...")
DEPTHS = (20, 150, 900)  # of lists in lists
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63 - 1, -2**63, 2**64, 10**400, 1.5, -0.0, 1e308, 1e-320,
    float("nan"), float("inf"), "", "x" * 5000, "\x00", "\x1b[2J", "\u202e", "\ud800", "/dev/zero",
    "../x", "inf", "nan", [], {}, [[]], [None], {"": None}, [1] * 1000, {"a": {"b": {}}},
    "{{ ''.__class__ }}", "{% for i in range(10**9) %}{% endfor %}")


def mutated_bytes(rng: random.Random, raw: bytes) -> bytes:
    """Flips, cuts, repeats, inserts; as it is in half of all cases."""
    if rng.random() < 0.5 or not raw:
        return raw
    at, length = rng.randrange(len(raw)), rng.randint(1, max(len(raw) // 4, 1))
    match rng.randrange(5):
        case 0:
            return raw[:at]
        case 1:
            return raw[:at] + raw[at + length:]
        case 2:
            return raw[:at] + raw[at:at + length] * rng.choice((2, 3, 50)) + raw[at:]
        case 3:
            return raw[:at] + rng.randbytes(rng.randint(1, 20)) + raw[at:]
        case _:
            return raw[:at] + bytes([raw[at] ^ (1 << rng.randrange(8))]) + raw[at + 1:]


def mutated_text(rng: random.Random, text: str) -> str:
    """One to three words, numbers or lines of it replaced, doubled or dropped."""
    for _ in range(rng.randint(1, 3)):
        lines = text.split("\n")
        at = rng.randrange(len(lines))
        match rng.randrange(5):
            case 0:
                lines[at] = lines[rng.randrange(len(lines))]
            case 1:
                del lines[at]
            case 2:
                lines.insert(at, rng.choice(WORDS))
            case _:
                words = lines[at].split(" ")
                words[rng.randrange(len(words))] = rng.choice(WORDS)
                lines[at] = " ".join(words)
        text = "\n".join(lines)
    return text


def mutated_json(rng: random.Random, text: str) -> str:
    """One to three of the document's values or keys replaced, dropped or nested; NaN and infinities
    as Python writes them."""
    value = json.loads(text)
    for _ in range(rng.randint(1, 3)):
        value = _changed(rng, value)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5)
    for depth in DEPTHS:  # as text: neither this nor Python's encoder need reach that far
        text = text.replace(f'"{_deep(depth)}"', "[" * depth + "]" * depth)
    return text


def _deep(depth: int) -> str:
    """Stands for lists in lists until the document is text."""
    return f"lists, {depth} deep"


def _changed(rng: random.Random, value: Any) -> Any:
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        match rng.randrange(8):
            case 0:
                return {name: one for name, one in value.items() if name != key}
            case 1:
                return {**value, rng.choice(("", "x" * 300, "\x1b[1m", key + "_")): value[key]}
            case _:
                return {**value, key: _changed(rng, value[key])}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.2:
            return value[:at] + value[at + 1:]
        return [*value[:at], _changed(rng, value[at]), *value[at + 1:]]
    return _deep(rng.choice(DEPTHS)) if rng.random() < 0.05 else rng.choice(VALUES)
