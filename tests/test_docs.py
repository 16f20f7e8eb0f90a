"""The documents name files, folders, modules and headings that exist, and the layout names every
room of the tree."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("xgpt", "xprofiler", "xsimulator", "xscheduler", "xrunner")
TOP = (*PACKAGES, "benchmarks", "csrc", "docs", "jobs", "tests", ".ci")
DOCUMENTS = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md",
                    *(ROOT / name / "README.md" for name in ("benchmarks", "csrc", "jobs"))])
# not those that a run, an installation or a linter wrote
WRITTEN = {"node_modules", "out", "build", "site-packages"}
PAGES = sorted(page for page in ROOT.rglob("*.md") if not WRITTEN & {*page.parts}
               and not any(part.startswith(".") for part in page.relative_to(ROOT).parts))
GROUPS = {"xgpt.policies", "xgpt.engines", "xgpt.forecasts"}  # entry points

# What stands between slashes, or ends like a source file; not the rest of an address or of a path
# that is not of this tree.
_PATH = re.compile(r"(?<![\w/.*~<-])[\w.-]+(?:/[\w.-]+)*/?(?![\w*<])")
_MODULE = re.compile(rf"(?<![\w/.])(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")
_SOURCES = (".py", ".pyi", ".j2")


def text_of(document: Path) -> str:
    return document.read_text(encoding="utf-8")


def tree() -> set[str]:
    """Paths of all files of the tree, from its root."""
    return {path.relative_to(ROOT).as_posix() for top in TOP for path in (ROOT / top).rglob("*")
            if path.is_file() and "__pycache__" not in path.parts}


FILES = tree()


def is_there(path: str) -> bool:
    """Whether a path from the root is in the tree or, for a source file, the end of one path."""
    ends = [name for name in FILES if name.endswith(f"/{path}")]
    return (ROOT / path).exists() or (path.endswith(_SOURCES) and len(ends) == 1)


def paths_in(text: str) -> Iterator[str]:
    """What reads as a path of this tree: it begins with a folder of its top, or ends like a source
    file."""
    without_links = _LINK.sub("]", text)
    for match in _PATH.finditer(without_links):
        path = match.group().rstrip(".")
        top, slash, _ = path.partition("/")
        if (slash and top in TOP) or path.endswith(_SOURCES):
            yield path


def is_name(dotted: str) -> bool:
    """Whether a dotted name is a module of the tree, or a name that stands in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        place = "/".join(parts[:length])
        rest = parts[length:]
        for file in (f"{place}.py", f"{place}/__init__.py"):
            if file in FILES:
                return len(rest) < 3 and all(
                    re.search(rf"\b{name}\b", (ROOT / file).read_text("utf-8")) for name in rest)
        if (ROOT / place).is_dir():
            return not rest
    return False


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", text_of(document), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_that_a_document_names_exists(document):
    missing = sorted({path for path in paths_in(text_of(document))
                      if not is_there(path) and not (document.parent / path).exists()})
    assert not missing, f"not in the tree, or there twice: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_module_that_a_document_names_exists(document):
    names = set(_MODULE.findall(text_of(document))) - GROUPS
    missing = sorted(name for name in names if not is_name(name) and name not in FILES)
    assert not missing, f"{document.name} names {missing}"


@pytest.mark.parametrize("document", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_document_leads_somewhere(document):
    for path, anchor in _LINK.findall(text_of(document)):
        if "://" in path or path.startswith("mailto:"):
            continue
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), f"{document.name} links {path}"
        assert not anchor or anchor in anchors(target), f"{document.name} links {path}#{anchor}"


def section(title: str) -> str:
    """The part of docs/design.md under a heading."""
    parts = re.split(r"^## (.+)$", text_of(ROOT / "docs" / "design.md"), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[title]


def test_the_layout_names_every_room():
    rooms = {Path(name).parent.as_posix() + "/" for name in FILES
             if name.endswith(".py") and name.split("/")[0] in PACKAGES}
    unnamed = sorted(rooms - set(re.findall(r"^\| `([^`]+/)`", section("Layout"), re.M)))
    assert not unnamed, f"docs/design.md has no line for {unnamed}"


@pytest.mark.parametrize(("folder", "pattern"), [("benchmarks", "*.py"), ("jobs", "*.yaml")])
def test_a_folder_s_own_page_names_all_of_it(folder, pattern):
    page = text_of(ROOT / folder / "README.md")
    assert not [path.name for path in (ROOT / folder).glob(pattern) if path.name not in page]


def test_each_question_of_where_is_answered_by_one_path():
    rows = re.findall(r"^\| (?!Where do I|---)([^|]+) \| ([^|]+) \|", section("Where do I"), re.M)
    assert len(rows) >= 10
    for question, answer in rows:
        (path,) = re.findall(r"`([^`]+)`", answer)
        assert (ROOT / path).exists(), f"{question}: {path}"


def test_a_path_that_does_not_exist_is_found():
    text = "See `xgpt/core/nowhere.py`, `gone.py`, (xgpt/cli/main.py) and https://a.b/c/d.py."
    assert [path for path in paths_in(text) if not is_there(path)] == [
        "xgpt/core/nowhere.py", "gone.py"]
    assert not is_name("xgpt.core.nowhere") and not is_name("xgpt.core.policies.Nothing")
    assert is_name("xgpt.core.policies.Policy") and is_name("xrunner.rules")
