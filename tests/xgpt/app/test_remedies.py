"""What is missing on a machine, and the one command that mends it."""

from __future__ import annotations

import urllib.error
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from xgpt.app import doctor as module
from xgpt.app.doctor import cache_in_words, hub_in_words, remedies
from xgpt.core.local import SmiGpu
from xrunner.checkpoint import hub

GPU = SmiGpu(index=0, uuid="GPU-0", name="NVIDIA Toy 40", memory_bytes=None)


def having(monkeypatch: pytest.MonkeyPatch, *, without: tuple[str, ...] = (),
           gpus: tuple[SmiGpu, ...] = (), smi: str = "") -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec",
                        lambda name: None if name in without else object())
    monkeypatch.setattr(module, "gpus_here", lambda: list(gpus))
    monkeypatch.setattr(module, "why_no_torch", lambda kind: "it was built without CUDA")
    monkeypatch.setattr(module.subprocess, "run", lambda *_, **how: SimpleNamespace(
        returncode=0, stdout=smi))


def commands(**found: str) -> list[str]:
    return [remedy.command for remedy in remedies(found)]


def test_a_machine_that_has_all_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch)
    assert commands(torch="2.13", mpi="mpi4py", compiler="g++ 12", hub="answers") == []


def test_packages_that_runs_need_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch, without=("torch", "mpi4py"))
    known = remedies({"compiler": "no C++ compiler is there", "native": "torch is not installed"})
    assert known[0].is_needed and known[0].command.endswith('".[run,report]"')
    assert "torch, mpi4py not installed" in known[0].why


def test_a_broken_mpi_is_installed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch)
    assert "--force-reinstall" in commands(mpi="fails: no libmpi.so")[0]


@pytest.mark.parametrize(("smi", "extra", "index"), [
    ("CUDA Version: 12.4", "cuda12", "cu128"), ("CUDA Version: 13.0", "cuda13", "cu130"),
    ("no word of it", "cuda12", "cu128")])
def test_gpus_take_the_builds_of_their_driver(monkeypatch: pytest.MonkeyPatch, smi: str, extra: str,
                                              index: str) -> None:
    having(monkeypatch, without=("cupy",), gpus=(GPU,), smi=smi)
    torch, cupy = commands()
    assert torch.endswith(index) and cupy.endswith(f'".[{extra}]"')


def test_a_compiler_is_named_by_the_system_s_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch)
    monkeypatch.setattr(module.shutil, "which", lambda name: name == "dnf" or None)
    found = {"compiler": "no C++ compiler is on the PATH", "native": "none, torch's serve"}
    assert commands(**found) == ["sudo dnf install -y gcc-c++"]
    assert commands(**{**found, "native": "avx512, from the wheel"}) == []


def test_the_hub_is_offline_reached_or_not(monkeypatch: pytest.MonkeyPatch) -> None:
    having(monkeypatch)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in hub_in_words()
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example/")

    def answering(error: Exception) -> None:
        def open_(request: Any, timeout: float) -> Any:
            raise error
        monkeypatch.setattr(hub.urllib.request, "urlopen", open_)

    answering(urllib.error.URLError("no such host"))
    said = hub_in_words()
    assert said == "https://mirror.example cannot be reached (no such host)"
    assert "HF_ENDPOINT" in commands(hub=said)[0]
    answering(urllib.error.HTTPError("https://mirror.example", 405, "no", {}, None))  # type: ignore[arg-type]
    assert hub_in_words() == "https://mirror.example answers"


def test_a_cache_that_cannot_be_written_to_is_needed(monkeypatch: pytest.MonkeyPatch,
                                                     tmp_path: Path) -> None:
    having(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert "of room" in cache_in_words()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    said = cache_in_words()
    assert "cannot be written to" in said
    (remedy,) = remedies({"cache": said})
    assert remedy.is_needed and "XDG_CACHE_HOME" in remedy.command
