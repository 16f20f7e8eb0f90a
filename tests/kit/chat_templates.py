"""Chat templates with the constructs of those that models are published with, shortened: a file
each in templates/."""

from pathlib import Path

_TEMPLATES = Path(__file__).with_name("templates")


def _text(name: str) -> str:
    return (_TEMPLATES / f"{name}.jinja").read_bytes().decode()  # with its own line breaks


CHATML, BRACKETS, HEADERS, THINKING, GENERATION, TURNS, PARTS = map(_text, (
    "chatml", "brackets", "headers", "thinking", "generation", "turns", "parts"))
PHI3, PHI4, OLMO, GRANITE, MISTRAL, KINDS = map(_text, (
    "phi3", "phi4", "olmo", "granite", "mistral", "kinds"))
