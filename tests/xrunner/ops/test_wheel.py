"""A wheel holds the native operators and their sources, and installs without a compiler, too; a
checkout that is installed as it lies has them compiled for its first run."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from compiled import has_compiler

import xgpt
from xrunner.ops.build import LIBRARY
from xrunner.ops.cpu import native

ROOT = Path(__file__).resolve().parents[3]
PARTS = ("setup.cfg", "pyproject.toml", "README.md", "LICENSE", "csrc", "xgpt", "xprofiler",
         "xsimulator", "xscheduler", "xrunner")
SAY = """
from xrunner.ops.cpu import native
from xrunner.ops import build
print(native.describe())
print(build.source_folder())
"""


@pytest.fixture
def tree(tmp_path):
    """What a wheel is made of: building leaves its files where it is done."""
    tree = tmp_path / "tree"
    tree.mkdir()
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy2
        copy(ROOT / part, tree / part)
    return tree


def built_wheel(tree: Path, **variables: str) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps",
               "--no-build-isolation", "--wheel-dir", str(tree / "dist"), str(tree)]
    subprocess.run(command, check=True, env={**os.environ, **variables}, timeout=280)
    (wheel,) = (tree / "dist").glob("*.whl")
    return wheel


def installed(wheel: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target",
               str(target), str(wheel)]
    subprocess.run(command, check=True, timeout=100)
    return target


def said_by(target: Path, cache: Path) -> list[str]:
    """What an interpreter with this installation, and no compiler, says of it."""
    done = subprocess.run(
        [sys.executable, "-c", SAY], check=True, timeout=100, capture_output=True, text=True,
        cwd=cache, env={**os.environ, "PYTHONPATH": str(target), "CXX": "/nowhere/c++",
                        "XDG_CACHE_HOME": str(cache), "XGPT_NATIVE": "auto",
                        "XGPT_NATIVE_FLAGS": ""})
    return done.stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="no compiler")
def test_a_wheel_s_library_serves_without_a_compiler(tree, tmp_path):
    wheel = built_wheel(tree)
    assert "-py3-none-linux_" in wheel.name
    target = installed(wheel, tmp_path / "target")
    words, folder = said_by(target, tmp_path)
    assert words == f"{native.describe().rpartition(', ')[0]}, as installed"
    assert folder == str(target / "xrunner" / "csrc")
    sources = {p.relative_to(ROOT / "csrc") for pattern in ("*.cpp", "*.h", "*.cu")
               for p in ROOT.glob(f"csrc/**/{pattern}")}
    found = {p.relative_to(folder) for p in Path(folder).rglob("*") if p.is_file()}
    assert found == {*sources, Path(LIBRARY)}
    plans_in_a_folder_of_its_own(target, tmp_path / "else where")


@pytest.mark.slow
def test_a_wheel_is_built_and_used_without_a_compiler(tree, tmp_path):
    wheel = built_wheel(tree, CXX="/nowhere/c++")
    assert wheel.name.endswith("-py3-none-any.whl")
    words, folder = said_by(installed(wheel, tmp_path / "target"), tmp_path)
    assert words.startswith("native operators: none, torch's serve: $CXX is /nowhere/c++")
    assert (Path(folder) / "ops/cpu/native.h").is_file()
    assert not (Path(folder) / LIBRARY).exists()


def plans_in_a_folder_of_its_own(target: Path, folder: Path) -> None:
    """The catalog and the page's parts are in the wheel; no git and no compiler is on the PATH."""
    folder.mkdir()
    shutil.copy2(ROOT / "jobs" / "opt-13b-summarise.yaml", folder / "job.yaml")
    for command in (["schedule", "job.yaml", "--out", "schedule.json"],
                    ["sweep", "job.yaml", "--bounds", "8", "--cores", "1", "--out", "sweep"],
                    ["report", "sweep"]):
        subprocess.run([sys.executable, "-m", "xgpt.cli.main", *command], check=True, timeout=100,
                       cwd=folder, capture_output=True,
                       env={"PATH": str(folder), "PYTHONPATH": str(target), "HOME": str(folder)})
    assert (folder / "schedule.json").is_file() and (folder / "sweep" / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_an_installed_checkout_is_compiled_for_its_first_run(tree, tmp_path):
    shutil.rmtree(tree / "csrc")
    for name in ("replay/replay.cpp", "ops/cpu/other.cpp"):
        source = tree / "csrc" / name
        source.parent.mkdir(parents=True)
        source.write_text(f'extern "C" int {source.stem}(void) {{ return 1; }}\n')
    program = "from setuptools.build_meta import build_editable; build_editable('.')"
    said = {}
    for compiler in ("/nowhere/c++", "g++"):
        done = subprocess.run(
            [sys.executable, "-c", program], check=True, cwd=tree, timeout=100,
            capture_output=True, text=True, env={**os.environ, "CXX": compiler,
                "XDG_CACHE_HOME": str(tmp_path / "cache"), "XGPT_NATIVE": ""})
        said[compiler] = done.stdout + done.stderr
    line = "the native operators are not compiled now: $CXX is /nowhere/c++"
    assert line in said["/nowhere/c++"] and line[:20] not in said["g++"]
    code = f"""
import sys; sys.path.insert(0, {str(tree)!r})
from xrunner.ops import build
build.compile_library = None  # all is there
for names in (build.OPERATORS, build.REPLAYS):
    print(build.cached_library(build.cache_folder(), names))
"""
    found = subprocess.run(
        [sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": "g++"})
    assert len(set(found.stdout.split())) == 2
    assert all(Path(one).is_file() for one in found.stdout.split())


def test_a_source_distribution_holds_csrc(tree):
    program = "from setuptools.build_meta import build_sdist; build_sdist('dist')"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tree, timeout=100,
                   capture_output=True)
    (archive,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        places = {name.partition("/")[2] for name in packed.getnames()}
        told = packed.extractfile(f"xgpt-{xgpt.__version__}/PKG-INFO")
        metadata = told.read().decode()
    assert {str(p.relative_to(ROOT)) for p in ROOT.glob("csrc/**/*.[ch]*")} <= places
    assert {f"{package}/py.typed" for package in PARTS[5:]} <= places, "their types are told"
    for pattern in ("xgpt/core/catalog/*.yaml", "xgpt/report/*.j2"):
        assert {str(path.relative_to(ROOT)) for path in ROOT.glob(pattern)} <= places
    assert f"\nVersion: {xgpt.__version__}\n" in metadata
    assert "\nClassifier: Typing :: Typed\n" in metadata


@pytest.mark.slow
@pytest.mark.skipif(not has_compiler(), reason="no compiler")
@pytest.mark.skipif(shutil.which("auditwheel") is None, reason="no auditwheel")
def test_an_index_accepts_the_wheel(tree, tmp_path):
    """A library of this machine alone, linux_x86_64, is refused by indexes."""
    wheel = built_wheel(tree)
    subprocess.run(["auditwheel", "repair", "--wheel-dir", str(tmp_path / "fixed"), str(wheel)],
                   check=True, timeout=100, capture_output=True)
    (fixed,) = (tmp_path / "fixed").glob("*-py3-none-manylinux_*.whl")
    words, _ = said_by(installed(fixed, tmp_path / "target"), tmp_path)
    assert words.endswith(", as installed"), "its library serves as it did"
