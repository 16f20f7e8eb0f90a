"""How far a run of 8-bit products can be trusted: compared with the model's own type before it
starts, on the job's own inputs."""

import json
from pathlib import Path
from typing import Any

from xgpt.app.opened import OpenedJob
from xgpt.core.units import INT8
from xgpt.launch.launcher import RankProgram, launcher_of
from xgpt.report.words import agreement_words
from xrunner.plan import AGREEMENT_FILE, RunPlan


def agreement_of(opened: OpenedJob, plan: RunPlan, run_file: Path,
                 lock: int) -> dict[str, Any] | None:
    """What agreement.json holds, measured unless it is there of the same run; None for a run of the
    model's own type. Raises XgptError."""
    if plan.weight_dtype != INT8:
        return None
    path = plan.output / AGREEMENT_FILE
    if (known := _read(path)) is None or known["fingerprint"] != plan.fingerprint:
        opened.tell.say(f"comparing {INT8} with {plan.dtype} on the job's own inputs")
        launcher_of(opened.job, opened.problem).run(
            RankProgram(module="xrunner.agreement", argument=run_file, count=1, inherited=(lock,)),
            watch=lambda: None)
        known = _read(path)
        assert known is not None, f"{path} was just written"
    agreement = {key: known[key] for key in ("inputs", "positions", "agreeing")}
    said = agreement_words({"agreement": agreement, "weight_dtype": plan.weight_dtype,
                            "dtype": plan.dtype})
    assert said is not None, f"{agreement = }"
    opened.tell.say(said)
    return agreement


def _read(path: Path) -> dict[str, Any] | None:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content
