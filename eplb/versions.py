"""Which versions of this program work together in one deployment.

A release has a software version, for people, and a protocol version, for the processes of a
deployment: it counts up whenever what they exchange changes, over the store or a connection. Two
processes work together where each one's protocol is at least the oldest that the other works with.
What ranks write, controllers and host caches read: neither may be older than the ranks.

    protocol   software
    2          0.2.0

A process that has not announced its version is of none: who joins waits for the announcement
(``telemetry/state/joining.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from eplb import __version__

PROTOCOL = 2
OLDEST_PROTOCOL = PROTOCOL - 1  # the oldest that this release works with

RANKS, CONTROLLER, HOST_CACHE = "ranks", "controller", "host cache"
LAUNCHER, SERVICE = "launcher", "service"
NAMES = {one: f"the {one}" for one in (RANKS, CONTROLLER, HOST_CACHE, LAUNCHER, SERVICE)}


@dataclass(frozen=True)
class Announcement:
    """The version of one process, or of all ranks of one start, as it joins a deployment."""

    component: str  # a key of NAMES
    name: str  # start of the ranks; name of the controller's or service's process; number of a host
    software: str = __version__
    protocol: int = PROTOCOL
    oldest: int = OLDEST_PROTOCOL  # protocol of the others
    time: float = 0.0  # seconds since the epoch, by the store's clock
    every_s: float = 0.0  # until the next announcement; 0: there is none
    since: float = 0.0  # time of the first announcement of that name
    process: str = ""  # where the name is that of a host: whose it is (telemetry/state/holder.py)

    @property
    def version(self) -> str:
        """For people."""
        return f"eplb {self.software} (protocol {self.protocol})"


def announcement_from_dict(found: Mapping[str, Any]) -> Announcement:
    """Read what ``asdict`` made of one in any version; fields unknown here are left out.

    Raises:
        ValueError: a field is missing, or of another type.
    """
    kinds = {"component": str, "name": str, "software": str, "protocol": int, "oldest": int}
    for name, kind in kinds.items():
        if type(found.get(name)) is not kind:
            raise ValueError(f"{name} is {found.get(name)!r}, expected {kind.__name__}")
    known = {name: found[name] for name in kinds}
    figures: dict[str, Any] = {
        name: float(found.get(name, 0.0)) for name in ("time", "every_s", "since")
    }
    return Announcement(**known, **figures, process=str(found.get("process", "")))


def refusal(joining: Announcement, present: Announcement) -> str:
    """Return why a process must not join beside one that is there; "": it may."""
    expected = ""
    if present.protocol < joining.oldest:
        expected = f"protocol {joining.oldest} or later: upgrade by one release at a time"
    elif joining.protocol < present.oldest:
        expected = f"protocol {present.oldest} or later to join it: upgrade this process first"
    elif RANKS == joining.component != present.component and present.protocol < joining.protocol:
        expected = (
            f"protocol {joining.protocol} or later: upgrade controllers and host caches before "
            "ranks"
        )
    elif RANKS == present.component != joining.component and joining.protocol < present.protocol:
        expected = f"protocol {joining.protocol} at most: ranks go back before all others"
    if not expected:
        return ""
    return (
        f"{NAMES[joining.component]} of {joining.version} cannot join: found "
        f"{NAMES[present.component]} of {present.version}, expected {expected}"
    )
