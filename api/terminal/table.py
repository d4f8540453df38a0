"""Tables of commands: plain columns, which fit a pipe as they fit a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from api.terminal.printable import printable

PIPE_COLUMNS = 10_000  # a line of a pipe is never folded


def plain_table(columns: Sequence[str], last: str | None = None) -> Table:
    """Make a table without a frame.

    Args:
        columns: names of the columns, to the right, where numbers are read from.
        last: name of a further column of text, to the left and folded to the terminal.
    """
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    if last is not None:
        table.add_column(last, overflow="fold")
    return table


def cell(value: object) -> str:
    """Give a value as the text of a cell: without control characters and markup."""
    if value is None:
        return "-"
    shown = f"{value:.3f}" if isinstance(value, float) else str(value)
    return escape(printable(shown))


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], last: str | None = None
) -> None:
    """Print rows of values under the names of their columns."""
    table = plain_table(columns, last)
    for row in rows:
        table.add_row(*map(cell, row))
    print_plain(table)


def print_plain(*parts: Table | str) -> None:
    """Print tables and lines on standard output."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    for part in parts:
        console.print(part)
