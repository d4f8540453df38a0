"""Output of commands: untrusted text without control sequences, errors, and a terminal that closes.

Untrusted text stays on one line and moves no cursor.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import IO, Any, cast

from rich.console import Console
from rich.markup import escape
from rich.table import Table

PIPE_COLUMNS = 10_000  # a line of a pipe is never folded

# C0 and C1 controls, DEL, line and paragraph separators, marks and overrides of direction, and
# surrogates, which no stream can encode.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Escape what moves the cursor, begins a line or changes the direction of the text."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def print_error(sentence: object) -> None:
    """Print a refusal on the error stream."""
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    errors.print(printable(f"eplb: {sentence}"), markup=False)


class UnbreakableStream:
    """A stream that drops its input once it has no reader: a closed terminal ends no run."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write, or drop."""
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        """Flush, or drop."""
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self) -> None:
        """Discard what follows and what is still buffered."""
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def unbreakable_console(stream: IO[str]) -> Console:
    """Make a console on a stream of this process."""
    return Console(file=cast(IO[str], UnbreakableStream(stream)))


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
    """Print tables and lines on standard output; lines of a pipe are neither folded nor padded."""
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PIPE_COLUMNS
    for part in parts:
        with console.capture() as shown:
            console.print(part, soft_wrap=isinstance(part, str))
        text = shown.get()
        if not console.is_terminal:
            text = "".join(f"{line.rstrip()}\n" for line in text.splitlines())
        sys.stdout.write(text)
