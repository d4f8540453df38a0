"""How far a command is: a bar on the error stream of a terminal, which its end removes.

A pipe gets a line now and then from a command that may take long, and else nothing. A command that
prints JSON has no bar.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[int], object]  # takes the number of parts that are finished
LINE_AFTER_S = 5.0
MOST_BETWEEN_S = 60.0


@contextmanager
def progress(
    what: str, total: int | None = None, *, is_shown: bool = True, line_after_s: float | None = None
) -> Iterator[Advance]:
    """Show how many of ``total`` parts are finished; None: their number is not known.

    Args:
        what: the parts, in the plural.
        total: how many there are.
        is_shown: whether a terminal gets a bar.
        line_after_s: seconds until the first line where the error stream is no terminal; each
            further one takes twice as long, up to a minute. None: no lines.
    """
    console = Console(stderr=True)
    with Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # a result may go into a file while the error stream is a terminal
        disable=not (is_shown and console.is_terminal),
    ) as shown:
        task = shown.add_task(what, total=total)
        if line_after_s is None or console.is_terminal:
            yield lambda finished: shown.update(task, completed=finished)
            return
        with _lines(what, total, line_after_s) as advance:
            yield advance


@contextmanager
def _lines(what: str, total: int | None, after_s: float) -> Iterator[Advance]:
    """Write a line at growing intervals, by a thread: one part may take long."""
    begun, is_over, num_finished = time.monotonic(), threading.Event(), 0

    def advance(finished: int) -> None:
        nonlocal num_finished
        num_finished = finished

    def write() -> None:
        wait = after_s
        while not is_over.wait(wait):
            done = f"{num_finished:,}" + ("" if total is None else f" of {total:,}")
            line = f"{what}: {done} after {time.monotonic() - begun:.0f} s"
            if not num_finished:
                line += "; first plans take minutes where kernels were not compiled (eplb compile)"
            print(line, file=sys.stderr, flush=True)
            wait = min(2 * wait, MOST_BETWEEN_S)

    thread = threading.Thread(target=write, name="progress", daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        is_over.set()
        thread.join()
