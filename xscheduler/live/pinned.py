"""The best control variables for stages that are given: what is reached without moving a layer.

The closed forms place layers by a problem's lengths; here they are held where a schedule has them.
For each value of the other variables (a line) the largest admissible batch is bisected, all lines
at once; throughput nearly always grows with the batch, so the batches near that edge are evaluated
one by one. RRA's lines are thinned out at first, then every one near the best is looked at, and so
on until none is better: exact on the grid of whole numbers wherever the best lines lie together.
Where RRA encodes in chunks, every chunk size of the search is a line too."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from xgpt.core.controls import ContinuousControls, RraControls, WaaControls
from xgpt.core.deployment import Pool
from xgpt.core.errors import InputError, Mistake
from xgpt.core.policies import Role, policy, replanned_policies
from xgpt.core.problem import Problem
from xgpt.core.schedule import Estimate
from xgpt.core.units import format_bytes, format_seconds
from xprofiler.interpolation import REFUSED_BEYOND
from xprofiler.timing import TimingSource
from xscheduler.admissible import Limit, Limits, forbidding
from xscheduler.copies import most_copies, problem_for
from xsimulator.allocation import pool_layers
from xsimulator.plans import StagePlan, shared_plans
from xsimulator.policies import ClosedForm, geometric, group_counts, make_config, make_policy
from xsimulator.policies.rra.closed_form import Rra
from xsimulator.policies.waa.closed_form import Waa
from xsimulator.policies.waa.divisions import FixedDivision

MAX_BATCH = 1 << 16
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048)  # chosen: tokens
NEAR_EDGE = 8  # batches below and above the edge that are evaluated one by one
BELOW = (0.5, 0.7, 0.85, 0.93, 0.97)  # of the edge: further batches, should throughput have bent
SPREAD = 12  # lines on either side of the best that are looked at in a round
MAX_ROUNDS = 20
FEW = 4  # of the phase lengths of the chunk in use, every fourth with each other chunk at first

Line = tuple[int, int, int]  # decode_iterations (WAA: 1), decode_micro_batches, encode_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to go on. `reason` says why it is not admissible; None if it is. `estimate` is what
    it would do all the same, where that can be said."""

    estimate: Estimate | None
    reason: str | None

    @property
    def qps(self) -> float:
        """Throughput of an admissible way, else 0."""
        return self.estimate.figures.throughput_qps if self.estimate and not self.reason else 0.0


class PinnedPlans:
    """Plans of a problem whose layers lie as a schedule has them (a PlanSource)."""

    def __init__(self, problem: Problem, timing: TimingSource, pools: Sequence[Pool]) -> None:
        plans = shared_plans(problem, timing)
        self.problem, self.layers = problem, plans.layers
        self._pools = {tuple(stage.ranks for stage in pool.stages):
                       plans.of_stages(pool.stages, pool.role) for pool in pools}

    def both(self, tp_degree: int, tp_gpus: int) -> StagePlan:
        """RRA's one pool."""
        (plan,) = self._pools.values()
        return plan

    def pool(self, ranks: Sequence[tuple[int, ...]], role: Role, first_index: int = 0) -> StagePlan:
        """The pool on these ranks."""
        return self._pools[tuple(ranks)]


def pinned_policy(deployed: Estimate, problem: Problem, timing: TimingSource) -> ClosedForm:
    """The closed form of the schedule's policy on the stages of one of its copies (a policy's whose
    closed form is not told its stages: on its own)."""
    problem = problem_for(problem, deployed)
    if not isinstance(deployed.controls, (RraControls, WaaControls)):
        return make_policy(deployed.policy, problem, timing)
    plans = PinnedPlans(problem, timing, deployed.deployment.pools)
    if isinstance(deployed.controls, RraControls):
        return Rra(problem, timing, plans=plans)
    devices = deployed.deployment.encoding.num_devices
    return Waa(deployed.policy, problem, timing, lambda *_: FixedDivision(devices), plans=plans)


def fits_the_job(deployed: Estimate, problem: Problem) -> None:
    """Raises InputError where the schedule cannot be what is deployed for this problem."""
    mistakes = []

    def refuse(key: str, value: object, allowed: str) -> None:
        mistakes.append(Mistake(file="schedule", line=None, key=key, value=value, allowed=allowed))

    if deployed.policy not in replanned_policies():
        refuse("policy", deployed.policy,
               f"one of {', '.join(replanned_policies())}: others have no schedule to change")
    if deployed.others:
        refuse("others", len(deployed.others),
               "none: how to go on is worked out for copies that are alike")
        raise InputError(mistakes)
    deployment, cluster = deployed.deployment, problem.cluster
    ranks = sorted(rank for stage in deployment.stages for rank in stage.ranks)
    fitting = most_copies(cluster, deployment.devices_per_replica)
    if ranks != list(range(len(ranks))) or not (
            deployment.replicas in (fitting, problem.fixed.replicas) and fitting):
        refuse("stages", f"{deployment.num_devices} ranks", f"{cluster.num_devices}, the devices "
                                                            f"of cluster {cluster.name}")
    for pool in deployed.deployment.pools:
        wanted = pool_layers(problem.model, pool.role)
        held = (sum(stage.num_layers for stage in pool.stages),
                sum(stage.num_encoder_layers for stage in pool.stages))
        if held != wanted:
            refuse("stages", f"{held[0]} + {held[1]} layers",
                   f"{wanted[0]} + {wanted[1]} layers of {problem.model.name}, in each pool")
    if mistakes:
        raise InputError(mistakes)


class _ConfigFigures(NamedTuple):
    """What was found out about a configuration."""

    limit: Limit
    throughput_qps: float
    latency_s: float
    memory_bytes: float
    present: float
    ttft_s: float
    tpot_s: float


class PinnedSearch:
    """Searches one problem on the stages of `deployed`, under a latency limit; of copies one, for
    all alike."""

    def __init__(self, deployed: Estimate, problem: Problem, timing: TimingSource,
                 latency_limit_s: float, *, most_batch: int = MAX_BATCH) -> None:
        """most_batch: the largest encode_batch that caches have room for."""
        problem = problem_for(problem, deployed)
        self._deployed, self._problem, self._limit_s = deployed, problem, latency_limit_s
        self._policy: Any = pinned_policy(deployed, problem, timing)
        decoding, fixed = deployed.deployment.decoding, problem.fixed.encode_batch
        self._groups = sorted({*group_counts(len(decoding.stages)), decoding.num_groups})
        self._batches = (fixed, fixed) if fixed else (1, min(problem.num_queries or MAX_BATCH,
                                                             most_batch))
        self._has_iterations = "decode_iterations" in policy(deployed.policy).variable_names
        self._deployed_config, missing = make_config(deployed.policy, deployed)
        assert not missing, f"{missing = }"
        self._chunk = getattr(self._deployed_config, "encode_chunk", 0)
        # a decode pool's chunks stay as they are, and hold up no batch
        self._chunks = _chunks(self._chunk, problem) if self._has_iterations else [self._chunk]
        self._largest = partial(_largest_batch, self._batches, problem.lengths.inputs.mean
                                if self._has_iterations else 0.0)
        self._known: dict[tuple[Line, int], _ConfigFigures] = {}

    def current(self) -> Way:
        """The control variables as they are."""
        figures = self._deployed.figures
        line = figures.decode_iterations, self._deployed.deployment.num_groups, self._chunk
        point = line, figures.encode_batch
        self._evaluate([point])
        return Way(estimate=self._estimate(*point),
                   reason=self._excluded() or self._reason(self._known[point]))

    def best(self) -> Way:
        """The admissible configuration of highest throughput; else how close one can get."""
        if (reason := self._excluded()) is not None:
            return Way(estimate=None, reason=reason)
        lines = self._first_lines()
        seen: set[Line] = set()
        for _ in range(MAX_ROUNDS):
            if not (new := [line for line in lines if line not in seen]):
                break
            seen.update(new)
            self._look_at(new)
            nearest = self._best_known() or self._tightest(seen)
            lines = [] if nearest is None else self._around(nearest[0])
        if (known := self._best_known()) is None:
            return self._out_of_reach(seen)
        return Way(estimate=self._estimate(*known), reason=None)

    def _excluded(self) -> str | None:
        """Why the job does not allow the policy and plan that are deployed."""
        fixed, now = self._problem.fixed, self._deployed.variables
        for key in ("policy", "tp_degree", "tp_gpus"):
            wanted = getattr(fixed, key)
            if wanted is not None and wanted != now[key]:
                return f"the job fixes {key} {wanted}, deployed is {now[key]}"
        return None

    def _first_lines(self) -> list[Line]:
        now, fixed = self._deployed, self._problem.fixed
        groups = (self._groups if fixed.decode_micro_batches is None
                  else [fixed.decode_micro_batches])
        iterations = [1]
        if self._has_iterations and fixed.decode_iterations is not None:
            iterations = [fixed.decode_iterations]
        elif self._has_iterations:
            most = max(self._policy.flow.max_iterations, 1)
            iterations = sorted({*geometric(most), min(now.figures.decode_iterations, most)})
        # what encodes in chunks does as B_E / N_D says: its other sizes need but a few N_D
        return [(n, count, chunk) for count in groups for chunk in self._chunks
                for n in (iterations if chunk == self._chunk else iterations[::FEW])]

    def _around(self, line: Line) -> list[Line]:
        """Every line near the best that the job leaves free, in each variable by itself."""
        fixed, (iterations, groups, chunk) = self._problem.fixed, line
        near = [(iterations, groups, other) for other in self._chunks]
        if self._has_iterations and fixed.decode_iterations is None:
            most = max(self._policy.flow.max_iterations, 1)
            reach = max(SPREAD, iterations // 10)
            near += [(n, groups, chunk) for n in range(max(iterations - reach, 1),
                                                min(iterations + reach, most) + 1)]
        if fixed.decode_micro_batches is None:
            near += [(iterations, g, chunk) for g in range(
                max(groups - SPREAD, 1), min(groups + SPREAD, self._groups[-1]) + 1)]
        return near

    def _look_at(self, lines: Sequence[Line]) -> None:
        """Evaluate the batches of these lines that may be the best."""
        low, _ = self._batches
        edges = self._edges(lines)
        wanted = []
        for line, edge in edges.items():
            sizes = {edge + k for k in range(-NEAR_EDGE, NEAR_EDGE + 1)}
            sizes |= {round(edge * share) for share in BELOW}
            wanted += [(line, size) for size in sizes if low <= size <= self._largest(line)]
        self._evaluate(wanted)

    def _edges(self, lines: Sequence[Line]) -> dict[Line, int]:
        """Largest admissible batch of each line, by bisection; the smallest batch where none is."""
        low, _ = self._batches
        largest = {line: self._largest(line) for line in lines}
        spans = dict.fromkeys(lines, (low, low))
        rising = list(lines)  # double until something forbids it, then bisect
        while rising:
            tried = {line: min(2 * spans[line][0], largest[line]) for line in rising}
            self._evaluate(list(tried.items()))
            rising = []
            for line, size in tried.items():
                if self._known[line, size].limit:
                    spans[line] = (spans[line][0], size)
                else:
                    is_last = size >= largest[line]
                    spans[line] = (size, size + is_last)
                    if not is_last:
                        rising.append(line)
        while open_lines := [line for line, (a, b) in spans.items() if b - a > 1]:
            middles = {line: sum(spans[line]) // 2 for line in open_lines}
            self._evaluate(list(middles.items()))
            for line, size in middles.items():
                below, above = spans[line]
                is_free = not self._known[line, size].limit
                spans[line] = (size, above) if is_free else (below, size)
        return {line: below for line, (below, _) in spans.items()}

    def _evaluate(self, points: Sequence[tuple[Line, int]]) -> None:
        if not (new := sorted(set(points) - self._known.keys())):
            return
        arrays = self._policy.evaluate([self._config(*point) for point in new])
        limits = forbidding(arrays, Limits.of(
            self._problem.constraint, queries=self._problem.num_queries or math.inf,
            latency_s=self._limit_s, stretch=REFUSED_BEYOND, is_timed=True))
        columns = (arrays.throughput_qps, arrays.latency_s, arrays.memory_bytes, arrays.present,
                   arrays.ttft_s, arrays.tpot_s)
        for point, limit, *row in zip(new, limits.tolist(), *(c.tolist() for c in columns),
                                      strict=True):
            self._known[point] = _ConfigFigures(Limit(limit), *row)

    def _reason(self, seen: _ConfigFigures) -> str | None:
        """What forbids a configuration, in words, or None."""
        constraint = self._problem.constraint
        why = {
            Limit.TTFT: f"{format_seconds(seen.ttft_s)} of "
                        f"{format_seconds(constraint.limit_s('ttft'))}",
            Limit.TPOT: f"{format_seconds(seen.tpot_s)} of "
                        f"{format_seconds(constraint.limit_s('tpot'))}",
            Limit.MEMORY: f"{format_bytes(seen.memory_bytes)} of "
                          f"{format_bytes(self._policy.capacity_bytes)} that can be used",
            Limit.QUERIES: f"{seen.present:.0f} would run at once, "
                           f"{self._problem.num_queries} are left",
            Limit.RANGE: "the profile says nothing about such sizes",
            Limit.LATENCY: f"{format_seconds(seen.latency_s)} of {format_seconds(self._limit_s)}"}
        return f"{seen.limit.words}: {why[seen.limit]}" if seen.limit else None

    def _best_known(self) -> tuple[Line, int] | None:
        low, high = self._batches
        free = [point for point, seen in self._known.items()
                if not seen.limit and low <= point[1] <= high]
        return min(free, key=lambda point: (-self._known[point].throughput_qps, point),
                   default=None)

    def _tightest(self, seen: set[Line]) -> tuple[Line, int] | None:
        """The smallest batch's least latency among those that nothing else forbids."""
        smallest = [(line, self._batches[0]) for line in seen]
        late = [point for point in smallest if self._known[point].limit is Limit.LATENCY]
        return min(late, key=lambda point: (self._known[point].latency_s, point), default=None)

    def _out_of_reach(self, seen: set[Line]) -> Way:
        """The tightest latency on these stages, or what else is in the way."""
        point = self._tightest(seen)
        if point is None:
            why = self._reason(self._known[min(seen), self._batches[0]])
            return Way(estimate=None, reason=f"even the smallest batch is too large ({why})")
        tightest = self._estimate(*point)
        return Way(estimate=tightest, reason=(
            f"the tightest latency on these stages is {tightest.figures.latency_s:.4g} s, with "
            f"{variables_words(tightest)}; the limit is {self._limit_s:.4g} s"))

    def _estimate(self, line: Line, batch: int) -> Estimate:
        estimate: Estimate = self._policy.estimate(self._config(line, batch))
        return estimate.changed(policy=self._deployed.policy).in_copies(
            self._deployed.deployment.replicas)

    def _config(self, line: Line, batch: int) -> Any:
        own = {"decode_iterations": line[0]} if self._has_iterations else {}
        if self._chunk:
            own["encode_chunk"] = line[2]
        return replace(self._deployed_config, encode_batch=batch, decode_micro_batches=line[1],
                       **own)


def _chunks(deployed: int, problem: Problem) -> list[int]:
    """Chunk sizes that a running pool can take up: those of the search. From a batch that is
    encoded alone to chunks there is no way, nor back: they use their slots otherwise."""
    if not deployed or problem.fixed.encode_chunk is not None:
        return [deployed]
    return sorted({*CHUNKS, deployed})


def _largest_batch(batches: tuple[int, int], mean_input: float, line: Line) -> int:
    """No larger batch of a line is looked at: of more tokens than the chunks of a phase hold, the
    rest would wait. `mean_input` 0: where no phase encodes a batch in chunks."""
    least, most = batches
    iterations, groups, chunk = line
    if not chunk or not mean_input:
        return most
    return min(max(int(chunk * iterations * groups / mean_input), least), most)


def variables_words(estimate: Estimate) -> str:
    """The control variables, in words; not every policy has iterations."""
    figures, controls = estimate.figures, estimate.controls
    if isinstance(controls, ContinuousControls):
        budget = f", token_budget {controls.token_budget}" if controls.token_budget else ""
        return f"max_active {controls.max_active}{budget}"
    iterations = ""
    if isinstance(controls, RraControls):
        iterations = f"decode_iterations {controls.decode_iterations}, "
        if controls.encode_chunk:
            iterations += f"encode_chunk {controls.encode_chunk}, "
    return (f"encode_batch {figures.encode_batch}, {iterations}"
            f"decode_micro_batches {estimate.deployment.num_groups}")
