"""What xgpt does with input that nobody meant: `python benchmarks/fuzz.py [--seed N] [--scale X]`.

Job files, files of requests, schedules, profiles and models' folders are mutated, in their bytes
and in their values, and read as a command reads them; some models' folders by the command itself.
A case fails where it ends in anything but a result or an XgptError, takes more seconds of a
processor than its budget, asks for more than 2 GiB, or writes outside its own folder. Failures are
printed with what is needed to see them again: kind, seed and number. --out DIR keeps the files of
those that fail.

Recorded: benchmarks/results/ (counts by kind and outcome). Cases run in processes of their own, a
few hundred at a time, so that a hang or a crash of the interpreter is one failure, too."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from mutations import mutated_bytes, mutated_json, mutated_text

from xgpt.core.errors import XgptError

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 2 * 2**30  # beyond what the process has when a case begins
AT_A_TIME = 100
EXIT_CODES = (0, 1, 2, 3, 75)


class Kind(NamedTuple):
    """`count` cases, each of `budget_s` at most; `run(rng, folder)` makes and tries one."""

    count: int
    budget_s: int
    run: Callable[[random.Random, Path], object]


class Failure(NamedTuple):
    kind: str
    case: int
    what: str


class TooLong(BaseException):
    """The alarm of a case."""


def job_file(rng: random.Random, folder: Path) -> None:
    from xgpt.job.job_file import load_job
    from xgpt.job.resolve import resolve

    text = rng.choice(_jobs())
    path = folder / "job.yaml"
    path.write_bytes(mutated_bytes(rng, mutated_text(rng, text).encode("utf-8", "replace")))
    (folder / "prompts.jsonl").write_text('{"prompt": "Hi", "max_tokens": 4}\n')
    resolve(load_job(path, ()))


def _jobs() -> list[str]:
    paths = sorted((ROOT / "jobs").glob("*.yaml"))
    return [path.read_text(encoding="utf-8") for path in paths]


REQUESTS = [
    '{"id": "a", "prompt": "Hi", "max_tokens": 5, "temperature": 0.5, "top_k": 3, "stop": ["x"]}',
    '{"custom_id": "b", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", '
    '"messages": [{"role": "user", "content": [{"type": "text", "text": "q"}]}], "n": 1}}',
    '{"tokens": [1, 2, 3], "forced_tokens": 4, "extra": {"deep": [1, {"x": null}]}}',
    '{"prompt": "\\u00e9\\ud83d\\ude42", "top_p": 0.9}']
TABLES = {".csv": 'id,prompt,max_tokens\na,"x, ""y""\nz",3\nb,q,\n',
          ".tsv": "id\tprompt\na\tx\nb\ty\n", ".txt": "one\ntwo\n\nthree\n",
          ".json": '[{"prompt": "a"}, "b", {"tokens": [1]}]'}


def request_file(rng: random.Random, folder: Path) -> None:
    from xgpt.core.lengths import truncated_normal  # noqa: F401 (what a command has loaded)
    from xgpt.requests.request_files import RequestFiles
    from xgpt.requests.spool import SpoolWriter
    from xgpt.requests.spool_columns import ColumnsWriter
    from xrunner.files.spooled_requests import read_and_tokenise

    class Bytes:
        vocab_size = 1000

        def tokenise(self, requests: Any) -> Any:
            return [list(r.tokens) if r.tokens is not None else
                    list((r.prompt or "".join(m["content"] for m in r.messages or ())).encode())
                    for r in requests]

    suffix = rng.choice([".jsonl"] * 4 + [*TABLES])
    if suffix == ".jsonl":
        lines = [rng.choice(REQUESTS) for _ in range(rng.randint(1, 8))]
        at = rng.randrange(len(lines))
        lines[at] = mutated_json(rng, lines[at]) if rng.random() < 0.7 else mutated_text(
            rng, lines[at])
        text = "\n".join(lines) + "\n"
    else:
        text = mutated_text(rng, TABLES[suffix])
    raw = text.encode("utf-8", "surrogatepass")
    path = folder / f"requests{suffix}"
    path.write_bytes(mutated_bytes(rng, raw) if rng.random() < 0.4 else raw)
    spool = SpoolWriter(ColumnsWriter())
    found = read_and_tokenise(RequestFiles(paths=(path,)), Bytes(), spool)
    spool.save(folder, found.caps[:0].reshape(0, 2), 0)


def schedule_or_profile(rng: random.Random, folder: Path) -> None:
    from xgpt.core.schedule_file import load_schedule, save_schedule, to_json
    from xprofiler.profile_file import load_profile, save_profile

    path = folder / "file.json"
    is_schedule = rng.random() < 0.5
    text = rng.choice(_schedules() if is_schedule else _profiles())
    changed = mutated_json(rng, text) if rng.random() < 0.7 else mutated_text(rng, text)
    path.write_bytes(changed.encode("utf-8", "surrogatepass"))
    if is_schedule:
        schedule = load_schedule(path)
        to_json(schedule)
        save_schedule(schedule, folder / "again.json")
    else:
        save_profile(load_profile(path), folder / "again.json")


_KEPT: dict[str, list[str]] = {}


def _schedules() -> list[str]:
    """Of two policies, planned for a catalog model within a second."""
    if "schedules" not in _KEPT:
        found = []
        for policy in ("rra", "waa-c"):
            with tempfile.TemporaryDirectory() as name:
                path = Path(name) / "schedule.json"
                _command("schedule", str(ROOT / "jobs/opt-13b-summarise.yaml"), "--out", str(path),
                         "--set", f"schedule.policy={policy}", "--max-seconds", "5", check=True)
                found.append(path.read_text(encoding="utf-8"))
        _KEPT["schedules"] = found
    return _KEPT["schedules"]


def _profiles() -> list[str]:
    """The profile that the tests' own jobs are planned by, made of a data sheet's figures."""
    if "profiles" not in _KEPT:
        sys.path.insert(0, str(ROOT / "tests/kit"))
        from profiles import amdahl, profile_of

        from xgpt.core import catalog
        from xprofiler.profile_file import save_profile

        with tempfile.TemporaryDirectory() as name:
            path = Path(name) / "profile.json"
            save_profile(profile_of(catalog.model("opt-13b"), 2, 1, amdahl(0.1)), path)
            _KEPT["profiles"] = [path.read_text(encoding="utf-8")]
    return _KEPT["profiles"]


def model_folder(rng: random.Random, folder: Path) -> None:
    import torch

    from xrunner.checkpoint.identity import model_files
    from xrunner.checkpoint.reader import open_weights
    from xrunner.checkpoint.source import read_spec
    from xrunner.checkpoint.tensors import check_weights
    from xrunner.files.tokenizer import TextTokenizer, eos_ids

    broken = _broken_model(rng, folder)
    spec = read_spec(broken, "fuzzed")
    check_weights(broken, spec)
    model_files(broken)
    eos_ids(broken)
    tokenizer = TextTokenizer(broken)
    if tokenizer.template is not None:
        with suppress(ValueError):  # an error record of the request
            tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    open_weights(broken, torch.float32).close()


def _toy(family: str) -> Path:
    """A toy model's folder, made once."""
    sys.path.insert(0, str(ROOT / "tests/kit"))
    import small_tokenizers
    import toys

    place = Path(os.environ["XGPT_FUZZ_TOYS"]) / family
    if not (place / "config.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        toys.make_model(family, place)
        small_tokenizers.plain_folder(
            place, chat_template="{{ messages[0].content }}", eos_token="</s>")
    return place


def _broken_model(rng: random.Random, folder: Path) -> Path:
    broken = folder / "model"
    shutil.copytree(_toy(rng.choice(["llama", "gpt2"])), broken)
    for path in rng.sample(sorted(broken.iterdir()), k=1 + (rng.random() < 0.3)):
        raw = path.read_bytes()
        if rng.random() < 0.1:
            path.unlink()
        elif path.suffix == ".json" and rng.random() < 0.8:
            path.write_text(mutated_json(rng, raw.decode()), encoding="utf-8",
                            errors="surrogatepass")
        elif path.suffix == ".safetensors" and rng.random() < 0.7:
            length = int.from_bytes(raw[:8], "little")
            head = mutated_json(rng, raw[8:8 + length].decode()).encode("utf-8", "surrogatepass")
            path.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + length:])
        else:
            path.write_bytes(mutated_bytes(rng, raw))
    return broken


def command(rng: random.Random, folder: Path) -> None:
    """`xgpt run` on a broken model's folder: exit code, messages, and what it leaves behind."""
    broken = _broken_model(rng, folder)
    (folder / "prompts.jsonl").write_text('{"tokens": [7, 8], "max_tokens": 2}\n')
    (folder / "job.yaml").write_text(
        "model: model\ncluster: local\nworkload: {requests: prompts.jsonl, output_tokens: "
        "{mean: 2, std: 1, max: 4}}\nschedule: {policy: rra, encode_batch: 1, "
        "decode_iterations: 2, tp_degree: 1}\nrun: {ranks: 1, dtype: float32, "
        "threads_per_rank: 1}\noutput: out\n")
    before = _tree(folder)
    done = _command("run", str(folder / "job.yaml"), "--json")
    assert done.returncode in EXIT_CODES, f"exit code {done.returncode}: {done.stderr[-500:]}"
    assert "Traceback" not in done.stderr and "bug of xgpt" not in done.stderr, done.stderr[-900:]
    json.loads(done.stdout)
    changed = {name for name, state in _tree(folder).items() if before.get(name) != state}
    assert all(name.startswith("out") for name in changed), f"written outside: {sorted(changed)}"
    assert broken.is_dir()


def _tree(folder: Path) -> dict[str, tuple[int, int]]:
    return {str(path.relative_to(folder)): (path.stat().st_size, path.stat().st_mtime_ns)
            for path in folder.rglob("*") if path.is_file()}


def _command(*words: str, check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from xgpt.cli.main import main; main()", *words], text=True,
        capture_output=True, check=check, errors="replace", stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"})


KINDS = {"job file": Kind(2000, 10, job_file), "file of requests": Kind(3000, 10, request_file),
         "schedule or profile": Kind(1000, 10, schedule_or_profile),
         "model's folder": Kind(200, 30, model_folder),
         "model's folder, by the command": Kind(200, 90, command)}


@contextmanager
def limited(kind: Kind) -> Iterator[None]:
    """Time and memory of a case. The command's own limits are its children's."""
    def ring(number: int, frame: object) -> None:
        raise TooLong

    # a machine that has other work must not fail a case: but one that waits for ever is a hang, too
    signal.signal(signal.SIGPROF, ring)
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_PROF, kind.budget_s)
    signal.alarm(20 * kind.budget_s)
    before = resource.getrlimit(resource.RLIMIT_AS)
    if kind.run is not command:
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + MOST_BYTES, before[1]))
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)


def try_case(name: str, seed: int, case: int, keep: Path | None = None) -> tuple[str, str]:
    """(outcome, what failed)"""
    kind, rng = KINDS[name], random.Random(f"{seed}/{name}/{case}")
    with tempfile.TemporaryDirectory(prefix="xgpt-fuzz-") as temporary:
        folder, what = Path(temporary), ""
        try:
            with limited(kind):
                kind.run(rng, folder)
            outcome = "taken"
        except XgptError as cause:
            outcome = "refused"
            if not str(cause).strip() or len(str(cause)) > 100_000:
                outcome, what = "failed", f"a message of {len(str(cause))} characters"
        except TooLong:
            outcome, what = "failed", f"longer than {kind.budget_s} s"
        except BaseException as cause:
            outcome = "failed"
            what = f"{type(cause).__name__}: {str(cause)[:300]} " + " < ".join(
                f"{Path(f.filename).name}:{f.lineno}" for f in reversed(
                    traceback.extract_tb(cause.__traceback__)[-4:]))
        if outcome == "failed" and keep is not None:
            shutil.copytree(folder, keep / f"{name.replace(' ', '-')}-{seed}-{case}",
                            dirs_exist_ok=True)
    return outcome, what


def batch(arguments: tuple[str, int, int, int, Path | None]) -> tuple[Counter[str], list[Failure]]:
    name, seed, first, count, keep = arguments
    outcomes, failures = Counter[str](), list[Failure]()
    for case in range(first, first + count):
        outcome, what = try_case(name, seed, case, keep)
        outcomes[outcome] += 1
        if what:
            failures.append(Failure(name, case, what))
    return outcomes, failures


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="of the counts")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    failures, table = list[Failure](), dict[str, Counter[str]]()
    with tempfile.TemporaryDirectory() as toys_folder:
        os.environ["XGPT_FUZZ_TOYS"] = toys_folder
        for family in ("llama", "gpt2"):
            _toy(family)
        context = multiprocessing.get_context("spawn")
        with context.Pool(asked.processes, maxtasksperchild=1) as pool:
            for name in asked.kinds:
                count = max(round(KINDS[name].count * asked.scale), 1)
                parts = [(name, asked.seed, first, min(AT_A_TIME, count - first), asked.out)
                         for first in range(0, count, AT_A_TIME)]
                table[name] = Counter()
                for outcomes, failed in pool.imap_unordered(batch, parts):
                    table[name] += outcomes
                    failures += failed
                print(f"{name}: {dict(table[name])}", flush=True)
    for failure in failures:
        print(f"FAILED {failure.kind} --seed {asked.seed} case {failure.case}: {failure.what}")
    print("\n| kind | cases | taken | refused | failed |\n|---|---|---|---|---|")
    for name, outcomes in table.items():
        print(f"| {name} | {outcomes.total()} | {outcomes['taken']} | {outcomes['refused']} | "
              f"{outcomes['failed']} |")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
