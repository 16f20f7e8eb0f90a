"""How far off a source's times are, by group of operators, and the margin that follows.

A latency's relative error (the logarithm of measured over computed) is

    common + sum over groups of (share of the latency) * (error of the group + error of the step)

`common` is of all steps alike; a group's error is common to all of its steps; a step's is of its
size. Sizes within a factor of two miss alike, so of a query whose context doubles n times the
errors of n + 1 sizes average. The groups' errors are independent of each other. Of engines that
nothing was measured of a group's median may be known to lean to one side (`lean`). Where the
numbers come from: fit_errors.py and strange_engines.py, in benchmarks/ up to commit 3fdb9ebd; how
well they hold: benchmarks/validated.py.

At the end: a source made of another one, of which a table's times are longer. It shows how much a
figure rests on the table."""

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
    """Operators whose times miss together. The values are the words of the catalog."""

    PRODUCTS = "products"  # and the rest of a layer, the embedding and the head
    ENCODE_ATTENTION = "encode_attention"
    DECODE_ATTENTION = "decode_attention"
    ALL_REDUCE = "all_reduce"
    HANDOVER = "handover"  # messages between stages, and KV entries between pools
    HOST = "host"  # what a step takes besides

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    OperatorGroup.PRODUCTS: "products", OperatorGroup.ENCODE_ATTENTION: "attention of encoding",
    OperatorGroup.DECODE_ATTENTION: "attention of decoding", OperatorGroup.HOST: "the host's part",
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
    """The group of a profile's table, by its name."""
    return _GROUPS.get(table, OperatorGroup.PRODUCTS)


class GroupError(NamedTuple):
    """Scales of logarithms of measured over computed: common to a group's steps, and of each size.
    `lean`: their median, below 0 where most times are shorter than computed."""

    common: float
    step: float = 0.0
    lean: float = 0.0

    def of_sizes(self, sizes: float) -> float:
        """Of steps of so many sizes together."""
        return math.hypot(self.common, self.step / math.sqrt(sizes))


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceErrors:
    """`checked`: in words, what the errors were read off; `common`: of all steps alike."""

    kind: SourceKind
    checked: str
    common: float
    groups: Mapping[OperatorGroup, GroupError] = field(default_factory=dict)

    def spread(self, shares: Mapping[OperatorGroup, float], sizes: float = 1.0) -> float:
        """Standard deviation of a latency's logarithm. `shares`: of the groups in the latency."""
        return math.hypot(self.common, *self._parts(shares, sizes).values())

    def lean(self, shares: Mapping[OperatorGroup, float]) -> float:
        """Median of a latency's logarithm."""
        return sum(shares.get(group, 0.0) * error.lean for group, error in self.groups.items())

    def factor(self, shares: Mapping[OperatorGroup, float], confidence: float,
               sizes: float = 1.0) -> float:
        """What the computed latency is multiplied by so that the real one stays below it with this
        confidence; 1 at least."""
        quantile = max(student_quantile(confidence), 0.0)
        return math.exp(max(self.lean(shares) + quantile * self.spread(shares, sizes), 0.0))

    def least_factor(self, confidence: float) -> float:
        """No shares and sizes have a smaller factor: the least of sum(lean s) + quantile
        hypot(common, own s) over shares s of the groups that lean to shorter times."""
        quantile = max(student_quantile(confidence), 0.0)
        leaning = math.hypot(*(error.lean / error.common for error in self.groups.values()
                               if error.lean < 0))
        return math.exp(self.common * math.sqrt(max(quantile**2 - leaning**2, 0.0)))

    def weakest(self, shares: Mapping[OperatorGroup, float], sizes: float = 1.0
                ) -> OperatorGroup | None:
        """The group that contributes most; None where what is common does."""
        parts = self._parts(shares, sizes)
        group = max(parts, key=parts.__getitem__, default=None)
        return None if group is None or parts[group] <= self.common else group

    def _parts(self, shares: Mapping[OperatorGroup, float], sizes: float
               ) -> dict[OperatorGroup, float]:
        return {group: shares.get(group, 0.0) * error.of_sizes(sizes)
                for group, error in self.groups.items()}


def sizes_of(first_context: float, tokens: float) -> float:
    """Independent sizes of the steps of a query whose context grows by so many tokens."""
    return 1 + math.log2(1 + max(tokens, 0.0) / max(first_context, 1.0))


def student_quantile(share: float) -> float:
    """Of Student's distribution of four degrees of freedom (it has a closed form), in units of its
    scale. Logarithms of requests in the half `fit`, over their spread, are of about as many: the
    likelihood is greatest at four."""
    assert 0 < share < 1, f"{share = }"
    alpha = 4 * share * (1 - share)
    q = math.cos(math.acos(math.sqrt(min(alpha, 1.0))) / 3) / math.sqrt(alpha)
    return math.copysign(2 * math.sqrt(max(q - 1, 0.0)), share - 0.5)


# An engine of which nothing was measured on a GPU is as far off as five others are under the common
# constants, which were fitted to kernels' tables (and the skew of ranks to one of the five's runs):
# FasterTransformer, DistServe, vLLM, TensorRT-LLM and SGLang, counted alike, versions of one
# sharing its weight. Products and attention: as the tables are off. What is common to all steps,
# and the all-reduces': measured by strange_engines.py. Ranks wait less for each other in most
# engines than in the one that the skew was fitted to; in vLLM of 2023 they waited much longer.
UNCALIBRATED = SourceErrors(
    kind="uncalibrated", checked="no run of this engine was compared; so far off were runs of five "
    "others, as if nothing had been measured of them", common=0.15, groups={
        OperatorGroup.PRODUCTS: GroupError(0.08, 0.06),
        OperatorGroup.ENCODE_ATTENTION: GroupError(0.11, 0.11),
        OperatorGroup.DECODE_ATTENTION: GroupError(0.19, 0.22),
        OperatorGroup.ALL_REDUCE: GroupError(0.40, 0.40, -0.50),
        OperatorGroup.HANDOVER: GroupError(0.20, 0.35), OperatorGroup.HOST: GroupError(1.0)})
# Constants of one generation on another: those of Ampere leave today's servers on Hopper 7 % too
# slow in the mean, beyond what groups explain.
CARRIED = 0.08
# Others' tables, run by another engine than they were measured under: Vidur's of Llama-2-70B are
# as far from vLLM 0.2's runs as constants are.
IMPORTED = 0.20
# Products of a type of which no table is at hand: vLLM's of fp8 on H200, which were fitted since,
# had been so far off when their type was known by its data sheet's rate alone.
UNMEASURED_TYPE = 0.30


def with_products_of(dtype: str, errors: SourceErrors) -> SourceErrors:
    """The same where products are of a type that was never compared."""
    own = errors.groups.get(OperatorGroup.PRODUCTS, GroupError(0.0))
    group = own._replace(common=math.hypot(own.common, UNMEASURED_TYPE))
    return replace(errors, groups={**errors.groups, OperatorGroup.PRODUCTS: group},
                   checked=f"{errors.checked}; products of {dtype} were compared with nothing")


def errors_from(row: Mapping[str, Any], checked: str, *, is_carried: bool) -> SourceErrors:
    """Of an engine on a generation of GPUs, by its row of the catalog: "common", and groups as
    pairs. `is_carried`: to another generation."""
    groups = {OperatorGroup(name): GroupError(*pair)
              for name, pair in row.items() if name != "common"}
    common = row.get("common", 0.0)
    return SourceErrors(
        kind="calibrated", groups=groups, common=math.hypot(common, CARRIED) if is_carried
        else common, checked=f"{checked}, carried over to another" if is_carried else checked)


class Raised:
    """`source`, with the times of a table, or of all tables of a group, multiplied by `factor`."""

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
    """One source for all who ask for the same longer times: what they derive from it they share."""
    return _raised(source, what, factor)  # type: ignore[arg-type]  # a source is hashable


_raised = lru_cache(maxsize=256)(Raised)
