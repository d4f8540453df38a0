"""Which host of a deployment this machine is, and how far its clock is off."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from api.monitor.verdict import CLOCK_TOLERANCE_S
from eplb.clock import Clock
from eplb.errors import ConfigError
from telemetry.state.runs import Details
from telemetry.state.store import StateStore

if TYPE_CHECKING:
    from api.deploy.deployment import Deployment

CLOCK_EXPECTED = f"at most {CLOCK_TOLERANCE_S:g} s: synchronise it (NTP)"


def host_here(deployment: Deployment, given: int | None) -> int:
    """Find which host of a deployment this machine is.

    Args:
        deployment: names an address for each host.
        given: the number that the command was given, if it was.

    Raises:
        ConfigError: the address of that host, or every host's, is none of this machine; or more
            than one is, and none was given.
    """
    hosts = deployment.hosts
    own = [host for host, address in enumerate(hosts) if is_own(address)]
    if given is None:
        if len(own) == 1:
            return own[0]
        found = "all of them are" if own else "none of them is"
        raise ConfigError(
            f"topology.hosts has {', '.join(hosts)}: {found} of this machine, "
            "expected one, or --host N"
        )
    if given >= len(hosts):
        raise ConfigError(f"--host is {given}, expected 0..{len(hosts) - 1} (topology.nodes)")
    if given not in own:
        raise ConfigError(
            f"host {given} has address {hosts[given]} (topology.hosts), which is none of this "
            "machine, expected one of its own"
        )
    return given


def is_own(address: str) -> bool:
    """Return whether this machine has an address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as end:
        try:
            end.bind((address, 0))
        except OSError:
            return False
    return True


def clock_offset(
    store: StateStore, kind: str, detail: Details, clock: Clock
) -> tuple[float, float]:
    """Write an event; seconds by which this host is ahead of the store, and how wrong that may be.

    The store gives its time with the event.
    """
    before = clock()
    number = store.add_event(kind, detail)
    after = clock()
    (event,) = store.events(after=number - 1, limit=1)
    return (before + after) / 2 - event.time, (after - before) / 2


def offset_text(offset_s: float) -> str:
    """Say how far this host's clock is off."""
    side = "ahead of" if offset_s > 0 else "behind"
    return f"this host's is {abs(offset_s):.3f} s {side} the store's"
