"""How far a command is: a bar on the error stream of a terminal, which its end removes.

A pipe gets nothing, and neither does a command that prints JSON.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[int], object]  # takes the number of parts that are finished


@contextmanager
def progress(what: str, total: int | None = None, *, is_shown: bool = True) -> Iterator[Advance]:
    """Show how many of ``total`` parts are finished; None: their number is not known."""
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
        yield lambda finished: shown.update(task, completed=finished)
