"""`xgpt doctor`: what a machine has, in words and as JSON; a GPU's verdict from what its process
says; a refusal where there is no GPU."""

import json
import urllib.error
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from jobs import job as job_of
from xgpt.app import doctor
from xgpt.app import profile as timing
from xgpt.app.doctor import cache_in_words, hub_in_words, remedies
from xgpt.app.opened_job import open_file
from xgpt.app.profile import timing_of
from xgpt.app.running import prepare as checks
from xgpt.cli.main import cli
from xgpt.cli.terminal import Terminal
from xgpt.core.errors import InputError, XgptError
from xgpt.core.system import machine as local
from xgpt.core.system.machine import SmiGpu
from xprofiler.roofline import Roofline
from xrunner.checkpoint import source as hub

CARD = {"card": "NVIDIA Toy 40", "copy_bytes_per_s": 100.0}
CASE = {"operator": "silu_mul", "shape": "8", "dtype": "float16", "agrees": True,
        "bytes_per_s": 80.0}


@pytest.fixture
def without(monkeypatch):
    """A machine that has nothing."""
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor, "gpus_here", list)
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_a_bare_machine_is_told_what_it_lacks_in_80_columns(without):
    shown = CliRunner().invoke(cli, ["doctor"], catch_exceptions=False)
    assert shown.exit_code == 0 and max(map(len, shown.stdout.splitlines())) <= 80
    assert "No job runs here yet." in shown.stdout
    assert '    pip install -c constraints.txt -e ".[run,report]"\n' in shown.stdout
    told = json.loads(CliRunner().invoke(cli, ["doctor", "--json"]).stdout)
    assert list(told) == ["processor", "memory", "torch", "native", "mpi", "compiler", "gpus",
                          "cupy", "slurm", "engines", "packages", "hub", "cache", "missing"]
    assert "extra `run`" in told["torch"] and "no C++ compiler" in told["compiler"]
    assert told["slurm"] == "no sbatch on the PATH" and "none" in told["gpus"]
    done = CliRunner().invoke(cli, ["doctor", "--gpu"])
    assert done.exception.exit_code == 1 and "no GPU here" in str(done.exception)


def test_a_package_that_crashes_when_imported_is_told_of(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text("raise SystemExit('a torch that is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor.asked("torch") == "fails: a torch that is broken"


def test_a_node_says_which_shared_files_it_does_not_see_and_where_it_cannot_write(
        tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "asked", lambda part: "fails: no libmpi" if part == "mpi" else "ok")
    monkeypatch.setattr(doctor, "gpus_here", lambda: [GPU])
    monkeypatch.setattr(doctor, "_LEAST_SHM_BYTES", 2**70)
    (tmp_path / "there").touch()
    monkeypatch.setattr(doctor, "why_no_folder", lambda folder: f"{folder.name} is full")
    found = doctor.node_report({
        "jobs": [str(tmp_path / "job.yaml")], "overrides": [], "gpus": 2, "seen": {
            str(tmp_path / "there"): "output folder", str(tmp_path / "absent"): "model"}})
    assert found["facts"]["GPUs"] == f"1 x {GPU.name}" and "free" in found["facts"]["local disk"]
    lacking = found["lacking"]
    assert lacking["mpi"] == "no libmpi" and "needed" in lacking["/dev/shm"]
    assert lacking["model"] == f"{tmp_path / 'absent'} is not seen there"
    assert lacking["output folder"].endswith(f"{tmp_path.name} is full")
    assert lacking["GPUs"].endswith("and the job asks for 2")
    assert "no such file" in lacking["job"].lower()


def test_a_job_file_without_slurm_is_refused():
    done = CliRunner().invoke(cli, ["doctor", "job.yaml"])
    assert done.exit_code == 2 and "a job file goes with --slurm" in done.output


def test_what_compares_kernels_writes_the_file_or_is_quoted(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "gpus_here", lambda: [GPU])
    with pytest.raises(XgptError, match="needs xgpt's source tree"):
        doctor.compare_on_gpu(tmp_path, tmp_path)
    script = tmp_path / "gpu_report.py"
    (tmp_path / "what_it_shares.py").write_text("TEXT = ''")
    script.write_text("import sys; from what_it_shares import TEXT; open(sys.argv[1], 'w')")
    file = doctor.compare_on_gpu(tmp_path, tmp_path)
    assert file.name == "xgpt-doctor-nvidia-toy-40.json" and file.is_file()
    script.write_text("raise SystemExit('cupy is not installed')")
    with pytest.raises(XgptError, match="cupy is not installed"):
        doctor.compare_on_gpu(tmp_path, tmp_path)


def test_a_kernel_that_differs_is_named_and_all_cases_are_written(tmp_path):
    pytest.importorskip("torch", reason="kernels are compared with torch (extra: run)")
    from gpu_report import write
    write(CARD, iter([CASE, {**CASE, "bytes_per_s": 60.0}]), tmp_path / "all.json")
    assert json.loads((tmp_path / "all.json").read_text())["card"] == "NVIDIA Toy 40"
    with pytest.raises(XgptError, match="^place: not what torch computes"):
        write(CARD, iter([CASE, {**CASE, "operator": "place", "agrees": False}]),
              tmp_path / "differs.json")
    assert len(json.loads((tmp_path / "differs.json").read_text())["cases"]) == 2


GPU = SmiGpu(index=0, uuid="GPU-0", name="NVIDIA Toy 40", memory_bytes=None)


def having(monkeypatch: pytest.MonkeyPatch, *, without: tuple[str, ...] = (),
           gpus: tuple[SmiGpu, ...] = (), smi: str = "") -> None:
    monkeypatch.setattr(doctor.importlib.util, "find_spec",
                        lambda name: None if name in without else object())
    monkeypatch.setattr(doctor, "gpus_here", lambda: list(gpus))
    monkeypatch.setattr(doctor, "why_no_torch", lambda kind: "it was built without CUDA")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **how: SimpleNamespace(
        stdout=smi, stderr="", returncode=0))


def commands(**found: str) -> list[str]:
    return [remedy.command for remedy in remedies(found)]


NO_COMPILER = {"compiler": "no C++ compiler is on the PATH", "native": "none, torch's serve"}


@pytest.mark.parametrize(("without", "found", "said"), [
    ((), {"torch": "2.13", "mpi": "mpi4py", "compiler": "g++ 12", "hub": "answers"}, []),
    (("torch", "mpi4py"), {"native": "torch is not installed"}, ['".[run,report]"']),
    ((), {"mpi": "fails: no libmpi.so"}, ["--force-reinstall"]),
    ((), NO_COMPILER, ["sudo dnf install -y gcc-c++"]),  # the system's own command
    ((), NO_COMPILER | {"native": "avx512, from the wheel"}, [])])
def test_what_is_missing_has_one_command_that_mends_it(monkeypatch, without, found, said):
    having(monkeypatch, without=without)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: name == "dnf" or None)
    assert len(commands(**found)) == len(said)
    assert all(words in command for words, command in zip(said, commands(**found), strict=True))
    if without:
        assert remedies(found)[0].is_needed
        assert "torch, mpi4py not installed" in remedies(found)[0].why


@pytest.mark.parametrize(("smi", "extra", "index"), [
    ("CUDA Version: 12.4", "cuda12", "cu128"), ("CUDA Version: 13.0", "cuda13", "cu130"),
    ("no word of it", "cuda12", "cu128")])
def test_gpus_take_the_builds_of_their_driver(monkeypatch, smi, extra, index):
    having(monkeypatch, without=("cupy",), gpus=(GPU,), smi=smi)
    torch, cupy = commands()
    assert torch.endswith(index) and cupy.endswith(f'".[{extra}]"')


def test_the_hub_is_offline_reached_or_not(monkeypatch):
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
    answering(urllib.error.HTTPError("https://mirror.example", 405, "no", {}, None))
    assert hub_in_words() == "https://mirror.example answers"


def test_a_cache_that_cannot_be_written_to_is_needed(monkeypatch, tmp_path):
    having(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    assert "free; " in cache_in_words()
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    said = cache_in_words()
    assert "cannot be written to" in said
    (remedy,) = remedies({"cache": said})
    assert remedy.is_needed and "XDG_CACHE_HOME" in remedy.command


TWO_A40 = "0, GPU-a, NVIDIA A40, 46068\n1, GPU-b, NVIDIA A40, 46068\n"


@pytest.fixture()
def job(tmp_path):
    def make(ranks=None, cluster="local"):
        return job_of(tmp_path, model="opt-125m", cluster=cluster,
                      run=f"{{ranks: {ranks}}}" if ranks else None)

    return make


@pytest.fixture()
def machine(monkeypatch):
    """Two GPUs, and a PyTorch that can use them."""
    monkeypatch.setattr(local, "_query_gpus", lambda: local.parse_smi(TWO_A40))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(local, "usable_cores", lambda *_: 8)
    for module in (checks, timing):
        monkeypatch.setattr(module, "why_no_torch", lambda kind: None)


def test_a_run_on_this_machines_gpus_is_executed_and_others_are_planned_only(machine, job, capsys):
    for ranks in (None, 1, 2):
        checks.refuse_what_cannot_run(job(ranks), Terminal())
    assert "note" not in capsys.readouterr().err
    checks.refuse_what_cannot_run(job(3), Terminal())
    assert "3 ranks share 2 x A40" in capsys.readouterr().err
    with pytest.raises(InputError, match="this machine's GPUs.*plan for any cluster"):
        checks.refuse_what_cannot_run(job(cluster="a40-4"), Terminal())


def test_a_pytorch_without_cuda_is_refused_with_the_ways_out(machine, monkeypatch, job):
    monkeypatch.setattr(checks, "why_no_torch", lambda kind: "PyTorch has no CUDA")
    with pytest.raises(InputError, match="PyTorch has no CUDA.*CUDA_VISIBLE_DEVICES"):
        checks.refuse_what_cannot_run(job(), Terminal())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    checks.refuse_what_cannot_run(job(), Terminal())  # on CPU ranks


def test_gpus_are_measured_where_they_can_be(machine, monkeypatch, job, capsys):
    asked = []

    def measure(wanted: object, tell: object) -> object:
        asked.append(wanted)
        return wanted

    monkeypatch.setattr(timing, "quick_profile", measure)
    monkeypatch.setattr(timing, "ProfileTiming", lambda profile: profile)
    opened = open_file(job().source, (), Terminal())
    assert timing_of(opened) is asked[0]
    assert asked[0].metadata.device == "A40" and asked[0].metadata.ranks == 2
    monkeypatch.setattr(timing, "why_no_torch", lambda kind: "PyTorch has no CUDA")
    assert isinstance(timing_of(opened), Roofline)
    assert "roofline of A40" in capsys.readouterr().err
