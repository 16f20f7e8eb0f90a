"""The batch script: pinned whole by a file, read by a real bash, and every value quoted."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from screens import check_screen

from xgpt.core.errors import InputError
from xgpt.job.sections import SlurmSpec
from xgpt.launch.slurm_jobs import BatchJob, Task, check_paths, quoted, render_sbatch

GOLDEN = Path(__file__).with_name("golden_slurm.sh")
AWKWARD = "it's a \"job\" of 50% $HOME `id` #1; a\\b"


def batch(*tasks: Task, **changes: Any) -> BatchJob:
    own: dict[str, Any] = {
        "name": "job", "spec": SlurmSpec(), "nodes": 1, "ranks_each": 2, "gpus_per_node": None,
        "time": None, "python": "/venv/bin/python",
        "tasks": tasks or (Task(job_file=Path("/jobs/a.yaml"), output=Path("/out/a")),)}
    return BatchJob(**{**own, **changes})


FULL = SlurmSpec(
    partition="gpu", account="007", qos="high", constraint="a40&nvme", reservation="maintenance",
    dependency="afterok:12:13", nodes=2, ntasks_per_node=4, gpus_per_node="a40:4",
    cpus_per_task=8, mem="200G", time="02:00:00", exclusive=True, mail_type=("END", "FAIL"),
    mail_user="me@example.org", at_once=1, extra=("--comment=\"two words\"", "--nice"),
    modules=("cuda/12.4", "gcc"), venv="/home/me/my venv", launch="srun", requeue=5,
    warning_s=300, env=(("UCX_NET_DEVICES", "mlx5_0:1"), ("NOTE", "it's $5")),
    prologue=("ulimit -l unlimited",), container=("apptainer", "exec", "image.sif"))


def test_a_script_with_every_option_is_as_the_file_has_it_and_one_of_few_has_no_more():
    script = render_sbatch(batch(
        Task(job_file=Path("/jobs/a.yaml"), output=Path("/out/a b")),
        Task(job_file=Path("/jobs/it's.yaml"), output=Path("/out/50%"),
             overrides=("run.seed=1", "constraint.latency_s=inf")),
        name="two jobs", spec=FULL, nodes=2, ranks_each=4, gpus_per_node="a40:4", time="02:00:00"))
    assert script == GOLDEN.read_text(encoding="utf-8")
    few, never = render_sbatch(batch()), render_sbatch(batch(spec=SlurmSpec(requeue=0)))
    check_screen(Path(__file__).with_name("screens.txt"), "script of few options", "\n".join([
        *(line for line in few.splitlines() if line.startswith("#SBATCH")), "(never requeued)",
        *sorted({*never.splitlines()} - {*few.splitlines()})]))


@given(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), max_size=30))
@examples(60)
def test_bash_reads_every_text_as_the_one_word_it_was(text):
    done = subprocess.run(["bash", "-c", f"printf '%s|' {quoted(text)} end"], capture_output=True,
                          check=True, env={"LC_ALL": "C", "HOME": "/nowhere"})
    assert done.stdout == text.encode() + b"|end|"


def in_slurms_words(line: str) -> list[str]:
    """An `#SBATCH` line's words, as sbatch takes it apart: a backslash escapes whatever comes next,
    between quotes of either kind, too; outside of them an escaped space still ends the word."""
    words, word, quote, is_escaped = [], "", "", False
    for char in line.removeprefix("#SBATCH") + " ":
        if not quote and char.isspace():
            words += [word] if word else []
            word, is_escaped = "", False
        elif is_escaped:
            word, is_escaped = word + char, False
        elif char == "\\":
            is_escaped = True
        elif char == quote:
            quote = ""
        elif not quote and char in "'\"":
            quote = char
        elif not quote and char == "#":
            break
        else:
            word += char
    return words


@given(st.text(st.characters(codec="utf-8", exclude_characters="\n\r\0"), max_size=30))
def test_sbatch_reads_every_text_as_the_one_word_it_was(text):
    assert in_slurms_words(f"#SBATCH --comment={quoted(text)} --next") == [
        f"--comment={text}", "--next"]


def run(script: str, folder: Path, submit: str, **environment: str,
        ) -> subprocess.CompletedProcess[str]:
    """The script by bash, with shell words for what it starts and a scontrol that takes notes."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "python").write_text(f"#!/bin/bash\n{submit}\n")
    (tools / "scontrol").write_text(f'#!/bin/bash\necho "$@" >> "{tools}/requeued"\n')
    for name in ("python", "scontrol"):
        (tools / name).chmod(0o755)
    path = folder / "script.sh"
    path.write_text(script)
    return subprocess.run(["bash", str(path)], capture_output=True, text=True, timeout=60,
                          check=False, env={"PATH": f"{tools}:/usr/bin:/bin", "SLURM_JOB_ID": "17",
                                            **environment})


def one_task(folder: Path, **changes: Any) -> str:
    output = folder / "it's the \"out\" of $HOME, 50%"
    output.mkdir(exist_ok=True)
    task = Task(job_file=folder / f"{AWKWARD}.yaml", output=output,
                overrides=(f"name={AWKWARD}",))
    return render_sbatch(batch(task, python="python", **changes))


def test_what_is_started_gets_every_word_and_the_environment_it_was_promised(tmp_path):
    (tmp_path / "my venv" / "bin").mkdir(parents=True)
    (tmp_path / "my venv" / "bin" / "activate").write_text("echo activated\n")
    spec = SlurmSpec(venv=str(tmp_path / "my venv"), env=(("NOTE", AWKWARD),),
                     prologue=("echo first; cd /",), requeue=1)
    done = run(one_task(tmp_path, spec=spec), tmp_path,
               'printf "%s\\n" "$@" "$NOTE" "$PWD"; exit 3')
    assert done.returncode == 3 and done.stderr == ""
    assert done.stdout.splitlines() == [
        "activated", "first", "-P", "-m", "xgpt.cli.main", "submit",
        str(tmp_path / f"{AWKWARD}.yaml"), "--set", f"name={AWKWARD}", AWKWARD, "/"]


def test_each_task_of_an_array_is_a_job_file_of_its_own(tmp_path):
    tasks = [Task(job_file=Path(f"/jobs/{name}.yaml"), output=tmp_path / name)
             for name in ("a", "it's", "c d")]
    script = render_sbatch(batch(*tasks, python="python"))
    for index, task in enumerate(tasks):
        done = run(script, tmp_path, 'echo "$5"', SLURM_ARRAY_TASK_ID=str(index))
        assert done.stdout == f"{task.job_file}\n"
    assert "--array=0-2\n" in script and "slurm-%A_%a.log" in script


WARNED = 'trap "exit 75" USR1; kill -USR1 $PPID; for i in $(seq 100); do sleep 0.1; done; exit 9'

ANSWERED = 'echo line >> "$output/results.jsonl"; '


def test_a_warning_stops_xgpt_and_the_job_goes_back_to_the_queue_so_many_times(tmp_path):
    script = one_task(tmp_path, spec=SlurmSpec(requeue=2, prologue=("export output",)))
    for count in (1, 2):
        done = run(script, tmp_path, ANSWERED + WARNED)
        assert done.returncode == 0 and f"time {count} of 2" in done.stdout
    done = run(script, tmp_path, ANSWERED + WARNED)
    assert done.returncode == 75 and "goes on from here" in done.stdout
    assert (tmp_path / "tools" / "requeued").read_text() == "requeue 17\n" * 2


def test_two_allocations_without_an_answer_end_the_job(tmp_path):
    script = one_task(tmp_path, spec=SlurmSpec(requeue=6, prologue=("export output",)))
    codes = [run(script, tmp_path, submit).returncode for submit in
             (WARNED, ANSWERED + WARNED, WARNED)]
    assert codes == [0, 0, 0]
    done = run(script, tmp_path, WARNED)
    assert done.returncode == 1 and "in a row added no answer" in done.stdout
    assert (tmp_path / "tools" / "requeued").read_text() == "requeue 17\n" * 3


_OLD = """module() { echo "ModuleCmd_Load.c(213):ERROR:105: no modulefile '$2'" >&2; return 0; }"""

@pytest.mark.parametrize(("lines", "told"), [
    (["true", "cd /nowhere"], "cd /nowhere"), (["false; echo further"], "false"),
    (["if true; then", "  false", "fi"], "false"), (["f() { false; true; }", "f", "no-such"],
                                                    "no-such"),
    (["cat <<X | grep -q other", "text", "X"], "grep -q other"), ([". /no/such"], ". /no/such"),
    (["set -e", "false"], "false"),
    (["echo 'return 3' > $0.more", ". $0.more"], ". $0.more")])
def test_a_line_that_fails_ends_the_job_by_its_name(tmp_path, lines, told):
    script = one_task(tmp_path, spec=SlurmSpec(prologue=tuple(lines)))
    done = run(script, tmp_path, "echo started")
    assert done.returncode == 1 and "started" not in done.stdout
    assert "xgpt: the job ends, since line" in done.stderr
    assert told in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("lines", [
    ["false || true", "[ -d /nowhere ] && cd /nowhere", "if false; then", "  :", "fi", "! true"],
    ["echo 'false; echo $UNSET; true' > $0.more", ". $0.more"], ["(false; true)"],
    ["set -euo pipefail", "trap 'exit 9' EXIT", "trap - EXIT"], ["unset -f failed"]])
def test_what_is_no_failure_ends_nothing(tmp_path, lines):
    done = run(one_task(tmp_path, spec=SlurmSpec(prologue=tuple(lines))), tmp_path, WARNED)
    assert done.returncode == 0 and "time 1 of 3" in done.stdout


@pytest.mark.parametrize(("module", "code"), [
    ("module() { return 1; }", 1), (_OLD, 1), ("unset -f module", 1),
    ("module() { echo 'warning: old' >&2; }", 0)])
def test_a_module_that_is_not_loaded_ends_the_job(tmp_path, module, code):
    script = one_task(tmp_path, spec=SlurmSpec(modules=("gcc", "a b")))
    done = run(script.replace("\nload_module() {", f"\n{module}\nload_module() {{", 1), tmp_path,
               "echo started")
    assert done.returncode == code and ("started" in done.stdout) == (code == 0)
    assert ("load_module gcc" in done.stderr) == (code == 1)
    done = run(one_task(tmp_path, spec=SlurmSpec(venv="/no/venv")), tmp_path, "echo started")
    assert done.returncode == 1 and ". /no/venv/bin/activate" in done.stderr.splitlines()[-1]


def test_a_warning_that_python_could_not_take_yet_counts_too(tmp_path):
    done = run(one_task(tmp_path), tmp_path, "kill -USR1 $PPID; exec sleep 9")
    assert done.returncode == 0 and "time 1 of 3" in done.stdout
    # one that cannot be requeued ends as stopped
    (other := tmp_path / "other").mkdir()
    script = one_task(other).replace("scontrol requeue", "false scontrol requeue")
    assert run(script, other, WARNED).returncode == 75


@pytest.mark.parametrize(("submit", "code"), [
    ("exit 75", 75),  # a stop that nobody warned of
    (WARNED.replace("exit 75", "exit 1"), 1),  # failed while it was stopping
    (WARNED.replace("exit 75", "exit 0"), 0),  # done before it could stop
    (WARNED.replace("exit 75", "exit 4"), 4),  # requests expired at their deadlines
    (f"echo by >> stop; {WARNED}", 75)])  # a user's stop at the same time
def test_nothing_else_goes_back_to_the_queue(tmp_path, submit, code):
    script = one_task(tmp_path, spec=SlurmSpec(prologue=('cd "$output"',)))
    done = run(script, tmp_path, submit)
    assert done.returncode == code
    assert not (tmp_path / "tools" / "requeued").exists()


@pytest.mark.parametrize(("job_file", "output", "key"), [
    ("/a\nb.yaml", "/out", "slurm"), ("/a.yaml", "/o\nut", "slurm"),
    ("/a.yaml", "/o\\ut", "output")])
def test_a_path_that_no_script_can_hold_is_refused(job_file, output, key):
    with pytest.raises(InputError) as caught:
        check_paths(batch(Task(job_file=Path(job_file), output=Path(output))))
    assert [mistake.key for mistake in caught.value.mistakes] == [key]
    check_paths(batch(Task(job_file=Path("/a\\b.yaml"), output=Path("/o 'u\" t%"))))
