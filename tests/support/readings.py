"""Readings of a store, as tests make and change them."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from api.monitor.document import ORDER, document_of, state_in
from api.monitor.monitor import Monitor
from api.monitor.state import Reading
from api.monitor.verdict import judged
from telemetry.state.store import StateStore


def read(store: StateStore, now: float | None = None) -> Reading:
    """Read a store once, at a time."""
    monitor = Monitor(store, clock=time.time if now is None else lambda: now)
    monitor.refresh()
    return monitor.reading()


def changed(seen: Reading, **changes: Any) -> Reading:
    """Give a reading with other values of its own fields or of its state, judged again."""
    if "ranks" in changes:
        silent = tuple(view.rank for view in changes["ranks"] if not view.is_alive)
        changes.setdefault("silent_ranks", silent)
    of_state = {name: value for name, value in changes.items() if name in ORDER}
    others = {name: value for name, value in changes.items() if name not in ORDER}
    document = replace(document_of(seen.state), **of_state)
    if document.token_time is not None:
        document = replace(document, token_age_s=document.time - document.token_time)
    return judged(replace(seen, state=state_in(document), **others))
