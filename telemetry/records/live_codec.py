"""Live settings as JSON text, in one form for every store.

    version 1   no "version", two switches: {"movement": true, "observe": false}
    version 2   revision, both layers, and when each live value was set

A setting that is missing is not set, and one that is not known here is left out: a later program
may have more, and it cannot be applied here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eplb.errors import ConfigError, StoreError
from telemetry.live import (
    LIVE_NAMES,
    SWITCHES,
    Control,
    LiveChange,
    LiveSettings,
    LiveState,
    changed,
    checked,
)
from telemetry.records.typed_json import VERSION, from_json, from_record, to_json, version_of

LIVE_VERSION = 2
_WHAT = "the record of live settings"
_NO_REVISION = "set by a program without revisions of settings"


def live_to_text(state: LiveState) -> str:
    """Return the live settings as JSON text."""
    record = {
        VERSION: LIVE_VERSION,
        "revision": state.revision,
        "static": state.static.set_values(),
        "live": state.live.set_values(),
        "changes": {name: vars(change) for name, change in state.changes.items()},
        "until": dict(state.until),
    }
    return to_json(record)


def live_from_text(text: str | bytes) -> LiveState:
    """Make live settings from what ``live_to_text`` gave, or a program before it.

    Raises:
        StoreError: an unknown version, or a value that cannot be used.
    """
    record = from_json(text, _WHAT)
    if version_of(record, _WHAT, (1, LIVE_VERSION)) == 1:
        return with_switches(LiveState(), from_record(Control, record, _WHAT))
    try:
        revision = int(record["revision"])
        static, live = (_layer(record[name]) for name in ("static", "live"))
        changes = {
            name: from_record(LiveChange, change, f"{_WHAT}, change of {name}")
            for name, change in record["changes"].items()
            if name in LIVE_NAMES
        }
        # Missing in what a program before it wrote: there nothing ends by itself.
        ends = record.get("until", {}).items()
        until = {name: float(end) for name, end in ends if name in LIVE_NAMES}
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise StoreError(f"{_WHAT} cannot be read: {type(exc).__name__}: {exc}") from exc
    return LiveState(revision, static, live, changes, until)


def with_switches(state: LiveState, control: Control) -> LiveState:
    """Return the state with switches that a program without revisions has set.

    What differs counts as set by an operator: a kill switch of theirs must outlast a start.
    """
    before, wanted = state.control, vars(control)
    different = {name: wanted[name] for name in SWITCHES if wanted[name] != getattr(before, name)}
    if not different:
        return state
    found = changed(state, different, expected=None, now=0.0, reason=_NO_REVISION)
    return replace(found, revision=max(1, state.revision))


def _layer(values: Mapping[str, Any]) -> LiveSettings:
    known = {name: value for name, value in values.items() if name in LIVE_NAMES}
    try:
        return LiveSettings(**checked(known)) if known else LiveSettings()
    except ConfigError as exc:
        raise StoreError(f"{_WHAT} cannot be read: {exc}") from exc
