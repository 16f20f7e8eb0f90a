"""How the KV entries of a run lie in memory: in rows, each as long as the longest query, or in
blocks, which a query takes as it grows (xrunner.engine.kv)."""

from xgpt.app.opened import OpenedJob
from xgpt.core.errors import wrong
from xgpt.core.schedule import Estimate
from xrunner.rules.steps import kv_budget, rules_for


def lies_in_blocks(opened: OpenedJob, estimate: Estimate) -> bool:
    """Whether what the rules of `estimate` reserve for a query lies in blocks. On a GPU it does,
    unless the job says `rows`: there memory that is set aside is taken, where pages of a CPU's that
    were never written are not. Raises InputError where the job asks for what is not executed."""
    job, wish = opened.job, opened.job.run.kv_layout
    rules, is_encoder_decoder = rules_for(estimate), opened.problem.model.is_encoder_decoder
    if any(kv_budget(rule) is not None for rule in rules):
        if wish == "rows":
            raise wrong(job.source, "run.kv_layout", wish, f"auto or blocks with {estimate.policy}:"
                        " continuous batching leaves queries where they are, in blocks")
        return False  # they do so whatever is asked for
    is_able = not is_encoder_decoder and any(
        kv_budget(rule, in_blocks=True) is not None for rule in rules)
    if wish == "blocks" and not is_able:
        what = "an encoder-decoder model" if is_encoder_decoder else estimate.policy
        raise wrong(job.source, "run.kv_layout", wish, f"auto or rows with {what}, whose entries "
                    "lie in rows alone")
    is_gpu = opened.problem.cluster.device.kind == "gpu"
    return is_able and (wish == "blocks" or (wish == "auto" and is_gpu))
