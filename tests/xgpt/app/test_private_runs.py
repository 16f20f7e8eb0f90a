"""`run.private`, secrets, and what of a model's folder is trusted, on a real run of a toy."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="runs need the extra `run`")
import toys  # noqa: E402
from job_folder import write_job, xgpt  # noqa: E402

from xgpt.core.errors import InputError  # noqa: E402
from xrunner.checkpoint.tensors import check_weights  # noqa: E402

SECRET = "hf_" + "PlantedSecretOfTheTests" * 2
SCHEDULE = "policy: rra, encode_batch: 2, decode_iterations: 3, tp_degree: 1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("private-llama")
    toys.make_model("llama", directory)
    return directory


def test_a_private_runs_files_are_its_users_alone_and_hold_no_secret(
        model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        cache: dict[str, str]) -> None:
    for name in ("PYTHONPATH", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, cache[name])
    # by data sheets: whether the plan is good does not matter
    monkeypatch.setattr("xgpt.app.timing.why_no_torch", lambda kind: "nothing is measured")
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, SECRET)
    before = os.umask(0o022)
    try:
        job = write_job(tmp_path, model, [{"tokens": [7, 8, 9], "max_tokens": 3}] * 3,
                        schedule=SCHEDULE, ranks=1)
        text = job.read_text(encoding="utf-8").replace("run: {", "run: {private: true, ", 1)
        assert "private" in text
        job.write_text(text, encoding="utf-8")
        done = xgpt("submit", job, "--json")
    finally:
        os.umask(before)
    assert done.returncode == 0, done.stderr
    output = tmp_path / "out"
    files = [path for path in output.rglob("*") if path.is_file()]
    assert len(files) > 5 and stat.S_IMODE(output.stat().st_mode) == 0o700
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
        assert SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in done.stdout + done.stderr


def test_pickled_weights_are_refused_unless_they_are_asked_for(model: Path,
                                                               tmp_path: Path) -> None:
    from safetensors.torch import load_file

    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    torch.save(load_file(model / "model.safetensors"), tmp_path / "pytorch_model.bin")
    spec = toys.spec_of(tmp_path)
    with pytest.raises(InputError, match=r"pytorch_model\.bin.*can run code.*pickles: true"):
        check_weights(tmp_path, spec)
    check_weights(tmp_path, spec, may_unpickle=True)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors"])
def test_an_index_names_files_of_its_own_folder_alone(model: Path, tmp_path: Path,
                                                      file: str) -> None:
    (tmp_path / "config.json").write_text((model / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(InputError, match="the name of a file of this folder"):
        check_weights(tmp_path, toys.spec_of(tmp_path))


def test_transformers_is_never_told_to_trust_a_folder() -> None:
    import ast

    calls: list[Any] = []
    root = Path(__file__).resolve().parents[3]
    for path in (path for package in ("xgpt", "xrunner", "xprofiler", "benchmarks") for path in
                 (root / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and (
                    node.func.attr in ("from_pretrained", "from_config")):
                trust = [k.value for k in node.keywords if k.arg == "trust_remote_code"]
                calls.append((path.name, node.lineno, trust))
    assert calls
    for name, line, trust in calls:
        assert trust and getattr(trust[0], "value", None) is False, f"{name}:{line}"
