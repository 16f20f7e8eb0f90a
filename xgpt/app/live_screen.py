"""The screen of `xgpt top`, drawn by rich (the extra `top`)."""

import importlib.util
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from xgpt.app.live import Glance
from xgpt.core.errors import MissingExtraError
from xgpt.core.visible import visible

_LOOK_S = 1.0
_SPARKS = " .:-=+*#"
_COLOURS = {"running": "green", "done": "green", "died": "red", "stopped": "yellow"}


def follow(look: Callable[[Glance | None], Glance | None]) -> Glance | None:
    """Shows the job once a second until it ends, or q or Ctrl-C is pressed; returns the last look
    at it. Raises MissingExtraError without rich."""
    if importlib.util.find_spec("rich") is None:
        raise MissingExtraError("rich", "top", "the live view (`xgpt status` needs nothing)")
    from rich.console import Console
    from rich.live import Live

    paces: list[float] = []
    now = look(None)
    if now is None or not now.is_active:
        return now
    console = Console()
    with _keys() as is_to_leave, Live(console=console, screen=True, auto_refresh=False) as live:
        while now is not None:
            if now.tokens_per_s is not None:
                paces.append(now.tokens_per_s)
            live.update(screen(now, paces), refresh=True)
            if not now.is_active or is_to_leave(_LOOK_S):
                break
            now = look(now)
    return now


def screen(now: Glance, paces: list[float]) -> Any:
    """What is drawn. `paces`: output tokens per second at each look so far."""
    from rich.console import Group
    from rich.panel import Panel
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    colour = _COLOURS.get(now.state, "cyan")
    parts: list[Any] = []
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold", no_wrap=True)
    facts.add_column(ratio=1)
    if now.progress is not None and now.progress.total:
        # in a cell: on its own it ends no line, and would take the place of the next
        facts.add_row("progress", ProgressBar(total=now.progress.total,
                                              completed=now.progress.done))
    for label, words in now.facts:
        style = "red" if label == "latency" and now.is_late else ""
        facts.add_row(label, Text(visible(words), style=style))
    if len(paces) > 1:
        facts.add_row("tokens/s", Text(_spark(paces[-40:]), no_wrap=True))
    parts.append(facts)
    if now.ranks:
        ranks = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in now.columns:
            ranks.add_column(name, justify="left" if name == "pool" else "right")
        ranks.add_column("", width=20)
        for rank, row in list(zip(now.ranks, now.rank_rows, strict=True))[:_most_ranks()]:
            ranks.add_row(*row, ProgressBar(total=1.0, completed=rank.recent_share,
                                                       width=20))
        parts += [Text(""), ranks]
        if len(now.ranks) > _most_ranks():
            parts.append(Text(f"and {len(now.ranks) - _most_ranks()} more ranks", style="dim"))
    if now.remark:
        parts += [Text(""), Text(visible(now.remark), style="yellow")]
    if now.messages:
        parts += [Text(""), Text("last messages", style="bold"), *(
            Text(visible(line), no_wrap=True, overflow="ellipsis", style="dim")
            for line in now.messages)]
    title = Text(visible(f"{now.name}: {now.state}"), style=f"bold {colour}")
    return Panel(Group(*parts), title=title,
                 subtitle="q leaves; the job goes on")


def _most_ranks() -> int:
    """Ranks that the terminal has lines for."""
    try:
        return max(os.get_terminal_size().lines - 20, 4)
    except OSError:
        return 16


def _spark(values: list[float]) -> str:
    """One character a value, in ASCII: the higher, the darker."""
    most = max(values) or 1.0
    return "".join(_SPARKS[round(max(v, 0.0) / most * (len(_SPARKS) - 1))] for v in values)


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Waits so many seconds, or until a key is pressed: whether it was q or Ctrl-C, or nobody types
    there. An exception of Ctrl-C could be lost where Python ignores them."""
    import termios
    import tty

    def is_to_leave(seconds: float) -> bool:
        ready, _, _ = select.select([descriptor], [], [], seconds)
        return bool(interrupts) or (
            bool(ready) and os.read(descriptor, 1) in (b"q", b"Q", b""))

    interrupts: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: interrupts.append(number))
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield is_to_leave
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
        signal.signal(signal.SIGINT, previous)
