"""Which host of a deployment this machine is."""

from __future__ import annotations

import socket

from api.deploy.deployment import Deployment
from eplb.errors import ConfigError


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
