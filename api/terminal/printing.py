"""How commands print answers, and read times and numbers."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from api.terminal.printable import print_table, printable
from eplb.errors import ConfigError

WHY = "from the command line"  # default reason of a change by a command
TIME_OR_AGE = "2026-03-01T12:00 or, of today, 12:00 (UTC), or an age as 90m, 12h or 7d"
UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
# Fields that are seconds since the epoch.
TIMES = frozenset({"time", "since", "until", "expires", "start", "end", "broke_at"})


def listing(items: Iterable[dict[str, Any]], columns: str, none: str) -> None:
    """Print items of an answer as a table, a field in each column.

    Times are printed as dates, lists with commas.

    Args:
        items: the items of the answer.
        columns: names of fields, the last one of text; ``plan_id:plan`` has another heading.
        none: is printed for an empty list.
    """
    fields = [column.partition(":") for column in columns.split()]
    rows = [[cell(name, one.get(name)) for name, _, _ in fields] for one in items]
    if not rows:
        line(none)
    else:
        *headings, last = (heading or name for name, _, heading in fields)
        print_table(headings, rows, last)


def cell(name: str, value: Any) -> Any:
    """Give a field as it is printed."""
    if name in TIMES and isinstance(value, int | float):
        return at(value)
    if name == "seconds" and isinstance(value, dict):
        return ", ".join(f"{stage} {seconds}" for stage, seconds in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def line(*texts: str) -> None:
    """Print untrusted texts, each on a line."""
    for text in texts:
        print(printable(text))


def more(found: dict[str, Any]) -> None:
    """Print how to continue a list."""
    if found["next"] is not None:
        line(f"there are more: --after {found['next']}")


def at(seconds: float) -> str:
    """Give a time since the epoch as date and time of UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) + "Z"


def time_of(option: str, text: str) -> float:
    """Read a time, or an age, as seconds since the epoch.

    Raises:
        ConfigError: it is neither, before 1970, or in the future.
    """
    now, age = time.time(), re.fullmatch(r"(\d{1,12})([smhd])", text)
    try:
        if age:
            found = now - int(age[1]) * UNITS_S[age[2]]
        else:
            is_of_day = re.fullmatch(r"\d\d:\d\d(:\d\d)?", text)
            day = time.strftime("%Y-%m-%dT", time.gmtime(now)) if is_of_day else ""
            parsed = datetime.fromisoformat(day + text)
            found = (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError) as exc:
        raise ConfigError(f"{option} is {text!r}, expected a time as {TIME_OR_AGE}") from exc
    if not 0 <= found <= now:
        place = "in the future" if found > now else "before 1970"
        raise ConfigError(f"{option} is {text!r}, which is {place}, expected 1970-01-01 to now")
    return found


def numbers(option: str, text: str, least: int = 1, most: int = 65_536) -> tuple[int, ...]:
    """Distinct whole numbers, separated by commas.

    Raises:
        ConfigError: anything else, or a number out of range.
    """
    try:
        # int() alone takes 1_0 as 10.
        found = tuple(dict.fromkeys(int(part.replace("_", "?")) for part in text.split(",")))
    except ValueError:
        found = ()
    if not found or min(found) < least or max(found) > most:
        raise ConfigError(f"{option} is {text!r}, expected numbers of {least} to {most}, as 1,2,4")
    return found
