"""Errors of a timing source by group of operators, and the safety margin that follows.

A latency's relative error (the logarithm of measured over computed) is

    common + sum over groups of (share of the latency) * (error of the group + error of the step)

All steps share `common`, the steps of a group share the group's error, and steps of one size share
the step's. Sizes within a factor of two miss alike, so for a request whose context doubles n times
the errors of n + 1 sizes average. Errors of different groups are independent. For engines that were
never measured a group's median may be known to lean to one side (`lean`). Sources of the numbers:
fit_errors.py and strange_engines.py, in benchmarks/ up to commit 3fdb9ebd. Their validation:
benchmarks/validated.py.

`Raised` is a source with longer times in one table. It shows how much a figure rests on the
table."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from numpy.typing import ArrayLike

from xgpt.core.cluster import Link
from xgpt.core.lengths import FloatArray
from xgpt.core.policies import Role
from xprofiler.profile import HANDOVER, HANDOVER_DIRECT, STEP_OVERHEAD, TableKey
from xprofiler.timing import MessageKind, Operator, TimingSource, of_role

SourceKind = Literal["uncalibrated", "calibrated", "imported", "measured"]


class OperatorGroup(Enum):
    """Operators whose errors are correlated. The values are the keys of the catalog."""

    PRODUCTS = "products"  # matrix products, with the rest of a layer, the embedding and the head
    ENCODE_ATTENTION = "encode_attention"
    DECODE_ATTENTION = "decode_attention"
    ALL_REDUCE = "all_reduce"
    HANDOVER = "handover"  # messages between stages, and KV cache handed over between pools
    HOST = "host"  # the host's overhead of a step

    @property
    def words(self) -> str:
        """The group's name on screens."""
        return _WORDS[self]


_WORDS = {
    OperatorGroup.PRODUCTS: "matrix products", OperatorGroup.ENCODE_ATTENTION: "prefill attention",
    OperatorGroup.DECODE_ATTENTION: "decode attention", OperatorGroup.HOST: "host overhead",
    OperatorGroup.ALL_REDUCE: "all-reduces", OperatorGroup.HANDOVER: "messages between stages"}
_GROUPS = {
    Operator.ENCODE_ATTENTION.value: OperatorGroup.ENCODE_ATTENTION,
    **dict.fromkeys((Operator.DECODE_ATTENTION.value, Operator.CROSS_ATTENTION.value,
                     Operator.KV_COMPACTION.value), OperatorGroup.DECODE_ATTENTION),
    MessageKind.ALL_REDUCE.value: OperatorGroup.ALL_REDUCE,
    **dict.fromkeys((MessageKind.TRANSFER.value, HANDOVER, HANDOVER_DIRECT),
                    OperatorGroup.HANDOVER),
    STEP_OVERHEAD: OperatorGroup.HOST}


def group_of(table: str) -> OperatorGroup:
    """The operator group of the profile table with this name."""
    return _GROUPS.get(table, OperatorGroup.PRODUCTS)


class GroupError(NamedTuple):
    """Error of a group, in logarithms of measured over computed time. `common`: scale shared by all
    of its steps. `step`: scale of each step size. `lean`: median, below 0 where most times are
    shorter than computed."""

    common: float
    step: float = 0.0
    lean: float = 0.0

    def of_sizes(self, sizes: float) -> float:
        """Scale of the error over steps of `sizes` independent sizes together."""
        return math.hypot(self.common, self.step / math.sqrt(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceErrors:
    """Errors of a timing source. `checked`: the comparison that they come from, in words. `common`:
    scale of the error that all steps share. `groups`: errors by group of operators."""

    kind: SourceKind
    checked: str
    common: float
    groups: Mapping[OperatorGroup, GroupError] = field(default_factory=dict)

    def spread(self, shares: Mapping[OperatorGroup, float], sizes: float = 1.0) -> float:
        """Standard deviation of a latency's logarithm. `shares`: share of the latency by group;
        `sizes`: independent step sizes in it (`sizes_of`)."""
        return math.hypot(self.common, *self._parts(shares, sizes).values())

    def lean(self, shares: Mapping[OperatorGroup, float]) -> float:
        """Median of the logarithm of measured over computed latency. `shares`: as for `spread`."""
        return sum(shares.get(group, 0.0) * error.lean for group, error in self.groups.items())

    def factor(self, shares: Mapping[OperatorGroup, float], confidence: float,
               sizes: float = 1.0) -> float:
        """Safety factor, at least 1: the real latency stays below the computed one times this
        factor with probability `confidence`."""
        quantile = max(student_quantile(confidence), 0.0)
        return math.exp(max(self.lean(shares) + quantile * self.spread(shares, sizes), 0.0))

    def least_factor(self, confidence: float) -> float:
        """Lower bound on `factor` over all shares and sizes. It is the exponential of the least
        sum(lean s) + quantile * hypot(common, own s), over shares s of groups that lean to shorter
        times."""
        quantile = max(student_quantile(confidence), 0.0)
        leaning = math.hypot(*(error.lean / error.common for error in self.groups.values()
                               if error.lean < 0))
        return math.exp(self.common * math.sqrt(max(quantile**2 - leaning**2, 0.0)))

    def weakest(self, shares: Mapping[OperatorGroup, float], sizes: float = 1.0
                ) -> OperatorGroup | None:
        """The group that contributes most to `spread`; None where `common` does."""
        parts = self._parts(shares, sizes)
        group = max(parts, key=parts.__getitem__, default=None)
        return None if group is None or parts[group] <= self.common else group

    def _parts(self, shares: Mapping[OperatorGroup, float], sizes: float
               ) -> dict[OperatorGroup, float]:
        return {group: shares.get(group, 0.0) * error.of_sizes(sizes)
                for group, error in self.groups.items()}


def sizes_of(first_context: float, tokens: float) -> float:
    """Number of independent step sizes of a request whose context grows from `first_context` by
    `tokens`: one more each time it doubles."""
    return 1 + math.log2(1 + max(tokens, 0.0) / max(first_context, 1.0))


def student_quantile(share: float) -> float:
    """Quantile `share` of Student's t distribution with four degrees of freedom, in units of its
    scale. At four the likelihood of the fitted requests' logarithms, over their spread, is
    greatest; the quantile has a closed form there."""
    assert 0 < share < 1, f"{share = }"
    alpha = 4 * share * (1 - share)
    q = math.cos(math.acos(math.sqrt(min(alpha, 1.0))) / 3) / math.sqrt(alpha)
    return math.copysign(2 * math.sqrt(max(q - 1, 0.0)), share - 0.5)


# For an engine that was never measured on a GPU: the errors of five others under the common
# constants, which were fitted to kernels' tables (and the skew of ranks to runs of one of the
# five). They are FasterTransformer, DistServe, vLLM, TensorRT-LLM and SGLang, with equal weights;
# versions of one share its weight. Matrix products and attention: errors of the tables. Common and
# all-reduces: measured by strange_engines.py. Ranks wait less for each other in most engines than
# in the one that the skew was fitted to; in vLLM of 2023 they waited much longer.
UNCALIBRATED = SourceErrors(
    kind="uncalibrated", checked="this engine was never measured; these are the errors of five "
    "others under constants not fitted to them", common=0.15, groups={
        OperatorGroup.PRODUCTS: GroupError(0.08, 0.06),
        OperatorGroup.ENCODE_ATTENTION: GroupError(0.11, 0.11),
        OperatorGroup.DECODE_ATTENTION: GroupError(0.19, 0.22),
        OperatorGroup.ALL_REDUCE: GroupError(0.40, 0.40, -0.50),
        OperatorGroup.HANDOVER: GroupError(0.20, 0.35), OperatorGroup.HOST: GroupError(1.0)})
# Constants of one generation on another. Ampere's leave servers on Hopper 7 % too slow in the
# mean, beyond what groups explain.
CARRIED = 0.08
# Imported tables, run by another engine than they were measured under: Vidur's of Llama-2-70B are
# as far from vLLM 0.2's runs as constants are.
IMPORTED = 0.20
# Matrix products of a dtype without a table: the error of vLLM's in fp8 on H200, when computed from
# the data sheet's rate alone.
UNMEASURED_TYPE = 0.30


def with_products_of(dtype: str, errors: SourceErrors) -> SourceErrors:
    """`errors` with the matrix products' error widened, for a `dtype` that was never measured."""
    own = errors.groups.get(OperatorGroup.PRODUCTS, GroupError(0.0))
    group = own._replace(common=math.hypot(own.common, UNMEASURED_TYPE))
    return replace(errors, groups={**errors.groups, OperatorGroup.PRODUCTS: group},
                   checked=f"{errors.checked}; {dtype} matrix products were never measured")


def errors_from(row: Mapping[str, Any], checked: str, *, is_carried: bool) -> SourceErrors:
    """The SourceErrors of a catalog row: "common", and (common, step) pairs by group.
    `is_carried`: the row is of another generation of GPUs, which widens `common`."""
    groups = {OperatorGroup(name): GroupError(*pair)
              for name, pair in row.items() if name != "common"}
    common = row.get("common", 0.0)
    return SourceErrors(
        kind="calibrated", groups=groups, common=math.hypot(common, CARRIED) if is_carried
        else common, checked=f"{checked}, carried over to another" if is_carried else checked)


class Raised:
    """`source` with the times of one table, or of all tables of a group, multiplied by `factor`."""

    def __init__(self, source: TimingSource, what: TableKey | OperatorGroup,
                 factor: float) -> None:
        if isinstance(what, TableKey) and what.name == HANDOVER_DIRECT:
            what = what._replace(name=HANDOVER)  # the quicker way counts
        self._source, self._what, self._factor = source, what, factor
        self.reach, self.provenance = source.reach, source.provenance
        overhead_s = source.facts.step_overhead_s * self._of(TableKey(STEP_OVERHEAD))
        self.facts = replace(source.facts, step_overhead_s=overhead_s)

    def operator_s(self, operator: Operator, x: ArrayLike, y: ArrayLike = 0.0, *,
                   tp_degree: int = 1) -> FloatArray:
        """See TimingSource."""
        return self._of(TableKey(operator.value, tp_degree)) * self._source.operator_s(
            operator, x, y, tp_degree=tp_degree)

    def message_s(self, kind: MessageKind, num_bytes: ArrayLike, link: Link, *,
                  tp_degree: int = 1) -> FloatArray:
        """See TimingSource."""
        return self._of(TableKey(kind.value, tp_degree, link.name)) * self._source.message_s(
            kind, num_bytes, link, tp_degree=tp_degree)

    def of_role(self, role: Role) -> TimingSource:
        """See xprofiler.timing.of_role."""
        own = of_role(self._source, role)
        return self if own is self._source else Raised(own, self._what, self._factor)

    def _of(self, key: TableKey) -> float:
        is_meant = (group_of(key.name) is self._what if isinstance(self._what, OperatorGroup) else
                    key == self._what)
        return self._factor if is_meant else 1.0


def raised(source: TimingSource, what: TableKey | OperatorGroup, factor: float) -> Raised:
    """The `Raised` source of these arguments; the same object for the same arguments, so that
    figures derived from it are shared."""
    return _raised(source, what, factor)  # type: ignore[arg-type]  # a source is hashable


_raised = lru_cache(maxsize=256)(Raised)
