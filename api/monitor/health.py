"""Who leads a deployment, from its store alone."""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.state.events import STARTING
from telemetry.state.holder import is_dead, shown
from telemetry.state.store import StateStore

STARTING_SHOWN_S = 600.0  # longer than any supervisor waits for progress of a start


@dataclass(frozen=True)
class Leadership:
    """The controller that leads, or why there is none."""

    leader: str  # its process; "": none leads
    left_s: float  # until its lease runs out without a renewal
    starting: str  # where none leads: one that compiles, and how far it is; "": none does
    why_none: str  # "": one leads
    # The leader renews its lease in its turns, at a third of the time to live, and nowhere else.
    turn_age_s: float | None = None  # since a turn renewed the latest lease; None: there was none
    held_s: float = 0.0  # that this leader has led


def leadership(store: StateStore, now: float) -> Leadership:
    """Find the process that leads; a lease that ran out, or of a process that exited, is none.

    Raises:
        StoreError: the store cannot be read.
    """
    lease = store.latest_lease()
    held = lease is not None and bool(lease.ttl_s)  # 0: it was given up
    age_s = None if lease is None else max(0.0, now - (lease.expires - lease.ttl_s))
    if lease is not None and held and lease.expires >= now and not is_dead(lease.holder):
        left_s, held_s = lease.expires - now, max(0.0, now - lease.since)
        return Leadership(shown(lease.holder), left_s, "", "", age_s, held_s)
    if starting := _starting(store, now):
        return Leadership("", 0.0, starting, f"no controller leads yet: {starting}", age_s)
    why = "no controller leads, expected one (eplb serve or eplb controller)"
    if lease is not None and held and lease.expires < now:
        since_s = now - lease.expires
        why = f"no controller leads: the lease of {shown(lease.holder)} ran out {since_s:.0f} s ago"
    elif lease is not None and held:
        why = f"no controller leads: {shown(lease.holder)} has exited"
    return Leadership("", 0.0, "", why, age_s)


def _starting(store: StateStore, now: float) -> str:
    latest = next(store.events_backwards({STARTING, "lease"}), None)
    if latest is None or latest.kind != STARTING or now - latest.time > STARTING_SHOWN_S:
        return ""
    holder = str(latest.detail.get("holder"))
    if is_dead(holder):
        return ""
    work, age_s = latest.detail.get("work"), max(0.0, now - latest.time)
    return f"{shown(holder)} is starting: {work}, as of {age_s:.0f} s ago"
