"""Ranks on several hosts: job keys, mpiexec's options, and hosts that cannot serve."""

import fcntl
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import problems
import pytest
from problems import estimate_of, roofline_of, schedule_of, toy_problem
from screens import check_screen

from jobs import job
from xgpt.core.controls import FixedSchedule
from xgpt.core.deployment import Deployment, Pool, StageAssignment
from xgpt.core.errors import InputError, XgptError
from xgpt.core.schedule import Estimate, Schedule
from xgpt.core.system.lifeline import READY
from xgpt.job.job import Job
from xgpt.job.resolve import resolve, resolve_cluster
from xgpt.job.sections import SlurmSpec
from xgpt.launch import launcher as local
from xgpt.launch import standby as launch
from xgpt.launch.exports import EngineCommand, vllm_command
from xgpt.launch.launcher import (
    HostsLauncher,
    LocalLauncher,
    RankProgram,
    SlurmLauncher,
    check_hosts,
    launcher_of,
    rank_layout,
    ranks_per_node,
)
from xgpt.launch.standby import MEASURES, RUNS, Standby, standby_for
from xsimulator.rough.formulas import fixed_estimate


def local_job(folder: Path, run: str) -> Job:
    return job(folder, model="opt-125m", cluster="local", run=f"{{{run}}}")


def hosts_for(launcher: Path, names: tuple[str, ...], threads: int = 1) -> HostsLauncher:
    return HostsLauncher(names=names, ranks_each=2, threads_per_rank=threads,
                         program=str(launcher), source=Path("job.yaml"))


def fake_ssh(folder: Path, **answers: str) -> Path:
    """A launcher whose hosts do what the shell words say; any other host is unknown."""
    cases = "".join(f"{name}) {words};;\n" for name, words in answers.items())
    script = folder / "fake ssh"
    script.write_text(f'#!/bin/sh\nhost=$1; shift\ncase $host in\n{cases}'
                      '*) echo "no route to $host" >&2; exit 255;;\nesac\n')
    script.chmod(0o755)
    return script


def test_hosts_make_a_cluster_of_as_many_nodes_which_share_the_ranks(tmp_path):
    two, one = (local_job(tmp_path, run) for run in ("ranks: 4, hosts: [h1, h2]", "ranks: 2"))
    assert isinstance(launcher_of(one, resolve(one)), LocalLauncher)
    assert isinstance(launcher_of(two, resolve(two)), HostsLauncher)
    two, one = resolve_cluster(two), resolve_cluster(one)
    assert (two.num_nodes, two.devices_per_node, one.num_nodes) == (2, 2, 1)
    assert two.intra_link != two.inter_link and one.intra_link == one.inter_link
    assert two.device.name == one.device.name, "a host's cores are divided by its own ranks"


def test_mpiexec_is_told_of_the_hosts_and_of_no_more_ranks_than_whole_replicas(
        tmp_path, monkeypatch):
    monkeypatch.setattr(local, "find_mpiexec", lambda: "mpiexec")
    argument, launcher = tmp_path / "run.json", fake_ssh(tmp_path)
    module = [sys.executable, "-m", "mpi4py", "-m", "worker", str(argument)]
    four, one = (RankProgram(module="worker", argument=argument, count=count) for count in (4, 1))
    # what follows it runs without a network
    isolated = [sys.executable, "-I", "-S", str(Path(local.__file__).with_name("isolated.py"))]
    assert LocalLauncher().command(four) == [*isolated, "mpiexec", "-n", "4", *module]
    hosts = hosts_for(launcher, ("h1", "h2"))
    assert hosts.command(four) == [
        "mpiexec", "-launcher", "ssh", "-launcher-exec", str(launcher), "-hosts", "h1,h2", "-ppn",
        "2", "-n", "4", *module]
    assert "mpiexec" in hosts.command(one), "the host is another one"
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_0:1")
    over = " ".join(replace(hosts, interface="ib0").command(four))
    assert "-iface ib0" in over and "-genv FI_TCP_IFACE ib0" in over
    assert "UCX_NET_DEVICES" not in over, "the user's own word"
    assert "mpiexec" not in LocalLauncher().command(one)
    ranks = RankProgram(module="worker", argument=tmp_path / "run.json", count=6, per_node=3)
    of_hosts = HostsLauncher(names=("h1", "h2"), ranks_each=4, threads_per_rank=1, program=None,
                             source=Path("job.yaml")).command(ranks)
    assert of_hosts[of_hosts.index("-ppn") + 1] == "3"
    of_slurm = SlurmLauncher(spec=SlurmSpec(), ranks_each=4, environ={}).command(ranks)
    assert {"--nodes=2", "--ntasks=6", "--ntasks-per-node=3"} <= set(of_slurm)


@pytest.mark.parametrize(("has_gpus", "own"), [
    (True, ["--cpus-per-task=8", "--gpus-per-task=2"]), (False, ["--cpus-per-task=8"])])
def test_a_task_of_slurm_is_a_replica_with_its_devices(tmp_path, has_gpus, own):
    """Six replicas of two devices each, three on a node."""
    ranks = RankProgram(module="worker", argument=tmp_path / "run.json",
                        **rank_layout(copies(6, 2), 6, per_replica=True))
    launcher = SlurmLauncher(spec=SlurmSpec(), ranks_each=6, has_gpus=has_gpus,
                             environ={"SLURM_CPUS_PER_TASK": "4"})
    command = launcher.command(ranks)
    begin = command.index("--nodes=2")
    assert command[begin:command.index(sys.executable)] == [
        "--nodes=2", "--ntasks=6", "--ntasks-per-node=3", *own]
    ours = launcher.command(replace(ranks, devices_each=0))
    assert "--cpus-per-task=4" in ours and not any("gpus" in word for word in ours), (
        "ranks that are devices see all GPUs of their node")


@pytest.mark.parametrize(("replicas", "each", "per_node"), [
    (2, 3, 6), (8, 1, 8), (3, 4, 8), (2, 8, 8), (1, 16, 8), (2, 5, 5)])
def test_a_replica_stays_on_its_node_unless_it_is_larger(replicas, each, per_node):
    assert ranks_per_node(copies(replicas, each), 8) == per_node


@pytest.mark.parametrize(("shapes", "per_node"), [
    ([(1, 5), (1, 3), (1, 5), (1, 3)], 8), ([(1, 4), (1, 2), (1, 4), (1, 2)], 6),
    ([(1, 16), (1, 5), (3, 1)], 8), ([(1, 4), (1, 2), (1, 1)], 8), ([(1, 5), (1, 4), (1, 5)], None),
    ([(1, 8), (1, 16)], 8), ([(1, 4), (1, 16)], None)])
def test_copies_of_several_shapes_stay_on_their_nodes(shapes, per_node):
    first, *others = (copies(count, each) for count, each in shapes)
    assert ranks_per_node(first.beside(tuple(others)), 8) == per_node


def copies(count: int, each: int) -> Estimate:
    """So many copies, each a tensor-parallel group."""
    stage = StageAssignment(index=0, ranks=tuple(range(each)), first_layer=0, num_layers=2)
    pool = Pool(name="all", role="both", stages=(stage,), num_groups=1, kv_tokens=9)
    return replace(problems.estimate_of(
        problems.toy_problem(), encode_batch=2, decode_iterations=4), deployment=Deployment(
        pools=(pool,), tp_degree=each, tp_gpus=each, replicas=count))


def test_every_host_that_cannot_serve_is_named_with_its_reason(tmp_path):
    argument = tmp_path / "run.json"
    argument.touch()
    launcher = fake_ssh(tmp_path, good='sh -c "$*"', bare="exit 41", apart="exit 42",
                        small="echo 0", odd="echo Segmentation fault >&2; exit 139")
    names = ("good", "bare", "apart", "small", "odd", "gone")
    with pytest.raises(InputError) as caught:
        check_hosts(hosts_for(launcher, names), argument)
    said = {"bare": "same path on every host", "apart": f"does not see {argument}",
            "small": "has 0 cores", "gone": "cannot be reached: no route to gone",
            "odd": "cannot be reached: Segmentation fault (exit code 139)"}
    reasons = {str(m.value): m.allowed for m in caught.value.mistakes}
    assert reasons.keys() == said.keys() and all(said[name] in reasons[name] for name in said)
    check_hosts(hosts_for(launcher, ("good",)), argument)
    with pytest.raises(InputError, match="does not see"):
        check_hosts(hosts_for(launcher, ("good",)), tmp_path / "absent.json")
    with pytest.raises(InputError, match=r"run.launcher.*no such program"):
        check_hosts(hosts_for(tmp_path / "absent", ("h1",)), tmp_path)
    with pytest.raises(InputError, match=r"run.hosts.*has no program .*absent: run.engine_py"):
        check_hosts(replace(hosts_for(launcher, ("good",)),
                            engine_python=str(tmp_path / "absent")), argument)


PROBLEM = toy_problem()


def continuous(copies: int = 1) -> Schedule:
    one = fixed_estimate("sarathi", PROBLEM, roofline_of(PROBLEM),
        FixedSchedule(max_active=12, token_budget=64))
    return schedule_of(PROBLEM, one.in_copies(copies))


def of(schedule: Schedule, times_of: str = "xgpt", *, each: int | None = None,
       files: tuple[Path, Path] | None = None) -> EngineCommand:
    """each: devices of a node, where they are not all on one."""
    cluster = PROBLEM.cluster if each is None else replace(
        PROBLEM.cluster, devices_per_node=each)
    return vllm_command(schedule, replace(PROBLEM, cluster=cluster), model="org/some",
                        times_of=times_of, files=files)


def test_flags_say_the_schedules_numbers_as_their_screen_has_them():
    """Of two copies in chunks, of whole inputs, of RRA, by others' times."""
    whole = schedule_of(PROBLEM, fixed_estimate(
        "vllm", PROBLEM, roofline_of(PROBLEM), FixedSchedule(max_active=12)))
    rra = schedule_of(PROBLEM, estimate_of(PROBLEM, encode_batch=4, decode_iterations=8))
    check_screen(Path(__file__).with_name("screens.txt"), "vLLM flags", "\n\n".join(map(str, (
        of(continuous(copies=2), each=8), of(whole), of(rra), of(rra, times_of="vllm")))))


def test_offline_replicas_have_parts_of_the_file_and_devices_of_their_own():
    """Two replicas of four devices: on one node, on nodes of four (Slurm), and of two (Ray)."""
    files = Path("requests.jsonl"), Path("out/vllm.jsonl")
    check_screen(Path(__file__).with_name("screens.txt"), "vLLM offline", "\n\n".join(
        str(of(continuous(copies=2), each=each, files=files)) for each in (8, 4, 2)))


@pytest.mark.parametrize("each", [8, 4])
def test_the_parts_answers_are_put_together_in_order(tmp_path, each):
    """By a vLLM that copies its lines and says which devices it saw, and an srun of two tasks."""
    programs = {
        "vllm": 'while [ $# -gt 0 ]; do case $1 in -i) i=$2;; -o) o=$2;; esac; shift; done\n'
                'sed "s/$/ $CUDA_VISIBLE_DEVICES/" "$i" > "$o"',
        "srun": 'SLURM_PROCID=1 CUDA_VISIBLE_DEVICES=y "$@"; SLURM_PROCID=0 '
                'CUDA_VISIBLE_DEVICES=x "$@"'}
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    files = tmp_path / "re quests.jsonl", tmp_path / "o ut" / "vllm.jsonl"
    files[0].write_text("".join(f"line {place}\n" for place in range(9)))
    script = str(of(continuous(copies=2), each=each, files=files))
    subprocess.run(["bash", "-c", script], check=True, env={
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    lines = [line.split(" ", 2) for line in files[1].read_text().splitlines()]
    assert [number for _, number, _ in lines] == [str(place) for place in range(9)]
    devices = ["0,1,2,3", "4,5,6,7"] if each == 8 else ["x", "y"]
    assert list(dict.fromkeys(seen for *_, seen in lines)) == devices


def test_eight_bits_and_a_catalog_name_are_said_in_vllms_words():
    eight = replace(PROBLEM, weight_dtype="fp8", kv_dtype="fp8", model=replace(
        PROBLEM.model, hub_id="org/some"))
    own, narrow = (vllm_command(continuous(), one, model="some", times_of="vllm", files=None)
                   for one in (eight, replace(eight, weight_dtype="int8")))
    assert own.words[:3] == ("vllm", "serve", "org/some")
    assert own.words[-4:] == ("--quantization", "fp8", "--kv-cache-dtype", "fp8")
    assert "--quantization" not in narrow.words and "checkpoint alone" in " ".join(narrow.notes)


def test_two_pools_and_static_batches_are_refused():
    schedule = continuous()
    pool = schedule.deployment.pools[0]
    two = replace(schedule.deployment, pools=(
        replace(pool, role="encode"), replace(pool, role="decode")))
    with pytest.raises(XgptError, match="handed from a pool"):
        of(schedule.changed(estimate=replace(schedule.estimate, deployment=two)))
    with pytest.raises(XgptError, match="until its longest request is done"):
        of(schedule.changed(policy="ft"))


# Ranks that are started ahead serve like those that are started when they are wanted, take run
# after run, and are started anew where they cannot.

# Waits like xrunner.rank.standby; writes its process id where it is told to, and ends or stays as
# that file says.
PROGRAM = """
import os, pathlib, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as line:
    line.send(b"r")
    while True:
        word, files, *_ = socket.recv_fds(line, 4096, 4)
        if not word:
            sys.exit(0)
        module, _, argument = word.decode().partition("\\0")
        path = pathlib.Path(argument)
        said = path.read_text()
        path.write_text(f"{os.getpid()} {len(files)} {module}")
        while said == "wait" and path.read_text():
            pass
        for file in files:
            os.close(file)
        if said == "fail":
            sys.exit("it is broken")
        line.send(b".")
"""

@pytest.fixture
def said():
    return []


@pytest.fixture
def begin(tmp_path, monkeypatch, said):
    """Starts ranks ahead, which are none of MPI's, however many."""
    (tmp_path / "toy_standby.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(launch, "PROGRAM", "toy_standby")
    monkeypatch.setattr(launch, "local_mpi_command", LocalLauncher().command)
    found: list[Standby] = []

    def started(count: int) -> Standby:
        found.append(Standby(count, said.append))
        return found[-1]

    yield started
    for one in found:
        one.dismiss()


def program(folder: Path, standby: Standby, word: str = "", *, module: str = RUNS, count: int = 1,
            lock: tuple[int, ...] = (), **holds: str) -> RankProgram:
    argument = folder / "run.json"
    argument.write_text(word)
    return RankProgram(module=module, argument=argument, count=count, standby=standby,
                       inherited=lock, holds={"model": "m", "dtype": "d", **holds})


def run(folder: Path, standby: Standby, word: str = "", **more: str) -> str:
    """Which process took the run, with how many descriptors, as what."""
    with (folder / "lock").open("w") as lock:
        ranks = program(folder, standby, word, lock=(lock.fileno(),), **more)
        LocalLauncher().run(ranks, watch=lambda: None)
    return ranks.argument.read_text()


@pytest.mark.parametrize("ahead", [0, 1])
def test_one_process_takes_all_runs_of_the_same_weights(ahead, tmp_path, begin, said):
    standby = begin(ahead)
    before = standby.processes
    first = run(tmp_path, standby)
    assert [run(tmp_path, standby) for _ in range(2)] == [first] * 2
    assert first.endswith(f" 1 {RUNS}")
    assert said == ["ranks and weights: those of the job before"] * 2
    assert standby.processes == (int(first.split()[0]),) == (before or standby.processes)


def test_it_measures_first_and_then_takes_the_run(tmp_path, begin):
    standby = begin(1)
    measured = run(tmp_path, standby, module=MEASURES)
    assert measured.endswith(MEASURES)
    assert run(tmp_path, standby).split()[0] == measured.split()[0]
    after = program(tmp_path, standby, module=MEASURES)
    assert standby.serve(after) is None and standby.processes, "what a run set up is not measured"
    other = program(tmp_path, standby, module="xrunner.rank.agreement")
    assert standby.serve(other) is None and standby.processes == (), "another finds them gone"


def test_other_numbers_of_ranks_measure_beside_it_and_run_in_its_place(tmp_path, begin, said):
    standby = begin(2)
    before = standby.processes
    assert standby.serve(program(tmp_path, standby, module=MEASURES)) is None
    assert standby.processes == before
    taken = run(tmp_path, standby)
    assert standby.processes == (int(taken.split()[0]),) != before and not said


def test_it_keeps_what_it_is_handed_as_long_as_the_run(tmp_path, begin):
    held = []

    def look() -> None:
        with lock.open("w") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held.append(False)
            except BlockingIOError:
                held.append(True)
        ranks.argument.write_text("")

    standby, lock = begin(1), tmp_path / "lock"
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        ranks = program(tmp_path, standby, "wait", lock=(file.fileno(),))
        LocalLauncher().run(ranks, watch=look)
    look()
    assert held[0] and not held[-1]


def test_after_a_run_that_failed_the_next_one_has_ranks_of_its_own(tmp_path, begin, said):
    standby = begin(1)
    first = run(tmp_path, standby)
    with pytest.raises(XgptError, match="it is broken"):
        run(tmp_path, standby, "fail")
    assert run(tmp_path, standby) != first
    assert said[1:] == ["ranks: started anew, for those of the job before have ended"]


def test_ranks_that_died_are_replaced_and_other_weights_loaded_by_new_ones(tmp_path, begin, said):
    standby = begin(1)
    standby._started.process.kill()
    standby._started.process.wait()
    assert run(tmp_path, standby) and not said
    standby = begin(1)
    first, other = run(tmp_path, standby), run(tmp_path, standby, model="n", dtype="e")
    assert first != other and said == [
        "ranks: started anew, for the job has another model and dtype"]


@pytest.mark.parametrize("how", ["is dismissed", "its launcher is gone"])
def test_it_ends_when_nobody_wants_it(how, begin):
    standby = begin(1)
    process = standby._started.process
    if how == "is dismissed":
        standby.dismiss()
    else:
        assert standby._line.recv(1) == READY
        standby._line.close()  # as the system does when the launcher dies
    assert process.wait(timeout=20) in (0, -signal.SIGTERM)


@pytest.mark.parametrize(("more", "cores", "wanted"), [
    ("ranks: 1", 2, 1), ("ranks: 2", 2, 2), ("ranks: 3", 2, 0), ("", 4, 4), ("", 8, 1),
    ("threads_per_rank: 2", 4, 2), ("engine: deepspeed", 2, None), ("hosts: [a, b]", 2, None)])
def test_as_many_are_started_as_the_job_may_take(tmp_path, monkeypatch, more, cores, wanted):
    counts: list[int] = []
    monkeypatch.setattr(Standby, "_start", lambda self, count: counts.append(count))
    monkeypatch.setattr(launch, "find_spec", lambda name: name)
    for place in ("xgpt.job.resolve", "xgpt.launch.standby"):
        monkeypatch.setattr(f"{place}.usable_cores", lambda: cores)
    monkeypatch.setattr("xgpt.job.resolve.gpus_here", list)
    with standby_for(job(tmp_path, model="opt-125m", cluster="local", run=f"{{{more}}}")) as found:
        assert (found is None) == (wanted is None)
    assert counts == ([wanted] if wanted else [])
