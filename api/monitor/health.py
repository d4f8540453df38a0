"""Who leads a deployment, from its store alone."""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.events import STARTING
from telemetry.store import LoadStore, events_backwards
from telemetry.stores.holder import is_dead, shown

STARTING_SHOWN_S = 600.0  # longer than any supervisor waits for progress of a start


@dataclass(frozen=True)
class Leadership:
    """The controller that leads, or why there is none."""

    leader: str  # its process; "": none leads
    left_s: float  # until its lease runs out without a renewal
    starting: str  # where none leads: one that compiles, and how far it is; "": none does
    why_none: str  # "": one leads


def leadership(store: LoadStore, now: float) -> Leadership:
    """Find the process that leads; a lease that ran out, or of a process that exited, is none.

    Raises:
        StoreError: the store cannot be read.
    """
    lease = store.lease()
    held = lease is not None and bool(lease.ttl_s)
    if lease is not None and held and lease.expires >= now and not is_dead(lease.holder):
        return Leadership(shown(lease.holder), lease.expires - now, "", "")
    if starting := _starting(store, now):
        return Leadership("", 0.0, starting, f"no controller leads yet: {starting}")
    why = "no controller leads, expected one (eplb serve or eplb controller)"
    if lease is not None and held:
        age_s = max(0.0, now - lease.expires)
        why = f"no controller leads: the lease of {shown(lease.holder)} ran out {age_s:.0f} s ago"
    return Leadership("", 0.0, "", why)


def _starting(store: LoadStore, now: float) -> str:
    latest = next(events_backwards(store, {STARTING, "lease"}), None)
    if latest is None or latest.kind != STARTING or now - latest.time > STARTING_SHOWN_S:
        return ""
    holder = str(latest.detail.get("holder"))
    if is_dead(holder):
        return ""
    work, age_s = latest.detail.get("work"), max(0.0, now - latest.time)
    return f"{shown(holder)} is starting: {work}, as of {age_s:.0f} s ago"
