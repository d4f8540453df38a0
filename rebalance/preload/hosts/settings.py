"""Settings of the links between host caches: addresses, secret, bandwidth, deadlines."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from typing import Literal, get_args

from eplb.errors import ConfigError

Order = Literal["before_disk", "after_disk"]
HostAddress = tuple[str, int]  # a numeric address, because looking a name up has no deadline

LEAST_SECRET_BYTES = 16
# A tenth of a 100 Gbit/s link, which also carries requests and KV caches: 35 ms for 44 MB.
SERVING_BYTES_PER_SECOND = 1.25e9


@dataclass(frozen=True)
class HostLinkSettings:
    """Which other hosts a host cache asks for records, and whether it gives them any.

    ``hosts`` may be the same list on every host: a host cache does not ask its own address. Off
    where a host cache has no such settings at all.
    """

    hosts: tuple[HostAddress, ...]
    secret: bytes = field(repr=False)  # of the deployment; clients without it are refused
    listen: HostAddress | None = None  # None: it asks, and gives nothing
    order: Order = "before_disk"
    bytes_per_second: float = SERVING_BYTES_PER_SECOND  # inward, and as much outward
    max_transfers: int = 4  # records on their way outward at a time; further ones take turns
    silence_s: float = 2.0  # without a byte, after which a host counts as dead
    deadline_s: float = 10.0  # for one record, including the other host's disk read
    back_off_s: float = 30.0  # upper limit of the back-off of a failed host

    def __post_init__(self) -> None:
        check_secret(self.secret, "hosts")
        if self.order not in get_args(Order):
            raise ConfigError(f"order {self.order!r}, expected one of {', '.join(get_args(Order))}")
        if self.max_transfers < 1:
            raise ConfigError(f"max_transfers is {self.max_transfers}, expected 1 or more")
        for name in ("bytes_per_second", "silence_s", "deadline_s", "back_off_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}, expected more than 0")
        for address in [*self.hosts, *([self.listen] if self.listen else [])]:
            check_address(address)

    @property
    def others(self) -> tuple[HostAddress, ...]:
        """The hosts that are asked."""
        return tuple(host for host in self.hosts if host != self.listen)


def check_secret(secret: bytes, between: str) -> None:
    """Refuse a secret that could be guessed.

    Raises:
        ConfigError: it is too short.
    """
    if len(secret) < LEAST_SECRET_BYTES:
        raise ConfigError(
            f"a secret of {len(secret)} bytes between {between}, "
            f"expected {LEAST_SECRET_BYTES} or more"
        )


def check_address(address: HostAddress) -> None:
    """Refuse an address that would have to be looked up.

    Raises:
        ConfigError: it is no number, or its port is none.
    """
    host, port = address
    try:
        ipaddress.ip_address(host)
    except ValueError as exc:
        raise ConfigError(f"host {host!r}, expected a numeric address") from exc
    if not 0 < port < 2**16:
        raise ConfigError(f"port {port} of host {host}, expected 1..65535")
