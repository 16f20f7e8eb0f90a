"""`xgpt calibrate`: a user's own closed loops move a plan's times and their level of doubt."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from xgpt.cli.main import cli
from xgpt.core import catalog
from xgpt.core.errors import InputError
from xprofiler.calibration import load_calibration
from xsimulator.measured_loops import ServingPoint, fitted_factor, predicted

HEADER = ("model,device,engine,weight_dtype,tp_degree,concurrency,input_tokens,output_tokens,"
          "ttft_ms,tpot_ms")
SLOWER = 1.25
PLAN = ("plan", "llama-3.1-8b", "--prompts", "20k", "--input", "1000", "--output", "200",
        "--set", "schedule.policy=sarathi")


def loop(concurrency: int, inputs: int = 1024, **more) -> ServingPoint:
    return ServingPoint(**{
        "source": "own", "model": "llama-3.1-8b", "device": "H100", "engine": "vllm",
        "weight_dtype": "", "tp_degree": 1, "concurrency": concurrency, "input_tokens": inputs,
        "output_tokens": 128, "ttft_s": 1.0, "tpot_s": 1.0, **more})


def measured(*loops: ServingPoint) -> list[ServingPoint]:
    """The loops with the times of a machine on which all takes longer."""
    found = [(one, predicted(one)) for one in loops]
    return [loop(one.concurrency, one.input_tokens, tp_degree=one.tp_degree,
                 ttft_s=SLOWER * own.ttft_s, tpot_s=SLOWER * own.tpot_s) for one, own in found]


LOOPS = measured(loop(8), loop(16), loop(32, 2048), loop(64))


def row_of(one: ServingPoint, **more: object) -> str:
    cells = {"model": one.model, "device": one.device, "engine": one.engine, "weight_dtype": "",
             "tp_degree": one.tp_degree, "concurrency": one.concurrency,
             "input_tokens": one.input_tokens, "output_tokens": one.output_tokens,
             "ttft_ms": one.ttft_s * 1e3, "tpot_ms": one.tpot_s * 1e3, **more}
    return ",".join(map(str, cells.values()))


def result_of(one: ServingPoint, **more: object) -> dict[str, object]:
    """A file of `vllm bench serve --save-result`, vLLM 0.32; a few of its percentiles left out."""
    done = 10 * one.concurrency
    return {
        "date": "20261129-120000", "endpoint_type": "vllm", "backend": "vllm", "label": None,
        "model_id": "meta-llama/Llama-3.1-8B-Instruct", "tokenizer_id": "x", "num_prompts": done,
        "request_rate": "inf", "burstiness": 1.0, "max_concurrency": one.concurrency,
        "duration": 12.5, "completed": done, "failed": 0,
        "total_input_tokens": one.input_tokens * done,
        "total_output_tokens": one.output_tokens * done, "request_throughput": 20.0,
        "request_goodput": None, "output_throughput": 2000.0, "total_token_throughput": 9000.0,
        "max_output_tokens_per_s": 2500.0, "max_concurrent_requests": one.concurrency, "rtfx": 0.0,
        "mean_ttft_ms": one.ttft_s * 1e3, "median_ttft_ms": 1.0, "p99_ttft_ms": 2.0,
        "mean_tpot_ms": one.tpot_s * 1e3, "mean_itl_ms": one.tpot_s * 1e3, **more}


def invoke(*words: object) -> Result:
    return CliRunner().invoke(cli, [*map(str, words)], catch_exceptions=False)


def refused(*words: object) -> str:
    with pytest.raises(InputError) as why:
        invoke(*words)
    assert why.value.exit_code == 2
    return str(why.value)


def said(done: Result) -> str:
    """All that was shown, without the breaks of lines."""
    return " ".join(done.stdout.split())


@pytest.fixture(autouse=True)
def beside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def table(tmp_path):
    path = Path("loops.csv")
    path.write_text("\n".join([HEADER, *map(row_of, LOOPS[:3])]) + "\n")
    return path


@pytest.fixture
def made(table):
    out = table.with_name("own.json")
    done = invoke("calibrate", table, "--out", out)
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert "rows 3 of loops.csv" in said(done) and "now same cell: your runs" in said(done)
    return out


def test_three_rows_bring_times_nearer_and_are_not_followed_blindly(made):
    own = load_calibration(made)
    assert own.rows == 3 and own.tp_degrees == (1,) and own.engine == "vllm"
    assert own.before == pytest.approx(1 - 1 / SLOWER, rel=0.01)
    assert own.after < own.before / 2 and 1.1 < own.factor < SLOWER


def test_more_rows_are_followed_further_and_one_that_is_far_off_alone_little():
    times = {one: predicted(one) for one in LOOPS}

    def fitted(points, **more):
        return fitted_factor(points, {one: times.get(one) or predicted(one) for one in points},
                             **{"typical": 0.08, "scatter": 0.08, **more})[0]

    assert fitted(LOOPS[:2]) < fitted(LOOPS) < SLOWER
    assert fitted(LOOPS, typical=math.inf) == pytest.approx(SLOWER)
    assert fitted(LOOPS, typical=0.01) < 1.05


def test_a_plan_uses_a_calibration_and_says_so(made):
    with_it = invoke(*PLAN, "--on", "1xH100", "--set", f"plan.calibration={made}")
    factor = load_calibration(made).factor
    assert (f"computed; x {factor:.2f} by 3 rows of loops.csv (own.json); same cell: your runs of "
            "this model") in said(with_it)
    assert all(len(line) <= 80 for line in with_it.stdout.splitlines())
    alone = invoke(*PLAN, "--on", "1xH100")
    assert "vLLM on H100, computed; " in said(alone) and "same cell" not in said(alone)
    plans = [json.loads(invoke(*PLAN, "--on", "1xH100", *more, "--json").stdout)
             for more in ((), ("--set", f"plan.calibration={made}"))]
    assert plans[1]["job"]["wall_s"] == pytest.approx(factor * plans[0]["job"]["wall_s"], rel=0.02)
    assert plans[1]["proof"]["bound_qps"] == pytest.approx(
        plans[0]["proof"]["bound_qps"] / factor, rel=0.02), "no bound is broken"
    assert "by 3 rows of loops.csv (own.json)" in json.dumps(plans[1])


def test_a_larger_degree_than_measured_is_a_neighbour(made):
    done = invoke(*PLAN, "--on", "2xH100", "--set", f"plan.calibration={made}",
                  "--set", "schedule.tp_degree=2")
    assert "neighbour: degree 2 was not measured" in said(done)


def test_results_of_a_benchmark_are_taken_with_what_they_do_not_say(made):
    files = [Path(f"c{one.concurrency}.json") for one in LOOPS[:3]]
    for file, one in zip(files, LOOPS, strict=False):
        file.write_text(json.dumps(result_of(one)))
    out = Path("of-vllm.json")
    why = refused("calibrate", *files, "--out", out)
    assert not out.exists()
    assert all(why.count(f"--{key}: required") == 1 for key in ("device", "engine", "tp"))
    told = json.loads(invoke("calibrate", *files, "--out", out, "--device", "H100", "--engine",
                             "vllm", "--tp", 1, "--json").stdout)
    assert told["before"]["level"] != told["after"]["level"] == "same cell"
    assert told["calibration"]["source"] == "c8.json, c16.json, c32.json"
    assert load_calibration(out).factor == load_calibration(made).factor


@pytest.mark.parametrize(("more", "words"), [
    ({"request_rate": 4.0}, "request_rate = 4.0: Input should be 'inf'"),
    ({"failed": 2}, "failed = 2"), ({"max_concurrency": None}, "max_concurrency: "),
    ({"mean_tpot_ms": 0.0}, "mean_tpot_ms = 0.0"), ({"completed": "many"}, "completed = 'many'"),
    ({"model_id": "own/model"}, "--model: required with benchmark results, which do not say it: "
                                "unknown model 'own/model'")])
def test_a_result_that_is_no_closed_loop_is_refused(more, words):
    file = Path("bench.json")
    file.write_text(json.dumps(result_of(LOOPS[0], **more)))
    assert words in refused("calibrate", file, "--device", "H100", "--engine", "vllm", "--tp", 1)


def test_a_throughput_benchmark_and_a_folder_are_refused(tmp_path):
    file = tmp_path / "throughput.json"
    file.write_text(json.dumps({"elapsed_time": 3.0, "num_requests": 10, "total_num_tokens": 1000,
                                "requests_per_second": 3.3, "tokens_per_second": 333.0}))
    why = refused("calibrate", file, tmp_path)
    assert "mean_ttft_ms: Field required" in why
    assert f"{tmp_path}: file: a file of measured closed loops" in why


@pytest.mark.parametrize(("rows", "words"), [
    ([row_of(LOOPS[0]), row_of(LOOPS[1])], "rows = '2 of degree 1': at least 3 of one"),
    ([row_of(LOOPS[0])] * 3, "rows = '1 of degree 1'"),  # copies
    ([row_of(LOOPS[0]), row_of(LOOPS[1]), row_of(LOOPS[2], tp_degree=2)],
     "rows = '2 of degree 1, 1 of degree 2'"),
    ([row_of(LOOPS[0]), row_of(LOOPS[1], device="H200"), row_of(LOOPS[2], engine="sglang")],
     "engine = 'vllm, sglang': one"),
    ([row_of(LOOPS[0], tpot_ms=0), row_of(LOOPS[1], device="H101"), row_of(LOOPS[2])],
     "loops.csv:3: device = 'H101'"),
    ([row_of(one, tpot_ms=one.tpot_s * off) for one, off in zip(LOOPS, (1, 1e4, 1), strict=False)],
     "off by the factor of the other rows: see that degree, device and units (milliseconds)")])
def test_rows_that_make_no_calibration_are_refused(table, rows, words):
    table.write_text("\n".join([HEADER, *rows]) + "\n")
    assert words in refused("calibrate", table, "--out", table.with_name("own.json"))
    assert not table.with_name("own.json").exists()


def test_an_option_that_a_table_has_a_column_of_is_refused(table):
    assert "--tp = 1: left out: loops.csv has a column" in refused("calibrate", table, "--tp", 1)


@pytest.mark.parametrize(("on", "more", "words"), [
    ("1xH200", (), "device = 'H100': the planned device, H200"),
    ("1xH100", ("--engine", "sglang"), "engine = 'vllm': the planned engine, sglang"),
    ("1xH100", ("--set", "model=qwen2.5-7b"), "model = 'llama-3.1-8b': the planned model, "
                                              "qwen2.5-7b")])
def test_a_plan_refuses_a_calibration_of_something_else(made, on, more, words):
    assert words in refused(*PLAN, "--on", on, *more, "--set", f"plan.calibration={made}")


@pytest.mark.parametrize("spoil", [
    lambda text: text.replace('"rows": 3', '"rows": 30'), lambda text: text[:-20],
    lambda text: "[1, 2]", lambda text: "{}"])
def test_an_edited_or_damaged_calibration_is_refused(made, spoil):
    made.write_text(spoil(made.read_text()))
    why = refused(*PLAN, "--on", "1xH100", "--set", f"plan.calibration={made}")
    assert "edited or damaged" in why or "a calibration by `xgpt calibrate`" in why


def test_measured_times_take_no_calibration(made):
    why = refused(*PLAN, "--on", "1xH100", "--set", f"plan.calibration={made}",
                  "--set", "cluster=local")
    assert "plan.calibration" in why and "where step times are measured" in why


def test_rows_that_disagree_widen_the_doubt(table):
    wild = [row_of(one, tpot_ms=one.tpot_s * 1e3 * off)
            for one, off in zip(LOOPS, (0.6, 1.0, 1.7), strict=False)]
    table.write_text("\n".join([HEADER, *wild]) + "\n")
    found = json.loads(invoke("calibrate", table, "--out", table.with_name("own.json"),
                              "--json").stdout)
    level = catalog.accuracy()["levels"]["same cell"]["mean"]
    assert found["after"]["typical"] == pytest.approx(found["calibration"]["after"])
    assert found["after"]["typical"] > 2 * level
    far = ("--set", "schedule.tp_degree=1", "--set", "schedule.replicas=1")
    done = invoke(*PLAN, "--on", "2xH100", *far, "--set", "plan.calibration=own.json")
    assert "far: " in said(done), "two stages are less sure than what was measured"
    assert f"typical error {found['after']['typical']:.0%}" not in said(done)


def test_pods_measure_their_own_times(made):
    Path("job.yaml").write_text(json.dumps({
        "model": "llama-3.1-8b", "cluster": "1xH100", "schedule": {"policy": "sarathi"},
        "workload": {"requests": {"count": 100}, "input_tokens": 1000, "output_tokens": 100},
        "plan": {"engine": "vllm", "calibration": "own.json"}}))
    done = invoke("export", "job.yaml", "--to", "skypilot", "--image", "x")
    assert "--set cluster=local" in done.stdout and "--set plan.calibration=null" in done.stdout
