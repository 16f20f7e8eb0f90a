"""`xgpt profile` where nothing is measured: files shown, merged, imported, refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from job_folder import xgpt

from xprofiler.profile import Profile, ProfileMetadata, Sample, TableKey
from xprofiler.profile_file import load_profile, save_profile

METADATA = ProfileMetadata(model="m", model_shape="s", device="cpu-1c", dtype="float32", ranks=1,
                           threads_per_rank=1, kernels="k", libraries="torch 2")


def profile_of(x: float, **metadata: object) -> Profile:
    point = Sample(x=x, samples_s=(1e-3, 1.1e-3, 1.2e-3))
    return Profile(metadata=replace(METADATA, **metadata), tables={  # type: ignore[arg-type]
        TableKey("layer_rest"): (point,)})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_profile(profile_of(1), tmp_path / "a.json")
    save_profile(profile_of(8), tmp_path / "b.json")
    save_profile(profile_of(8, dtype="bfloat16"), tmp_path / "other.json")
    return tmp_path


def test_a_profile_is_shown_in_eighty_columns_and_as_json(saved: Path) -> None:
    shown = xgpt("profile", "show", saved / "a.json")
    assert shown.returncode == 0, shown.stderr
    assert "layer rest" in shown.stdout and "1.1 ms" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    table = json.loads(xgpt("profile", "show", saved / "a.json", "--json").stdout)["tables"]
    assert table == {"layer_rest tp=1": [
        {"x": 1, "y": 0, "median_s": 1.1e-3, "spread": pytest.approx(0.1 / 1.1)}]}


def test_profiles_of_the_same_thing_are_merged_and_others_refused(saved: Path) -> None:
    done = xgpt("profile", "merge", saved / "a.json", saved / "b.json", "--out", saved / "ab.json")
    assert done.returncode == 0, done.stderr
    assert [p.x for p in load_profile(saved / "ab.json").table("layer_rest")] == [1, 8]
    refused = xgpt("profile", "merge", saved / "a.json", saved / "other.json", "--out",
                   saved / "no.json")
    assert refused.returncode == 2 and "dtype" in refused.stderr
    assert not (saved / "no.json").exists()


@pytest.mark.parametrize("target", ["", "folder", "a.json/below.json"])
def test_a_place_that_cannot_be_written_is_told_before_anything_is_done(
        saved: Path, target: str) -> None:
    (saved / "folder").mkdir()
    for command in (("merge", saved / "a.json"), ("import", "vidur", saved, "--model", "opt-13b",
                                                  "--device", "A100-80")):
        done = xgpt("profile", *command, "--out", saved / target if target else "")
        assert done.returncode == 2, done.stderr
        assert "--out" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(("arguments", "said"), [
    (("--budget", "soon"), "seconds"), (("--budget", "0s"), "above 0"), (("--tp", "0"), "--tp"),
    (("--tp", "2,x"), "--tp"), (("--set", "cluster=a40-4"), "`local`")])
def test_wrong_wishes_are_refused_in_words(
        tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: smollm2-135m\ncluster: local\nworkload: {task: S}\n")
    done = xgpt("profile", job, *arguments)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("metadata", "said"), [
    ({"device": "A40"}, "device 'A40'"), ({"dtype": "float32"}, "dtype"),
    ({"model_shape": "t"}, "model")])
def test_a_job_refuses_a_profile_of_something_else(
        tmp_path: Path, metadata: dict[str, str], said: str) -> None:
    from xgpt.core import catalog
    from xprofiler.cache import model_shape

    fits = {"device": "A100-80", "dtype": "bfloat16",
            "model_shape": model_shape(catalog.model("opt-13b"))}
    save_profile(profile_of(1, **{**fits, **metadata}), tmp_path / "p.json")
    job = tmp_path / "job.yaml"
    job.write_text("model: opt-13b\ncluster: a100-16\nworkload: {task: S}\nprofile: p.json\n")
    done = xgpt("schedule", job)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert "p.json" in done.stderr and "Traceback" not in done.stderr
