"""Makes docs/first-hour/*.md: what three new users type in their first hour, and what they see.

    python docs/first_hour.py             runs every command and writes the pages
    python docs/first_hour.py --check     runs them and compares shapes: exit code 1 if one differs

A shape is the sequence of line labels of an output, without figures, notes and progress; of a plan
from data sheets, which is the same on every machine, all words. The first transcript runs a model
of 0.5 GB on this machine, which the README's first command has fetched."""

import os
import random
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "first-hour"
POLICY = ROOT / "tests" / "extending" / "toy_policy"
PROGRESS = ("running  ", "finding the best schedule", "profile: ", "profiling ")
VARYING = ("note", "layout", *PROGRESS)  # lines that come and go with the machine
GOOD = ("great battery", "a lovely screen", "fast delivery", "works perfectly", "my kids love it")
BAD = ("broke after a week", "far too loud", "arrived damaged", "the app crashes", "no refund")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transcript:
    """A page: its steps are words or commands, and `prepare` writes the files they need.
    is_local: figures and schedules depend on this machine."""

    name: str
    title: str
    steps: Sequence[str]
    prepare: Callable[[Path], None] = lambda folder: None
    is_local: bool = False


def reviews(folder: Path) -> None:
    """reviews.csv: 200 short reviews, half of them good."""
    draw = random.Random(1)
    lines = ["id,text"]
    for number in range(200):
        first, second = draw.sample(GOOD if number % 2 else BAD, 2)
        lines.append(f'{number + 1},"{first.capitalize()}, {second}."')
    (folder / "reviews.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def job_of_the_paper(folder: Path) -> None:
    """The job of the tutorial on policies, in the folder that commands run in."""
    text = (ROOT / "jobs" / "opt-13b-summarise.yaml").read_text(encoding="utf-8")
    text = re.sub(r"^output: .*", "output: out", text, flags=re.M)
    (folder / "job.yaml").write_text(text, encoding="utf-8")


TRANSCRIPTS = (
    Transcript(name="reviews", title="First hour: labels for 200 reviews", is_local=True,
               prepare=reviews, steps=(
        "A table of reviews, a laptop with two cores, and no GPU. Each review gets one of two "
        "labels. xgpt is installed with its extras `run`, `report` and `structured`.",
        "$ head -n 3 reviews.csv",
        "$ xgpt init --prompts reviews.csv --prompt 'Is this review good or bad? {text}' "
        "--choices good,bad",
        "The job file names the prompt, the labels and a small model. Every key has a comment.",
        "$ xgpt submit job.yaml",
        "Each answer is exactly one of the labels, and stands beside the columns of the table.",
        "$ head -n 3 out/reviews/results.csv | cut -d , -f 1-4",
        "$ xgpt status")),
    Transcript(name="how-many-gpus", title="First hour: how many H100 for 3 million prompts?",
               steps=(
        "A nightly job of 3 million prompts has to be done within 8 hours. No file is needed, "
        "and no GPU.",
        "$ xgpt plan llama-3.1-70b --on H100 --prompts 3M --input 1200 --output 300 --within 8h "
        "--save night.yaml",
        "The job file names as many GPUs as were found. How long would 8 take?",
        "$ xgpt plan llama-3.1-70b --on 8xH100 --prompts 3M --input 1200 --output 300",
        "And may 8 do it within 8 hours?",
        "$ xgpt schedule night.yaml --set cluster=8xH100; echo exit code $?")),
    Transcript(name="own-policy", title="First hour: a policy of one's own",
               prepare=job_of_the_paper, steps=(
        "The package of [the tutorial](../own-policy.md) is installed. Its policy `waves` is then "
        "planned, simulated and compared like every other.",
        "$ xgpt schedule job.yaml --set schedule.policy=waves",
        "$ xgpt simulate job.yaml --set schedule.policy=waves --set schedule.wave_queries=16",
        "$ xgpt sweep job.yaml --bounds 6,12 --over policy=waves,rra,ft")))


def main(arguments: Sequence[str]) -> int:
    is_check, wrong = "--check" in arguments, list[str]()
    PAGES.mkdir(exist_ok=True)
    for transcript in TRANSCRIPTS:
        page, path = made(transcript), PAGES / f"{transcript.name}.md"
        if not is_check:
            path.write_text(page, encoding="utf-8")
            print(path.relative_to(ROOT))
            continue
        known = path.read_text(encoding="utf-8")
        for old, new in zip(shapes(known, transcript), shapes(page, transcript), strict=True):
            if old != new:
                wrong.append(f"{path.relative_to(ROOT)}:\n  was  {old}\n  is   {new}")
    print("\n".join(wrong) or f"first hour: {len(TRANSCRIPTS)} transcripts")
    return 1 if wrong else 0


def made(transcript: Transcript) -> str:
    """The page, by running its commands in a folder of their own. Raises SystemExit for a command
    that fails and does not say `exit code`."""
    parts = [f"# {transcript.title}", f"Made by `python {Path(__file__).relative_to(ROOT)}`."]
    with tempfile.TemporaryDirectory() as name:
        transcript.prepare(Path(name))
        for step in transcript.steps:
            parts.append(step if not step.startswith("$ ") else
                         f"```console\n{step}\n{run(step[2:], Path(name))}\n```")
    return "\n\n".join(parts) + "\n"


def run(command: str, folder: Path) -> str:
    """The output of a command on a terminal of 80 columns, without its progress."""
    script = f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH; {command}"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", script], cwd=folder, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "80", "PYTHONPATH": str(POLICY)})
    if done.returncode:
        sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}")
    return "\n".join(line for line in done.stdout.rstrip("\n").split("\n")
                     if not line.startswith(PROGRESS))


def shapes(page: str, transcript: Transcript) -> Iterator[list[str]]:
    """The shape of each output of a page, its command first."""
    for block in re.findall(r"^```console\n(.*?)\n```$", page, re.M | re.S):
        command, *lines = block.split("\n")
        text = re.sub(r"[\d.,]*\d", "#", "\n".join(lines))
        if not transcript.is_local:
            yield [command, " ".join(re.sub(r"-{2,}", "-", text).split())]
            continue
        yield [command, *(line.split()[0] for line in text.split("\n")
                          if line and not line[0].isspace() and not line.startswith(VARYING))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
