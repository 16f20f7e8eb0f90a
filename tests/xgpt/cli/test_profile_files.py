"""`xgpt profile` where nothing is measured: files shown, imported, refused."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from job_folder import xgpt

from jobs import job_file
from xgpt.cli.main import cli
from xgpt.core import catalog
from xgpt.core.errors import InputError
from xprofiler.doubt import LEVELS
from xprofiler.profile import Profile, ProfileMetadata, Sample, TableKey, model_shape
from xprofiler.profile_file import save_profile
from xsimulator.measured_loops import own_points, predicted

METADATA = ProfileMetadata(model="m", model_shape="s", device="cpu-1c", dtype="float32", ranks=1,
                           threads_per_rank=1, kernels="k", libraries="torch 2")


def profile_of(x: float, **metadata: object) -> Profile:
    point = Sample(x=x, samples_s=(1e-3, 1.1e-3, 1.2e-3))
    return Profile(metadata=replace(METADATA, **metadata), tables={
        TableKey("layer_rest"): (point,)})


@pytest.fixture
def saved(tmp_path):
    save_profile(profile_of(1), tmp_path / "a.json")
    save_profile(profile_of(8), tmp_path / "b.json")
    save_profile(profile_of(8, dtype="bfloat16"), tmp_path / "other.json")
    return tmp_path


def test_a_profile_is_shown_in_eighty_columns_and_as_json(saved):
    brief = xgpt("profile", "show", saved / "a.json").stdout
    assert len(brief.splitlines()) <= 25 and "layer rest" not in brief and "verdict" in brief
    shown = xgpt("profile", "show", saved / "a.json", "--verbose")
    assert shown.returncode == 0, shown.stderr
    assert "layer rest" in shown.stdout and "1.1 ms" in shown.stdout
    assert max(map(len, shown.stdout.splitlines())) <= 80
    table = json.loads(xgpt("profile", "show", saved / "a.json", "--json").stdout)["tables"]
    assert table == {"layer_rest tp=1": [
        {"x": 1, "y": 0, "median_s": 1.1e-3, "spread": pytest.approx(0.1 / 1.1)}]}


@pytest.mark.parametrize(("metadata", "said"), [
    ({"device": "A40"}, "device 'A40'"), ({"dtype": "float32"}, "dtype"),
    ({"model_shape": "t"}, "model")])
def test_a_job_refuses_a_profile_of_something_else(tmp_path, metadata, said):
    fits = {"device": "A100-80", "dtype": "bfloat16",
            "model_shape": model_shape(catalog.model("opt-13b"))}
    save_profile(profile_of(1, **{**fits, **metadata}), tmp_path / "p.json")
    done = xgpt("schedule", job_file(tmp_path, cluster="a100-16", profile="p.json"))
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert "p.json" in done.stderr and "Traceback" not in done.stderr


def large(folder, nodes):
    """A job of 405 billion parameters, divided into two pools."""
    return job_file(
        folder, model="llama-3.1-405b",
        cluster=f"{{num_nodes: {nodes}, devices_per_node: 8, device: H200, intra_link: nvlink4, "
                "inter_link: ib-400g}",
        workload="{requests: {count: 400}, input_tokens: {mean: 50, std: 10, max: 100}, "
                 "output_tokens: {mean: 900, std: 200, max: 1500}}",
        schedule=f"{{policy: waa-c, tp_degree: 8, tp_gpus: {8 * nodes}}}")


@pytest.mark.parametrize(("nodes", "reason"), [
    # 16 devices have room for the weights twice, but half of them hold the whole KV cache
    (2, r"^no schedule: there is too little memory"),
    # memory is enough: nothing is said of it
    (3, r"^no schedule: the job has 400 requests, and every configuration has at least "
        r"9\d\d present at a time, by policy waa-c, encode_batch 1")])
def test_what_forbids_a_division_is_named(tmp_path, nodes, reason):
    done = xgpt("schedule", large(tmp_path, nodes))
    text = " ".join(done.stderr.removeprefix("xgpt: ").split())
    assert done.returncode == 3 and re.search(reason, text), text
    if nodes == 3:
        assert "memory" not in text
        return
    held = re.search(r"at least (\d+ GiB) on its fullest device, of which 125 GiB can be used, by "
                     r"policy waa-c, encode_batch 1, decode_micro_batches (\d+), tp_degree 8", text)
    assert held, text
    asked = xgpt("simulate", tmp_path / "job.yaml", "--set", "schedule.encode_batch=1",
                 "--set", f"schedule.decode_micro_batches={held[2]}").stdout
    assert f"to {held[1]} of 125 GiB per rank: DOES NOT FIT" in asked


HEADER = ("model,device,engine,weight_dtype,tp_degree,concurrency,input_tokens,output_tokens,"
          "ttft_ms,tpot_ms\n")
ROW = "llama-3.1-8b,H100,vllm,{weights},{degree},{batch},512,64,{ttft},{tpot}\n"


def accuracy(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["models", "--accuracy", *map(str, arguments)])


def exact(folder: Path) -> Path:
    """A file of eight loops that took just as long as they are predicted to."""
    rows = [{"weights": weights, "degree": degree, "batch": batch, "ttft": 100, "tpot": 10}
            for weights in ("", "fp8") for degree in (1, 2) for batch in (4, 16)]
    path = folder / "mine.csv"
    path.write_text(HEADER + "".join(ROW.format(**row) for row in rows), encoding="utf-8")
    for row, point in zip(rows, own_points(path), strict=True):
        found = predicted(point)
        row |= {"ttft": found.ttft_s * 1e3, "tpot": found.tpot_s * 1e3}
    path.write_text(HEADER + "".join(ROW.format(**row) for row in rows), encoding="utf-8")
    return path


def test_loops_that_took_as_long_as_predicted_are_no_error_in_table_and_object(tmp_path):
    shown = accuracy("--measured", exact(tmp_path))
    assert shown.exit_code == 0
    lines = shown.stdout.splitlines()
    assert max(map(len, lines[1:])) <= 80 and "mine.csv" in lines[0]
    gpus = catalog.names("device")
    rows = [line for line in lines if line.partition(" ")[0] in gpus]
    assert rows[0].split()[:4] == ["H100", "vllm", "TPOT", "8"]
    assert all(any(line.startswith(level) for line in lines)
               for level in ("same cell", "neighbour", "far", "degree", "shape", "engine and GPU"))
    told = json.loads(accuracy("--measured", exact(tmp_path), "--json").stdout)["measured"]
    assert [row["operator"] for row in told["rows"]] == ["TPOT", "TTFT", "request"]
    assert all(row["cases"] == 8 and row["worst"] < 1e-6 for row in told["rows"])
    assert told["kept"] == {"mine": [[0.9, 1.0]]}
    plain, with_margin = told["choosers"]
    assert plain["cases"] == with_margin["cases"] == 10 and plain["exact"] == 1
    assert plain["none"] == plain["broken"] == plain["regret"] == with_margin["broken"] == 0
    path = tmp_path / "mine.csv"
    path.write_text(HEADER + ROW.format(weights="", degree=1, batch=1, ttft=30, tpot=8),
                    encoding="utf-8")
    assert json.loads(accuracy("--measured", path, "--json").stdout)["measured"]["choosers"] == []


def test_the_figures_of_the_catalog_keep_what_is_promised():
    """Runs whose group was left out of the fit are within 9 % in the mean. They keep the share
    promised at 0.9 and above, give or take four points. Choices with that margin break a limit once
    in ten or less."""
    found = catalog.accuracy()
    assert all({row["gpu"]} <= {*catalog.names("device")} and row["engine"] in
               catalog.names("engine") for row in found["rows"])
    for table in ("degree", "shape", "engine and GPU"):
        rows = [row for row in found["rows"] if row["left_out"] == table
                and row["operator"] == "request"]
        cases = sum(row["cases"] for row in rows)
        assert cases == 236 and sum(row["cases"] * row["mean"] for row in rows) / cases < 0.09
        assert all(kept == pytest.approx(promised, abs=0.04)
                   for promised, kept in found["kept"][table] if promised >= 0.9)
    assert all(one["broken"] < 0.1 for one in found["choosers"]
               if one["margin"] == "confidence 0.9")
    means = [found["levels"][level]["mean"] for level in LEVELS]
    assert means == sorted(means)


def test_every_mistake_of_a_users_file_is_told_with_its_line(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text(HEADER + ROW.format(weights="", degree="two", batch=1, ttft=1, tpot=1)
                    + "gpt-9,H100,vlm,,1,1,1,1,1,1\n"
                    "llama-3.1-8b,H100,vllm,int3,1,0,512,64,nan,-1\n", encoding="utf-8")
    with pytest.raises(InputError) as caught:
        own_points(path)
    told = {(m.line, m.key) for m in caught.value.mistakes}
    assert told == {(2, "tp_degree"), (3, "model"), (3, "engine"), (4, "weight_dtype"),
                    (4, "concurrency"), (4, "ttft_ms"), (4, "tpot_ms")}
    assert any(m.allowed == "one of fp8 or nothing" for m in caught.value.mistakes)


@pytest.mark.parametrize("content", [b"", HEADER.encode(), b"\xff\xfe\x00", b"model,device\na,b\n",
                                     (HEADER + ROW.format(weights="", degree=1, batch=1, ttft=0,
                                                          tpot=1)).encode()],
                         ids=["empty", "no row", "no text", "columns missing", "no time"])
def test_a_file_that_cannot_be_read_is_wrong_input(tmp_path, content):
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    done = accuracy("--measured", path)
    assert isinstance(done.exception, InputError) and str(path) in str(done.exception)
