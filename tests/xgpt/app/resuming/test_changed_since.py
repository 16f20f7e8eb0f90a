"""What changed since a run was stopped: refused where it decides the answers, with nothing touched,
and otherwise no hindrance."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="runs need the extra `run`")
pytest.importorskip("transformers", reason="runs need the extra `run`")

from begun_runs import CONFIG, POLICIES, RUN, opened, roofline  # noqa: E402
from small_tokenizers import plain_folder  # noqa: E402

from jobs import job_file  # noqa: E402
from xgpt.app.opened_job import OpenedJob, open_file  # noqa: E402
from xgpt.app.running.prepare import keep_earlier_results, plan_for_ranks  # noqa: E402
from xgpt.app.schedule import plan_job  # noqa: E402
from xgpt.cli.terminal import Terminal  # noqa: E402
from xgpt.core.errors import InputError, StoppedEarly, XgptError  # noqa: E402
from xgpt.requests.spool import Record, SpoolWriter  # noqa: E402
from xrunner.checkpoint.identity import files_state, model_files  # noqa: E402
from xrunner.files.results import HELD_FILE  # noqa: E402


def stopped(run, after=6):
    with pytest.raises(StoppedEarly):
        run(after)


def check_refused_untouched(folder, run, said):
    out = folder / "out"
    before = [(out / name).read_bytes() for name in ("results.jsonl", "run.json", HELD_FILE)]
    with pytest.raises(InputError, match=said):
        run(ranks_work=False)
    assert before == [(out / name).read_bytes() for name in (
        "results.jsonl", "run.json", HELD_FILE)] and not list(out.glob("results-*"))


def test_a_stopped_run_is_not_gone_on_with_by_another_model(folder, run):
    """Answers of two models in one file would look like those of one."""
    stopped(run)
    other = folder / "out" / "model" / "generation_config.json"
    other.write_text("{}")
    check_refused_untouched(folder, run, r"generation_config.json.*start again with `--again`")
    other.unlink()
    assert run()["queries_before"] >= 6


def test_a_stopped_run_whose_requests_changed_is_refused_untouched(folder, run, monkeypatch):
    stopped(run)
    requests = folder / "requests.jsonl"
    text = requests.read_text()
    requests.write_text(text.replace("[7, 8, 9]", "[7, 8, 1]"))
    check_refused_untouched(folder, run, r"the requests: changed .*`xgpt submit --again`")
    requests.write_text(text)
    with monkeypatch.context() as patch:
        patch.setitem(RUN, "dtype", "dtype: float32, deterministic: true")
        check_refused_untouched(folder, run, r"run.deterministic: changed .*`xgpt submit --again`")
    assert run()["queries_before"] >= 6


def test_prefixes_that_do_not_fit_their_spool_stop_a_resume(folder, run):
    stopped(run)
    path = folder / "out" / "spool" / "prefixes.npy"
    np.save(path, np.zeros((3, 2), np.int64))
    with pytest.raises(XgptError, match="does not fit the requests of its spool: remove it"):
        run(ranks_work=False)
    path.unlink()
    assert run()["queries_before"] >= 6


def test_what_else_decides_the_answers_is_refused_by_its_key(folder, run):
    stopped(run)
    out, session = folder / "out", opened(folder)
    plan = plan_for_ranks(session, plan_job(session, roofline(session)).schedule, session.requests)
    asked = (out / "run.json").read_bytes()
    for changes, said in (
            ({"engine_args": {"max_num_seqs": 8}}, "run.engine_args"),
            ({"engine_version": "0.9.2"}, "the engine's version"),
            ({"engine": "vllm"}, "run.engine"), ({"max_tokens": 7}, "workload.max_tokens"),
            ({"seed": 3, "top_k": 5}, "run.seed, run.top_k"),
            ({"chat_template_kwargs": {"a": 1}}, "workload.chat_template_kwargs")):
        with pytest.raises(InputError, match=f"{re.escape(said)}: changed since the run"):
            keep_earlier_results(out, replace(plan, **changes), Terminal())
    assert (out / "run.json").read_bytes() == asked and (out / HELD_FILE).exists()


def test_a_byte_between_the_samples_is_seen_by_who_reads_them_all(folder, run, monkeypatch, capsys):
    weights = folder / "out" / "model" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(4 * 2**20))
    verified = "dtype: float32, verify: true"
    monkeypatch.setitem(RUN, "dtype", verified)
    stopped(run)
    monkeypatch.setitem(RUN, "dtype", "dtype: float32")
    stopped(run, 3)  # what was read stays known
    with weights.open("r+b") as file:
        file.seek(2**20 + 2**15)  # behind the beginning and before the first block
        file.write(b"x")
    monkeypatch.setitem(RUN, "dtype", verified)
    with pytest.raises(InputError, match=r"model.safetensors: .*start again with `--again`"):
        run(ranks_work=False)
    capsys.readouterr()
    monkeypatch.setitem(RUN, "dtype", "dtype: float32")
    run()
    assert "started without `run.verify`" not in capsys.readouterr().err


def test_what_was_begun_without_reading_all_says_so(folder, run, monkeypatch, capsys):
    (folder / "out" / "model").mkdir(parents=True)
    (folder / "out" / "model" / "model.safetensors").write_bytes(bytes(2**20))
    stopped(run)
    monkeypatch.setitem(RUN, "dtype", "dtype: float32, verify: true")
    run()
    assert "started without `run.verify`" in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_was_moved_goes_on(folder):
    moved = folder.with_name(f"{folder.name} moved")
    shutil.copytree(folder, moved)
    prints = []
    for place in (folder, moved):
        session = opened(place)
        prints.append(plan_for_ranks(
            session, plan_job(session, roofline(session)).schedule, session.requests).fingerprint)
    assert prints[0] == prints[1]


def test_lines_that_no_schedule_answers_do_not_keep_another_from_going_on(folder):
    with (folder / "requests.jsonl").open("a") as file:
        for line in ({"tokens": [7] * 201}, {"tokens": [7], "forced_tokens": 500},
                     {"tokens": [7] * 80, "forced_tokens": 49}, {"tokens": [1, 97] * 40}):
            file.write(json.dumps(line) + "\n")
    prints = {}
    for policy in POLICIES:
        session = opened(folder, policy, ranks=2)
        schedule = plan_job(session, roofline(session)).schedule
        plan = plan_for_ranks(session, schedule, session.requests)
        prints[policy] = plan.fingerprint
        assert (plan.query_kv_tokens, plan.most_input_tokens) == (33, 0), policy
    assert len(set(prints.values())) == 1, prints

TEMPLATE = ("{% for m in messages %}{{ strftime_now('%S.%f') }}{{ m.content }}{% endfor %}"
            "{% if enable_thinking %}think{% endif %}")


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Of two prompts to a model whose template tells the microsecond."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = plain_folder(tmp_path / "model", chat_template=TEMPLATE)
    (model / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 420}))
    (tmp_path / "r.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    (tmp_path / "out").mkdir()
    return job_file(tmp_path, model="model", cluster="local", output="out",
                    run="{ranks: 1, dtype: float32}", workload=(
                        "{requests: r.jsonl, output_tokens: {mean: 4, std: 1, max: 8}}"))


def prompts(path: Path, *overrides: str) -> OpenedJob:
    return open_file(path, overrides, Terminal(), "run")


def digest(session: OpenedJob) -> str:
    return session.spool.prompts_digest


def test_a_run_that_goes_on_renders_the_prompts_of_its_beginning(job):
    out, first = job.parent / "out", prompts(job)
    assert digest(first) != digest(prompts(job)), "nothing is begun"
    first.spool.save(out, np.array([(0, 8), (1, 8)]), 0)
    assert digest(first) != digest(prompts(job)), "nothing is answered"
    (out / "results.jsonl").write_text('{"index": 0}\n')
    assert digest(first) == digest(prompts(job))
    (out / "results.jsonl").write_text('{"index": 0}\n{"index": 1}\n')
    assert digest(first) != digest(prompts(job)), "all is done: it is another run"


def test_other_tokens_of_the_same_requests_are_refused_untouched(folder, run):
    """As another version of transformers may make them, or a template that draws lots."""
    stopped(run)
    out, session = folder / "out", opened(folder)
    plan = plan_for_ranks(session, plan_job(session, roofline(session)).schedule, session.requests)
    asked, other = (out / "run.json").read_bytes(), SpoolWriter()
    other.add(Record(id="0", line=1), [1, 2, 3])
    with pytest.raises(InputError, match=r"the prompts: the tokens .*`xgpt submit --again`"):
        keep_earlier_results(out, plan, Terminal(), spool=other)
    assert (out / "run.json").read_bytes() == asked and (out / HELD_FILE).exists()
    keep_earlier_results(out, plan, Terminal(), spool=session.spool)


def test_a_job_tells_the_template_what_it_reads_and_nothing_else(job):
    def lengths(*overrides: str) -> list[int]:
        requests = prompts(job, *overrides).requests
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


def test_a_template_among_others_is_a_file_that_decides_the_answers(job):
    model = job.parent / "model"
    before = model_files(model), files_state(model)
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    assert model_files(model).keys() - before[0].keys() == {
        "additional_chat_templates/tool_use.jinja"}
    assert files_state(model) != before[1]
