"""`xgpt doctor`: what a machine has, in words and as JSON; a GPU's verdict from what its process
says; a refusal where there is no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from xgpt.app import doctor
from xgpt.app.telling import LogTeller
from xgpt.cli.main import cli
from xgpt.core.errors import XgptError
from xgpt.core.system.machine import SmiGpu

CARD = {"card": "NVIDIA Toy 40", "copy_bytes_per_s": 100.0}
CASE = {"operator": "silu_mul", "dtype": "float16", "agrees": True, "bytes_per_s": 80.0}


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has nothing."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "gpus_here", list)
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def saying(monkeypatch: pytest.MonkeyPatch, *lines: dict[str, object], fails: str = "") -> None:
    """A GPU whose process says these lines, and then `fails`."""
    monkeypatch.setattr(doctor, "gpus_here", lambda: [
        SmiGpu(index=0, uuid="GPU-0", name="NVIDIA Toy 40", memory_bytes=None)])
    script = "\n".join(["import sys", *(f"print({json.dumps(json.dumps(line))})" for line in lines),
                        f"sys.exit({fails!r} or 0)"])
    popen = subprocess.Popen
    monkeypatch.setattr(doctor.subprocess, "Popen", lambda command, **how: popen(
        [sys.executable, "-c", script], **how))


def test_a_bare_machine_is_told_what_it_lacks_in_80_columns(without: None) -> None:
    shown = CliRunner().invoke(cli, ["doctor"], catch_exceptions=False)
    assert shown.exit_code == 0 and max(map(len, shown.stdout.splitlines())) <= 80
    assert "No job runs here yet." in shown.stdout
    assert '    pip install -c constraints.txt -e ".[run,report]"\n' in shown.stdout
    told = json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).stdout)
    assert list(told) == ["processor", "memory", "torch", "native", "mpi", "compiler", "gpus",
                          "cupy", "nvcc", "slurm", "engines", "packages", "hub", "cache", "browser",
                          "missing"]
    assert "extra `run`" in told["torch"] and "no C++ compiler" in told["compiler"]
    assert told["nvcc"] == "no nvcc on the PATH" and "none" in told["gpus"]


def test_what_is_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_asked", lambda part: f"{part} 1.0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    told = doctor.examine()
    assert "usable cores" in told["processor"] and told["mpi"] == "mpi 1.0"


@pytest.mark.parametrize("part", ["torch", "mpi"])
def test_torch_and_mpi_answer_for_themselves(part: str) -> None:
    pytest.importorskip("mpi4py", reason="ranks need the extra `run`")
    assert not doctor._asked(part).startswith("fails"), doctor._asked(part)


def test_a_package_that_crashes_when_imported_is_told_of(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('a torch that is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor._asked("torch") == "fails: a torch that is broken"


def test_without_a_gpu_it_refuses_with_exit_code_1(without: None) -> None:
    done = CliRunner().invoke(cli, ["doctor", "--gpu"])
    assert isinstance(done.exception, XgptError) and done.exception.exit_code == 1
    assert "no GPU here" in str(done.exception)


def test_a_card_on_which_all_agree_leaves_a_file(tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    saying(monkeypatch, CARD, CASE, {**CASE, "bytes_per_s": 60.0})
    monkeypatch.chdir(tmp_path)
    shown = CliRunner().invoke(cli, ["doctor", "--gpu"], catch_exceptions=False)
    assert shown.exit_code == 0 and max(map(len, shown.stdout.splitlines())) <= 80
    assert shown.stdout.splitlines()[2].split() == ["silu_mul", "yes", "80", "%"]
    written = json.loads((tmp_path / "xgpt-doctor-nvidia-toy-40.json").read_text())
    assert written["schema_version"] == doctor.SCHEMA_VERSION
    assert written["card"] == "NVIDIA Toy 40" and len(written["cases"]) == 2


def test_a_kernel_that_differs_is_a_failure_that_names_it(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saying(monkeypatch, CARD, CASE, {"operator": "place", "dtype": "float32", "agrees": False})
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["doctor", "--gpu", "--json"])
    assert isinstance(done.exception, doctor.DifferingKernels) and not done.stdout
    assert str(done.exception).startswith("place: ") and done.exception.exit_code == 1
    assert done.exception.details["verdict"]["differing"] == ("place",)
    assert (tmp_path / "xgpt-doctor-nvidia-toy-40.json").is_file()


def test_without_a_source_tree_it_says_that_it_needs_one(tmp_path: Path,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    saying(monkeypatch, CARD, CASE)
    with pytest.raises(XgptError, match="needs xgpt's source tree"):
        doctor.compare_on_gpu(LogTeller(), tmp_path, tmp_path / "support")


@pytest.mark.parametrize("lines", [[], [CARD, CASE]])
def test_a_process_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        lines: list[dict[str, object]]) -> None:
    saying(monkeypatch, *lines, fails="cupy is not installed")
    with pytest.raises(XgptError, match="cupy is not installed"):
        doctor.compare_on_gpu(LogTeller(), tmp_path)
    assert not list(tmp_path.iterdir())
