"""vLLM at work for tests, in the interpreter that has it: `VLLM_PYTHON vllm_answers.py`. It is
imported once for all that is asked, each a line of JSON on its input:

    {model, dtype, inputs, count}   one engine core of ours answers `inputs` (lists of tokens)
                                    greedily, `count` tokens each, all at once
    {model, passes}                 one engine core shares prefixes over these passes, each with
                                    requests to `add` ([name, tokens, start]) and to `end`,
                                    prefixes to `release`, and tokens that each request is to `want`
    {run}                           a run of our worker: the path of its run.json

Each is answered by a line that begins with ANSWER: `tokens` and `logprobs` of each input, `tokens`
by request of each pass, {} of a run, or `error` in words."""

import gc
import json
import sys
from pathlib import Path
from typing import Any

ANSWER = "answer: "
_ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    sys.path.insert(0, str(_ROOT / "xrunner" / "backends"))
    import other_python

    del sys.path[0]
    sys.meta_path.insert(0, other_python._Ours())
    from xgpt.core.errors import XgptError

    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = (_run(Path(asked["run"])) if "run" in asked else
                      _passes(asked) if "passes" in asked else _answers(asked))
        except XgptError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()  # the engine core, with its model and its cache
        print(f"{ANSWER}{json.dumps(answer)}", flush=True)


def _run(plan: Path) -> dict[str, Any]:
    from xrunner.backends.vllm import vllm_worker as worker

    code = worker.main([str(plan)])
    return {"error": f"exit code {code}"} if code else {}


def _passes(asked: dict[str, Any]) -> dict[str, Any]:
    from xrunner.backends.vllm.core import CoreSettings, EngineCore
    from xrunner.checkpoint.source import read_spec
    from xrunner.query import Sampling
    from xrunner.rules.steps import Start

    model = Path(asked["model"])
    spec = read_spec(model, str(model))
    core = EngineCore(CoreSettings(
        model_dir=model, dtype="float32", threads=1, max_queries=2, max_tokens=128, kv_tokens=256,
        kv_token_bytes=4 * spec.kv_elements_per_token_layer * spec.num_layers, has_prefixes=True,
        arguments={"block_size": 32}))
    given = []
    for one in asked["passes"]:
        core.end(one.get("end", []))
        core.release(one.get("release", []))
        for name, tokens, start in one.get("add", []):
            core.add(name, tokens, Sampling(), start=Start(*start))
        given.append({name: token.value for name, token in core.step(one["want"]).items()})
    return {"tokens": given}


def _answers(asked: dict[str, Any]) -> dict[str, Any]:
    from xrunner.backends.vllm.core import CoreSettings, EngineCore
    from xrunner.checkpoint.source import read_spec
    from xrunner.query import Sampling

    model, inputs, count = Path(asked["model"]), asked["inputs"], asked["count"]
    spec, longest = read_spec(model, str(model)), max(map(len, inputs)) + count + 1
    core = EngineCore(CoreSettings(
        model_dir=model, dtype=asked["dtype"], threads=1, max_queries=len(inputs),
        max_tokens=longest, kv_tokens=len(inputs) * longest,
        kv_token_bytes=4 * spec.kv_elements_per_token_layer * spec.num_layers))
    names = [str(place) for place in range(len(inputs))]
    for name, tokens in zip(names, inputs, strict=True):
        core.add(name, tokens, Sampling(top_logprobs=0))
    wanted, given = {name: len(inputs[int(name)]) for name in names}, []
    for _ in range(count):
        given.append(core.step(wanted))
        wanted = dict.fromkeys(names, 1)
    return {"tokens": [[step[name].value for step in given] for name in names],
            "logprobs": [[step[name].likelihood.logprob for step in given] for name in names]}


if __name__ == "__main__":
    main()
