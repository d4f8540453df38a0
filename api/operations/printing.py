"""What commands print of answers: tables, lines and times. The table's library is loaded late."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

WHY = "from the command line"  # reason of a change by a command that is given none


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], last: str | None = None) -> None:
    """Print rows under the names of their columns; ``last`` is a column of text."""
    from api.terminal.printable import print_table

    print_table(columns, rows, last)


def line(*texts: str) -> None:
    """Print untrusted texts, each on a line."""
    from api.terminal.printable import printable

    for text in texts:
        print(printable(text))


def more(found: dict[str, Any]) -> None:
    """Print how to continue a list."""
    if found["next"] is not None:
        line(f"there are more: --after {found['next']}")


def at(seconds: float) -> str:
    """Give a time since the epoch as date and time of UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) + "Z"
