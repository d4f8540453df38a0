"""What every process of the demo does with its log: escaped, and bounded in number.

A message that repeats more than ``MOST`` times in ``PERIOD_S`` is dropped for the rest of it and
counted: a process without descriptors logs the same error many thousand times a minute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from types import TracebackType

from api.terminal.printable import printable

MOST = 20
PERIOD_S = 60.0
KEPT_MESSAGES = 1000


class EscapingFormatter(logging.Formatter):
    """One line for a message; a traceback follows indented, so that none of it passes for one."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Give the line of a record."""
        return printable(super().formatMessage(record))

    def formatException(
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None]
        | tuple[None, None, None],
    ) -> str:
        """Give the traceback of a record."""
        lines = super().formatException(ei).splitlines()
        return "\n".join(f"    {printable(line)}" for line in lines)


class RepeatLimit(logging.Filter):
    """Lets ``MOST`` messages of one kind through in ``PERIOD_S``, and then says how many were not.

    A kind is a place in the code: the arguments of a message may be a stranger's.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}  # since when, and how many

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a record is printed."""
        now, place = self._clock(), (record.pathname, record.lineno)
        since, count = self._seen.pop(place, (now, 0))
        if now - since >= PERIOD_S:
            if count > MOST:
                record.msg = f"{record.getMessage()} ({count - MOST} more in {now - since:.0f} s)"
                record.args = ()
            since, count = now, 0
        if len(self._seen) >= KEPT_MESSAGES:
            self._seen.pop(next(iter(self._seen)))
        self._seen[place] = (since, count + 1)
        return count < MOST


def set_up_logging() -> None:
    """Log warnings to the error stream."""
    handler = logging.StreamHandler()
    handler.setFormatter(EscapingFormatter("%(name)s: %(message)s"))
    handler.addFilter(RepeatLimit())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
