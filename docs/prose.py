"""Checks the prose of pages, docstrings and messages; a step of `.ci/run`.

    python docs/prose.py [FILE...]        prints what is wrong; exit code 1 if anything is

Pages: the mean sentence has at most 20 words, none more than 40, and a page that is not generated
at most 1,500 words. Docstrings and messages: none more than 40 words, none of the phrases in
BANNED, and no docstring begins as in OPENINGS. Tables, code and links' targets are left out."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("xgpt", "xrunner", "xprofiler", "xsimulator", "xscheduler")
MEAN_WORDS, MOST_WORDS, PAGE_WORDS = 20, 40, 1500  # chosen
GENERATED = re.compile(r"docs/(job-file|cli|glossary)\.md|docs/(schema|first-hour)/.*")
RESULTS = re.compile(r"benchmarks/|CHANGELOG\.md")  # dated records: of these nothing is checked
# words of our own, for which the field has its noun (docs/glossary.md)
BANNED = re.compile(
    r"\b(copy of the model|copies of the model|not looked into|is had\b|to be had|can be had|"
    r"by the same estimates|mends|mended|a job without end|what products|comes to\b|come to\b|"
    r"queries/s|KV entries|leaves? [\d.]+ ?%? open|since [\w ]+ may be off|in vain|hoped for|"
    r"is told|are told|was told|were told|laid out|lays out|that it is of|what it is of|"
    r"that they are of|what they are of|of what is)\b", re.IGNORECASE)
OPENINGS = re.compile(
    r"(The same|What|Those|That|Whether it|Such|These|It|Who|They|Of|As(?! `))\b")
_SENTENCE = re.compile(r"(?<=[.!?:;])[\"')\]*_]*\s+(?=[\"'(\[*_`]*[A-Z0-9`])|\n\s*\n")
_WORD = re.compile(r"[A-Za-z0-9][\w'./%-]*")


def main(names: list[str]) -> int:
    listed = names or subprocess.run(
        ["git", "ls-files", "*.md", *(f"{package}/*.py" for package in PACKAGES)],
        cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    found = [line for name in listed for line in checked(name)]
    print("\n".join(found) or f"prose: {len(listed)} files, nothing wrong")
    return 1 if found else 0


def checked(name: str) -> Iterator[str]:
    """`FILE:LINE: what is wrong` of a page or a module."""
    text = (ROOT / name).read_text(encoding="utf-8")
    if name.endswith(".py"):
        yield from _of_module(name, text)
    elif not RESULTS.match(name):
        yield from _of_page(name, text)


def _of_page(name: str, text: str) -> Iterator[str]:
    prose = page_prose(text)
    lengths = [len(_WORD.findall(sentence)) for _, sentence in sentences(prose)]
    lengths = [length for length in lengths if length > 1]
    if lengths and mean(lengths) > MEAN_WORDS:
        yield f"{name}:1: sentences of {mean(lengths):.1f} words in the mean, not {MEAN_WORDS}"
    words = len(_WORD.findall(prose))
    if words > PAGE_WORDS and not GENERATED.fullmatch(name):
        yield f"{name}:1: {words} words, not {PAGE_WORDS}"
    yield from _of_text(name, 1, prose)


def _of_module(name: str, text: str) -> Iterator[str]:
    docstrings, listed = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and (
                    isinstance(first.value.value, str)):
                docstrings.add(id(first.value))
                told = first.value.value
                if OPENINGS.match(told):
                    yield f"{name}:{first.lineno}: a docstring begins with {told.split()[0]!r}"
                yield from _of_text(name, first.lineno, told)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and (
                node.func.attr == "split"):
            listed.add(ast.unparse(node.func.value))  # a list of words
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and (
                id(node) not in docstrings and node.value.count(" ") > 1
                and ast.unparse(node) not in listed):
            yield from _of_text(name, node.lineno, node.value)


def _of_text(name: str, line: int, text: str) -> Iterator[str]:
    for start, sentence in sentences(text):
        at = line + text.count("\n", 0, start)
        words = len(_WORD.findall(sentence))
        if words > MOST_WORDS:
            yield f"{name}:{at}: a sentence of {words} words: {_brief(sentence)}"
        for banned in BANNED.finditer(sentence):
            yield f"{name}:{at}: {banned.group()!r} in: {_brief(sentence)}"


def page_prose(text: str) -> str:
    """The running text of a Markdown page; what is left out keeps its line breaks."""
    def blank(found: re.Match[str]) -> str:
        return "\n\n" + "\n" * max(found.group().count("\n") - 2, 0)

    text = re.sub(r"^(```|~~~).*?^\1[^\n]*\n", blank, text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    lines = [re.sub(r"^\s*([-*+]|\d+\.) |^#+ |^> ", "\n\n", line)
             if not re.match(r"\s*\||    |\s*!\[|\s*<", line) else "\n" for line in
             text.split("\n")]
    kept = [line.lstrip("\n") if line.startswith("\n\n") else line for line in lines]
    starts = [line.startswith("\n\n") for line in lines]
    joined = "\n".join(("\x00" if start else "") + line
                       for line, start in zip(kept, starts, strict=True))
    return re.sub(r"\]\([^)]*\)", "]", joined)


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """(where it begins, sentence) of running text."""
    start = 0
    for end in [*(found.end() for found in re.finditer(_SENTENCE.pattern + "|\x00", text)),
                len(text)]:
        sentence = text[start:end].strip("\x00 \n")
        if sentence:
            yield start, sentence
        start = end


def _brief(sentence: str) -> str:
    flat = " ".join(sentence.split())
    return flat if len(flat) <= 90 else flat[:87] + "..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
