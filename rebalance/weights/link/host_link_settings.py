"""Settings of the links between host caches: addresses, secret, bandwidth, deadlines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from eplb.errors import ConfigError
from rebalance.weights.link.link_settings import (
    SERVING_BYTES_PER_SECOND,
    HostAddress,
    check_address,
    check_limits,
)
from rebalance.weights.link.tls import TlsFiles

Order = Literal["before_disk", "after_disk"]


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
    tls: TlsFiles | None = None  # None: bytes are not encrypted

    def __post_init__(self) -> None:
        check_limits(vars(self), "hosts")
        if self.order not in get_args(Order):
            raise ConfigError(f"order {self.order!r}, expected one of {', '.join(get_args(Order))}")
        for address in [*self.hosts, *([self.listen] if self.listen else [])]:
            check_address(address)

    @property
    def others(self) -> tuple[HostAddress, ...]:
        """The hosts that are asked."""
        return tuple(host for host in self.hosts if host != self.listen)
