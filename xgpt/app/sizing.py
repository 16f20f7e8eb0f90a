"""Plans without a job file: how many GPUs of a kind a job needs, or how long given ones take."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from xgpt.app.opened_job import OpenedJob, open_job
from xgpt.app.schedule import Plan, plan_job
from xgpt.app.teller import Teller
from xgpt.core import catalog
from xgpt.core.errors import InfeasibleError, InputError, UnknownNameError, nearest, wrong
from xgpt.core.system.whole_file import write_atomically
from xgpt.job.job_file import load_job
from xscheduler.cluster_sizes import why_impossible

NODE, MOST_GPUS = 8, 4096  # chosen: fewest and most GPUs that are tried
# job key -> the option that sets it
OPTIONS = {"model": "MODEL", "cluster": "--on", "workload.requests.count": "--prompts",
           "workload.input_tokens": "--input", "workload.output_tokens": "--output",
           "constraint.makespan_s": "--within", "constraint.latency_s": "--latency",
           "plan.engine": "--engine"}
SPARE = 4  # chosen: first try this many times the GPUs of the roofline limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The values of `xgpt plan`, each in the syntax of a job file. `on`: a GPU, to find how many
    are needed, or a cluster, to find how long it takes."""

    model: str
    on: str
    prompts: str | None = None
    input_tokens: str = ""
    output_tokens: str = ""
    within: str | None = None
    latency: str | None = None
    engine: str | None = None

    @property
    def asks_how_many(self) -> bool:
        """Whether `on` is a GPU without a number."""
        try:
            return bool(catalog.device_named(self.on))
        except UnknownNameError:
            return False

    def text(self, cluster: str, *, is_sized: bool = False) -> str:
        """The text of the job file for a cluster. `is_sized`: with the objective of fewest GPUs."""
        lines = [f"model: {self.model}", f"cluster: {cluster}", "workload:"]
        if self.prompts is not None:
            lines.append(f"  requests: {{count: {self.prompts}}}")
        lines += [f"  input_tokens: {self.input_tokens}", f"  output_tokens: {self.output_tokens}"]
        limits = [f"{key}: {limit}" for key, limit in (
            ("makespan_s", self.within), ("latency_s", self.latency)) if limit is not None]
        if limits:
            lines.append(f"constraint: {{{', '.join(limits)}}}")
        if self.engine is not None:
            lines.append(f"plan: {{engine: {self.engine}}}")
        if is_sized:
            lines.append("objective: devices")
        return "\n".join(lines) + "\n"


def answer(question: Question, place: Path, overrides: Sequence[str], tell: Teller, *,
           is_saved: bool) -> Plan:
    """Makes the plan that answers a question. `place`: path of its job file. `is_saved`: whether to
    write that file, for the GPUs found. Raises InputError, and InfeasibleError if the limits cannot
    be met."""
    def opened(cluster: str, *, is_sized: bool = False) -> OpenedJob:
        text = question.text(cluster, is_sized=is_sized)
        try:
            job = load_job(place, overrides, text)
        except InputError as error:
            raise InputError([replace(one, file="command line", line=None,
                                      key=OPTIONS.get(one.key, one.key))
                              for one in error.mistakes]) from None
        return open_job(job, tell, "lengths")

    cluster = question.on
    if question.asks_how_many:
        if question.within is None or question.prompts is None:
            raise wrong("command line", "--on", question.on, "a number of them, as in --on "
                        f"8x{question.on}; or give --prompts and --within to find how many")
        plan = _on_fewest(lambda count: opened(f"{count}x{question.on}", is_sized=True))
        cluster = f"{plan.schedule.estimate.num_devices}x{question.on}"
    elif not (cluster in catalog.names("cluster") or catalog.SIZED.fullmatch(cluster)):
        known = [*catalog.names("device"), *catalog.names("cluster")]
        raise wrong("command line", "--on", cluster, "a kind of GPU, so many of it (8xH100), or a "
                    f"cluster; {nearest(cluster, known)}")
    else:
        plan = plan_job(opened(cluster))
    if is_saved:
        write_atomically(place, question.text(cluster))
    return plan


def _on_fewest(opened: Callable[[int], OpenedJob]) -> Plan:
    """The plan on the fewest GPUs. `opened`: the job on at most so many."""
    count = NODE
    while count < MOST_GPUS and why_impossible(opened(count).problem):
        count *= 2
    count = min(SPARE * count, MOST_GPUS)
    while True:
        try:
            return plan_job(opened(count))
        except InfeasibleError as refusal:
            if count >= MOST_GPUS or math.isfinite(refusal.tightest_s):
                raise
            count = min(2 * count, MOST_GPUS)
