"""Sentences of reports and screens: about the run, the schedule, and the cost of the limit."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from xgpt.core.constraint import Metric, Prospect
from xgpt.core.deployment import StageAssignment
from xgpt.core.errors import visible
from xgpt.core.placement import Placement, Shares
from xgpt.core.policies import policy
from xgpt.core.schedule import Estimate, Schedule, Status
from xgpt.core.units import format_bytes, format_seconds
from xgpt.report.figures import percent, plain
from xgpt.report.output import Output, number, text_at

# a number and its unit stay on one line
_NUMBER_AND_UNIT = re.compile(r"(?<=\d) (?=(?:%|ms|us|s|[KMGT]iB|B|requests/s|tokens/s)(?:\W|$))")
_FENCED = re.compile(r"(```.*?(?:```|\Z))", re.DOTALL)  # the last one may be open
MAX_TEXT = 20_000
_AS_EXPECTED = 0.005  # chosen: it would read as 0 %
_ON = ("the device", "the host", "disk")


def clean(text: str, limit: int = MAX_TEXT) -> str:
    """`text` for a page: characters without a glyph, and those that turn the direction of text, are
    escaped; a text longer than `limit` is cut."""
    shown = visible(text)
    return shown if len(shown) <= limit else (
        f"{shown[:limit]} [{len(shown) - limit:,} more characters are in the files beside]")


def code_and_prose(text: str) -> list[tuple[bool, str]]:
    """`text` cut at its Markdown code fences into (is_code, part), without line breaks beside."""
    parts = _FENCED.split(text)
    cut = [(part.startswith("```"), part if part.startswith("```") else part.strip("\n"))
           for part in parts]
    return [(is_code, part) for is_code, part in cut if part] if len(parts) > 1 else [(False, text)]


def tight(sentence: str) -> str:
    """`sentence` with no line break between a number and its unit."""
    return _NUMBER_AND_UNIT.sub("\N{NO-BREAK SPACE}", sentence)


def counted(count: float, noun: str) -> str:
    """A number with its noun: `3 requests`, `1 request`."""
    plural = noun[:-1] + "ies" if noun.endswith("y") else (
        noun + "es" if noun.endswith("x") else noun + "s")
    return f"{count:,.0f} {noun if count == 1 else plural}"


def headline(output: Output, metrics: Mapping[str, Any]) -> str:
    """A sentence about a run's answers: their number, the time, and how many lack a part."""
    queries, wall_s = number(metrics, "queries") or 0.0, number(metrics, "wall_s", "measured")
    if not queries:
        return "No request is done yet"
    own, failed = queries - output.queries_before, output.queries.reasons()["error"]
    text = counted(queries - failed, "answer")
    if wall_s is not None:  # the time is known of this run alone
        text += f", {own:,.0f} of them by this run" * (own < queries)
        text += f" in {format_seconds(wall_s)}"
    lacking = [f"{count:,} {what}" for count, what in (
        (truncated(output), "truncated"), (failed, "failed")) if count]
    return "; ".join([text, *lacking])


def truncated(output: Output) -> int:
    """Number of answers that ended at their max_tokens; 0 for a job that asks for fixed lengths."""
    asked = output.job.get("run"), output.job.get("workload")
    run, workload = (part if isinstance(part, Mapping) else {} for part in asked)
    is_fixed = run.get("ignore_eos") or workload.get("score") or workload.get("embed")
    return 0 if is_fixed else output.queries.reasons()["length"]


def subject(output: Output, metrics: Mapping[str, Any]) -> str:
    """`smollm2-135m on 2 ranks of this machine`."""
    model = text_at(output.job, "model") or "a model"
    return f"{model.rstrip('/').rsplit('/', 1)[-1]} on {_place(output, metrics)}"


def expected_words(metrics: Mapping[str, Any]) -> str | None:
    """`Expected 12.0 s, took 13.6 s: 13 % slower`, with the causes if known; None without a
    prediction, or of a service, whose duration is that of its arrivals."""
    took_s, expected_s = (number(metrics, "wall_s", key) for key in ("measured", "predicted"))
    if took_s is None or not expected_s or not math.isfinite(expected_s) or (
            "served" in metrics):
        return None
    off, is_after = took_s / expected_s - 1, metrics.get("is_predicted_for_lengths") is True
    change = "as expected" if abs(off) < _AS_EXPECTED else (
        f"{percent(abs(off))} {'slower' if off > 0 else 'faster'}")
    why = "" if is_after else (text_at(metrics, "attribution", "sentence") or "").partition(": ")[2]
    return (f"Expected {format_seconds(expected_s)}{' for answers of these lengths' * is_after}, "
            f"took {format_seconds(took_s)}: {change}{f' ({why})' if why else ''}")


def reasons(schedule: Schedule) -> Sequence[str]:
    """The explanation, without its comparison of policies where the page has a table of them."""
    has_table = any(row.kind == "policy" for row in schedule.rejected)
    return schedule.explanation[1:] if has_table else schedule.explanation


def bare_gap(schedule: Schedule) -> str:
    """Words for the meaning of a gap if the schedule has a safety margin."""
    proof, to = schedule.proof, "to schedules without a safety margin"
    if proof.bare_gap is None or proof.bare_qps is None:
        return to
    return (f"{to}: the best found has {plain(proof.bare_qps)} requests/s, gap "
            f"{percent(proof.bare_gap, 2)}; the rest is the margin")


def bounds_words(schedule: Schedule) -> str:
    """A sentence with the upper bound of each policy, equal ones together."""
    policies: dict[str, list[str]] = {}
    for name, qps in schedule.proof.policy_bounds:
        policies.setdefault(plain(qps), []).append(policy(name).title)
    parts = [f"{qps}{' requests/s' * (index == 0)} by {listed(names)}"
             for index, (qps, names) in enumerate(policies.items())]
    return f"{', '.join(parts)}. Upper bounds, not achievable schedules"


def listed(names: Sequence[str]) -> str:
    """`A, B and C`."""
    return " and ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])


def margin_words(schedule: Schedule) -> str:
    """A sentence about the safety margin, with its cost if known; it is not known for a schedule
    that was chosen for the job's duration."""
    note = schedule.margin.note
    if schedule.margin.factor <= 1 or schedule.proof.status == Status.JOB:
        return note
    cost = ("costs nothing: the best schedule for the limit itself also keeps this tighter one"
            if schedule.margin.cost <= 0 else
            f"costs {percent(schedule.margin.cost, digits=1)} of the throughput")
    return f"{note}; the margin {cost}"


PROSPECTS: Mapping[Metric, str] = {
    "ttft": "first token", "tpot": "each token", "makespan": "whole job",
    "deadline": "deadlines"}


def prospect_words(prospect: Prospect) -> str:
    """A sentence about the expected value of a metric, with its limit and safety margin."""
    if prospect.share is not None:
        return (f"{percent(prospect.in_time or 0.0, 0)} of the requests in time, "
                f"{percent(prospect.in_time_with_margin or 0.0, 0)} with its margin; "
                f"{prospect.share * 100:g} % asked for")
    margin = "" if prospect.with_margin_s <= 1.001 * prospect.expected_s else (
        f", {format_seconds(prospect.with_margin_s)} with its margin")
    verb = "within" if prospect.is_kept else "OVER"
    return (f"{format_seconds(prospect.expected_s)}{margin}, {verb} the limit of "
            f"{format_seconds(prospect.limit_s)}")


def pruned_words(schedule: Schedule) -> str:
    """How many groups of configurations the search passed over, by reason."""
    parts = [f"{count:,} {reason}" for reason, count in schedule.proof.pruned]
    total = sum(count for _, count in schedule.proof.pruned)
    return f"{counted(total, 'group')} of configurations: {', '.join(parts)}"


def layers_of(stage: StageAssignment) -> str:
    """The layers of a stage: `layers 0-14`, with an encoder's layers apart."""
    parts = []
    if stage.num_encoder_layers:
        first = stage.first_encoder_layer
        parts.append(f"encoder {ranges(range(first, first + stage.num_encoder_layers))}")
    if stage.num_layers:
        name = "decoder" if stage.num_encoder_layers else "layers"
        first = stage.first_layer
        parts.append(f"{name} {ranges(range(first, first + stage.num_layers))}")
    return ", ".join(parts) or "no layers"


def ranks_of(stage: StageAssignment) -> str:
    """The ranks of a stage: `rank 0` or `ranks 0-3`."""
    return f"{'rank' if len(stage.ranks) == 1 else 'ranks'} {ranges(stage.ranks)}"


def ranges(numbers: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> '0-2, 5'."""
    runs: list[list[int]] = []
    for one in sorted(numbers):
        if runs and one == runs[-1][1] + 1:
            runs[-1][1] = one
        else:
            runs.append([one, one])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def banner(output: Output) -> str | None:
    """The warning at the top of the page of a run that is not simply done; else None."""
    if output.metrics is None:
        return ("This run has not finished: it wrote no metrics.json. It was stopped before its "
                "end, or is still going. What follows is computed from what is on disk.")
    if text_at(output.metrics, "status") == "stopped":
        return "This run was stopped early. What is written is valid; the same command goes on."
    num_errors = number(output.metrics, "errors") or len(output.errors)
    said = []
    if num_errors:
        said.append(f"{counted(num_errors, 'request')} could not be served; see the errors below.")
    if output.queries_before:
        said.append(
            f"{counted(output.queries_before, 'request')} of this job were answered by earlier "
            "runs. Figures of time and speed count this run's requests only; answers, their "
            "lengths and the distribution of latencies count all.")
    return " ".join(said) or None


def _place(output: Output, metrics: Mapping[str, Any]) -> str:
    planned = None if output.schedule is None else output.schedule.estimate.num_devices
    ranks = number(metrics, "ranks") or number(output.job, "run", "ranks") or planned
    cluster = output.job.get("cluster")
    name = cluster if isinstance(cluster, str) else text_at(output.job, "cluster", "name")
    where = "this machine" if name in (None, "local") else str(name)
    return where if ranks is None else f"{counted(ranks, 'rank')} of {where}"


def loading_words(metrics: Mapping[str, Any]) -> str | None:
    """Words for the weights loaded, and the speed; None if unknown."""
    loaded, seconds = number(metrics, "loaded_bytes"), number(metrics, "load_s", "measured")
    if not loaded or not seconds:
        return None
    done = "made" if text_at(metrics, "weights") == "random" else "loaded"
    return (f"{done} {format_bytes(loaded)} in {format_seconds(seconds)}: "
            f"{format_bytes(loaded / seconds)}/s")


def operators_words(metrics: Mapping[str, Any]) -> str | None:
    """A sentence if torch's operators were used, or no decode steps were captured on a GPU, with
    the reason; else None."""
    said = text_at(metrics, "operators") or ""
    return said if "torch's serve" in said or "no CUDA graphs" in said else None


def agreement_words(metrics: Mapping[str, Any]) -> str | None:
    """A sentence about how often 8-bit products choose the token of the model's own dtype; None for
    a run without them."""
    positions, agreeing = (number(metrics, "agreement", key) for key in ("positions", "agreeing"))
    if positions is None or agreeing is None:
        return None
    held, own = text_at(metrics, "weight_dtype"), text_at(metrics, "dtype")
    if not positions:
        return f"{held} was not compared with {own}: there is no input"
    inputs = counted(number(metrics, "agreement", "inputs") or 0, "input")
    return (f"{held}: the most likely next token is that of {own} at {agreeing / positions:.1%} of "
            f"{positions:,.0f} positions of {inputs}")


# variables that `controls_line` has words for; others are named by their policy's row
_TOLD = {"encode_batch", "decode_iterations", "decode_micro_batches", "encode_micro_batches",
         "max_active", "token_budget", "encode_chunk"}


def value_of(estimate: Estimate, variable: str) -> int | None:
    """The value of a control variable; None if the policy has no such variable, or no limit."""
    if variable not in policy(estimate.policy).variable_names:
        return None
    value: int | None = getattr(estimate.controls, variable)
    return value


def controls_line(estimate: Estimate) -> str:
    """The policy and its control variables, in a few words."""
    groups, title = estimate.deployment.num_groups, policy(estimate.policy).title
    in_groups = f", in {groups} micro-batches" if groups > 1 else ""
    more = "".join(f", {words}" for words in (*_others(estimate), *_batches(estimate)))
    if (most := value_of(estimate, "max_active")) is not None:
        budget = value_of(estimate, "token_budget")
        within = f", {budget} tokens a step" if budget else ""
        return f"{title}: up to {counted(most, 'request')} at a time{within}{more}{in_groups}"
    chunk, iterations = value_of(estimate, "encode_chunk"), value_of(estimate, "decode_iterations")
    if chunk and iterations is not None:
        return (f"{title}: prefill {estimate.figures.encode_batch} every "
                f"{counted(iterations, 'iteration')}, {chunk} tokens at a "
                f"time beside decoding{more}{in_groups}")
    text = f"{title}: prefill {estimate.figures.encode_batch} together"
    if chunk:
        text += f", and {chunk} tokens at a time beside decoding"
    if (parts := value_of(estimate, "encode_micro_batches") or 0) > groups:
        text += f" in {parts} micro-batches"
    if iterations is not None:
        text += f", then {counted(iterations, 'decode iteration')}"
    return text + more + in_groups


def _batches(estimate: Estimate) -> Iterator[str]:
    """Yields how static batches are formed, unless they are cut from the input's order."""
    if (own := estimate.variables.get("batches")) is None:
        return
    weights = [f"{weight:g} x {name}" for name, weight in (
        ("deadline", own.deadline), ("length", own.length)) if weight]
    yield f"in batches by {' + '.join(weights) or 'input order'}"
    if own.threshold is not None and math.isfinite(own.threshold):
        yield f"cost up to {own.threshold:g}"
    if own.pack is not None:
        yield f"{own.pack:,} output tokens"


def placement(shape: Estimate) -> str:
    """`2 replicas x 4 devices (TP 1, PP 4)`."""
    deployment = shape.deployment
    copies, devices = deployment.replicas, deployment.devices_per_replica
    stages = " + ".join(f"{len(pool.stages)} to {pool.name}" if len(deployment.pools) > 1 else
                        f"{len(pool.stages)}" for pool in deployment.pools)
    return (f"{counted(copies, 'replica')} x {counted(devices, 'device')} "
            f"(TP {deployment.tp_degree}, PP {stages})")


def controls_cell(estimate: Estimate) -> str:
    """The control variables without the policy's name, and tensor parallelism, in a few words."""
    words, deployment = controls_line(estimate).partition(": ")[2], estimate.deployment
    return words + (f"; TP {deployment.tp_degree} on {deployment.tp_gpus}"
                    if deployment.tp_degree > 1 else "")


def policy_sentence(estimate: Estimate) -> str:
    """A sentence that describes the policy."""
    row = policy(estimate.policy)
    return f"{row.title}: {row.words}."


def _others(estimate: Estimate) -> list[str]:
    """Values of other control variables, with the words of their policy's row."""
    return [f"{value} {variable.words}" for variable in policy(estimate.policy).variables
            if variable.name not in _TOLD
            and (value := value_of(estimate, variable.name)) is not None]


def placement_facts(schedule: Schedule, model: str = "the model") -> Iterator[tuple[str, str]]:
    """Pairs (label, text): what does not fit, where it lies, how a block is worked, and limits;
    nothing of a schedule without a placement."""
    placed, own = schedule.placed, schedule.deployment.decoding.placement
    if placed is None or own is None:
        return
    usable = format_bytes(schedule.figures.memory_capacity_bytes)
    needs = (f"{model} needs {format_bytes(placed.needed_bytes)} on its fullest "
             f"device, of which {usable} can be used: " if placed.needed_bytes else
             f"{usable} of the fullest device can be used: ")
    yield "tiers", (f"{needs}its weights lie {_where(own.weights)}, its KV cache "
                    f"{_where(own.kv)}, its hidden states {_where(own.hidden)}")
    yield "block", block_words(own, placed.block)
    diagonal = f"; diagonal blocks, not executed, would have {placed.diagonal_block:,} requests"
    any_order = f"{plain(placed.any_order_qps)} requests/s in any order of work, " if (
        math.isfinite(placed.any_order_qps)) else ""  # infinite where all could stay in memory
    yield "limits", (
        f"{any_order}{plain(placed.program_qps)}{' requests/s' * (not any_order)} by the linear "
        f"program of {counted(placed.tried, 'block')}{diagonal * bool(placed.diagonal_block)}")


def block_words(placement: Placement, requests: int) -> str:
    """`128 requests in device batches of 64, zig-zag; ...`."""
    order = "zig-zag" if placement.order == "zigzag" else "row by row"
    batch = min(placement.device_batch, requests)
    words = [f"{counted(requests, 'request')} in device batches of {batch:,}, {order}"]
    words += [f"{what} in 4 bits on host and disk" for what, bits in (
        ("weights", placement.weight_bits), ("KV cache", placement.kv_bits)) if bits == 4]
    if placement.host_attention:
        words.append("decode attention on the host")
    return ", ".join(words + ["copies not beside computing"] * (not placement.overlap))


def _where(shares: Shares) -> str:
    """`20 % on the device, 80 % on the host`."""
    whole = [name for share, name in zip(shares, _ON, strict=True) if share == 1]
    return f"on {whole[0]}" if whole else " and ".join(
        f"{percent(share, 0)} on {name}" for share, name in zip(shares, _ON, strict=True) if share)
