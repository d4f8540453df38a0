"""Which parts of the plug-in are on in this process of an engine; the gauge that shows it."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

log = logging.getLogger(__name__)

NAME = "eplb_engine_plugin_loaded"


@cache
def _gauge() -> Any:
    # Late: an engine brings prometheus_client; a process without it has the log line alone.
    try:
        from prometheus_client import Gauge

        return Gauge(
            NAME,
            "1 while a part of the EPLB plug-in works in this process, else 0",
            ["engine", "part"],
            multiprocess_mode="liveall",  # each process of the engine has its own value
        )
    except Exception as exc:
        log.warning("the gauge %s cannot be made: %s", NAME, exc)
        return None


_parts: dict[str, bool] = {}  # the parts of this process, which runs one engine


def parts_off() -> list[str]:
    """Parts that are off, or have found a fault."""
    return sorted(part for part, is_on in _parts.copy().items() if not is_on)


def set_part(engine: str, part: str, *, is_on: bool) -> None:
    """Set the gauge of one part."""
    _parts[part] = is_on
    gauge = _gauge()
    if gauge is not None:
        gauge.labels(engine, part).set(int(is_on))


def value_of(engine: str, part: str) -> float | None:
    """Return the gauge of one part; None where there is no gauge."""
    gauge = _gauge()
    return None if gauge is None else float(gauge.labels(engine, part)._value.get())
