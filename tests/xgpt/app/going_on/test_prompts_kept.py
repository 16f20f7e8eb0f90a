"""What decides a prompt stays with its run: the moment that a chat template is told, what the job
tells it besides, and the tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="runs need the extra `run`")
pytest.importorskip("torch", reason="runs need the extra `run`")

from begun_runs import CONFIG, Run, opened, roofline  # noqa: E402
from small_tokenizers import plain_folder  # noqa: E402

from xgpt.app.opened import OpenedJob, open_file  # noqa: E402
from xgpt.app.running.prepare import make_room, plan_for_ranks  # noqa: E402
from xgpt.app.schedule import plan_job  # noqa: E402
from xgpt.cli.terminal import Terminal  # noqa: E402
from xgpt.core.errors import InputError, StoppedEarly  # noqa: E402
from xgpt.core.spool import Record, SpoolWriter  # noqa: E402
from xrunner.checkpoint.identity import files_state, model_files  # noqa: E402
from xrunner.io.results import HELD_FILE  # noqa: E402

TEMPLATE = ("{% for m in messages %}{{ strftime_now('%S.%f') }}{{ m.content }}{% endfor %}"
            "{% if enable_thinking %}think{% endif %}")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of two prompts to a model whose template tells the microsecond."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = plain_folder(tmp_path / "model", chat_template=TEMPLATE)
    (model / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 420}))
    (tmp_path / "r.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "out").mkdir()
    path = tmp_path / "job.yaml"
    path.write_text("model: model\ncluster: local\noutput: out\nrun: {ranks: 1, dtype: float32}\n"
                    "workload: {requests: r.jsonl, output_tokens: {mean: 4, std: 1, max: 8}}\n")
    return path


def prompts(path: Path, *overrides: str) -> OpenedJob:
    return open_file(path, overrides, Terminal(), "run")


def digest(session: OpenedJob) -> str:
    assert session.spool is not None
    return session.spool.prompts_digest


def test_a_run_that_goes_on_renders_the_prompts_of_its_beginning(job: Path) -> None:
    out, first = job.parent / "out", prompts(job)
    assert digest(first) != digest(prompts(job)), "nothing is begun"
    assert first.spool is not None
    first.spool.save(out, np.array([(0, 8), (1, 8)]), 0)
    assert digest(first) != digest(prompts(job)), "nothing is answered"
    (out / "results.jsonl").write_text('{"index": 0}\n')
    assert digest(first) == digest(prompts(job))
    (out / "results.jsonl").write_text('{"index": 0}\n{"index": 1}\n')
    assert digest(first) != digest(prompts(job)), "all is done: it is another run"


def test_other_tokens_of_the_same_requests_are_refused_untouched(folder: Path, run: Run) -> None:
    """As another version of transformers may make them, or a template that draws lots."""
    with pytest.raises(StoppedEarly):
        run(6)
    out, session = folder / "out", opened(folder)
    plan = plan_for_ranks(session, plan_job(session, roofline(session)).schedule, session.requests)
    asked, other = (out / "run.json").read_bytes(), SpoolWriter()
    other.add(Record(id="0", line=1), [1, 2, 3])
    with pytest.raises(InputError, match=r"the prompts: the tokens .*`xgpt submit --again`"):
        make_room(out, plan, Terminal(), spool=other)
    assert (out / "run.json").read_bytes() == asked and (out / HELD_FILE).exists()
    make_room(out, plan, Terminal(), spool=session.spool)
    with pytest.raises(InputError, match=r"workload.chat_template_kwargs: changed since the run"):
        make_room(out, replace(plan, chat_template_kwargs={"enable_thinking": False}), Terminal())


def test_a_job_tells_the_template_what_it_reads_and_nothing_else(job: Path) -> None:
    def lengths(*overrides: str) -> list[int]:
        requests = prompts(job, *overrides).requests
        assert requests is not None and requests.input_tokens is not None
        return requests.input_tokens.tolist()
    key = "workload.chat_template_kwargs"
    assert min(lengths(f"{key}={{enable_thinking: true}}")) > max(
        lengths(f"{key}={{enable_thinking: false}}"))
    for wrong, said in (("{enable_thinkin: true}", rf"job.yaml.*{key}.enable_thinkin: left out: "
                         ".*It reads enable_thinking"), ("[1]", rf"{key}: a mapping of what")):
        with pytest.raises(InputError, match=said):
            lengths(f"{key}={wrong}")
    (job.parent / "r.jsonl").write_text(
        '{"prompt": "a", "chat_template_kwargs": {"enable_thinking": true}}\n'
        '{"prompt": "a", "chat_template_kwargs": {}}\n')
    told, untold = lengths(f"{key}={{enable_thinking: false}}")
    assert told > untold, "a line's own counts before the job's"


def test_a_template_among_others_is_a_file_that_decides_the_answers(job: Path) -> None:
    model = job.parent / "model"
    before = model_files(model), files_state(model)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    assert model_files(model).keys() - before[0].keys() == {
        "additional_chat_templates/tool_use.jinja"}
    assert files_state(model) != before[1]
