"""What commands print of answers: tables, lines and times. The table's library is loaded late."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

WHY = "from the command line"  # reason of a change by a command that is given none
TIMES = ("time", "since", "until", "expires")  # fields that are seconds since the epoch


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]], last: str | None = None) -> None:
    """Print rows under the names of their columns; ``last`` is a column of text."""
    from api.terminal.printable import print_table

    print_table(columns, rows, last)


def listing(items: Iterable[dict[str, Any]], columns: str, none: str = "") -> None:
    """Print items of an answer as a table, a field in each column.

    Times are printed as dates, lists with commas.

    Args:
        items: of the answer.
        columns: names of the fields, the last one of text; ``plan_id:plan`` has another heading.
        none: what is printed where there is no item; "": the headings.
    """
    fields = [column.partition(":") for column in columns.split()]
    rows = [[_cell(name, one.get(name)) for name, _, _ in fields] for one in items]
    if none and not rows:
        line(none)
    else:
        *headings, last = (heading or name for name, _, heading in fields)
        table(headings, rows, last)


def _cell(name: str, value: Any) -> Any:
    if name in TIMES and isinstance(value, int | float):
        return at(value)
    return ", ".join(map(str, value)) if isinstance(value, list) else value


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
