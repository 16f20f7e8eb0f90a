"""Starts the ranks of a run until all queries are answered.

After a rank dies the ranks are started again, a limited number of times. Queries that were being
run at two deaths may be their cause, so they are run last, by halves of those at which most has
died. Where a rank dies at work on one alone, that gets an error instead of an answer. The others
finish."""

from collections.abc import Callable
from typing import NamedTuple

from xgpt.app.teller import Teller
from xgpt.core.errors import StoppedEarly, XgptError
from xgpt.launch.process import RanksFailed
from xgpt.report.table import paragraph
from xgpt.report.words import counted
from xgpt.requests.spool import Spool
from xgpt.run_folder.files import RESULTS_FILE
from xrunner.files.deaths import Deaths
from xrunner.files.expired import expired_requests
from xrunner.files.lock import StopRequest
from xrunner.files.results import ResultWriter, answered, count_results
from xrunner.files.sink import read_underway
from xrunner.files.spooled_requests import SpooledQueries
from xrunner.plan import RunPlan
from xrunner.query import FinishedQuery


class Leg(NamedTuple):
    """One start of the ranks. `aside`: queries to leave out; `is_trial`: the others are under
    suspicion; `alone`: the only query to run, if there is one. `restarts`: that are left to engines
    below the ranks."""

    aside: tuple[int, ...] = ()
    alone: int | None = None
    is_trial: bool = False
    is_first: bool = True
    restarts: int = 0


class Legs:
    """The starts of a run's ranks, by what died at work on which query."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan, self.deaths = plan, Deaths(plan)
        self._results = plan.output / "results.jsonl"
        self._guilty = set[int]()  # has the cause, by the last trial

    def next_leg(self) -> Leg | None:
        """The queries to run next; None where every query is answered."""
        done, total = answered(self._results), len(Spool(self._plan.output))
        left = total - done.total - len(self._expired())
        if total and left <= 0:
            return None
        # few: no list of ten million queries
        self.deaths.read()
        suspects = sorted(query for query in self.deaths.suspects
                          if done.written <= query < total and query not in done.held)
        if not suspects or len(suspects) < left:
            return Leg(tuple(suspects))
        # those at which most has died, or half of them if they are known to have the cause
        most = max(self.deaths.counts[query] for query in suspects)
        group = [query for query in suspects if self.deaths.counts[query] == most]
        if len(group) > 1 and self._guilty.issuperset(group):
            group = group[:len(group) // 2]
        return Leg(tuple(query for query in suspects if query not in group), is_trial=True,
                   alone=group[0] if len(group) == 1 else None)

    def record(self, leg: Leg, cause: str) -> str:
        """Records a death; returns words for what follows from it, "" for nothing."""
        if leg.alone is not None:
            self._give_up(leg.alone, cause)
            asked = SpooledQueries(Spool(self._plan.output), self._plan)[leg.alone]
            return (f"The request {asked.id!r} was run alone, and its rank died again: it "
                    "has an error instead of an answer")
        done = answered(self._results)
        underway = [query for query in read_underway(self._plan.output)
                    if query >= done.written and query not in done.held]
        self.deaths.read()
        if leg.is_trial:  # a death before any query had begun counts for all of them: trials end
            self._guilty = {*underway} or self.deaths.suspects - {*leg.aside}
            underway = [*self._guilty]
        self.deaths.add(underway)
        suspects = len(self.deaths.suspects & set(underway))
        return "" if not suspects else (
            f"{counted(suspects, 'request')} {'was' if suspects == 1 else 'were'} being run at "
            "two deaths or more: they run by themselves at the end, then by halves, until one is "
            "alone")

    def _give_up(self, query: int, cause: str) -> None:
        written = count_results(self._results)
        writer = ResultWriter(self._results, first_index=written, model=self._plan.model_name)
        writer.write(FinishedQuery(
            query=SpooledQueries(Spool(self._plan.output), self._plan)[query], output_ids=(),
            finish_reason="error", text="", encode_start_s=0.0, first_token_s=0.0,
            last_token_s=0.0, error="ranks died several times at work on it, the last time alone: "
            + " ".join(cause.split())[-300:]))
        writer.leave_out(self._expired())
        writer.close()

    def _expired(self) -> list[int]:
        """Requests that have expired, and have no answer."""
        done = answered(self._results)
        return [query for query in expired_requests(self._plan.output)
                if query >= done.written and query not in done.held]


def run_through(plan: RunPlan, start: Callable[[Leg], None], *, restarts: int,
                tell: Teller) -> None:
    """Starts the ranks until every query is answered or a stop is requested. Raises the errors of
    `start`; for a rank's death only after `restarts` of them, not counting those of queries under
    suspicion that are run by themselves."""
    legs = Legs(plan)
    leg, is_first = legs.next_leg(), True
    while leg is not None:
        before = len(legs.deaths.engines)
        try:
            try:
                start(leg._replace(is_first=is_first, restarts=restarts))
            finally:
                legs.deaths.read()
                restarts = max(restarts - len(legs.deaths.engines) + before, 0)
        except RanksFailed as error:
            tell.end_progress()
            if error.is_told or (not leg.is_trial and restarts == 0):
                said = f"{_is_kept(plan)}; the same command goes on from there"
                raise XgptError(str(error) if "the same command goes on" in str(error) else
                                f"{error}\n{paragraph(said)}") from None
            what = legs.record(leg, str(error))
            if StopRequest(plan.output).is_made:
                raise StoppedEarly(f"{error}\nThe run was asked to stop meanwhile: "
                                   f"{_is_kept(plan)}, and the same command goes on from "
                                   "there") from None
            restarts -= not leg.is_trial
            tell.say(f"{error}")
            left = f" ({counted(restarts, 'more restart')} after this)" * (not leg.is_trial)
            tell.say(paragraph(f"note: {what + '. ' if what else ''}{_is_kept(plan)}; the ranks "
                               f"start again{left}"))
        else:
            # an engine's death may leave queries that are under suspicion
            is_over = not leg.aside and len(legs.deaths.engines) == before
            if is_over or StopRequest(plan.output).is_made:
                break
        leg, is_first = legs.next_leg(), False
    if answered(plan.output / RESULTS_FILE).written == len(Spool(plan.output)):
        legs.deaths.clear()


def _is_kept(plan: RunPlan) -> str:
    count = answered(plan.output / RESULTS_FILE).total
    return f"{counted(count, 'answer')} {'is' if count == 1 else 'are'} kept"
