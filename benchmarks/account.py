"""Where the time of a run of xgpt goes: products, attention, element-wise operators, cache, head,
messages, Python.

    python benchmarks/account.py RUN_FOLDER

RUN_FOLDER is what `xgpt submit` has left: its schedule is run once more, in a folder of its own, by
ranks that note when they enter and leave an operator. An operator inside another one counts as the
outer (the head's product as head); what is in none is Python: the head's decisions, the calls
themselves, the interpreter. The notes cost a few microseconds a call; how much longer the run took
than the one in RUN_FOLDER is said.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any

from torch.overrides import TorchFunctionMode

import xrunner
from xgpt.launch.local import find_mpiexec
from xgpt.launch.process import run_watched
from xrunner import worker
from xrunner.engine import head, pipeline
from xrunner.engine.kv import KvCache
from xrunner.engine.stage import StageExecutor
from xrunner.ops.linear import Product
from xrunner.plan import load_plan
from xrunner.transport.comm import MpiComm

CATEGORIES = ("products", "attention", "element-wise", "cache", "head", "messages", "Python")
PRODUCTS, ATTENTION, ELEMENT_WISE, CACHE, HEAD, MESSAGES, PYTHON = CATEGORIES
BETWEEN = "between steps"
# What a function of xrunner.ops is, by a part of its name; the first that fits, else element-wise.
_OPS = (("sample", HEAD), ("argmax", HEAD), ("attend", ATTENTION), ("attention", ATTENTION),
        ("context", ATTENTION), ("linear", PRODUCTS), ("product", PRODUCTS), ("store", CACHE),
        ("compact", CACHE), ("gather", CACHE), ("scatter", CACHE), ("place", CACHE))
_TORCH = {"linear": PRODUCTS, "matmul": PRODUCTS, "mm": PRODUCTS, "bmm": PRODUCTS,
          "addmm": PRODUCTS, "_linear_pointwise": PRODUCTS, "_mkl_linear": PRODUCTS,
          "scaled_dot_product_attention": ATTENTION}
_KEPT = ("run.json", "schedule.json", "spool", "model")  # what ranks read
_CLOCK = time.perf_counter


class Account:
    """Seconds by (kind of step, category). Time belongs to one category at every moment."""

    def __init__(self) -> None:
        self.seconds: Counter[tuple[str, str]] = Counter()
        self._kind, self._category, self._since = BETWEEN, PYTHON, _CLOCK()

    def restart(self) -> None:
        self.seconds.clear()
        self._since = _CLOCK()

    def switch(self, category: str, kind: str | None = None) -> tuple[str, str]:
        """From now on time is of `category` (and of the kind of step); what it was of before."""
        before, now = (self._kind, self._category), _CLOCK()
        self.seconds[before] += now - self._since
        self._since, self._category, self._kind = now, category, kind or self._kind
        return before

    def within(self, category: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, as of that category where it is not inside another operator."""

        def counted(*arguments: Any, **named: Any) -> Any:
            if self._category is not PYTHON:
                return call(*arguments, **named)
            self.switch(category)
            try:
                return call(*arguments, **named)
            finally:
                self.switch(PYTHON)

        return counted

    def step(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """StageExecutor.execute."""

        def counted(executor: StageExecutor, message: Any, inputs: Any) -> Any:
            self.switch(PYTHON, message.kind.value)
            try:
                return call(executor, message, inputs)
            finally:
                self.switch(PYTHON, BETWEEN)

        return counted

    def run(self, call: Callable[..., Any], target: Path) -> Callable[..., Any]:
        """What a rank does from the common start on; then the account is written to `target`."""

        def counted(*arguments: Any, **named: Any) -> Any:
            self.restart()
            with TorchCalls(self):
                out = call(*arguments, **named)
            self.switch(PYTHON)
            target.write_text(json.dumps([[*key, seconds]
                                          for key, seconds in self.seconds.items()]))
            return out

        return counted


class TorchCalls(TorchFunctionMode):
    """Counts torch's own functions where they are called outside our operators."""

    def __init__(self, account: Account) -> None:
        super().__init__()
        self._account = account

    def __torch_function__(self, call: Callable[..., Any], types: Any, args: Any = (),
                           kwargs: Any = None) -> Any:
        category = _TORCH.get(getattr(call, "__name__", ""), ELEMENT_WISE)
        return self._account.within(category, call)(*args, **(kwargs or {}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        sys.exit(be_rank(arguments.folder))
    print("\n".join(words(arguments.folder, *account_of(arguments.folder))))


def account_of(folder: Path) -> tuple[Counter[tuple[str, str]], float]:
    """(seconds by kind of step and category, mean over the ranks; seconds of that run) of the
    schedule in `folder`, run once more."""
    with tempfile.TemporaryDirectory() as name:
        again = Path(name)
        for kept in _KEPT:
            if (folder / kept).is_dir():
                shutil.copytree(folder / kept, again / kept)
            elif (folder / kept).is_file():
                shutil.copy(folder / kept, again / kept)
        plan = load_plan(folder / "run.json")
        model = again / "model" if plan.model_dir.parent == plan.output else plan.model_dir
        replace(plan, output=again, model_dir=model, is_watched=False).save()
        stages = json.loads((folder / "measured.json").read_text(encoding="utf-8"))["stages"]
        ranks = sum(len(stage["ranks"]) for stage in stages)
        start = [] if ranks == 1 else [find_mpiexec(), "-n", str(ranks)]
        through = [] if ranks == 1 else ["-m", "mpi4py"]
        run_watched([*start, sys.executable, *through, __file__, str(again), "--rank"],
                    watch=lambda: None, ask_to_stop=None)
        total: Counter[tuple[str, str]] = Counter()
        for rank in range(ranks):
            for kind, category, seconds in json.loads((again / f"account-{rank}.json").read_text()):
                total[kind, category] += seconds / ranks
        measured = json.loads((again / "measured.json").read_text(encoding="utf-8"))
        return total, float(measured["wall_s"])


def be_rank(folder: Path) -> int:
    """One rank of the run in `folder`, with its account."""
    account = Account()
    connect = worker.connect

    def connected(*arguments: Any) -> Any:
        world = connect(*arguments)
        target = folder / f"account-{world.comm.rank}.json"
        head.Head.run = account.run(head.Head.run, target)  # type: ignore[method-assign]
        worker.serve_stage = account.run(pipeline.serve_stage, target)
        return world

    worker.connect = connected
    _count_operators(account)
    _count_methods(account, StageExecutor, {"_sample": HEAD})
    _count_methods(account, Product, {"__call__": PRODUCTS})  # whatever form its weight has
    _count_methods(account, KvCache, dict.fromkeys(("free", "allocate", "place"), CACHE))
    _count_methods(account, MpiComm, dict.fromkeys(("send", "receive", "poll", "flush"), MESSAGES))
    StageExecutor.execute = account.step(StageExecutor.execute)  # type: ignore[method-assign]
    return worker.main([str(folder / "run.json")])


def _count_methods(account: Account, owner: type, categories: dict[str, str]) -> None:
    for name, category in categories.items():
        setattr(owner, name, account.within(category, getattr(owner, name)))


def _count_operators(account: Account) -> None:
    """Every public function of xrunner.ops, in whichever module of the runner has its name."""
    modules = [importlib.import_module(found.name) for found in pkgutil.walk_packages(
        xrunner.__path__, "xrunner.") if not found.name.startswith("xrunner.engines")]
    for module in modules:
        for name, value in list(vars(module).items()):
            if (isinstance(value, FunctionType) and not name.startswith("_")
                    and value.__module__.startswith("xrunner.ops")):
                category = next((c for part, c in _OPS if part in name), ELEMENT_WISE)
                setattr(module, name, account.within(category, value))


def words(folder: Path, account: Counter[tuple[str, str]], wall_s: float) -> list[str]:
    """A table of the account."""
    before = json.loads((folder / "measured.json").read_text(encoding="utf-8"))["wall_s"]
    kinds = [kind for kind in ("encode", "mixed", "decode", BETWEEN)
             if any(key[0] == kind for key in account)]
    total = sum(account.values())
    lines = [f"| seconds | {' | '.join(kinds)} | all | share |",
             f"|---|{'---|' * (len(kinds) + 2)}"]
    for category in CATEGORIES:
        row = [account[kind, category] for kind in kinds]
        lines.append(f"| {category} | {' | '.join(f'{x:.2f}' for x in row)} | {sum(row):.2f} | "
                     f"{sum(row) / total:.0%} |")
    sums = [sum(account[kind, c] for c in CATEGORIES) for kind in kinds]
    lines.append(f"| all | {' | '.join(f'{x:.2f}' for x in sums)} | {total:.2f} | |")
    return [*lines, "", f"The run with the notes took {wall_s:.2f} s, without them {before:.2f} s."]


if __name__ == "__main__":
    main()
