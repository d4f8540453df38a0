"""How far a command is: a bar on the error stream of a terminal, which its end removes.

A bar appears once its work has lasted a moment, so that a short command draws nothing. A pipe gets
a line now and then from a command that may take long, and else nothing. A command that prints JSON
has no bar.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Event, Thread

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from eplb.clock import Clock

Advance = Callable[[int], object]  # takes the number of parts that are finished
SHOWN_AFTER_S = 0.5  # of a bar
LINE_AFTER_S, MOST_BETWEEN_S = 5.0, 60.0  # of the first line of a pipe; between two
SAY_PERIOD_S = 5.0  # between two lines while kernels are compiled


@contextmanager
def progress(
    what: str,
    total: int | None = None,
    *,
    is_shown: bool = True,
    after_s: float = SHOWN_AFTER_S,
    line_after_s: float | None = None,
) -> Iterator[Advance]:
    """Show how many of ``total`` parts are finished; None: their number is not known.

    Args:
        what: the parts, in the plural.
        total: how many there are.
        is_shown: whether a terminal gets a bar.
        after_s: seconds until the bar appears.
        line_after_s: seconds until the first line where the error stream is no terminal; each
            further one takes twice as long, up to a minute. None: no lines.
    """
    console, num_finished = Console(stderr=True), 0
    bar = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,  # a result may go into a file while the error stream is a terminal
        disable=not (is_shown and console.is_terminal),
    )
    task = bar.add_task(what, total=total)

    def advance(finished: int) -> None:
        nonlocal num_finished
        num_finished = finished
        bar.update(task, completed=finished)

    def line(elapsed_s: float) -> str:
        done = f"{num_finished:,}" + ("" if total is None else f" of {total:,}")
        text = f"{what}: {done} after {elapsed_s:.0f} s"
        if not num_finished:
            text += "; first plans take minutes where kernels were not compiled (eplb compile)"
        return text

    with ExitStack() as threads:
        if not bar.disable:
            threads.callback(bar.stop)
            threads.enter_context(_repeated(bar.start, after_s, math.inf))
        elif line_after_s is not None and not console.is_terminal:
            threads.enter_context(_lines(line, line_after_s))
        yield advance


@contextmanager
def telling(
    what: str, *, is_shown: bool = True, line_after_s: float = LINE_AFTER_S
) -> Iterator[None]:
    """Say on the error stream what long work does: a bar of a terminal, lines of a pipe."""
    with ExitStack() as threads:
        threads.enter_context(progress(what, is_shown=is_shown))
        if is_shown and not sys.stderr.isatty():
            line = _lines(lambda elapsed_s: f"{what}: {elapsed_s:.0f} s so far", line_after_s)
            threads.enter_context(line)
        yield


@contextmanager
def _lines(line: Callable[[float], str], after_s: float) -> Iterator[None]:
    """Write a line, made of the seconds since the begin, at growing intervals."""
    begun = time.monotonic()

    def write() -> None:
        typer.echo(line(time.monotonic() - begun), err=True)

    with _repeated(write, after_s, MOST_BETWEEN_S):
        yield


@contextmanager
def _repeated(act: Callable[[], object], after_s: float, most_s: float) -> Iterator[None]:
    """Act in a thread, as one part of the work may take long: after so many seconds, then twice.

    Args:
        act: what to do.
        after_s: until the first time; each further one takes twice as long.
        most_s: between two times; infinite: there is one time.
    """
    is_over = Event()

    def repeat() -> None:
        wait_s = after_s
        while not is_over.wait(wait_s):
            act()
            if most_s == math.inf:
                return
            wait_s = min(2 * wait_s, most_s)

    thread = Thread(target=repeat, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
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
