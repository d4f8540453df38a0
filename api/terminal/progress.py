"""How far a command is: a bar on the error stream of a terminal, which its end removes.

A bar appears once its work has lasted a moment, so that a short command draws nothing. A pipe gets
nothing but, where work is long and cannot be counted, a line now and then (``telling``).
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eplb.clock import Clock

Advance = Callable[[int], object]  # takes the number of parts that are finished
SHOWN_AFTER_S = 0.5  # of a bar
TOLD_AFTER_S, TOLD_EVERY_S = 5.0, 15.0  # lines of a pipe
SAY_PERIOD_S = 5.0  # between two lines while kernels are compiled


@contextmanager
def progress(
    what: str,
    total: int | None = None,
    *,
    is_shown: bool = True,
    after_s: float = SHOWN_AFTER_S,
) -> Iterator[Advance]:
    """Show how many of ``total`` parts are finished; None: their number is not known."""
    console, is_over = Console(stderr=True), Event()
    shown = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # a result may go into a file while the error stream is a terminal
        disable=not (is_shown and console.is_terminal),
    )
    task = shown.add_task(what, total=total)

    def show_later() -> None:
        if not is_over.wait(after_s):
            shown.start()

    thread = Thread(target=show_later, name="progress", daemon=True)
    if not shown.disable:
        thread.start()
    try:
        yield lambda finished: shown.update(task, completed=finished)
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join()
        shown.stop()


@contextmanager
def telling(
    what: str,
    *,
    is_shown: bool = True,
    after_s: float = TOLD_AFTER_S,
    every_s: float = TOLD_EVERY_S,
) -> Iterator[None]:
    """Say on the error stream what long work does: a bar of a terminal, lines of a pipe."""
    is_over = Event()

    def tell() -> None:
        begun, wait_s = time.monotonic(), after_s
        while not is_over.wait(wait_s):
            typer.echo(f"{what}: {time.monotonic() - begun:.0f} s so far", err=True)
            wait_s = every_s

    thread = Thread(target=tell, name="progress", daemon=True)
    if is_shown and not sys.stderr.isatty():
        thread.start()
    try:
        with progress(what, is_shown=is_shown):
            yield
    finally:
        is_over.set()
        if thread.ident is not None:
            thread.join()


@contextmanager
def telling_of_compiler(*, is_shown: bool = True) -> Iterator[None]:
    """Say on the error stream that the first plans wait for the compiler; loads numba."""
    # Imported here: who only asks for help needs no compiler.
    from eplb.core.compiler import compiler_passes

    def say(line: str) -> None:
        if is_shown:
            typer.echo(f"{line} (once here; eplb compile does it beforehand)", err=True)

    reports = CompileReports(say)
    with compiler_passes(reports.note):
        yield
    reports.note("")


class CompileReports:
    """Reports how far the compilation of kernels is.

    Args:
        say: gets a line every few seconds, and one at the end.
        record: gets the state, ``begun`` or ``done``, and figures.
    """

    def __init__(
        self,
        say: Callable[[str], object],
        record: Callable[..., None] = lambda state, **figures: None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._say, self._record, self._clock = say, record, clock
        self._functions: set[str] = set()
        self._begun, self._said = clock(), -math.inf

    def note(self, function: str) -> None:
        """Record that the compiler works on a function; "": all are compiled."""
        now = self._clock()
        if not function and not self._functions:
            return  # they were on disk
        if not self._functions:
            self._begun = now
            self._record("begun")
        self._functions |= {function} - {""}
        count, seconds = len(self._functions), now - self._begun
        if not function:
            self._record("done", functions=count, seconds=seconds)
            self._say(f"compiled the kernels: {count} functions in {seconds:.0f} s")
        elif now - self._said >= SAY_PERIOD_S:
            self._said = now
            self._say(f"compiling the kernels: {count} functions in {seconds:.0f} s")
