"""What rank 0 knows of the replicas: which queries each was given, has begun and has done."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from xrunner.io.sink import RunSink
from xrunner.rules.routing import Recall, Router
from xrunner.rules.windows import Load


@dataclass(slots=True, kw_only=True)
class Account:
    """One replica. `begun` and `done` count queries, of those `given`, which are places in the
    order in which they are taken up."""

    given: list[int] = field(default_factory=list)
    begun: int = 0
    done: int = 0
    output_tokens: int = 0
    at_work: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    has_ended: bool = False

    @property
    def load(self) -> Load:
        return Load(len(self.given) - self.begun, self.begun - self.done)


class Accounts:
    """All replicas, and the rule that their queries are routed by."""

    def __init__(self, router: Router, order: Sequence[int], sink: RunSink) -> None:
        """`order`: the indices of the queries to be answered, as they are taken up."""
        self.router, self._order, self._sink = router, order, sink
        self.all = [Account() for _ in router.windows]

    @property
    def is_complete(self) -> bool:
        """Whether every query is done."""
        return sum(account.done for account in self.all) == len(self._order)

    @property
    def have_begun_all(self) -> bool:
        """Whether every query has begun."""
        return self.router.is_done and not any(account.load.waiting for account in self.all)

    def top_up(self, replica: int) -> list[int]:
        """The queries, by index, that are given to the replica now."""
        account = self.all[replica]
        places = self.router.top_up(replica, account.load)
        account.given += places
        return [self._order[place] for place in places]

    def note_begun(self, replica: int, begun: int) -> None:
        """So many of those given have begun; the launcher counts queries in this order."""
        account = self.all[replica]
        if begun == account.begun:
            return
        if self._sink.launcher is not None:
            self._sink.launcher.begin([
                self._order[place] for place in account.given[account.begun:begun]])
        self.router.note_begun(replica, begun - account.begun)
        account.begun = begun

    def recalls(self) -> list[Recall]:
        """What is to be called back from whom."""
        return self.router.recalls([account.load for account in self.all])

    def take_back(self, replica: int, indices: Sequence[int]) -> None:
        """The replica has given these back, which it had not begun."""
        account, wanted = self.all[replica], set(indices)
        waiting = account.given[account.begun:]
        places = [place for place in waiting if self._order[place] in wanted]
        assert len(places) == len(indices), f"{places = } {indices = }"
        account.given[account.begun:] = [
            place for place in waiting if self._order[place] not in wanted]
        self.router.take_back(replica, places)
