"""What a run does after a rank's death: it starts the ranks again, a bounded number of times. A
query that was under way at two deaths may be what kills them: it is left for the end and run alone
then, and where it kills its rank again it gets an error in the place of an answer. The others
finish."""

import json
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from xgpt.app.run_files import DEATHS_FILE, RESULTS_FILE
from xgpt.app.telling import Teller
from xgpt.core.errors import StoppedEarly, XgptError
from xgpt.core.spool import Spool
from xgpt.core.whole_file import write_atomically
from xgpt.launch.process import RanksFailed
from xgpt.report.table import paragraph
from xgpt.report.words import counted
from xrunner.files.intake import query_of
from xrunner.files.lock import StopRequest
from xrunner.files.results import ResultWriter, answered, count_results
from xrunner.files.sink import read_underway
from xrunner.plan import RunPlan
from xrunner.query import FinishedQuery

SUSPECT = 2  # deaths at which a query was under way


class Leg(NamedTuple):
    """One start of the ranks. `aside`: queries that it leaves out; `alone`: the one that it is
    for, if it is for one."""

    aside: tuple[int, ...] = ()
    alone: int | None = None
    is_first: bool = True


class Deaths:
    """At which queries' work ranks died, of one job."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan, self._path = plan, plan.output / DEATHS_FILE
        self._results = plan.output / "results.jsonl"
        self._counts = Counter[int](self._read())

    def next_leg(self) -> Leg | None:
        """What is to be run next; None where every query is answered."""
        done, total = answered(self._results), len(Spool(self._plan.output))
        if total and done.total >= total:
            return None
        # of few queries: no list of ten million
        suspects = sorted(query for query, count in self._counts.items() if count >= SUSPECT
                          and done.written <= query < total and query not in done.held)
        if not suspects or len(suspects) < total - done.total:
            return Leg(tuple(suspects))
        return Leg(tuple(suspects[1:]), alone=suspects[0])

    def record(self, leg: Leg, cause: str) -> str:
        """Takes note of a death; what comes of it, in words."""
        if leg.alone is not None:
            self._give_up(leg.alone, cause)
            return (f"query {leg.alone} was run alone, and its rank died again: it has an error "
                    "in the place of an answer")
        done = answered(self._results)
        underway = [query for query in read_underway(self._plan.output)
                    if query >= done.written and query not in done.held]
        self._counts.update(set(underway))
        suspects = sum(self._counts[query] >= SUSPECT for query in underway)
        write_atomically(self._path, json.dumps(
            {"fingerprint": self._plan.fingerprint, "deaths": dict(self._counts)}) + "\n")
        return "" if not suspects else (
            f"{counted(suspects, 'query')} under way at two deaths: left for the end, to run alone")

    def _give_up(self, query: int, cause: str) -> None:
        written = count_results(self._results)
        writer = ResultWriter(self._results, first_index=written, model=self._plan.model_name)
        writer.write(FinishedQuery(
            query=query_of(Spool(self._plan.output), self._plan, query), output_ids=(),
            finish_reason="error", text="", encode_start_s=0.0, first_token_s=0.0,
            last_token_s=0.0, error="ranks died three times at work on it, the last time alone: "
            + " ".join(cause.split())[-300:]))
        writer.close()

    def _read(self) -> dict[int, int]:
        try:
            saved = json.loads(self._path.read_text(encoding="utf-8"))
            if saved["fingerprint"] != self._plan.fingerprint:
                return {}
            return {int(query): int(count) for query, count in saved["deaths"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}


def run_through(plan: RunPlan, start: Callable[[Leg], None], *, restarts: int,
                tell: Teller) -> None:
    """Starts the ranks until every query is answered, or a stop was asked for. Raises what `start`
    raises, a rank's death only after so many `restarts`; a query that is run alone has its own."""
    deaths = Deaths(plan)
    leg, is_first = deaths.next_leg(), True
    while leg is not None:
        try:
            start(leg._replace(is_first=is_first))
        except RanksFailed as error:
            tell.end_progress()
            if error.is_told or (leg.alone is None and restarts == 0):
                raise _with_what_is_kept(error, plan) from None
            what = deaths.record(leg, str(error))
            if StopRequest(plan.output).is_made:
                raise StoppedEarly(f"{error}\nThe run was asked to stop meanwhile: "
                                   f"{_is_kept(plan)}, and the same command goes on from "
                                   "there") from None
            if leg.alone is None:
                restarts -= 1
            tell.say(f"{error}")
            tell.say(paragraph(f"note: {what + '. ' if what else ''}{_is_kept(plan)}; the ranks "
                               f"start again ({counted(restarts, 'more restart')} after this)"))
        else:
            if not leg.aside or StopRequest(plan.output).is_made:
                break
        leg, is_first = deaths.next_leg(), False
    if answered(plan.output / RESULTS_FILE).written == len(Spool(plan.output)):
        (plan.output / DEATHS_FILE).unlink(missing_ok=True)


def _with_what_is_kept(error: RanksFailed, plan: RunPlan) -> XgptError:
    text = str(error)
    if "the same command goes on" in text:
        return XgptError(text)
    goes_on = f"{_is_kept(plan)}; the same command goes on from there"
    return XgptError(f"{text}\n{paragraph(goes_on)}")


def _is_kept(plan: RunPlan) -> str:
    count = answered(plan.output / RESULTS_FILE).total
    return f"{counted(count, 'answer')} {'is' if count == 1 else 'are'} kept"
