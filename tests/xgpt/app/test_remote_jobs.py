"""Jobs handed in to Slurm, against stand-ins for its programs: what sbatch gets, what is kept, what
is refused before anything waits in a queue."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake_slurm
import jsonschema
import pytest
import yaml
from click.testing import CliRunner, Result
from job_folder import xgpt

from jobs import job_file
from xgpt.cli.main import cli
from xgpt.core.errors import InfeasibleError, InputError, XgptError
from xgpt.launch.exports import Exported, render_jobset, render_skypilot
from xgpt.run_folder.files import KEPT_FILE, load_record

SCHEDULE = "{policy: rra, encode_batch: 4, decode_iterations: 4, encode_chunk: 0, tp_degree: 1}"


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    return fake_slurm.install(tmp_path / "bin", monkeypatch)


@pytest.fixture
def folder(tmp_path):
    awkward = tmp_path / "it's a \"folder\" of 50% $HOME"
    awkward.mkdir()
    return awkward


def write(folder: Path, *, name: str = "job", cluster: str = "a40-4", bound: str = "inf",
          run: str = "weights: random", slurm: str = "time: 60", output: str = "out") -> Path:
    return job_file(
        folder, name, model="opt-125m", cluster=cluster, output=output, run=f"{{{run}}}",
        workload="{requests: {count: 40}, task: S}", constraint=f"{{latency_s: {bound}}}",
        slurm=f"{{{slurm}}}", schedule=SCHEDULE)


def submit(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, ["submit", *map(str, words)], catch_exceptions=False)


def options(script: str) -> dict[str, str]:
    """Of the `#SBATCH` lines."""
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines()
             if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def refusal(*words: str | Path) -> dict[str, str]:
    with pytest.raises(InputError) as caught:
        submit(*words)
    return {mistake.key: mistake.allowed for mistake in caught.value.mistakes}


def test_a_job_is_planned_here_and_handed_in_with_what_its_cluster_has(slurm, folder, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "9")  # of a shell within another allocation
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    done = submit(write(folder), "--set", "run.seed=5", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    out = folder / "out"
    assert found["jobs"] == [{"job_id": "123", "output": str(out),
                              "log": str(out / "slurm-123.log")}]
    assert found["schedules"][0]["figures"]["throughput_qps"] > 0
    given = options(slurm.script)
    assert (given["nodes"], given["ntasks-per-node"], given["gpus-per-node"], given["time"]) == (
        "1", "4", "4", "60")
    assert slurm.script == (out / "slurm.sh").read_text() == found["script"]
    assert '--set run.seed=5' in slurm.script
    assert slurm.calls[-1] == ["sbatch", "--parsable", str(out / "slurm.sh")]
    assert "SLURM_NTASKS" not in slurm.environ and slurm.environ["SLURM_CONF"] == "/etc/slurm.conf"
    record = load_record(out)
    assert record is not None and (record.job_id, record.cluster) == ("123", None)


def test_a_person_is_told_how_to_follow_and_to_end_it(slurm, folder):
    slurm.says(sbatch={"out": "some site's greeting\n77;east\n"})
    done = submit(write(folder))
    out = str(folder / "out").replace('"', '\\"').replace("$", "\\$")
    assert "submitted as Slurm job 77: 1 node, 4 ranks" in done.stderr
    assert f'xgpt status "{out}"' in done.stderr and f'xgpt stop "{out}"' in done.stderr
    assert f'tail -F "{out}/slurm-77.log"' in done.stderr and done.stdout == ""
    record = load_record(folder / "out")
    assert record is not None and record.cluster == "east"


def test_a_dry_run_shows_script_and_schedule_and_leaves_nothing(slurm, folder):
    done = submit(write(folder), "--dry-run", "--verbose")
    assert done.stdout.startswith("#!/bin/bash") and "rra" in done.stderr.lower()
    shown = submit(write(folder), "--dry-run")
    assert shown.stdout == "" and shown.stderr.startswith("time  ")
    assert len(shown.stderr.splitlines()) <= 25 and "slurm.sh (--verbose prints it)" in shown.stderr
    assert not (folder / "out").exists() and slurm.calls == []
    found = json.loads(submit(write(folder), "--dry-run", "--json").stdout)
    assert found["script"] + "\n" == done.stdout and found["ranks"] == 4


def test_the_time_limit_follows_from_the_plan_where_the_job_names_none(slurm, folder):
    short = submit(write(folder, slurm="{}"[1:-1]), "--slurm")
    assert "by the prediction with its margin" in short.stderr
    limits = [options(slurm.script)["time"]]
    submit(write(folder), "--set", "slurm.time=", "--set", "workload.requests={count: 9000}",
           "--set", "output=more", "--set", "model=opt-13b")
    limits.append(options(slurm.script)["time"])
    assert limits[0] == "00:15:00" and "00:20:00" <= limits[1] < "04:00:00", limits


@pytest.mark.parametrize(("requeue", "then"), [(3, "it is requeued, up to 3 times"),
                                               (0, "the same command goes on from there")])
def test_a_time_limit_below_the_prediction_is_warned_of(slurm, folder, requeue, then):
    def sets(*values: str) -> list[str]:
        return [word for value in values for word in ("--set", value)]

    def said(time: str) -> str:
        return " ".join(submit(
            write(folder), "--dry-run", *sets(
                "workload.requests={count: 90000}", "model=opt-13b", f"slurm.requeue={requeue}",
                f"slurm.time={time}")).stderr.split())

    tight = said("00:30:00")
    assert "WARNING slurm.time is 00:30:00; the job" in tight and then in tight
    assert re.search(r"Leave slurm.time out for \d\d:\d\d:\d\d", tight)
    ample = said("99-00:00:00")
    assert "99-00:00:00, as slurm.time says" in ample and "WARNING" not in ample


def test_on_nodes_that_nobody_has_seen_the_partitions_limit_holds(slurm, folder):
    done = submit(write(folder, cluster="local", slurm="nodes: 2, ntasks_per_node: 3"))
    assert "the partition's own" in done.stderr
    assert "known in the allocation" in done.stderr
    given = options(slurm.script)
    assert (given["nodes"], given["ntasks-per-node"]) == ("2", "3")
    assert "time" not in given and "gpus-per-node" not in given


def test_a_job_may_want_more_replicas_than_this_machine_has_devices(slurm, folder):
    done = submit(write(folder, cluster="local", slurm="nodes: 50, ntasks_per_node: 20"),
                  "--dry-run", "--set", "schedule.replicas=1000")
    assert done.exit_code == 0 and "known in the allocation" in done.stderr
    assert refusal(write(folder, cluster="local", slurm="nodes: 50, ntasks_per_node: 20"),
                   "--set", "schedule.replicas=1001").keys() == {"schedule.replicas"}


@pytest.mark.parametrize(("changes", "layout"), [
    ({"cluster": "local", "slurm": "gpus_per_node: 'a40:2', nodes: 2"}, ("2", "2", "a40:2")),
    ({"cluster": "local", "run": "weights: random, ranks: 6", "slurm": "nodes: 2"},
     ("2", "3", None)),
    ({"cluster": "a40-8", "run": "weights: random, ranks: 4"}, None),
    ({"slurm": "extra: --gres=gpu:a40:4"}, ("1", "4", None)),
    ({"slurm": "gpus_per_node: 8"}, ("1", "4", "8"))])
def test_nodes_ranks_and_gpus(slurm, folder, changes, layout):
    submit(write(folder, **changes))
    given = options(slurm.script)
    found = given["nodes"], given["ntasks-per-node"], given.get("gpus-per-node")
    assert found == (layout or ("1", "4", "4"))


def test_several_job_files_are_one_array(slurm, folder):
    same = "time: 60, at_once: 2"
    jobs = [write(folder, name=name, output=f"out/{name}", slurm=same) for name in "abc"]
    done = submit(*jobs, "--json")
    assert [job["job_id"] for job in json.loads(done.stdout)["jobs"]] == ["123_0", "123_1", "123_2"]
    assert options(slurm.script)["array"] == "0-2%2"
    for index, name in enumerate("abc"):
        record = load_record(folder / "out" / name)
        assert record is not None and record.job_id == f"123_{index}"
        assert record.log == folder / "out" / "a" / f"slurm-123_{index}.log"


def test_an_array_is_of_jobs_that_are_alike(slurm, folder):
    first, plain = write(folder, name="a"), folder / "plain.yaml"
    assert refusal(first, write(folder, name="b", slurm="time: 61")).keys() == {"slurm", "output"}
    plain.write_text(first.read_text().replace("slurm: {time: 60}", ""))
    assert "as the other job files have" in refusal(first, plain)["slurm"]
    assert refusal(plain, plain).keys() == {"output"}  # without Slurm: one after another
    assert slurm.calls == []
    submit(plain, "--slurm")
    assert "--set slurm.launch=srun" in slurm.script, "else the job would be a local one there"


def test_what_is_wrong_is_found_before_the_queue(slurm, folder):
    with pytest.raises(InfeasibleError):
        submit(write(folder, bound="0.0001"))
    no_requests = write(folder)
    no_requests.write_text(no_requests.read_text().replace("requests: {count: 40}, ", ""))
    assert "workload.requests" in refusal(no_requests)
    assert slurm.calls == []


def test_what_sbatch_says_is_passed_on(slurm, folder, monkeypatch):
    slurm.says(sbatch={"err": "sbatch: error: invalid partition specified: gpu\n", "code": 1})
    with pytest.raises(XgptError, match="refused the job: .*invalid partition"):
        submit(write(folder))
    assert load_record(folder / "out") is None
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(XgptError, match="no sbatch on this machine.*--dry-run"):
        submit(write(folder))


def test_a_folder_whose_job_waits_or_runs_is_not_handed_in_twice(slurm, folder):
    submit(write(folder))
    for line in ("PENDING|Priority|0:00|1:00:00|N/A|", "RUNNING|None|1:10|1:00:00|N/A|n1"):
        slurm.queue(line)
        with pytest.raises(XgptError, match=f"job 123 for it is {line.partition('|')[0].lower()}"):
            submit(write(folder))
    slurm.forgets()
    assert submit(write(folder)).exit_code == 0


def test_run_says_where_it_runs(slurm, folder):
    with pytest.raises(InputError, match="inside an allocation.*slurm=null"):
        CliRunner().invoke(cli, ["run", str(write(folder, cluster="local", slurm="nodes: 1"))],
                           catch_exceptions=False)


def test_requests_on_standard_input_are_kept_for_the_allocation(slurm, folder):
    lines, place = b'{"tokens": [1, 2]}\n', {"workload.requests": "-", "workload.task": "null",
                                             "workload.output_tokens": "{mean: 5, std: 1, max: 9}"}
    words = [word for key, value in place.items() for word in ("--set", f"{key}={value}")]
    for dry, is_kept in ((["--dry-run"], False), ([], True)):
        done = CliRunner().invoke(cli, ["submit", str(write(folder)), *words, *dry], input=lines,
                                  catch_exceptions=False)
        assert done.exit_code == 0, done.output
        assert (folder / "out" / KEPT_FILE).is_file() == is_kept
    assert (folder / "out" / KEPT_FILE).read_bytes() == lines


HERE = Path(__file__).parent
SCHEMAS = HERE.parents[1] / "schemas"
AWKWARD = Exported(
    name="awkward", job_file=Path("/data/it's a \"folder\" of 50% $(HOME)/job: 1.yaml"),
    words=("--set", "run.seed=5", "--set", "name=yes"), nodes=2, devices=4, gpu="A100-80",
    image="registry/xgpt:1.0", claim="xgpt", remarks=("A remark.", "Another: 'quoted'."))


def schema(name: str) -> Any:
    return json.loads((SCHEMAS / name).read_text())


def check_jobset(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text)
    jsonschema.validate(found, schema("jobset-v1alpha2.json"))
    return found


def check_skypilot(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text)
    known = schema("skypilot-0.14.json")
    jsonschema.validate(found, known["task"])
    jsonschema.validate(found["resources"], known["resources"])
    return found


@pytest.fixture
def job(tmp_path):
    return job_file(tmp_path, "My job", model="opt-125m", run="{weights: random}", output="out",
                    workload="{requests: {count: 40}, task: S}", schedule=SCHEDULE)


def text_of(job: Path, to: str, *words: str) -> str:
    done = xgpt("export", job, "--to", to, "--image", "xgpt:1", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_manifests_have_awkward_names_quoted_and_name_the_hosts_of_two_nodes():
    assert render_jobset(AWKWARD) == (HERE / "golden_jobset.yaml").read_text()
    task = check_skypilot(render_skypilot(replace(AWKWARD, nodes=1)))
    assert task["run"] == ('python3 -P -m xgpt.cli.main submit "job: 1.yaml" --set run.seed=5 '
                           '--set name=yes\n')
    assert task["resources"]["accelerators"] == {"A100-80GB": 4}
    check_jobset(render_jobset(AWKWARD))


def test_what_no_runner_executes_is_refused_before_a_file_is_written(tmp_path):
    """A pod would refuse it: a divided mixture, and fp8."""
    own = job_file(tmp_path, "job", model="mixtral-8x7b", cluster="8xH100", output="out",
                   plan="{engine: vllm}", run="{weight_dtype: fp8}", schedule="{ep_degree: 8, "
                   "tp_degree: 8}", workload="{requests: {count: 40}, task: S}")
    done = xgpt("export", own, "--to", "jobset", "--image", "xgpt:1")
    assert done.returncode == 2 and not done.stdout
    assert "schedule.ep_degree = 8: left out" in done.stderr
    assert "run.weight_dtype = 'fp8': left out" in done.stderr


def test_what_a_schedule_takes_is_what_the_same_file_asks_for_each_time(job, tmp_path):
    four = ("--set", "schedule.tp_degree=4")  # one copy on all devices
    found = check_jobset(text_of(job, "jobset", *four))
    (only,) = found["spec"]["replicatedJobs"]
    pod = only["template"]["spec"]["template"]["spec"]
    assert found["metadata"]["name"] == "my-job"
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    command = pod["containers"][0]["command"]
    assert command[:6] == ["python3", "-P", "-m", "xgpt.cli.main", "submit", str(job)]
    assert command[6:] == [*four, "--set", "cluster=local", "--set", "run.ranks=4",
                           "--set", "slurm=null"]
    task = check_skypilot(text_of(job, "skypilot", *four, "--set", "run.seed=7"))
    assert task["resources"]["accelerators"] == {"A40": 4}
    assert task["workdir"] == str(job.parent) and '"My job.yaml"' in task["run"]
    assert "--set run.seed=7 --set cluster=local --set run.ranks=4" in task["run"]
    text, path = text_of(job, "jobset"), tmp_path / "new" / "jobset.yaml"
    assert text_of(job, "jobset", "--out", str(path)) == "" and path.read_text() == text
    assert max(map(len, (line for line in text.splitlines() if line.startswith("#")))) <= 80
    found = json.loads(text_of(job, "jobset", "--json"))
    assert (found["to"], found["text"], found["file"]) == ("jobset", text, None)
