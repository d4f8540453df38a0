"""The log of every process: text or JSON lines, escaped, and bounded in number.

A message that repeats more than ``MOST`` times in ``PERIOD_S`` is dropped for the rest of it and
counted: a process without descriptors logs the same error many thousand times a minute.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Annotated, Any, Literal

from api.terminal.printable import printable
from eplb.declared import Setting
from telemetry.log_context import log_fields

MOST = 20
PERIOD_S = 60.0
KEPT_MESSAGES = 1000

Level = Literal["debug", "info", "warning", "error"]
Field = int | str | None | Callable[[], int | str | None]


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


class ErrorStream(logging.Handler):
    """Writes to the error stream of the moment.

    Who replaces ``sys.stderr`` for a while closes it afterwards; a thread that outlives the call
    would log into a closed file.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write the line of a record."""
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:  # as every handler of the standard library does
            self.handleError(record)


class RepeatLimit(logging.Filter):
    """Passes ``MOST`` messages of one kind in ``PERIOD_S``, and then reports how many it dropped.

    A kind is a place in the code: the arguments of a message may come from an untrusted client.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._seen: dict[tuple[str, int], tuple[float, int]] = {}  # since when, and how many

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is printed."""
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


class JsonFormatter(logging.Formatter):
    """One JSON object a line; a control character is escaped, as JSON does.

    ``time`` (UTC), ``level``, ``logger``, ``message``; where they are known ``deployment``,
    ``process``, ``rank``, ``generation`` and ``task``; with an exception ``exception``.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Give the line of a record."""
        moment = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: _now(value) for name, value in _process_fields.items()}
        line |= log_fields()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        known = {name: value for name, value in line.items() if value is not None}
        return json.dumps(known, default=str)


@dataclass(frozen=True)
class LogSettings:
    """How a process writes its log; its children do the same."""

    format: Annotated[
        Literal["text", "json"],
        Setting("one line of text, or one JSON object a line", short="log_format"),
    ] = "text"
    level: Annotated[Level, Setting("least level that is written", short="log_level")] = "warning"
    deployment: str | None = None


_settings = LogSettings()  # the settings of this process
_process_fields: dict[str, Field] = {}  # fields of every record of this process


def _now(value: Field) -> int | str | None:
    return value() if callable(value) else value


def log_settings() -> LogSettings:
    """Give how this process writes its log."""
    return _settings


def set_process_fields(**fields: Field) -> None:
    """Set fields of every log record of this process; a function is called for each record."""
    _process_fields.update(fields)


def set_up_logging(settings: LogSettings = _settings, **fields: Field) -> None:
    """Log to the error stream. A second call replaces the first.

    Args:
        fields: of every record of this process.
    """
    global _settings
    _settings = settings
    set_process_fields(deployment=settings.deployment, **fields)
    is_json = settings.format == "json"
    handler = ErrorStream()
    handler.setFormatter(JsonFormatter() if is_json else EscapingFormatter("%(name)s: %(message)s"))
    handler.addFilter(RepeatLimit())
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(is_json)
