"""Settings of the links between host caches: addresses, secret, bandwidth, deadlines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args

from eplb.declared import Setting
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
    bytes_per_second: Annotated[
        float,
        Setting(
            "rate at which a host cache receives, and at which it sends",
            unit="bytes/s",
            above=0,
            at_most=10**15,
        ),
    ] = SERVING_BYTES_PER_SECOND
    silence_s: Annotated[
        float,
        Setting("time without a byte after which a host counts as dead", above=0, at_most=3600),
    ] = 2.0
    # Not settings: the bandwidth is limited above, and a record of 44 MB takes 35 ms of it.
    max_transfers: int = 4  # records that are sent at a time; further ones take turns
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
