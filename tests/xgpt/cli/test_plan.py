"""`xgpt plan`: how many GPUs, or how long, without a job file."""

import json

import pytest
from click.testing import CliRunner, Result

from xgpt.app.sizing import Question
from xgpt.cli.plan import plan
from xgpt.core.errors import InfeasibleError, InputError
from xgpt.job.job_file import load_job

JOB = {"--prompts": "200000", "--input": "400", "--output": "100"}


def ask(on: str, **more: str) -> Result:
    given = {**JOB, "--on": on, **{f"--{key}": value for key, value in more.items()}}
    words = [word for pair in given.items() for word in pair if word]
    return CliRunner().invoke(plan, ["opt-1.3b", *words, "--set=schedule.policy=sarathi"],
                              catch_exceptions=False)


def test_how_many_gpus_are_needed_and_the_job_file_of_that(tmp_path):
    file = tmp_path / "job.yaml"
    done = ask("A40", within="30min", save=str(file))
    assert done.exit_code == 0, done.output
    screen = done.stdout.splitlines()
    assert len(screen) <= 25 and screen[2].startswith("time ")
    assert " expected, " in screen[2] and "(limit 30 min)" in screen[2]
    (chosen,) = (line for line in screen if line.endswith(", chosen"))
    job = load_job(file)
    assert job.cluster == f"{chosen.split()[0]}xA40" and job.workload.count == 200_000
    assert "links        assumed: " in done.stdout, "nobody stated them"
    # fewer miss the limit, as the table says
    before = screen[screen.index(chosen) - 1]
    assert before.endswith(("no", "only expected"))


def test_how_long_given_gpus_take_and_what_would_keep_the_limit():
    taken = json.loads(ask("4xA40", json="").stdout)
    assert taken["figures"]["throughput_qps"] > taken["job"]["throughput_qps"] > 0
    assert taken["question"]["on"] == "4xA40"
    with pytest.raises(InfeasibleError, match=r"within 1 min|within 60") as why:
        ask("4xA40", within="60s")
    assert "4 x A40 need" in str(why.value) and "may do" in str(why.value)


@pytest.mark.parametrize(("on", "more", "words"), [
    ("A40", {}, "8xA40"), ("13xA40", {"within": "1h"}, "multiple of 8"),
    ("A41", {"within": "1h"}, "--on"), ("4xA40", {"within": "soon"}, "--within"),
    ("4xA40", {"prompts": "many"}, "--prompts")])
def test_a_wrong_question_says_what_is_allowed(on, more, words):
    with pytest.raises(InputError) as why:
        ask(on, **more)
    assert words in str(why.value)


def test_a_kind_of_gpu_asks_how_many_however_it_is_written():
    asked = Question(model="opt-1.3b", on="rtx4090")
    assert asked.asks_how_many and not Question(model="opt-1.3b", on="a40-4").asks_how_many
