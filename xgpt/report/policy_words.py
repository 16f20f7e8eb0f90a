"""How a policy and its control variables are shown, in a line, a cell or sentences. Its row says
what a policy has, so that one of another package is shown as ours are."""

from xgpt.core.policies import Policy, policy
from xgpt.core.schedule import Estimate
from xgpt.core.units import format_seconds
from xgpt.report.words import counted

# variables that the words below speak of; others are named by their rows
_TOLD = {"encode_batch", "decode_iterations", "decode_micro_batches", "encode_micro_batches",
         "max_active", "token_budget", "encode_chunk"}


def row_of(estimate: Estimate) -> Policy:
    return policy(estimate.controls.policy)


def value_of(estimate: Estimate, variable: str) -> int | None:
    """What is executed; None where the policy has no such variable, or it is without limit."""
    if variable not in row_of(estimate).variable_names:
        return None
    value: int | None = getattr(estimate.controls, variable)
    return value


def controls_line(estimate: Estimate) -> str:
    """The policy and its control variables in a few words."""
    groups, title = estimate.deployment.num_groups, row_of(estimate).title
    in_groups = f", in {groups} micro-batches" if groups > 1 else ""
    more = "".join(f", {words}" for words in _others(estimate))
    if (most := value_of(estimate, "max_active")) is not None:
        budget = value_of(estimate, "token_budget")
        within = f", {budget} tokens a step" if budget else ""
        return f"{title}: up to {counted(most, 'query')} at a time{within}{more}{in_groups}"
    chunk, iterations = value_of(estimate, "encode_chunk"), value_of(estimate, "decode_iterations")
    if chunk and iterations is not None:
        return (f"{title}: encode {estimate.figures.encode_batch} every "
                f"{counted(iterations, 'iteration')}, {chunk} tokens at a "
                f"time beside decoding{more}{in_groups}")
    text = f"{title}: encode {estimate.figures.encode_batch} together"
    if chunk:
        text += f", and {chunk} tokens at a time beside decoding"
    if (parts := value_of(estimate, "encode_micro_batches") or 0) > groups:
        text += f" in {parts} micro-batches"
    if iterations is not None:
        text += f", then {counted(iterations, 'decode iteration')}"
    return text + more + in_groups


def controls_cell(estimate: Estimate) -> str:
    """The control variables, short enough for a column."""
    deployment = estimate.deployment
    if (most := value_of(estimate, "max_active")) is not None:
        words = [f"{most} at a time"]
        if budget := value_of(estimate, "token_budget"):
            words.append(counted(budget, "token"))
    else:
        words = [f"{estimate.figures.encode_batch} encoded"]
    if (parts := value_of(estimate, "encode_micro_batches") or 0) > deployment.num_groups:
        words[0] += f" in {parts}"
    if (iterations := value_of(estimate, "decode_iterations")) is not None:
        words.append(counted(iterations, "iteration"))
    if chunk := value_of(estimate, "encode_chunk"):
        words.append(f"chunks of {chunk}")
    words += _others(estimate)
    if deployment.num_groups > 1:
        words.append(f"{deployment.num_groups} groups")
    if deployment.tp_degree > 1:
        words.append(f"TP {deployment.tp_degree} on {deployment.tp_gpus}")
    return ", ".join(words)


def schedule_sentences(estimate: Estimate) -> tuple[str, ...]:
    """What the schedule does, for the report."""
    row, figures, deployment = row_of(estimate), estimate.figures, estimate.deployment
    sentences = [f"Policy: {row.title}, {row.words}."]
    iterations = value_of(estimate, "decode_iterations")
    if iterations is not None and (chunk := value_of(estimate, "encode_chunk")):
        sentences.append(
            f"In every {counted(iterations, 'iteration')} {counted(figures.encode_batch, 'query')} "
            f"are encoded beside decoding, in chunks of at most {counted(chunk, 'token')}; "
            f"{figures.decode_batch:.1f} queries decode at once on average. Such a period takes "
            f"{format_seconds(figures.period_s)}, encoding one query "
            f"{format_seconds(figures.encode_s)}.")
    elif iterations is not None:
        sentences.append(
            f"Each period encodes {counted(figures.encode_batch, 'query')} together and then "
            f"decodes {counted(iterations, 'iteration')} before the next encoding; "
            f"{figures.decode_batch:.1f} queries decode at once on average. One period takes "
            f"{format_seconds(figures.period_s)}, of which encoding takes "
            f"{format_seconds(figures.encode_s)}.")
    else:
        sentences.append(
            f"{counted(figures.encode_batch, 'query')} are encoded together, "
            f"{figures.decode_batch:.1f} decode at once on average; a decode iteration takes "
            f"{format_seconds(figures.decode_iteration_s)}.")
        if chunk := value_of(estimate, "encode_chunk"):
            sentences.append(
                "Whenever fewer decode than planned, the devices that decode encode, too: up to "
                f"{counted(chunk, 'token')} of the inputs that wait, beside decoding.")
    if deployment.num_groups > 1:
        sentences.append(f"The decode batch is split into {deployment.num_groups} micro-batches, "
                         "so that stages work while others hand over.")
    parallel = "no tensor parallelism" if not deployment.tp_gpus or deployment.tp_degree < 2 else (
        f"the first {deployment.tp_gpus} devices work in tensor-parallel groups of "
        f"{deployment.tp_degree}")
    copies = deployment.replicas
    of_each = "" if copies == 1 else " of each copy"
    sentences.append(f"The layers{of_each} are spread over "
                     f"{counted(len(deployment.stages), 'stage')}, {parallel}.")
    if copies > 1:
        devices = counted(deployment.devices_per_replica, "device")
        sentences.append(f"{copies:,} copies of the model, each on {devices}, share the queries; "
                         "batches and times are those of one copy.")
    for other in estimate.others:
        copies, each = other.deployment.replicas, other.deployment.devices_per_replica
        are = "copy of another shape shares" if copies == 1 else "copies of another shape share"
        sentences.append(
            f"{copies:,} more {are} the queries, on {counted(each, 'device')}"
            f"{' each' * (copies > 1)}, with a schedule of its own: {controls_line(other)}.")
    return tuple(sentences)


def _others(estimate: Estimate) -> list[str]:
    """Variables that only their row has words for."""
    return [f"{value} {variable.words}" for variable in row_of(estimate).variables
            if variable.name not in _TOLD
            and (value := value_of(estimate, variable.name)) is not None]
