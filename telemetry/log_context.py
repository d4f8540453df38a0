"""What the log lines of the current thread are about, for formatters that write fields.

A component sets a field where it learns it; every record of that thread carries it from then on,
whichever module logs. Nothing here formats or filters.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from types import MappingProxyType

_fields: ContextVar[Mapping[str, int | str]] = ContextVar(
    "log_fields", default=MappingProxyType({})
)


def set_log_fields(**fields: int | str | None) -> None:
    """Set fields of this thread's log records; None removes one."""
    merged = dict(_fields.get()) | fields
    _fields.set({name: value for name, value in merged.items() if value is not None})


def log_fields() -> Mapping[str, int | str]:
    """Return the fields of this thread's log records."""
    return _fields.get()
