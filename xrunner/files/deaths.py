"""deaths.json: how often something died while it worked on each request. The launcher records the
deaths of ranks, and rank 0 meanwhile those of engines below ranks, never both at once."""

import json
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from xgpt.core.system.whole_file import read_object, write_atomically
from xrunner.plan import RunPlan

DEATHS_FILE = "deaths.json"
SUSPECT = 2  # deaths at which a request was being run


class EngineDeath(NamedTuple):
    """The death of a replica's engine. `given_back`: requests that went to others."""

    replica: int
    given_back: int
    why: str


class Deaths:
    """The deaths of a run so far: `counts`, by request, and those of `engines`, in order."""

    def __init__(self, plan: RunPlan) -> None:
        self._path, self._fingerprint = plan.output / DEATHS_FILE, plan.fingerprint
        self.counts, self.engines = Counter[int](), list[EngineDeath]()
        self.restarts_left = plan.restarts  # of engines
        self.read()

    def read(self) -> None:
        """Reads what another process has recorded meanwhile."""
        saved = read_object(self._path)
        if saved.get("fingerprint") == self._fingerprint:
            self.counts = Counter({int(one): count for one, count in saved["deaths"].items()})
            self.engines = [EngineDeath(*one) for one in saved.get("engines", ())]

    def add(self, requests: Iterable[int], engine: EngineDeath | None = None) -> None:
        """Records a death while these requests were being run."""
        self.counts.update(set(requests))
        if engine is not None:
            self.engines.append(engine)
            self.restarts_left -= 1
        write_atomically(self._path, json.dumps({
            "fingerprint": self._fingerprint, "deaths": dict(self.counts),
            "engines": self.engines}) + "\n")

    @property
    def suspects(self) -> set[int]:
        """Requests that may be the cause."""
        return {one for one, count in self.counts.items() if count >= SUSPECT}

    def clear(self) -> None:
        self._path.unlink(missing_ok=True)
